"""The clusters of the gateway: the endpoints, and the routers as ext_proc and log servers."""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterDnsLookupFamily,
    ClusterLbPolicy,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    HealthCheckHttpHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    KeepaliveSettings,
    Pipe,
    SocketAddress,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions as UpstreamOptions,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from extproc.adapters.envoy_settings import UNIX_PREFIX
from extproc.adapters.wire import DECISION_NAMESPACE
from extproc.core.phases import Observe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.adapters.envoy_settings import GatewaySettings

LLM_CLUSTER = "llm"
EXT_PROC_CLUSTER = "extproc"

_UPSTREAM_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
# Envoy's defaults (1,024 requests, 3 retries) turn a busy moment into 503.
_MAX_REQUESTS = 10_000
_MAX_RETRIES = 1_000
# Before its first request a cluster is checked once a minute unless told otherwise.
_IDLE_CHECK_S = 2.0
# Spread over unhealthy hosts only when none is healthy; Envoy's default does so below 50 %.
_PANIC_PERCENT = 1.0
# Below the 5 s after which vLLM and SGLang (uvicorn) close an idle connection.
_ENGINE_IDLE_S = 4.0
_ROUTER_CONNECT_S = 0.25
# A replaced container or pod has another address; Envoy's own 5 s are a long time without it.
_DNS_REFRESH_S = 2.0
_ROUTER_CHECK_S = 1.0
# Not 1: a router under full load may answer one check late.
_ROUTER_UNHEALTHY = 2
# A dead router fails at once, and each failure is a request routed without its prefix.
_ROUTER_FAILURES = 3
_ROUTER_EJECTION_S = 2.0
_ROUTER_EJECTED_PERCENT = 50
_KEEPALIVE_S = 10.0
_KEEPALIVE_TIMEOUT_S = 2.0


def clusters(settings: GatewaySettings) -> list[Cluster]:
    """List every cluster the listener refers to."""
    return [llm_cluster(settings), *router_clusters(settings)]


def llm_cluster(settings: GatewaySettings) -> Cluster:
    """Describe the endpoints: the decision's list first, Envoy's own choice where it is silent."""
    options = UpstreamOptions(
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=seconds(_ENGINE_IDLE_S)),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=Http1ProtocolOptions()
        ),
    )
    return Cluster(
        name=LLM_CLUSTER,
        type=_discovery(settings.endpoints),
        dns_refresh_rate=_dns_refresh(settings.endpoints),
        dns_lookup_family=_dns_family(settings.endpoints),
        connect_timeout=seconds(settings.connect_timeout_s),
        circuit_breakers=_circuit_breakers(),
        common_lb_config=_panic_only_when_all_fail(),
        health_checks=_endpoint_checks(settings),
        load_balancing_policy=override_policy(settings),
        typed_extension_protocol_options={_UPSTREAM_OPTIONS: Any.pack(options)},
        load_assignment=_assignment(LLM_CLUSTER, settings.endpoints),
    )


def override_policy(settings: GatewaySettings) -> LoadBalancingPolicy:
    """Follow the decision.

    Metadata comes first: a client can set the header (it is stripped, too), but never
    the metadata.
    """
    key = MetadataKey(
        key=DECISION_NAMESPACE, path=[MetadataKeyPathSegment(key=settings.destination_header)]
    )
    override = OverrideHost(
        override_host_sources=[
            OverrideHostOverrideHostSource(metadata=key),
            OverrideHostOverrideHostSource(header=settings.destination_header),
        ],
        fallback_policy=_policy("least_request", Any.pack(LeastRequest())),
    )
    return _policy("override_host", Any.pack(override))


def router_clusters(settings: GatewaySettings) -> list[Cluster]:
    """Describe the routers: one cluster to ask, and one per router to tell what became of it."""
    ask = _router_cluster(EXT_PROC_CLUSTER, settings.routers)
    ask.health_checks = [
        HealthCheck(
            timeout=seconds(_ROUTER_CHECK_S),
            interval=seconds(_ROUTER_CHECK_S),
            no_traffic_interval=seconds(_ROUTER_CHECK_S),
            unhealthy_threshold=_ROUTER_UNHEALTHY,
            healthy_threshold=1,
            grpc_health_check=HealthCheckGrpcHealthCheck(),
        )
    ]
    named = zip(log_cluster_names(settings), settings.routers, strict=False)
    return [ask, *(_router_cluster(name, [router]) for name, router in named)]


def log_cluster_names(settings: GatewaySettings) -> list[str]:
    """Name one cluster per router for the access log.

    Each router hears of every request: a log stream stays on one host of a cluster, so a
    shared cluster would tell one router of the requests that another one decided.
    """
    if settings.observe is not Observe.ACCESS_LOG:
        return []
    return [f"{EXT_PROC_CLUSTER}-log-{number}" for number in range(len(settings.routers))]


def socket_address(host: str, port: int) -> Address:
    """Give a TCP address in Envoy's form."""
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def seconds(value_s: float) -> timedelta:
    """Give a duration in Envoy's form."""
    return timedelta(seconds=value_s)


def _router_cluster(name: str, routers: Sequence[str]) -> Cluster:
    http2 = Http2ProtocolOptions(
        connection_keepalive=KeepaliveSettings(
            interval=seconds(_KEEPALIVE_S), timeout=seconds(_KEEPALIVE_TIMEOUT_S)
        )
    )
    options = UpstreamOptions(
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2)
    )
    return Cluster(
        name=name,
        type=_discovery(routers),
        dns_refresh_rate=_dns_refresh(routers),
        dns_lookup_family=_dns_family(routers),
        connect_timeout=seconds(_ROUTER_CONNECT_S),
        lb_policy=ClusterLbPolicy.LEAST_REQUEST,
        circuit_breakers=_circuit_breakers(),
        common_lb_config=_panic_only_when_all_fail(),
        outlier_detection=_avoid_failing_routers(),
        typed_extension_protocol_options={_UPSTREAM_OPTIONS: Any.pack(options)},
        load_assignment=_assignment(name, routers),
    )


def _avoid_failing_routers() -> OutlierDetection:
    """Leave out for a while what fails between two health checks; a lone router stays in use."""
    return OutlierDetection(
        consecutive_gateway_failure=_ROUTER_FAILURES,
        enforcing_consecutive_gateway_failure=100,
        interval=seconds(_ROUTER_CHECK_S),
        base_ejection_time=seconds(_ROUTER_EJECTION_S),
        max_ejection_percent=_ROUTER_EJECTED_PERCENT,
    )


def _discovery(addresses: Iterable[str]) -> ClusterDiscoveryType:
    """Let Envoy resolve where a host is a name."""
    named = any(_is_named(text) for text in addresses)
    return ClusterDiscoveryType.STRICT_DNS if named else ClusterDiscoveryType.STATIC


def _dns_refresh(addresses: Iterable[str]) -> timedelta | None:
    return seconds(_DNS_REFRESH_S) if any(_is_named(text) for text in addresses) else None


def _dns_family(addresses: Iterable[str]) -> ClusterDnsLookupFamily:
    """Take IPv4 where there is both, as the routers do: the two must name the same hosts."""
    named = any(_is_named(text) for text in addresses)
    return ClusterDnsLookupFamily.V4_PREFERRED if named else ClusterDnsLookupFamily.AUTO


def _is_named(text: str) -> bool:
    if text.startswith(UNIX_PREFIX):
        return False
    try:
        ipaddress.ip_address(text.rpartition(":")[0].strip("[]"))
    except ValueError:
        return True
    return False


def _assignment(name: str, addresses: Iterable[str]) -> ClusterLoadAssignment:
    members = [LbEndpoint(endpoint=Endpoint(address=_address(text))) for text in addresses]
    localities = [LocalityLbEndpoints(lb_endpoints=members)] if members else []
    return ClusterLoadAssignment(cluster_name=name, endpoints=localities)


def _address(text: str) -> Address:
    if text.startswith(UNIX_PREFIX):
        return Address(pipe=Pipe(path=text.removeprefix(UNIX_PREFIX)))
    host, _, port = text.rpartition(":")
    return socket_address(host.strip("[]"), int(port))


def _endpoint_checks(settings: GatewaySettings) -> list[HealthCheck]:
    if settings.health_path is None:
        return []
    check = HealthCheck(
        timeout=seconds(settings.health_timeout_s),
        interval=seconds(settings.health_interval_s),
        no_traffic_interval=seconds(min(settings.health_interval_s, _IDLE_CHECK_S)),
        unhealthy_threshold=2,
        healthy_threshold=1,
        http_health_check=HealthCheckHttpHealthCheck(path=settings.health_path),
    )
    return [check]


def _circuit_breakers() -> CircuitBreakers:
    limits = CircuitBreakersThresholds(
        max_connections=_MAX_REQUESTS,
        max_pending_requests=_MAX_REQUESTS,
        max_requests=_MAX_REQUESTS,
        max_retries=_MAX_RETRIES,
    )
    return CircuitBreakers(thresholds=[limits])


def _panic_only_when_all_fail() -> ClusterCommonLbConfig:
    return ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=_PANIC_PERCENT))


def _policy(name: str, config: Any) -> LoadBalancingPolicy:
    extension = TypedExtensionConfig(
        name=f"envoy.load_balancing_policies.{name}", typed_config=config
    )
    return LoadBalancingPolicy(
        policies=[LoadBalancingPolicyPolicy(typed_extension_config=extension)]
    )
