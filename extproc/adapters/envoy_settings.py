"""What the Envoy before the routers is to do, as plain values.

Free of Envoy's own types, whose import takes over a second: only what prints or starts
a configuration pays for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.core.phases import DESTINATION_HEADER, BodyMode, Observe
from extproc.core.session import SessionRules

UNIX_PREFIX = "unix:"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """One listener for clients, the endpoints behind it, and the routers it asks.

    `endpoints` are `host:port`; `routers`, too, or `unix:/path`, one per router process: Envoy
    opens one connection per worker and address, so one shared port would feed one process.
    A host that is a name makes Envoy resolve it, again and again.
    An `admin_port` of None leaves the admin interface out; port 0 asks for a free one.

    `buffer_bytes` is what a router is shown of a body in BUFFERED_PARTIAL mode, and what
    Envoy keeps for a retry. `max_body_bytes` is the size above which Envoy answers 413; a
    body without content-length is held up to it, so it also bounds Envoy's memory per
    request. `health_path` None turns active health checks of the endpoints off.
    `forward_headers` are sent to the routers beside those that every decision needs.
    """

    listen_host: str = "127.0.0.1"
    listen_port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int | None = 9901
    endpoints: tuple[str, ...] = ()
    routers: tuple[str, ...] = ("127.0.0.1:9002",)
    body_mode: BodyMode = BodyMode.BUFFERED_PARTIAL
    observe: Observe = Observe.ACCESS_LOG
    buffer_bytes: int = 4 * 1024 * 1024
    max_body_bytes: int = 64 * 1024 * 1024
    message_timeout_s: float = 0.5
    failure_mode_allow: bool = True
    retries: int = 2
    connect_timeout_s: float = 0.5
    upload_timeout_s: float = 120.0
    idle_timeout_s: float = 600.0
    health_path: str | None = "/health"
    health_interval_s: float = 2.0
    health_timeout_s: float = 1.0
    access_log_flush_s: float = 0.05
    destination_header: str = DESTINATION_HEADER
    forward_headers: tuple[str, ...] = SessionRules().headers
