"""One ext_proc stream as a sans-IO object: events of Envoy in, actions out.

A request is decided once and every message is answered once, in the way its body mode
demands. BUFFERED and BUFFERED_PARTIAL: the reply to the only body message decides. STREAMED:
the reply to the headers decides and can't wait for the body, unless Envoy sends the body
early; then it waits, for a limited time. FULL_DUPLEX_STREAMED: Envoy forwards our echo alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, assert_never

from extproc.core.errors import BodyTooLargeError, RequestRefusedError
from extproc.core.events import Finished, FirstByte
from extproc.core.intake import IntakeSettings, read_request
from extproc.core.phases import (
    Action,
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
    StreamEvent,
    StreamSettings,
    declared_bytes,
    echo_body,
    reply,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.decision import Decision, RoutingRequest
    from extproc.core.events import Event

_BUFFERED_MODES = (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)


class Routing(Protocol):
    """What a stream asks of a router."""

    def route(self, request: RoutingRequest, now_s: float) -> Decision:
        """Choose and record; raise RequestRefusedError to answer the client at once."""
        ...

    def apply(self, event: Event, now_s: float) -> None:
        """Take in what became of the request."""
        ...


class Stream:
    """The state of one stream. Without a router every request passes undecided."""

    def __init__(
        self, router: Routing | None, intake: IntakeSettings, settings: StreamSettings
    ) -> None:
        self._router = router
        self._intake = intake
        self._settings = settings
        self._mode = settings.body_mode
        self._response_mode = BodyMode.NONE
        self._early_body = False
        self._subset: frozenset[str] | None = None
        self._headers: dict[str, str] = {}
        self._held: list[bytes] = []
        self._body_bytes = 0
        self._status = 0
        self._owes_headers = self._decided = self._response_begun = False
        self._headers_over = self._body_over = self._trailers_over = False
        self._finished = self._closed = False
        self._reports: list[Action] = []
        self._decision: Decision | None = None
        self._hold_until_s: float | None = None

    @property
    def decision(self) -> Decision | None:
        """The decision, once made."""
        return self._decision

    @property
    def hold_until_s(self) -> float | None:
        """When to call `expire`, while a reply is held back for a limited time."""
        return self._hold_until_s

    @property
    def owes_body(self) -> bool:
        """Whether bytes are lost if the stream ends here: Envoy forwards only our echo."""
        duplex = BodyMode.FULL_DUPLEX_STREAMED
        request = self._mode is duplex and not self._body_over
        return not self._finished and (request or self._response_mode is duplex)

    def receive(self, event: StreamEvent, now_s: float) -> list[Action]:
        """Take one message of Envoy and give the actions that answer it, in order.

        Never raises for outside input. After Finish every message is ignored.
        """
        if self._finished:
            return []
        if event.opening is not None:
            self._open(event.opening)
        try:
            actions = self._receive(event, now_s)
        except RequestRefusedError as error:
            actions = self._refuse(error)
        return self._account(actions)

    def expire(self, now_s: float) -> list[Action]:
        """Decide on what is there: the reply may not be held back any longer."""
        if self._hold_until_s is None or self._finished:
            return []
        try:
            actions = self._release(now_s, end_of_stream=False)
        except RequestRefusedError as error:
            actions = self._refuse(error)
        return self._account(actions)

    def close(self, now_s: float, *, delivered: bool = True) -> None:
        """End the stream, however it ended.

        Reports the end of the request where nobody else will: when streams are what we
        observe, or when the decision was not `delivered` to Envoy.
        """
        observed = self._settings.observe is Observe.STREAM or not delivered
        if self._router and self._decision and observed and not self._closed:
            decision_id = self._decision.decision_id
            self._router.apply(Finished(decision_id=decision_id, status=self._status), now_s)
        self._closed = True

    def _open(self, opening: Opening) -> None:
        if opening.request_mode is not None:
            self._mode = opening.request_mode
        if opening.response_mode is not None:
            self._response_mode = opening.response_mode
        self._early_body = self._early_body or opening.early_body
        if opening.subset is not None:
            self._subset = opening.subset
        self._headers.update(opening.headers)

    def _refuse(self, error: RequestRefusedError) -> list[Action]:
        self._held.clear()
        self._hold_until_s = None
        return [Refuse(error), Finish()]

    def _account(self, actions: list[Action]) -> list[Action]:
        self._finished = any(isinstance(action, Finish) for action in actions)
        reports, self._reports = self._reports, []
        return [*reports, *actions]

    def _receive(self, event: StreamEvent, now_s: float) -> list[Action]:
        match event:
            case RequestHeaders():
                return self._request_headers(event, now_s)
            case RequestBody():
                return self._request_body(event, now_s)
            case RequestTrailers():
                return self._request_trailers(now_s)
            case ResponseHeaders():
                self._status = event.status
                return self._respond(
                    [Continue(phase=Phase.RESPONSE_HEADERS)], end_of_stream=event.end_of_stream
                )
            case ResponseBody():
                return self._response_body(event, now_s)
            case ResponseTrailers():
                return self._respond([Continue(phase=Phase.RESPONSE_TRAILERS)], end_of_stream=True)
            case _:
                assert_never(event)

    def _request_headers(self, event: RequestHeaders, now_s: float) -> list[Action]:
        if self._headers_over:
            return []
        self._headers_over = True
        self._headers.update(event.headers)
        self._limit(declared_bytes(self._headers) or 0)
        phase = Phase.REQUEST_HEADERS
        if event.end_of_stream or self._mode is BodyMode.NONE:
            self._body_over = True
            decision = self._decide(b"", now_s, complete=event.end_of_stream, phase=phase)
            return [reply(phase, decision), *self._end_request()]
        if self._mode in _BUFFERED_MODES:
            return [reply(phase, None)]
        if self._mode is BodyMode.STREAMED and not self._early_body:
            return [reply(phase, self._decide(b"", now_s, complete=False, phase=phase))]
        self._owes_headers = True
        if self._router is None:
            return self._release(now_s, end_of_stream=False)
        if self._mode is BodyMode.STREAMED:
            self._hold_until_s = now_s + self._settings.hold_s
        return []

    def _request_body(self, event: RequestBody, now_s: float) -> list[Action]:
        if self._body_over:
            return []
        self._headers_over = True
        self._body_bytes += len(event.body)
        self._limit(self._body_bytes)
        self._body_over = event.end_of_stream or self._mode in _BUFFERED_MODES
        if self._decided:
            actions: list[Action] = [*self._pass([event.body], end_of_stream=event.end_of_stream)]
        else:
            self._held.append(event.body)
            if self._may_gather():
                return []
            actions = self._release(now_s, end_of_stream=event.end_of_stream)
        return [*actions, *self._end_request()] if self._body_over else actions

    def _may_gather(self) -> bool:
        more = not self._body_over and self._body_bytes < self._settings.gather_bytes
        return more and (self._owes_headers or self._mode is BodyMode.FULL_DUPLEX_STREAMED)

    def _request_trailers(self, now_s: float) -> list[Action]:
        if self._trailers_over:
            return []
        self._headers_over = self._body_over = self._trailers_over = True
        phase, decision, actions = Phase.REQUEST_TRAILERS, None, list[Action]()
        if self._held or self._owes_headers:
            actions = self._release(now_s, end_of_stream=False)
        elif not self._decided:
            decision = self._decide(b"", now_s, complete=True, phase=phase)
        return [*actions, Continue(phase=phase, decision=decision), *self._end_request()]

    def _release(self, now_s: float, *, end_of_stream: bool) -> list[Action]:
        """Decide on the body held, then answer every message held."""
        self._hold_until_s = None
        held, self._held = self._held, []
        whole = self._mode is BodyMode.BUFFERED or self._trailers_over or end_of_stream
        complete = whole or declared_bytes(self._headers) == self._body_bytes
        phase = Phase.REQUEST_HEADERS if self._owes_headers else Phase.REQUEST_BODY
        decision = self._decide(b"".join(held), now_s, complete=complete, phase=phase)
        if self._owes_headers:
            self._owes_headers = False
            return [reply(phase, decision), *self._pass(held, end_of_stream=end_of_stream)]
        if self._mode is not BodyMode.FULL_DUPLEX_STREAMED:
            return [reply(phase, decision)]
        first, *rest = self._pass(held, end_of_stream=end_of_stream) or [EchoBody(phase=phase)]
        return [replace(first, decision=decision), *rest]

    def _pass(self, bodies: list[bytes], *, end_of_stream: bool) -> Sequence[EchoBody | Continue]:
        phase = Phase.REQUEST_BODY
        if self._mode is BodyMode.FULL_DUPLEX_STREAMED:
            return echo_body(phase, b"".join(bodies), end_of_stream=end_of_stream)
        return [Continue(phase=phase) for _ in bodies]

    def _decide(
        self, body: bytes, now_s: float, *, complete: bool, phase: Phase
    ) -> Decision | None:
        self._decided = True
        if self._router is None:
            return None
        try:
            request = read_request(
                self._headers.get(":path", ""),
                self._headers,
                body,
                complete=complete,
                subset=self._subset,
                settings=self._intake,
            )
            self._decision = self._router.route(request, now_s)
        except RequestRefusedError:
            raise
        except Exception as error:  # noqa: BLE001 - costs the decision, never the request
            self._reports.append(Report(phase, error))
        return self._decision

    def _response_body(self, event: ResponseBody, now_s: float) -> list[Action]:
        if event.body and not self._response_begun:
            self._response_begun = True
            if self._router and self._decision:
                self._router.apply(FirstByte(self._decision.decision_id), now_s)
        phase, ends = Phase.RESPONSE_BODY, event.end_of_stream
        actions: Sequence[Action] = [Continue(phase=phase)]
        if self._response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            actions = echo_body(phase, event.body, end_of_stream=ends)
        return self._respond(actions, end_of_stream=ends)

    def _respond(self, actions: Sequence[Action], *, end_of_stream: bool) -> list[Action]:
        return [*actions, Finish()] if end_of_stream else [*actions, *self._end_request()]

    def _end_request(self) -> list[Action]:
        observes = self._settings.observe is Observe.STREAM and self._decision is not None
        stays = observes or self._response_mode is BodyMode.FULL_DUPLEX_STREAMED
        return [] if stays else [Finish()]

    def _limit(self, body_bytes: int) -> None:
        if body_bytes > self._settings.max_body_bytes:
            message = f"the body exceeds {self._settings.max_body_bytes} bytes"
            raise BodyTooLargeError(message)
