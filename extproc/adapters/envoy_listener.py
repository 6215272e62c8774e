"""The gateway's listener: strip, ask a router, hold to the body limit, choose the host, log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import (
    HeaderMutation,
    HeaderMutationRemoveOnMatch,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    Http2ProtocolOptions,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import RouteConfiguration, VirtualHost
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.buffer.v3 import Buffer
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExternalProcessorRouteCacheAction,
    HeaderForwardingRules,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any

from extproc.adapters.envoy_clusters import (
    EXT_PROC_CLUSTER,
    log_cluster_names,
    seconds,
    socket_address,
)
from extproc.adapters.envoy_routes import BUFFER_FILTER, EXT_PROC_FILTER, routes
from extproc.adapters.wire import DECISION_NAMESPACE
from extproc.core.phases import BodyMode, Observe

if TYPE_CHECKING:
    from extproc.adapters.envoy_settings import GatewaySettings

_OWN_HEADERS = "x-extproc-"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
# What a router reads of every request; credentials never leave Envoy.
_FORWARDED = (":path", ":method", "content-length", "content-type", "content-encoding")
# HTTP/2 allows no smaller initial window in Envoy.
_MIN_WINDOW_BYTES = 65_535
_STREAMS_PER_CONNECTION_WINDOW = 4
_MAX_WINDOW_BYTES = 2**31 - 1


def listener(settings: GatewaySettings) -> Listener:
    """Describe the clients' side."""
    manager = connection_manager(settings)
    manager.http_filters.append(
        HttpFilter(name="envoy.filters.http.router", typed_config=Any.pack(Router()))
    )
    manager.route_config = RouteConfiguration(
        name="llm", virtual_hosts=[VirtualHost(name="llm", domains=["*"], routes=routes(settings))]
    )
    network_filter = Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(manager)
    )
    return Listener(
        name="llm",
        address=socket_address(settings.listen_host, settings.listen_port),
        per_connection_buffer_limit_bytes=settings.buffer_bytes,
        filter_chains=[FilterChain(filters=[network_filter])],
    )


def connection_manager(settings: GatewaySettings) -> HttpConnectionManager:
    """Describe all that concerns us in a connection manager, without routes and router filter."""
    window_bytes = max(_MIN_WINDOW_BYTES, min(settings.buffer_bytes, _MAX_WINDOW_BYTES))
    connection_bytes = min(window_bytes * _STREAMS_PER_CONNECTION_WINDOW, _MAX_WINDOW_BYTES)
    return HttpConnectionManager(
        stat_prefix="llm",
        stream_idle_timeout=seconds(settings.idle_timeout_s),
        request_timeout=seconds(settings.upload_timeout_s),
        # Over HTTP/2 it is the window, not the connection's buffer, that limits what we see.
        http2_protocol_options=Http2ProtocolOptions(
            initial_stream_window_size=window_bytes,
            initial_connection_window_size=connection_bytes,
        ),
        early_header_mutation_extensions=[_strip(settings)],
        http_filters=_http_filters(settings),
        access_log=[_access_log(settings, cluster) for cluster in log_cluster_names(settings)],
    )


def _strip(settings: GatewaySettings) -> TypedExtensionConfig:
    """Take away what only we may set, before any filter or route sees it."""
    ours = StringMatcher(prefix=_OWN_HEADERS, ignore_case=True)
    mutations = [
        HeaderMutation(remove=settings.destination_header),
        HeaderMutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=ours)),
    ]
    return TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=Any.pack(EarlyHeaderMutation(mutations=mutations)),
    )


def _http_filters(settings: GatewaySettings) -> list[HttpFilter]:
    limit = Buffer(max_request_bytes=settings.max_body_bytes)
    return [
        HttpFilter(name=BUFFER_FILTER, typed_config=Any.pack(limit), disabled=True),
        HttpFilter(name=EXT_PROC_FILTER, typed_config=Any.pack(_ext_proc(settings))),
    ]


def _ext_proc(settings: GatewaySettings) -> ExternalProcessor:
    exact = [*_FORWARDED, settings.destination_header, *settings.forward_headers]
    patterns = [StringMatcher(exact=name) for name in dict.fromkeys(exact)]
    return ExternalProcessor(
        grpc_service=_grpc(EXT_PROC_CLUSTER),
        processing_mode=_processing_mode(settings),
        # The body is never changed, so its length may go upstream as it came.
        allow_content_length_header=True,
        failure_mode_allow=settings.failure_mode_allow,
        # Envoy's own choice, 500, would blame the request.
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        message_timeout=seconds(settings.message_timeout_s),
        route_cache_action=ExternalProcessorRouteCacheAction.RETAIN,
        # Without this flag a decision that needs the body is a race in STREAMED mode.
        send_body_without_waiting_for_header_response=settings.body_mode is BodyMode.STREAMED,
        forward_rules=HeaderForwardingRules(allowed_headers=ListStringMatcher(patterns=patterns)),
        # Not naming envoy.lb here makes every choice silently random.
        metadata_options=MetadataOptions(
            forwarding_namespaces=_untyped(_SUBSET_NAMESPACE),
            receiving_namespaces=_untyped(DECISION_NAMESPACE),
        ),
    )


def _processing_mode(settings: GatewaySettings) -> ProcessingMode:
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
    body, none = ProcessingModeBodySendMode, ProcessingModeBodySendMode.NONE
    duplex = settings.body_mode is BodyMode.FULL_DUPLEX_STREAMED
    observed = settings.observe is Observe.STREAM
    return ProcessingMode(
        request_header_mode=send,
        request_body_mode=body[settings.body_mode.name],
        # Full duplex hands over the trailers, too.
        request_trailer_mode=send if duplex else skip,
        response_header_mode=send if observed else skip,
        response_body_mode=body.STREAMED if observed else none,
        response_trailer_mode=send if observed else skip,
    )


def _access_log(settings: GatewaySettings, cluster: str) -> AccessLog:
    common = CommonGrpcAccessLogConfig(
        log_name="extproc",
        grpc_service=_grpc(cluster),
        transport_api_version=ApiVersion.V3,
        buffer_flush_interval=seconds(settings.access_log_flush_s),
    )
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        typed_config=Any.pack(HttpGrpcAccessLogConfig(common_config=common)),
    )


def _grpc(cluster: str) -> GrpcService:
    return GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=cluster))


def _untyped(namespace: str) -> MetadataOptionsMetadataNamespaces:
    return MetadataOptionsMetadataNamespaces(untyped=[namespace])
