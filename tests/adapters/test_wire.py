"""The vendored messages against envoy-data-plane, a typed API of Envoy's own protos."""

import json

import betterproto2
import pytest
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.data.accesslog import v3 as data
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as Mode,
)
from envoy_data_plane.envoy.service.accesslog import v3 as als
from envoy_data_plane.envoy.service.ext_proc import v3
from envoy_data_plane.envoy.type import v3 as types
from envoy_data_plane.google.protobuf import ListValue, Struct, Value
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters import wire
from extproc.adapters.proto import access_log_pb2, ext_proc_pb2
from extproc.adapters.wire import WireError, decode, decode_any, encode
from extproc.core.decision import Decision, DecisionId, Reason, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.errors import (
    BodyTooLargeError,
    NoEndpointError,
    RequestRefusedError,
    SheddingError,
    UnreadableBodyError,
)
from extproc.core.phases import (
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
)

DESTINATION = "x-gateway-destination-endpoint"
DECISION = Decision(
    decision_id=DecisionId("r-7"),
    endpoints=(Endpoint.parse("10.0.0.1:8000"), Endpoint.parse("10.0.0.2:8000")),
    policy="tiered",
    reason=Reason.MATCH,
    request=RoutingRequest(prompt_tokens=4096),
    matched_tokens=3968,
)
EXPECTED_METADATA = {
    "envoy.lb": {
        DESTINATION: "10.0.0.1:8000,10.0.0.2:8000",
        "x-extproc-decision-id": "r-7",
        "x-extproc-reason": "match",
        "x-extproc-policy": "tiered",
        "x-extproc-matched-tokens": 3968,
        "x-extproc-prompt-tokens": 4096,
    }
}


def header_map(**headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return HeaderMap(
        headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in names.items()]
    )


def written(action):
    return v3.ProcessingResponse.parse(encode(action))


def read(**fields):
    return decode(bytes(v3.ProcessingRequest(**fields)))


def metadata_of(response):
    return response.dynamic_metadata.to_dict()


def test_request_headers_are_read():
    event = read(
        request_headers=v3.HttpHeaders(headers=header_map(x_a="b", X_C="ä"), end_of_stream=True)
    )

    assert event == RequestHeaders(headers={"x-a": "b", "x-c": "ä"}, end_of_stream=True)


def test_a_header_in_the_old_text_field_and_one_sent_twice_are_read():
    headers = [HeaderValue(key="a", value="1"), HeaderValue(key="a", raw_value=b"\xff")]
    event = read(request_headers=v3.HttpHeaders(headers=HeaderMap(headers=headers)))

    assert event.headers == {"a": "1,\ufffd"}


@pytest.mark.parametrize(
    ("status", "expected"), [("200", 200), ("", 0), ("9" * 9000, 0), ("2٣0", 0), ("abc", 0)]
)
def test_response_headers_are_read(status, expected):
    headers = HeaderMap(headers=[HeaderValue(key=":status", raw_value=status.encode())])
    event = read(response_headers=v3.HttpHeaders(headers=headers))

    assert event == ResponseHeaders(status=expected)


@given(st.binary(), st.booleans())
def test_bodies_are_read(body, end):
    message = v3.HttpBody(body=body, end_of_stream=end)

    assert read(request_body=message) == RequestBody(body=body, end_of_stream=end)
    assert read(response_body=message) == ResponseBody(body=body, end_of_stream=end)


def test_trailers_are_read():
    trailers = v3.HttpTrailers(trailers=header_map(grpc_status="0"))

    assert read(request_trailers=trailers) == RequestTrailers()
    assert read(response_trailers=trailers) == ResponseTrailers()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Mode.NONE, BodyMode.NONE),
        (Mode.STREAMED, BodyMode.STREAMED),
        (Mode.BUFFERED, BodyMode.BUFFERED),
        (Mode.BUFFERED_PARTIAL, BodyMode.BUFFERED_PARTIAL),
        (Mode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED),
        (Mode(5), BodyMode.FULL_DUPLEX_STREAMED),
        (Mode(99), None),
    ],
)
def test_the_modes_of_the_first_message_are_read(mode, expected):
    config = v3.ProtocolConfiguration(
        request_body_mode=mode,
        response_body_mode=Mode.STREAMED,
        send_body_without_waiting_for_header_response=True,
    )
    event = read(request_headers=v3.HttpHeaders(), protocol_config=config)

    assert event.opening == Opening(
        request_mode=expected, response_mode=BodyMode.STREAMED, early_body=True
    )


def subset_hint(value):
    hint = Struct(fields={"x-gateway-destination-endpoint-subset": value})
    return Metadata(filter_metadata={"envoy.lb.subset_hint": hint})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Value(string_value=" 10.0.0.3:8000, 10.0.0.4:8000 ,"), {"10.0.0.3:8000", "10.0.0.4:8000"}),
        (
            Value(list_value=ListValue(values=[Value(string_value=" 10.0.0.3:8000 ")])),
            {"10.0.0.3:8000"},
        ),
        (
            Value(
                list_value=ListValue(
                    values=[Value(string_value="[0:0::1]:80"), Value(number_value=1.0)]
                )
            ),
            {"[::1]:80"},
        ),
        (Value(string_value="some.name"), {"some.name"}),
        (Value(string_value=""), set()),
        (Value(list_value=ListValue(values=[])), set()),
        (Value(number_value=3.0), set()),
    ],
    ids=["text", "list", "ipv6 and a number", "a name", "empty text", "empty list", "a number"],
)
def test_the_subset_hint_is_read_trimmed_and_in_canonical_form(value, expected):
    event = read(request_headers=v3.HttpHeaders(), metadata_context=subset_hint(value))

    assert event.opening.subset == expected


def test_metadata_without_a_hint_is_no_hint():
    other = Metadata(filter_metadata={"envoy.lb.subset_hint": Struct(), "x": Struct()})
    event = read(request_headers=v3.HttpHeaders(), metadata_context=other)

    assert event.opening.subset is None


def test_headers_sent_as_attributes_are_read():
    texts = {
        "request.path": "/v1/messages",
        "request.method": "POST",
        "request.headers['X-Session-Id']": "s",
        "source.address": "1.2.3.4",
    }
    fields = {key: Value(string_value=text) for key, text in texts.items()}
    fields["request.headers['n']"] = Value(number_value=1.0)
    event = read(
        request_body=v3.HttpBody(body=b"{}"),
        attributes={"envoy.filters.http.ext_proc": Struct(fields=fields)},
    )

    assert event.opening.headers == {
        ":path": "/v1/messages",
        ":method": "POST",
        "x-session-id": "s",
    }


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_wire_error(message):
    try:
        decode(message)
    except WireError:
        return


texts = st.text(max_size=8) | st.text(alphabet="aB-:", max_size=200)
header_lists = st.lists(st.tuples(texts, st.binary(max_size=6) | texts.map(str.encode)), max_size=5)
rests = st.sampled_from(
    [
        {},
        {"protocol_config": v3.ProtocolConfiguration(request_body_mode=Mode.STREAMED)},
        {"metadata_context": Metadata()},
        {"metadata_context": Metadata(filter_metadata={"a": Struct()})},
        {"observability_mode": True},
        {"attributes": {"x": Struct(fields={"request.path": Value(string_value="/p" * 60)})}},
    ]
)


@given(header_lists, st.booleans(), rests, st.binary(max_size=4))
def test_headers_read_by_hand_are_those_the_library_reads(fields, end, rest, more):
    values = [HeaderValue(key=name, raw_value=value) for name, value in fields]
    values += [HeaderValue(key="old", value="text")] * (len(more) == 1)
    headers = v3.HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=end)
    message = bytes(v3.ProcessingRequest(request_headers=headers, **rest))

    assert decode(message) == decode_any(message)
    _decode_alike(message + more)


@given(st.binary(max_size=300), st.booleans(), rests, st.binary(max_size=4))
def test_bodies_read_by_hand_are_those_the_library_reads(body, end, rest, more):
    part = v3.HttpBody(body=body, end_of_stream=end)
    message = bytes(v3.ProcessingRequest(request_body=part, **rest))

    assert decode(message) == decode_any(message)
    _decode_alike(message + more)
    _decode_alike(message[: len(message) - len(more)])


def test_what_envoy_sends_in_the_default_flow_is_read_by_hand(monkeypatch):
    monkeypatch.setattr(wire, "decode_any", None)
    first = b"\x12r\np\n\x1d\n\x05:path\x1a\x14/v1/chat/completions\n\x0f\n\x07:method\x1a\x04POST"
    first += b"\n\x14\n\x0econtent-length\x1a\x0248\n(\n\x0ccontent-type\x1a\x18application/"
    first += b"octet-streamB\x00Z\x02\x08\x03"
    opening = Opening(request_mode=BodyMode.BUFFERED_PARTIAL, response_mode=BodyMode.NONE)

    assert decode(first).opening == opening
    assert decode(first).headers[":path"] == "/v1/chat/completions"
    body = b"x" * 70_000
    assert decode(b'"\xf6\xa2\x04\n\xf0\xa2\x04' + body + b"\x10\x01B\x00") == RequestBody(
        body=body, end_of_stream=True, opening=Opening()
    )


@given(st.sampled_from([0x12, 0x22]), st.binary(max_size=30))
def test_broken_messages_read_by_hand_are_those_the_library_reads(tag, data):
    _decode_alike(bytes([tag]) + data)


@pytest.fixture(autouse=True)
def _by_hand_at_any_length(monkeypatch):
    monkeypatch.setattr(wire, "_LONG_BYTES", 0)


def _decode_alike(message):
    try:
        expected = decode_any(message)
    except WireError:
        with pytest.raises(WireError):
            decode(message)
        return

    assert decode(message) == expected


def test_a_message_without_a_phase_is_a_wire_error():
    with pytest.raises(WireError):
        decode(b"")


@pytest.mark.parametrize("phase", list(Phase))
def test_an_undecided_reply_is_an_empty_message_of_its_phase(phase):
    response = written(Continue(phase=phase))

    assert response.to_dict() == {_camel(phase.value): {}}


def test_a_stripped_reply_removes_the_clients_destination():
    for phase in (Phase.REQUEST_HEADERS, Phase.REQUEST_BODY):
        response = getattr(written(Continue(phase=phase, strip=True)), phase.value)

        assert response.response.header_mutation.remove_headers == [DESTINATION]
        assert not response.response.header_mutation.set_headers


def test_stripping_is_left_out_where_headers_are_gone():
    trailers = Continue(phase=Phase.REQUEST_TRAILERS, strip=True)

    assert written(trailers).to_dict() == {"requestTrailers": {}}


@pytest.mark.parametrize("phase", [Phase.REQUEST_HEADERS, Phase.REQUEST_BODY])
def test_a_decision_is_written_to_header_and_metadata_alike(phase):
    response = written(Continue(phase=phase, decision=DECISION))
    (option,) = getattr(response, phase.value).response.header_mutation.set_headers

    assert option.header.key == DESTINATION
    assert option.header.raw_value == b"10.0.0.1:8000,10.0.0.2:8000"
    assert option.header.value == ""
    assert option.append_action.name == "OVERWRITE_IF_EXISTS_OR_ADD"
    assert metadata_of(response) == EXPECTED_METADATA


def test_a_decision_at_the_trailers_is_metadata_alone():
    response = written(Continue(phase=Phase.REQUEST_TRAILERS, decision=DECISION))

    assert response.request_trailers.header_mutation is None
    assert metadata_of(response) == EXPECTED_METADATA


@given(st.binary(max_size=200), st.booleans())
def test_echoes_are_streamed_body_responses(body, end):
    for phase in (Phase.REQUEST_BODY, Phase.RESPONSE_BODY):
        response = written(EchoBody(phase=phase, body=body, end_of_stream=end))
        streamed = getattr(response, phase.value).response.body_mutation.streamed_response

        assert (streamed.body, streamed.end_of_stream) == (body, end)
        assert response.dynamic_metadata is None


def test_an_echo_may_carry_the_decision():
    response = written(EchoBody(phase=Phase.REQUEST_BODY, decision=DECISION))

    assert metadata_of(response) == EXPECTED_METADATA


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (NoEndpointError("none ready"), 503, "server_error", None),
        (SheddingError("full"), 429, "invalid_request_error", b"1"),
        (BodyTooLargeError("too long"), 413, "invalid_request_error", None),
        (UnreadableBodyError(), 400, "invalid_request_error", None),
    ],
)
def test_a_refusal_is_an_immediate_response_with_a_json_body(error, status, kind, retry_after):
    immediate = written(Refuse(error)).immediate_response
    headers = {o.header.key: o.header.raw_value for o in immediate.headers.set_headers}

    assert int(immediate.status.code) == status
    assert headers.pop("content-type") == b"application/json"
    assert headers == ({"retry-after": retry_after} if retry_after else {})
    assert json.loads(immediate.body) == {
        "error": {"message": str(error) or error.code, "type": kind, "code": error.code}
    }
    assert immediate.details == f"extproc_{error.code}"


def test_every_refusal_can_be_written():
    for kind in RequestRefusedError.__subclasses__():
        assert written(Refuse(kind("x"))).immediate_response is not None


def _camel(name):
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


# Every field of ours must have the number and kind that Envoy's protos give it.
def _oracle_fields(name):
    renamed = {"HttpAccessLogEntries": "StreamAccessLogsMessageHttpAccessLogEntries"}
    for module in (v3, core, data, als, types):
        found = getattr(module, renamed.get(name, name), None)
        if found is not None and issubclass(found, betterproto2.Message):
            return {
                field.name: field.metadata["betterproto"].number
                for field in found.__dataclass_fields__.values()
            }
    raise LookupError(name)


@pytest.mark.parametrize("module", [ext_proc_pb2, access_log_pb2])
def test_every_field_number_is_envoys(module):
    for name, message in module.DESCRIPTOR.message_types_by_name.items():
        oracle = _oracle_fields(name)
        ours = {field.name: field.number for field in message.fields}

        assert ours == {field: oracle.get(field) for field in ours}, name


@pytest.mark.parametrize("mode", [m for m in Mode if m.name != "GRPC"])
def test_every_mode_number_is_envoys(mode):
    assert ext_proc_pb2.BodySendMode.Value(mode.name) == int(mode)
