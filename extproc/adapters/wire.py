"""Envoy's ext_proc messages as bytes on one side, the stream's events and actions on the other."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, assert_never

from google.protobuf.message import DecodeError

from extproc.adapters.proto import ext_proc_pb2 as pb
from extproc.adapters.shortcut import cut_body, cut_headers
from extproc.core.endpoint import Endpoint
from extproc.core.errors import EndpointError, ExtprocError
from extproc.core.phases import (
    DESTINATION_HEADER,
    BodyMode,
    Continue,
    EchoBody,
    Opening,
    Phase,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamEvent,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from google.protobuf.struct_pb2 import Struct

    from extproc.core.decision import Decision
    from extproc.core.errors import RequestRefusedError

PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DECISION_NAMESPACE = "envoy.lb"
"""The namespace of dynamic metadata that override_host reads; Envoy must allow us to write it."""
DECISION_ID_KEY = "x-extproc-decision-id"

_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_SUBSET_KEY = "x-gateway-destination-endpoint-subset"
_HEADER_ATTRIBUTE = re.compile(r"request\.headers\[['\"](.+)['\"]\]")
_STATUS = re.compile(r"[1-5][0-9]{2}")
_PSEUDO_ATTRIBUTES = {"request.path": ":path", "request.method": ":method"}
_MODES = {
    pb.NONE: BodyMode.NONE,
    pb.STREAMED: BodyMode.STREAMED,
    pb.BUFFERED: BodyMode.BUFFERED,
    pb.BUFFERED_PARTIAL: BodyMode.BUFFERED_PARTIAL,
    pb.FULL_DUPLEX_STREAMED: BodyMode.FULL_DUPLEX_STREAMED,
    # Envoy's GRPC mode too forwards only what is given back.
    pb.GRPC: BodyMode.FULL_DUPLEX_STREAMED,
}
_CLIENT_FAULTS = range(400, 500)
# What Envoy sends beside headers and body is a few bytes, or it differs each time.
_MAX_REST_BYTES = 64
# The library copies a body twice; below this that costs less than reading by hand.
_LONG_BYTES = 65_536


class WireError(ExtprocError):
    """Bytes that are no ProcessingRequest we know."""


def decode(data: bytes) -> StreamEvent:
    """Read one ProcessingRequest; raise WireError for bytes that are none."""
    if len(data) >= _LONG_BYTES and (body := cut_body(data)):
        content, ends, rest = body
        if len(rest) <= _MAX_REST_BYTES:
            known, opening = _read_rest(rest)
            if known:
                return RequestBody(body=content, end_of_stream=ends, opening=opening)
    elif head := cut_headers(data):
        headers, ends, rest = head
        if len(rest) <= _MAX_REST_BYTES:
            known, opening = _read_rest(rest)
            if known:
                return RequestHeaders(headers=headers, end_of_stream=ends, opening=opening)
    return decode_any(data)


def decode_any(data: bytes) -> StreamEvent:
    """Read one ProcessingRequest with the protobuf library; errors as `decode`."""
    try:
        message = pb.ProcessingRequest.FromString(data)
    except DecodeError as error:
        text = "not a ProcessingRequest"
        raise WireError(text) from error
    opening = _read_opening(message)
    match message.WhichOneof("request"):
        case "request_headers":
            headers = message.request_headers
            return RequestHeaders(
                headers=_read_headers(headers.headers.headers),
                end_of_stream=headers.end_of_stream,
                opening=opening,
            )
        case "request_body":
            body = message.request_body
            return RequestBody(body=body.body, end_of_stream=body.end_of_stream, opening=opening)
        case "request_trailers":
            return RequestTrailers(opening=opening)
        case "response_headers":
            headers = message.response_headers
            return ResponseHeaders(
                status=_read_status(headers.headers.headers),
                end_of_stream=headers.end_of_stream,
                opening=opening,
            )
        case "response_body":
            body = message.response_body
            return ResponseBody(body=body.body, end_of_stream=body.end_of_stream, opening=opening)
        case "response_trailers":
            return ResponseTrailers(opening=opening)
        case _:
            text = "a ProcessingRequest of an unknown phase"
            raise WireError(text)


def encode(action: Continue | EchoBody | Refuse) -> bytes:
    """Write one ProcessingResponse."""
    match action:
        case Refuse():
            return _immediate(action.error).SerializeToString()
        case EchoBody():
            response = pb.ProcessingResponse()
            streamed = _body_of(response, action.phase).body_mutation.streamed_response
            streamed.body = action.body
            streamed.end_of_stream = action.end_of_stream
            if action.decision is not None:
                _write_metadata(response, action.decision)
            return response.SerializeToString()
        case Continue():
            if action.decision is None:
                return (_STRIPPED if action.strip else _PASSED)[action.phase]
            return _decided(action.phase, action.decision).SerializeToString()
        case _:
            assert_never(action)


@lru_cache(maxsize=64)
def _read_rest(rest: bytes) -> tuple[bool, Opening | None]:
    """Read what stands behind headers or body; nearly always the same bytes.

    False when it is more than an opening.
    """
    try:
        message = pb.ProcessingRequest.FromString(rest)
    except DecodeError:
        return False, None
    if message.WhichOneof("request") is not None:
        return False, None
    return True, _read_opening(message)


def _read_opening(message: pb.ProcessingRequest) -> Opening | None:
    has_config = message.HasField("protocol_config")
    if not (has_config or message.attributes or message.HasField("metadata_context")):
        return None
    config = message.protocol_config
    return Opening(
        request_mode=_MODES.get(config.request_body_mode) if has_config else None,
        response_mode=_MODES.get(config.response_body_mode) if has_config else None,
        early_body=config.send_body_without_waiting_for_header_response,
        subset=_read_subset(message.metadata_context.filter_metadata),
        headers=_read_attributes(message.attributes.values()),
    )


def _read_headers(headers: Iterable[pb.HeaderValue]) -> dict[str, str]:
    """Read headers; a name sent twice keeps both values, as one comma-separated list."""
    result: dict[str, str] = {}
    for header in headers:
        value = header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        name = header.key.lower()
        result[name] = f"{result[name]},{value}" if name in result else value
    return result


def _read_status(headers: Iterable[pb.HeaderValue]) -> int:
    text = _read_headers(headers).get(":status", "")
    return int(text) if _STATUS.fullmatch(text) else 0


def _read_attributes(structs: Iterable[Struct]) -> dict[str, str]:
    result: dict[str, str] = {}
    for struct in structs:
        for key, value in struct.fields.items():
            header = _HEADER_ATTRIBUTE.fullmatch(key)
            name = header[1].lower() if header else _PSEUDO_ATTRIBUTES.get(key)
            if name and value.WhichOneof("kind") == "string_value":
                result[name] = value.string_value
    return result


def _read_subset(filter_metadata: Mapping[str, Struct]) -> frozenset[str] | None:
    """Read the subset hint; a hint that is no text and no list allows nobody."""
    if _SUBSET_NAMESPACE not in filter_metadata:
        return None
    fields = filter_metadata[_SUBSET_NAMESPACE].fields
    if _SUBSET_KEY not in fields:
        return None
    value = fields[_SUBSET_KEY]
    texts = [value.string_value, *(item.string_value for item in value.list_value.values)]
    names = (name.strip() for text in texts for name in text.split(","))
    return frozenset(_canonical(name) for name in names if name)


def _canonical(name: str) -> str:
    try:
        return Endpoint.parse(name)
    except EndpointError:
        return name


def _decided(phase: Phase, decision: Decision) -> pb.ProcessingResponse:
    response = pb.ProcessingResponse()
    _write_metadata(response, decision)
    if phase is Phase.REQUEST_TRAILERS:
        # The headers are gone; the host is still chosen by metadata.
        response.request_trailers.SetInParent()
        return response
    option = _common(response, phase).header_mutation.set_headers.add()
    option.header.key = DESTINATION_HEADER
    # Envoy takes `value` for an empty header.
    option.header.raw_value = decision.header_value.encode()
    option.append_action = pb.OVERWRITE_IF_EXISTS_OR_ADD
    return response


def _write_metadata(response: pb.ProcessingResponse, decision: Decision) -> None:
    fields = response.dynamic_metadata.fields[DECISION_NAMESPACE].struct_value.fields
    fields[DESTINATION_HEADER].string_value = decision.header_value
    fields[DECISION_ID_KEY].string_value = decision.decision_id
    fields["x-extproc-reason"].string_value = decision.reason.value
    fields["x-extproc-policy"].string_value = decision.policy
    fields["x-extproc-matched-tokens"].number_value = decision.matched_tokens
    fields["x-extproc-prompt-tokens"].number_value = decision.prompt_tokens


def _common(response: pb.ProcessingResponse, phase: Phase) -> pb.CommonResponse:
    if phase is Phase.REQUEST_HEADERS:
        return response.request_headers.response
    return _body_of(response, phase)


def _body_of(response: pb.ProcessingResponse, phase: Phase) -> pb.CommonResponse:
    if phase is Phase.RESPONSE_BODY:
        return response.response_body.response
    return response.request_body.response


def _immediate(error: RequestRefusedError) -> pb.ProcessingResponse:
    response = pb.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = error.status
    immediate.details = f"extproc_{error.code}"
    kind = "invalid_request_error" if error.status in _CLIENT_FAULTS else "server_error"
    body = {"error": {"message": str(error) or error.code, "type": kind, "code": error.code}}
    immediate.body = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    for name, value in headers.items():
        option = immediate.headers.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = pb.OVERWRITE_IF_EXISTS_OR_ADD
    return response


def _passed(phase: Phase) -> bytes:
    response = pb.ProcessingResponse()
    getattr(response, phase.value).SetInParent()
    return response.SerializeToString()


def _stripped(phase: Phase) -> bytes:
    if phase not in {Phase.REQUEST_HEADERS, Phase.REQUEST_BODY}:
        return _passed(phase)
    response = pb.ProcessingResponse()
    _common(response, phase).header_mutation.remove_headers.append(DESTINATION_HEADER)
    return response.SerializeToString()


_PASSED = {phase: _passed(phase) for phase in Phase}
_STRIPPED = {phase: _stripped(phase) for phase in Phase}
