"""One ext_proc stream: every message answered once, in the way its body mode demands."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.decision import Decision, DecisionId, Reason, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.errors import BodyTooLargeError, NoEndpointError
from extproc.core.events import EndpointUp, Event, Finished, FirstByte
from extproc.core.intake import IntakeSettings
from extproc.core.phases import (
    MAX_ECHO_BYTES,
    BodyMode,
    Continue,
    EchoBody,
    Finish,
    Observe,
    Opening,
    Phase,
    Refuse,
    Report,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamSettings,
)
from extproc.core.router import Router, RouterSettings
from extproc.core.stream import Stream

A, B, C = (Endpoint.parse(f"10.0.0.{host}:8000") for host in (1, 2, 3))
BODY = json.dumps(
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief " * 400},
            {"role": "user", "content": "hello"},
        ],
    }
).encode()
INTAKE = IntakeSettings()


class Notebook:
    """A router with one answer that writes down what it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.requests: list[RoutingRequest] = []
        self.events: list[Event] = []

    def route(self, request: RoutingRequest, now_s: float) -> Decision:
        del now_s
        self.requests.append(request)
        if self.error:
            raise self.error
        return Decision(
            decision_id=DecisionId("d-1"),
            endpoints=(A, B),
            policy="tiered",
            reason=Reason.COLD,
            request=request,
            matched_tokens=0,
        )

    def apply(self, event: Event, now_s: float) -> None:
        del now_s
        self.events.append(event)


def pool(*endpoints: Endpoint) -> Router:
    router = Router(RouterSettings(), router_id="r")
    for endpoint in endpoints:
        router.apply(EndpointUp(endpoint=endpoint), 0.0)
    return router


def stream(router=None, **settings) -> Stream:
    return Stream(router or pool(A, B), INTAKE, StreamSettings(**settings))


def headers(end=False, opening=None, **more) -> RequestHeaders:
    names = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    extra = {name.replace("_", "-"): value for name, value in more.items()}
    return RequestHeaders(headers=names | extra, end_of_stream=end, opening=opening)


def mode(request_mode: BodyMode, **more) -> Opening:
    return Opening(request_mode=request_mode, **more)


def chunk(body: bytes, end=False) -> RequestBody:
    return RequestBody(body=body, end_of_stream=end)


def cut(body: bytes, size: int) -> list[RequestBody]:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return [chunk(part, end=at == len(parts) - 1) for at, part in enumerate(parts)]


def play(one: Stream, *events) -> list:
    return [action for event in events for action in one.receive(event, 0.0)]


def decisions(actions) -> list[Decision]:
    return [a.decision for a in actions if isinstance(a, Continue | EchoBody) and a.decision]


def echoed(actions) -> bytes:
    return b"".join(a.body for a in actions if isinstance(a, EchoBody))


EMPTY_HEADERS_REPLY = Continue(phase=Phase.REQUEST_HEADERS, strip=True)


@pytest.mark.parametrize("body_mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
def test_buffered_modes_decide_in_the_body_reply_and_end_the_stream(body_mode):
    one = stream()

    assert play(one, headers(opening=mode(body_mode))) == [EMPTY_HEADERS_REPLY]
    assert play(one, chunk(BODY, end=True)) == [
        Continue(phase=Phase.REQUEST_BODY, decision=one.decision),
        Finish(),
    ]
    assert one.decision is not None
    assert one.decision.prompt_tokens > 500


def test_the_mode_of_the_settings_counts_where_envoy_does_not_say():
    duplex = stream(body_mode=BodyMode.FULL_DUPLEX_STREAMED)

    assert play(duplex, headers()) == []
    assert echoed(play(duplex, chunk(BODY, end=True))) == BODY


def test_a_cut_body_is_decided_by_what_is_there():
    whole, part = Notebook(), Notebook()
    play(stream(whole), headers(content_length=str(len(BODY))), chunk(BODY))
    play(stream(part), headers(content_length=str(len(BODY))), chunk(BODY[:3000]))

    (first,), (second,) = whole.requests, part.requests
    assert second.readable
    assert second.chains[0] == first.chains[0][: len(second.chains[0])]
    assert len(second.chains[0]) > 0


@pytest.mark.parametrize("body_mode", list(BodyMode))
def test_headers_that_end_the_request_are_decided_in_their_reply(body_mode):
    one = stream()
    actions = play(one, headers(end=True, opening=mode(body_mode)))

    assert actions == [Continue(phase=Phase.REQUEST_HEADERS, decision=one.decision), Finish()]
    assert one.decision is not None
    assert one.decision.reason is Reason.FALLBACK


def test_no_body_mode_decides_by_the_headers_alone():
    actions = play(stream(), headers(opening=mode(BodyMode.NONE)))

    assert len(decisions(actions)) == 1
    assert actions[-1] == Finish()


def test_streamed_headers_are_answered_at_once_and_every_body_message_is_acknowledged():
    one = stream()
    events = [headers(opening=mode(BodyMode.STREAMED)), *cut(BODY, 1000)]
    replies = [one.receive(event, 0.0) for event in events]

    assert replies[0] == [Continue(phase=Phase.REQUEST_HEADERS, decision=one.decision)]
    assert one.decision is not None
    assert all(reply == [Continue(phase=Phase.REQUEST_BODY)] for reply in replies[1:-1])
    assert replies[-1] == [Continue(phase=Phase.REQUEST_BODY), Finish()]


def test_streamed_with_an_early_body_waits_for_the_prompt_then_answers_every_message():
    one = stream()
    events = [headers(opening=mode(BodyMode.STREAMED, early_body=True)), *cut(BODY, 1000)]
    replies = [one.receive(event, 0.0) for event in events]

    assert replies[:-1] == [[]] * (len(events) - 1)
    assert replies[-1] == [
        Continue(phase=Phase.REQUEST_HEADERS, decision=one.decision),
        *[Continue(phase=Phase.REQUEST_BODY)] * (len(events) - 1),
        Finish(),
    ]


def test_an_early_body_that_is_slow_is_decided_when_the_hold_ends():
    one = stream(hold_s=0.1)
    play(one, headers(opening=mode(BodyMode.STREAMED, early_body=True)), chunk(BODY[:2000]))

    assert one.hold_until_s == pytest.approx(0.1)
    assert one.expire(0.1) == [
        Continue(phase=Phase.REQUEST_HEADERS, decision=one.decision),
        Continue(phase=Phase.REQUEST_BODY),
    ]
    assert one.hold_until_s is None
    assert one.expire(0.2) == []
    assert play(one, chunk(BODY[2000:], end=True)) == [
        Continue(phase=Phase.REQUEST_BODY),
        Finish(),
    ]


def test_a_hold_that_ends_without_a_ready_endpoint_refuses():
    one = stream(pool())
    play(one, headers(opening=mode(BodyMode.STREAMED, early_body=True)))
    refusal, last = one.expire(1.0)

    assert isinstance(refusal, Refuse)
    assert last == Finish()
    assert one.hold_until_s is None


def test_gathering_ends_at_its_limit():
    one = stream(gather_bytes=1000)
    play(one, headers(opening=mode(BodyMode.FULL_DUPLEX_STREAMED)))

    assert play(one, chunk(BODY[:999])) == []
    assert echoed(play(one, chunk(BODY[999:1000]))) == BODY[:1000]
    assert play(one, chunk(BODY[1000:2000])) == [
        EchoBody(phase=Phase.REQUEST_BODY, body=BODY[1000:2000])
    ]


@given(st.binary(max_size=200_000), st.integers(1, 90_000), st.integers(1, 150_000), st.booleans())
def test_full_duplex_echoes_every_byte_in_small_parts_and_ends_once(body, size, gather, trailers):
    one = stream(Notebook(), gather_bytes=gather)
    events = cut(body, size) or [chunk(b"", end=True)]
    if trailers:
        events[-1] = replace(events[-1], end_of_stream=False)
        events.append(RequestTrailers())
    actions = play(one, headers(opening=mode(BodyMode.FULL_DUPLEX_STREAMED)), *events)

    echoes = [a for a in actions if isinstance(a, EchoBody)]
    assert echoed(actions) == body
    assert all(len(a.body) <= MAX_ECHO_BYTES for a in echoes)
    assert sum(a.end_of_stream for a in echoes) == (0 if trailers else 1)
    assert trailers or echoes[-1].end_of_stream
    assert actions[0] == Continue(phase=Phase.REQUEST_HEADERS, decision=one.decision)
    assert len(decisions(actions)) == 1
    assert actions[-1] == Finish()
    assert (actions[-2] == Continue(phase=Phase.REQUEST_TRAILERS)) == trailers


@pytest.mark.parametrize("size", [1, 7, 16_384])
@pytest.mark.parametrize("body_mode", [BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED])
def test_a_body_in_pieces_is_the_same_request_as_the_whole(body_mode, size):
    opening = mode(body_mode, early_body=True)
    bodies = cut(BODY, size)
    notebook = Notebook()
    play(stream(notebook), headers(opening=opening), *bodies)
    plain = Notebook()
    play(stream(plain), headers(opening=mode(BodyMode.BUFFERED)), chunk(BODY, end=True))

    assert notebook.requests == plain.requests


@pytest.mark.parametrize("body_mode", [BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED])
def test_a_second_end_of_stream_is_not_answered(body_mode):
    for observe in Observe:
        one = stream(observe=observe)
        play(one, headers(opening=mode(body_mode, early_body=True)), chunk(BODY, end=True))

        assert play(one, chunk(b"", end=True)) == []


def test_trailers_that_end_a_request_without_a_body_are_answered_once_with_the_decision():
    one = stream(observe=Observe.STREAM)
    play(one, headers())

    assert play(one, RequestTrailers()) == [
        Continue(phase=Phase.REQUEST_TRAILERS, decision=one.decision)
    ]
    assert one.decision is not None
    assert play(one, RequestTrailers()) == []


def test_trailers_after_a_buffered_body_pass():
    one = stream(observe=Observe.STREAM)
    play(one, headers(), chunk(BODY))

    assert play(one, RequestTrailers()) == [Continue(phase=Phase.REQUEST_TRAILERS)]


OVER_LIMIT = [(body_mode, True) for body_mode in BodyMode] + [
    (body_mode, False) for body_mode in BodyMode if body_mode is not BodyMode.NONE
]


@pytest.mark.parametrize(("body_mode", "declared"), OVER_LIMIT)
def test_a_body_one_byte_over_the_limit_is_refused(body_mode, declared):
    one = stream(max_body_bytes=len(BODY) - 1, gather_bytes=100_000)
    length = {"content_length": str(len(BODY))} if declared else {}
    events = [headers(opening=mode(body_mode, early_body=True), **length), *cut(BODY, 1000)]
    if body_mode in {BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL}:
        events[1:] = [chunk(BODY, end=True)]
    *before, refusal, last = play(one, *events)

    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, BodyTooLargeError)
    assert last == Finish()
    assert before in ([], [EMPTY_HEADERS_REPLY])
    assert one.decision is None


@pytest.mark.parametrize("text", ["", "-1", "9" * 5000, "1e9", "\u0663", "abc"])
def test_a_content_length_that_is_none_is_ignored(text):
    actions = play(stream(), headers(content_length=text), chunk(BODY, end=True))

    assert len(decisions(actions)) == 1


def test_a_body_at_the_limit_passes():
    actions = play(stream(max_body_bytes=len(BODY)), headers(), chunk(BODY, end=True))

    assert len(decisions(actions)) == 1


@pytest.mark.parametrize("end", [True, False], ids=["headers only", "with a body"])
def test_without_a_ready_endpoint_the_client_gets_503(end):
    one = stream(pool())
    *_, refusal, last = play(one, headers(end=end), *([] if end else [chunk(BODY, end=True)]))

    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, NoEndpointError)
    assert last == Finish()


def test_the_subset_hint_narrows_the_choice_and_an_empty_one_allows_nobody():
    only = stream(pool(A, B, C))
    actions = play(only, headers(end=True, opening=Opening(subset=frozenset({C}))))
    nobody = play(stream(), headers(end=True, opening=Opening(subset=frozenset())))

    assert decisions(actions)[0].endpoints == (C,)
    assert isinstance(nobody[0], Refuse)


@pytest.mark.parametrize("body", [b"", b"{", b"not json", b"[1,2]", b"\xff\xfe", b'{"a":1}'])
def test_a_body_that_is_no_prompt_is_routed_by_load(body):
    one = stream()
    actions = play(one, headers(), chunk(body, end=True))

    assert decisions(actions)[0].reason is Reason.FALLBACK
    assert actions[-1] == Finish()


@pytest.mark.parametrize("body_mode", list(BodyMode))
def test_a_fault_of_the_router_costs_the_decision_not_the_request(body_mode):
    fault = ZeroDivisionError("bug")
    one = stream(Notebook(fault))
    bodies = [] if body_mode is BodyMode.NONE else [chunk(BODY, end=True)]
    actions = play(one, headers(opening=mode(body_mode)), *bodies)

    assert [a.error for a in actions if isinstance(a, Report)] == [fault]
    assert not any(isinstance(a, Refuse) for a in actions)
    assert decisions(actions) == []
    assert EMPTY_HEADERS_REPLY in actions
    assert actions[-1] == Finish()
    if body_mode is BodyMode.FULL_DUPLEX_STREAMED:
        assert echoed(actions) == BODY


@pytest.mark.parametrize("body_mode", list(BodyMode))
def test_without_a_router_every_request_passes_undecided(body_mode):
    one = Stream(None, INTAKE, StreamSettings())
    bodies = [] if body_mode is BodyMode.NONE else cut(BODY, 1000)
    replies = [one.receive(headers(opening=mode(body_mode, early_body=True)), 0.0)]
    replies += [one.receive(body, 0.0) for body in bodies]
    actions = [action for reply in replies for action in reply]

    assert replies[0][0] == EMPTY_HEADERS_REPLY
    assert decisions(actions) == []
    assert actions[-1] == Finish()
    if body_mode is BodyMode.FULL_DUPLEX_STREAMED:
        assert echoed(actions) == BODY


@pytest.mark.parametrize("body_mode", [BodyMode.BUFFERED, BodyMode.STREAMED])
def test_a_filter_that_skips_headers_gets_the_decision_with_the_body(body_mode):
    one = stream(Notebook())
    opening = mode(body_mode, headers={":path": "/v1/chat/completions", "x-session-id": "s"})
    actions = one.receive(RequestBody(body=BODY, end_of_stream=True, opening=opening), 0.0)

    assert actions == [Continue(phase=Phase.REQUEST_BODY, decision=one.decision), Finish()]


def test_skipped_headers_in_full_duplex_carry_the_decision_on_the_first_echo():
    one = stream(Notebook())
    opening = mode(BodyMode.FULL_DUPLEX_STREAMED)
    first = one.receive(RequestBody(body=b"", opening=opening), 0.0)
    actions = play(one, RequestTrailers())

    assert first == []
    assert actions == [
        EchoBody(phase=Phase.REQUEST_BODY, decision=one.decision),
        Continue(phase=Phase.REQUEST_TRAILERS),
        Finish(),
    ]


@pytest.mark.parametrize("observe", list(Observe))
def test_the_end_is_told_by_the_stream_only_where_streams_are_observed(observe):
    router = Notebook()
    one = stream(router, observe=observe)
    play(one, headers(), chunk(BODY, end=True), ResponseHeaders(status=200))
    one.close(1.0)
    one.close(2.0)

    told = [Finished(decision_id=DecisionId("d-1"), status=200)]
    assert router.events == (told if observe is Observe.STREAM else [])


def test_an_undelivered_decision_is_released_by_the_stream():
    router = Notebook()
    one = stream(router)
    play(one, headers(), chunk(BODY, end=True))
    one.close(1.0, delivered=False)

    assert router.events == [Finished(decision_id=DecisionId("d-1"))]


def test_an_observed_stream_stays_open_until_the_response_ends():
    router = Notebook()
    one = stream(router, observe=Observe.STREAM)
    actions = play(
        one,
        headers(),
        chunk(BODY, end=True),
        ResponseHeaders(status=200),
        ResponseBody(body=b""),
        ResponseBody(body=b"data: 1"),
        ResponseBody(body=b"data: 2"),
    )

    assert Finish() not in actions
    assert actions[2:] == [
        Continue(phase=Phase.RESPONSE_HEADERS),
        *[Continue(phase=Phase.RESPONSE_BODY)] * 3,
    ]
    assert router.events == [FirstByte(DecisionId("d-1"))]
    assert play(one, ResponseBody(body=b"", end_of_stream=True))[-1] == Finish()


@pytest.mark.parametrize(
    "last", [ResponseHeaders(status=204, end_of_stream=True), ResponseTrailers()]
)
def test_a_response_ends_with_headers_or_trailers_too(last):
    one = stream(observe=Observe.STREAM)
    play(one, headers(end=True))
    *_, answer, end = play(one, last)

    assert answer in [
        Continue(phase=Phase.RESPONSE_HEADERS),
        Continue(phase=Phase.RESPONSE_TRAILERS),
    ]
    assert end == Finish()


def test_a_response_in_full_duplex_is_echoed_whatever_is_observed():
    one = stream()
    opening = mode(BodyMode.BUFFERED, response_mode=BodyMode.FULL_DUPLEX_STREAMED)
    play(one, headers(opening=opening), chunk(BODY, end=True))
    answer = b"x" * 150_000
    actions = play(one, ResponseHeaders(status=200), ResponseBody(body=answer, end_of_stream=True))

    assert echoed(actions) == answer
    assert [a.end_of_stream for a in actions if isinstance(a, EchoBody)] == [False, False, True]
    assert actions[-1] == Finish()


def test_a_response_seen_alone_passes():
    actions = play(stream(), ResponseHeaders(status=200))

    assert actions == [Continue(phase=Phase.RESPONSE_HEADERS), Finish()]


def test_bytes_are_owed_only_while_envoy_waits_for_our_echo():
    duplex, buffered = stream(), stream()
    play(duplex, headers(opening=mode(BodyMode.FULL_DUPLEX_STREAMED)), chunk(BODY))
    play(buffered, headers())

    assert duplex.owes_body
    assert not buffered.owes_body
    play(duplex, chunk(b"", end=True))
    assert not duplex.owes_body


events = st.one_of(
    st.builds(
        headers,
        end=st.booleans(),
        opening=st.none()
        | st.builds(
            Opening,
            request_mode=st.none() | st.sampled_from(BodyMode),
            response_mode=st.none() | st.sampled_from(BodyMode),
            early_body=st.booleans(),
            subset=st.none() | st.just(frozenset({A})),
        ),
    ),
    st.builds(RequestBody, body=st.binary(max_size=50), end_of_stream=st.booleans()),
    st.just(RequestTrailers()),
    st.builds(ResponseHeaders, status=st.integers(0, 599), end_of_stream=st.booleans()),
    st.builds(ResponseBody, body=st.binary(max_size=50), end_of_stream=st.booleans()),
    st.just(ResponseTrailers()),
)


@given(
    st.lists(events, max_size=8),
    st.sampled_from(Observe),
    st.sampled_from(BodyMode),
    st.integers(1, 100),
)
def test_any_order_of_messages_ends_without_an_error_and_decides_at_most_once(
    history, observe, body_mode, limit
):
    router = Notebook()
    one = stream(
        router, observe=observe, body_mode=body_mode, gather_bytes=limit, max_body_bytes=150
    )
    actions = []
    for event in history:
        actions += one.receive(event, 0.0)
        actions += one.expire(1.0)
    one.close(2.0, delivered=True)

    assert len(router.requests) <= 1
    assert len(decisions(actions)) <= 1
    assert Finish() not in actions[:-1]
    assert sum(isinstance(event, Finished) for event in router.events) <= 1
    assert len(one._held) <= len(history)


def test_headers_that_come_twice_are_answered_once():
    one = stream()

    assert play(one, headers())
    assert play(one, headers()) == []
