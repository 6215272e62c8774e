"""What calls do: ext_proc exchanges, health, and sinks such as the access log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from extproc.adapters.exchange import FAILED_TEXT
from extproc.adapters.http2.inbox import INTERNAL, NOT_FOUND, OK, UNAVAILABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.adapters.exchange import Exchange, Exchanges, Outgoing, Sink
    from extproc.adapters.http2.stream import Call, Stream

CHECK_METHOD, WATCH_METHOD = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_ANSWER = health_pb2.HealthCheckResponse


class Timer(Protocol):
    """Something that will happen, unless cancelled."""

    def cancel(self) -> None:
        """Let it not happen."""
        ...


def process_method(
    exchanges: Exchanges, later: Callable[[float, Callable[[], None]], Timer]
) -> Callable[[Stream], Call]:
    """Give the ext_proc method; `later` calls back after so many seconds."""
    return lambda stream: _Process(stream, exchanges, later)


def sink_method(sink: Sink) -> Callable[[Stream], Call]:
    """Give the method of a sink."""
    return lambda stream: _Sunk(stream, sink)


class Health:
    """The standard health service: the status of each name, and who watches it."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._watches: set[_Watch] = set()

    def set(self, service: str, *, serving: bool) -> None:
        """Change a status, and tell those who watch it."""
        status = _ANSWER.SERVING if serving else _ANSWER.NOT_SERVING
        if self._statuses.get(service) == status:
            return
        self._statuses[service] = status
        for watch in list(self._watches):
            if watch.service == service:
                watch.tell(status)

    def find(self, service: str) -> int | None:
        """Give a status; None for a name that is not known."""
        return self._statuses.get(service)

    def end_watches(self) -> None:
        """End the calls that would never end by themselves."""
        for watch in list(self._watches):
            watch.leave()

    def check(self, stream: Stream) -> Call:
        """Answer one question."""
        return _Check(stream, self)

    def watch(self, stream: Stream) -> Call:
        """Answer now, and at every change."""
        return _Watch(stream, self, self._watches)


class _Process:
    __slots__ = ("_deciding", "_exchange", "_exchanges", "_given", "_later", "_stream", "_timer")

    def __init__(
        self,
        stream: Stream,
        exchanges: Exchanges,
        later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self._stream = stream
        self._exchanges = exchanges
        self._exchange: Exchange = exchanges.begin()
        self._later = later
        self._timer: Timer | None = None
        self._given = 0
        self._deciding = 0

    def receive(self, data: bytes) -> None:
        self._send(self._exchange.receive(data))

    def half_close(self) -> None:
        self._stream.finish(OK)

    def close(self, sent: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._deciding:
            self._exchange.delivered = sent >= self._deciding
        self._exchange.close()

    def _expire(self) -> None:
        self._timer = None
        self._send(self._exchange.expire())

    def _send(self, messages: list[Outgoing]) -> None:
        exchange, stream = self._exchange, self._stream
        for message in messages:
            self._given += 1
            if message.decides:
                self._deciding = self._given
            stream.send(message.data)
        if exchange.failed:
            stream.finish(INTERNAL, FAILED_TEXT)
        elif exchange.finished:
            stream.finish(OK)
        else:
            self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        until_s = self._exchange.hold_until_s
        if until_s is not None:
            self._timer = self._later(max(0.0, until_s - self._exchanges.clock()), self._expire)


class _Sunk:
    __slots__ = ("_sink", "_stream")

    def __init__(self, stream: Stream, sink: Sink) -> None:
        self._stream = stream
        self._sink = sink

    def receive(self, data: bytes) -> None:
        self._sink.record(data)

    def half_close(self) -> None:
        self._stream.send(self._sink.answer)
        self._stream.finish(OK)

    def close(self, sent: int) -> None:
        """Nothing is held."""


class _Check:
    __slots__ = ("_health", "_stream")

    def __init__(self, stream: Stream, health: Health) -> None:
        self._stream = stream
        self._health = health

    def receive(self, data: bytes) -> None:
        service = _read_service(self._stream, data)
        status = None if service is None else self._health.find(service)
        if status is None:
            self._stream.finish(NOT_FOUND, "no such service")
            return
        self._stream.send(_written(status))
        self._stream.finish(OK)

    def half_close(self) -> None:
        self._stream.finish(INTERNAL, "a question was expected")

    def close(self, sent: int) -> None:
        """Nothing is held."""


class _Watch:
    def __init__(self, stream: Stream, health: Health, watches: set[_Watch]) -> None:
        self._stream = stream
        self._health = health
        self._watches = watches
        self.service: str | None = None

    def receive(self, data: bytes) -> None:
        if self.service is not None:
            return
        self.service = _read_service(self._stream, data)
        if self.service is not None:
            self._watches.add(self)
            status = self._health.find(self.service)
            self.tell(_ANSWER.SERVICE_UNKNOWN if status is None else status)

    def half_close(self) -> None:
        if self.service is None:
            self._stream.finish(INTERNAL, "a question was expected")

    def close(self, sent: int) -> None:  # noqa: ARG002 - of the contract
        self._watches.discard(self)

    def tell(self, status: int) -> None:
        self._stream.send(_written(status))

    def leave(self) -> None:
        self._stream.finish(UNAVAILABLE, "the server is stopping")


def _read_service(stream: Stream, data: bytes) -> str | None:
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError:
        stream.finish(INTERNAL, "not a HealthCheckRequest")
        return None


def _written(status: int) -> bytes:
    return bytes(_ANSWER(status=_ANSWER.ServingStatus.Name(status)).SerializeToString())
