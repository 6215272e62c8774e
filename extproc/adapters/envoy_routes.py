"""The gateway's routes: which requests go to the endpoints, which are refused, what is retried."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteMatch,
)
from envoy_data_plane.envoy.extensions.filters.http.buffer.v3 import Buffer, BufferPerRoute
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExtProcPerRoute
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.v3 import Int64Range
from envoy_data_plane.google.protobuf import Any

from extproc.adapters.envoy_clusters import LLM_CLUSTER, seconds
from extproc.core.errors import BodyTooLargeError
from extproc.core.phases import BodyMode

if TYPE_CHECKING:
    from extproc.adapters.envoy_settings import GatewaySettings

BUFFER_FILTER = "envoy.filters.http.buffer"
EXT_PROC_FILTER = "envoy.filters.http.ext_proc"

# A POST is sent again only when no engine can have begun it, or one says it is not ready.
_RETRY_ON = "connect-failure,refused-stream,reset-before-request,retriable-status-codes"
_NOT_READY = 503
# How often a retry may draw a host again that was tried before.
_HOST_ATTEMPTS = 5
_BACK_OFF_S = 0.005
_MAX_BACK_OFF_S = 0.05
_MAX_LENGTH = 2**63 - 1
_REPEATING_MODES = (BodyMode.BUFFERED_PARTIAL, BodyMode.STREAMED)


def routes(settings: GatewaySettings) -> list[Route]:
    """List what happens by path and by declared size.

    A body above the limit never reaches an engine. One that declares its length is refused
    by it; one that does not (chunked) is held back whole before a router is asked. Behind
    the ext_proc filter the buffer filter would do harm: of a body shown in part it counts
    bytes twice and writes a content-length too large (seen with Envoy 1.40).
    """
    limit_bytes = settings.max_body_bytes
    hold = {BUFFER_FILTER: Any.pack(BufferPerRoute(buffer=Buffer(max_request_bytes=limit_bytes)))}
    action = _llm_action(settings)
    too_large = Route(
        match=_declared(Int64Range(start=limit_bytes + 1, end=_MAX_LENGTH)),
        direct_response=_refusal(limit_bytes),
        response_headers_to_add=[_json()],
        typed_per_filter_config=_not_asked(),
    )
    # A router that ends a partial or streamed exchange in mid-body makes Envoy 1.40 repeat
    # bytes of the body behind its content-length where retries are configured: the engine
    # would read them as another request. Held back whole, bodies stay intact; engines begin
    # nothing before a body is whole, so the wait costs no time to the first token.
    sized = Route(
        match=_declared(Int64Range(start=0, end=limit_bytes + 1)),
        route=action,
        typed_per_filter_config=hold if settings.body_mode in _REPEATING_MODES else {},
    )
    rest = Route(match=RouteMatch(prefix="/"), route=action, typed_per_filter_config=hold)
    return [*_health(settings), too_large, sized, rest]


def _health(settings: GatewaySettings) -> list[Route]:
    if settings.health_path is None:
        return []
    route = Route(
        match=RouteMatch(path=settings.health_path),
        route=RouteAction(cluster=LLM_CLUSTER),
        typed_per_filter_config=_not_asked(),
    )
    return [route]


def _declared(length: Int64Range) -> RouteMatch:
    header = HeaderMatcher(name="content-length", range_match=length)
    return RouteMatch(prefix="/", headers=[header])


def _llm_action(settings: GatewaySettings) -> RouteAction:
    """Send to the endpoints, and again to the next of the decision's list where that is safe."""
    predicate = RetryPolicyRetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=Any.pack(PreviousHostsPredicate()),
    )
    retry = RetryPolicy(
        retry_on=_RETRY_ON,
        retriable_status_codes=[_NOT_READY],
        num_retries=settings.retries,
        retry_host_predicate=[predicate],
        host_selection_retry_max_attempts=_HOST_ATTEMPTS,
        retry_back_off=RetryPolicyRetryBackOff(
            base_interval=seconds(_BACK_OFF_S), max_interval=seconds(_MAX_BACK_OFF_S)
        ),
    )
    # Upstream issues 46095 and 46237: retries may repeat parts of a FULL_DUPLEX body.
    safe = settings.body_mode is not BodyMode.FULL_DUPLEX_STREAMED
    # No limit on the whole: a completion may run for long; the idle timeout ends hung ones.
    return RouteAction(
        cluster=LLM_CLUSTER, timeout=seconds(0), retry_policy=retry if safe else None
    )


def _not_asked() -> dict[str, Any]:
    return {EXT_PROC_FILTER: Any.pack(ExtProcPerRoute(disabled=True))}


def _refusal(limit_bytes: int) -> DirectResponseAction:
    """Answer as a router would."""
    error = {
        "message": f"the body exceeds {limit_bytes} bytes",
        "type": "invalid_request_error",
        "code": BodyTooLargeError.code,
    }
    text = json.dumps({"error": error})
    return DirectResponseAction(
        status=BodyTooLargeError.status, body=DataSource(inline_string=text)
    )


def _json() -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key="content-type", value="application/json"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
