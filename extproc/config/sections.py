"""The config tree: one frozen section per part, with every default.

Validation is strict: an unknown key, a text where a number belongs or a limit below its
floor is an error, since a setting that silently does nothing is found in production.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from extproc.config.addresses import HeaderName, ListenAddress, LogUrl, Target, TcpAddress, UrlPath
from extproc.core.policies import Tuning
from extproc.core.router import RouterSettings

_TUNING = Tuning()
_ROUTER = RouterSettings()
MAX_WORKERS = 64
WORKERS_NEED_LOG = (
    "several workers need decision_log: alone, each would know only what it decided itself"
)


class Section(BaseModel):
    """A frozen part of the tree that knows all of its keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=False
    )


class Listen(Section):
    """Where the router serves Envoy, and how it ends.

    Of several `workers` on this host the second listens at the next port (or `unix:/path.1`),
    and so on; so do their metrics.
    """

    address: ListenAddress = "127.0.0.1:9002"
    transport: Literal["h2", "grpc"] = "h2"
    router_id: str = Field(default="router", min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1
    max_streams: PositiveInt = 10_000
    drain_s: NonNegativeFloat = 10.0


class Member(Section):
    """One endpoint: `host:port`; names are resolved, since Envoy compares addresses."""

    address: Target
    weight: PositiveFloat = 1.0
    max_inflight: PositiveInt | None = None
    draining: bool = False

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, value: object) -> object:
        return {"address": value} if isinstance(value, str) else value


class Endpoints(Section):
    """Who serves the model: a list here, or a file that is read again when it changes."""

    static: tuple[Member, ...] = Field(default=(), max_length=10_000, strict=False)
    file: str | None = Field(default=None, min_length=1)
    poll_s: PositiveFloat = 1.0
    resolve_s: PositiveFloat = 30.0

    @model_validator(mode="before")
    @classmethod
    def _accept_list(cls, value: object) -> object:
        return {"static": value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _have_one_source(self) -> Self:
        if self.static and self.file:
            message = "give a list or a file, not both"
            raise ValueError(message)
        return self


class Health(Section):
    """Active health checks of the endpoints by HTTP GET."""

    enabled: bool = True
    path: UrlPath = "/health"
    interval_s: PositiveFloat = 2.0
    timeout_s: PositiveFloat = 1.0
    unhealthy_threshold: PositiveInt = 2
    healthy_threshold: PositiveInt = 1


class Intake(Section):
    """How a body becomes blocks and keys; lists left out are the built-in ones."""

    block_bytes: Annotated[int, Field(ge=64, le=65_536)] = 512
    max_prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 131_072
    secret: str = Field(default="extproc", min_length=1, max_length=1_024)
    secret_env: str | None = Field(default=None, min_length=1)
    session_headers: tuple[HeaderName, ...] | None = Field(default=None, max_length=64)
    session_fields: tuple[str, ...] | None = Field(default=None, max_length=64)
    tier1_header: HeaderName | None = None
    tier1_field: str | None = Field(default=None, min_length=1, max_length=128)
    default_model: str = Field(default="", max_length=256)
    refuse_unreadable: bool = False


class Routing(Section):
    """The policy, its six tuning values, and the limits of what is remembered."""

    policy: Literal["round-robin", "least-request", "session", "prefix", "tiered"] = "tiered"
    gamma: NonNegativeFloat = _TUNING.gamma
    gamma_new: NonNegativeFloat = _TUNING.gamma_new
    phi: NonNegativeFloat = _TUNING.phi
    load_factor: Annotated[float, Field(ge=1.0)] = _TUNING.load_factor
    load_floor: NonNegativeInt = _TUNING.load_floor
    prefix_tokens: PositiveInt = _TUNING.prefix_tokens
    cache_tokens: PositiveInt = _ROUTER.cache_tokens
    max_index_blocks: PositiveInt = _ROUTER.max_index_blocks
    prefill_tokens_per_s: PositiveFloat = _ROUTER.prefill_tokens_per_s
    session_ttl_s: PositiveFloat = _ROUTER.session_ttl_s
    max_sessions: PositiveInt = _ROUTER.max_sessions
    max_tier1_keys: PositiveInt = _ROUTER.max_tier1_keys
    lease_ttl_s: PositiveFloat = _ROUTER.lease_ttl_s
    max_leases: PositiveInt = _ROUTER.max_leases
    slow_start_s: NonNegativeFloat = _ROUTER.slow_start_s
    suspect_s: NonNegativeFloat = _ROUTER.suspect_s
    fallbacks: NonNegativeInt = _ROUTER.fallbacks


class Stream(Section):
    """How Envoy shows us a request, and how we learn what became of it."""

    body_mode: Literal["buffered-partial", "buffered", "streamed", "full-duplex-streamed"] = (
        "buffered-partial"
    )
    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    observe: Literal["access-log", "stream", "none"] = "access-log"


class MetricsSection(Section):
    """Where metrics, health and the debug pages are served; null turns them off."""

    address: TcpAddress | None = "127.0.0.1:9090"


class Scrape(Section):
    """Reading of the engines' own metrics, each in its dialect, which `auto` asks of them.

    `path` replaces the dialect's own page.
    """

    enabled: bool = True
    dialect: Literal["auto", "vllm", "sglang", "trtllm"] = "auto"
    path: UrlPath | None = None
    interval_s: PositiveFloat = 1.0
    timeout_s: PositiveFloat = 1.0


class Logging(Section):
    """What is logged; prompts never are."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    decisions: bool = True


class Record(Section):
    """A file of decisions without prompt text, for `extproc simulate`."""

    file: str | None = Field(default=None, min_length=1)
    max_bytes: Annotated[int, Field(ge=1_048_576)] = 256 * 1024 * 1024


class DecisionLog(Section):
    """The log that several routers share: a stream for each pool on a Valkey or Redis server.

    `valkeys://` is TLS, checked against `ca_file` or the system's authorities. Routers share
    what they know if prefix, pool, secret and block size are the same.
    """

    url: LogUrl
    username: str | None = Field(default=None, min_length=1, max_length=256)
    password_file: str | None = Field(default=None, min_length=1)
    password_env: str | None = Field(default=None, min_length=1)
    ca_file: str | None = Field(default=None, min_length=1)
    prefix: str = Field(default="extproc", max_length=128, pattern=r"^[\w.:-]+$")
    pool: str = Field(default="default", max_length=128, pattern=r"^[\w.-]+$")

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _be_consistent(self) -> Self:
        if self.password_file and self.password_env:
            message = "give password_file or password_env, not both"
            raise ValueError(message)
        if self.ca_file and not self.url.startswith(("valkeys:", "rediss:")):
            message = "ca_file is for valkeys://"
            raise ValueError(message)
        return self


class Gateway(Section):
    """The Envoy that `extproc envoy-config` describes.

    `routers` lists every router process as Envoy reaches it; left out, the workers here.
    """

    listen: TcpAddress = "127.0.0.1:8080"
    admin: TcpAddress | None = "127.0.0.1:9901"
    routers: tuple[ListenAddress, ...] = Field(default=(), max_length=256, strict=False)
    message_timeout_s: PositiveFloat = 0.5
    buffer_bytes: Annotated[int, Field(ge=16_384)] = 4 * 1024 * 1024
    failure_mode_allow: bool = True
    retries: NonNegativeInt = 2
    connect_timeout_s: PositiveFloat = 0.5
    upload_timeout_s: PositiveFloat = 120.0
    idle_timeout_s: PositiveFloat = 600.0
    access_log_flush_s: PositiveFloat = 0.05


class Config(Section):
    """The whole file."""

    listen: Listen = Listen()
    endpoints: Endpoints = Endpoints()
    health: Health = Health()
    intake: Intake = Intake()
    routing: Routing = Routing()
    stream: Stream = Stream()
    metrics: MetricsSection = MetricsSection()
    scrape: Scrape = Scrape()
    logging: Logging = Logging()
    record: Record = Record()
    decision_log: DecisionLog | None = None
    gateway: Gateway = Gateway()

    @model_validator(mode="after")
    def _let_workers_share(self) -> Self:
        if self.listen.workers > 1 and self.decision_log is None:
            raise ValueError(WORKERS_NEED_LOG)
        return self
