"""One ext_proc stream's messages as bytes, in and out, whatever carries them.

Faults of ours end the stream without a word, whereupon Envoy goes on alone, unless Envoy
has body bytes that only our echo would bring back: then the stream fails loudly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, assert_never

from extproc.adapters.wire import PROCESSOR_SERVICE, decode, encode
from extproc.core.errors import ExtprocError
from extproc.core.phases import Action, Continue, EchoBody, Finish, Refuse, Report
from extproc.core.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.decision import Decision
    from extproc.core.errors import RequestRefusedError
    from extproc.core.intake import IntakeSettings
    from extproc.core.phases import StreamSettings
    from extproc.core.stream import Routing

PROCESS_METHOD = f"/{PROCESSOR_SERVICE}/Process"

LIVENESS, READINESS = "liveness", "readiness"
READY_SERVICES = ("", READINESS, PROCESSOR_SERVICE)
"""The names of gRPC health that tell whether requests are routed."""

FAILED_TEXT = "the router failed"
"""What Envoy is told of a stream that fails loudly."""

# A body one read of Envoy above the limit must still reach us, to be refused with 413.
_SLACK_BYTES = 4 * 1024 * 1024


class ListenError(ExtprocError):
    """The address can't be listened on."""


class TooManyStreamsError(ExtprocError):
    """A stream above the limit: its request passes undecided."""


class Observer(Protocol):
    """What an operator may want to know of the streams; every method returns at once."""

    def on_stream_open(self) -> None:
        """Take note that Envoy began a stream."""
        ...

    def on_stream_close(self) -> None:
        """Take note that a stream ended, however it ended."""
        ...

    def on_decision(self, decision: Decision, seconds: float) -> None:
        """Take note of a decision, made so long after the message that completed the prompt."""
        ...

    def on_refused(self, error: RequestRefusedError) -> None:
        """Take note of a request answered in place of an engine."""
        ...

    def on_error(self, phase: str, error: Exception) -> None:
        """Take note of a request that passes undecided by a fault; `phase` says where."""
        ...


class SilentObserver:
    """An observer that takes note of nothing."""

    def on_stream_open(self) -> None:
        """Do nothing."""

    def on_stream_close(self) -> None:
        """Do nothing."""

    def on_decision(self, decision: Decision, seconds: float) -> None:
        """Do nothing."""

    def on_refused(self, error: RequestRefusedError) -> None:
        """Do nothing."""

    def on_error(self, phase: str, error: Exception) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """A gRPC method that takes messages in until the client ends them, then answers once.

    `path` is `/package.Service/Method`; `record` takes one message and never raises.
    """

    path: str
    record: Callable[[bytes], None]
    answer: bytes = b""


class Outgoing(NamedTuple):
    """One message for Envoy; `decides`: it carries the decision."""

    data: bytes
    decides: bool = False


class Exchanges:
    """Begins an exchange for each stream of Envoy; `clock` gives monotonic seconds.

    Those above `max_streams` are answered, but pass undecided.
    """

    def __init__(
        self,
        *,
        router: Routing,
        intake: IntakeSettings,
        stream: StreamSettings,
        clock: Callable[[], float],
        observer: Observer,
        max_streams: int,
    ) -> None:
        self._router = router
        self._intake = intake
        self._stream_settings = stream
        self._max_streams = max_streams
        self.clock = clock
        self.observer = observer
        self.open = 0
        """Exchanges begun and not closed."""

    @property
    def max_message_bytes(self) -> int:
        """The longest message of Envoy to take in."""
        return self._stream_settings.max_body_bytes + _SLACK_BYTES

    def begin(self) -> Exchange:
        """Begin an exchange, to be closed by the caller however it ends."""
        admitted = self.open < self._max_streams
        router = self._router if admitted else None
        self.open += 1
        self.observer.on_stream_open()
        if not admitted:
            self.observer.on_error("limit", TooManyStreamsError())
        return Exchange(self, Stream(router, self._intake, self._stream_settings))


class Exchange:
    """One stream's messages: `receive` gives what answers each, in order, and never raises."""

    __slots__ = ("_exchanges", "_stream", "delivered", "failed", "finished")

    def __init__(self, exchanges: Exchanges, stream: Stream) -> None:
        self._exchanges = exchanges
        self._stream = stream
        self.delivered = True
        """Whether Envoy was given the decision, if there is one; the carrier sets it back."""
        self.finished = False
        """Whether nothing more is to be said."""
        self.failed = False
        """Whether it finished in a way that must be an error to Envoy."""

    @property
    def hold_until_s(self) -> float | None:
        """When to call `expire`, while a reply is held back for a limited time."""
        return self._stream.hold_until_s

    def receive(self, data: bytes) -> list[Outgoing]:
        """Take in one message of Envoy."""
        stream, exchanges = self._stream, self._exchanges
        try:
            undecided = stream.decision is None
            began_s = exchanges.clock()
            actions = stream.receive(decode(data), began_s)
            if undecided and stream.decision is not None:
                exchanges.observer.on_decision(stream.decision, exchanges.clock() - began_s)
            return self._carry_out(actions)
        except Exception as error:  # noqa: BLE001 - costs the decision, never the request
            return self._fail(error)

    def expire(self) -> list[Outgoing]:
        """Answer what may not wait any longer."""
        try:
            return self._carry_out(self._stream.expire(self._exchanges.clock()))
        except Exception as error:  # noqa: BLE001 - likewise
            return self._fail(error)

    def close(self) -> None:
        """End the exchange, however the stream ended."""
        self._exchanges.open -= 1
        self._stream.close(self._exchanges.clock(), delivered=self.delivered)
        self._exchanges.observer.on_stream_close()

    def _fail(self, error: Exception) -> list[Outgoing]:
        self._exchanges.observer.on_error("stream", error)
        self.failed = self._stream.owes_body
        self.finished = True
        return []

    def _carry_out(self, actions: list[Action]) -> list[Outgoing]:
        outgoing: list[Outgoing] = []
        for action in actions:
            match action:
                case Finish():
                    self.finished = True
                case Continue() | EchoBody():
                    decides = action.decision is not None
                    self.delivered = self.delivered and not decides
                    outgoing.append(Outgoing(encode(action), decides))
                case Report():
                    self._exchanges.observer.on_error(action.phase.value, action.error)
                case Refuse():
                    self._exchanges.observer.on_refused(action.error)
                    outgoing.append(Outgoing(encode(action)))
                case _:
                    assert_never(action)
        return outgoing
