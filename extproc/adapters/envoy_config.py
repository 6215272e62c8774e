"""Envoy's configuration for the gateway, built from Envoy's own typed messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml
from betterproto2 import Casing
from envoy_data_plane.envoy.config.bootstrap.v3 import (
    Admin,
    Bootstrap,
    BootstrapStaticResources,
)
from envoy_data_plane.envoy.config.listener.v3 import Listener

from extproc.adapters.envoy_clusters import (
    clusters,
    override_policy,
    router_clusters,
    socket_address,
)
from extproc.adapters.envoy_listener import connection_manager, listener
from extproc.adapters.envoy_routes import routes

if TYPE_CHECKING:
    from betterproto2 import Message

    from extproc.adapters.envoy_settings import GatewaySettings

_COLUMNS = 100
_PLACES = {
    "listener": "To the listener.",
    "http_connection_manager": "To its connection manager; the filters go before router.",
    "routes": "To the virtual host, in this order, in place of the route to the endpoints.",
    "llm_cluster": "To the cluster of the endpoints, which the routes call llm, for its lb_policy.",
    "clusters": "To the clusters.",
}


def bootstrap(settings: GatewaySettings) -> Bootstrap:
    """Describe a whole Envoy: one listener, the endpoints, the routers, the admin interface."""
    resources = BootstrapStaticResources(
        listeners=[listener(settings)], clusters=clusters(settings)
    )
    if settings.admin_port is None:
        return Bootstrap(static_resources=resources)
    address = socket_address(settings.admin_host, settings.admin_port)
    return Bootstrap(admin=Admin(address=address), static_resources=resources)


def filter_snippet(settings: GatewaySettings) -> str:
    """Give as YAML the parts that an existing Envoy needs, each named by where it belongs."""
    limit = Listener(per_connection_buffer_limit_bytes=settings.buffer_bytes)
    manager = _plain(connection_manager(settings))
    del manager["stat_prefix"]
    parts: dict[str, object] = {
        "listener": _plain(limit),
        "http_connection_manager": manager,
        "routes": [_plain(route) for route in routes(settings)],
        "llm_cluster": {"load_balancing_policy": _plain(override_policy(settings))},
        "clusters": [_plain(cluster) for cluster in router_clusters(settings)],
    }
    return "\n".join(f"# {_PLACES[name]}\n{_dump({name: part})}" for name, part in parts.items())


def to_yaml(message: Message) -> str:
    """Give the one YAML text of a message: fields in Envoy's order, defaults left out."""
    return _dump(_plain(message))


def _plain(message: Message) -> dict[str, object]:
    return message.to_dict(casing=Casing.SNAKE)


def _dump(value: dict[str, object]) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=_COLUMNS, allow_unicode=True)
