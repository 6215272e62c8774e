"""The gRPC server Envoy calls: moves messages between Envoy and a stream object, and no more.

Faults of ours end the stream without a word, whereupon Envoy goes on alone, unless Envoy
has body bytes that only our echo would bring back: then the stream fails loudly.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.adapters.wire import PROCESSOR_SERVICE, decode, encode
from extproc.core.errors import ExtprocError
from extproc.core.phases import Action, Continue, EchoBody, Finish, Refuse, Report
from extproc.core.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.core.decision import Decision
    from extproc.core.errors import RequestRefusedError
    from extproc.core.intake import IntakeSettings
    from extproc.core.phases import StreamSettings
    from extproc.core.stream import Routing

LIVENESS, READINESS = "liveness", "readiness"

_READY_SERVICES = ("", READINESS, PROCESSOR_SERVICE)
# A body one read of Envoy above the limit must still reach us, to be refused with 413.
_SLACK_BYTES = 4 * 1024 * 1024
# Envoy's connection keepalive may ping every few seconds; C-core's default takes that for abuse.
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)

Context = grpc.aio.ServicerContext[bytes, bytes]


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
class ServerSettings:
    """Where to serve (`host:port`, port 0 for a free one, or `unix:/path`), and how much."""

    address: str = "127.0.0.1:0"
    max_streams: int = 10_000


class ExtProcServer:
    """ext_proc and gRPC health, with further services such as the access log beside them.

    `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        router: Routing,
        intake: IntakeSettings,
        stream: StreamSettings,
        clock: Callable[[], float],
        observer: Observer | None = None,
        services: Sequence[grpc.GenericRpcHandler] = (),
    ) -> None:
        self._settings = settings
        self._router = router
        self._intake = intake
        self._stream_settings = stream
        self._clock = clock
        self._observer: Observer = observer or SilentObserver()
        self._services = services
        self._streams = 0
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: grpc.aio.Server | None = None
        self._address = settings.address

    @property
    def address(self) -> str:
        """The address served, with the real port once started."""
        return self._address

    @property
    def streams(self) -> int:
        """Streams now open."""
        return self._streams

    async def start(self) -> None:
        """Listen and serve; raise ListenError when the address is not to be had."""
        limit = self._stream_settings.max_body_bytes + _SLACK_BYTES
        sizes = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", -1)]
        server = grpc.aio.server(options=[*_OPTIONS, *sizes])
        process = grpc.stream_stream_rpc_method_handler(self._process)
        processor = grpc.method_handlers_generic_handler(PROCESSOR_SERVICE, {"Process": process})
        server.add_generic_rpc_handlers((processor, *self._services))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = server.add_insecure_port(self._settings.address)
        except RuntimeError as error:
            message = f"cannot listen on {self._settings.address}"
            raise ListenError(message) from error
        if not self._settings.address.startswith("unix:"):
            self._address = f"{self._settings.address.rpartition(':')[0]}:{port}"
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(serving=False)
        await server.start()
        self._server = server

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checks whether requests are routed; liveness is not touched."""
        answer = health_pb2.HealthCheckResponse
        for service in _READY_SERVICES:
            await self._health.set(service, answer.SERVING if serving else answer.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Drain: report not serving, take no new streams, end the rest after `grace_s`."""
        if self._server is None:
            return
        await self.set_serving(serving=False)
        await self._server.stop(grace_s)
        self._server = None

    async def _process(self, _requests: object, context: Context) -> None:
        admitted = self._streams < self._settings.max_streams
        stream = Stream(self._router if admitted else None, self._intake, self._stream_settings)
        exchange = _Exchange(stream, context, self._clock, self._observer)
        self._streams += 1
        self._observer.on_stream_open()
        try:
            if not admitted:
                self._observer.on_error("limit", TooManyStreamsError())
            await exchange.run()
        except Exception as error:  # noqa: BLE001 - costs the decision, never the request
            if context.done():
                return
            self._observer.on_error("stream", error)
            if stream.owes_body:
                await context.abort(grpc.StatusCode.INTERNAL, "the router failed")
        finally:
            self._streams -= 1
            stream.close(self._clock(), delivered=exchange.delivered)
            self._observer.on_stream_close()


class _Exchange:
    """One stream's messages, in and out."""

    def __init__(
        self, stream: Stream, context: Context, clock: Callable[[], float], observer: Observer
    ) -> None:
        self._stream = stream
        self._context = context
        self._clock = clock
        self._observer = observer
        self._reading: asyncio.Future[object] | None = None
        self.delivered = True
        """Whether Envoy was given the decision, if there is one."""

    async def run(self) -> None:
        """Answer until the stream says Finish or Envoy leaves."""
        try:
            while True:
                data = await self._read()
                if data is None:
                    actions = self._stream.expire(self._clock())
                elif isinstance(data, bytes):
                    actions = self._receive(data)
                else:
                    return
                if await self._send(actions):
                    return
        finally:
            await self._drop_read()

    async def _read(self) -> object | None:
        """Wait for Envoy's next message; None when the stream may not wait that long.

        A read goes on when waiting ends, since cancelling one cancels the whole call.
        """
        until_s = self._stream.hold_until_s
        if self._reading is None and until_s is None:
            return await self._context.read()
        reading = self._reading or asyncio.ensure_future(self._context.read())
        self._reading = reading
        timeout_s = None if until_s is None else max(0.0, until_s - self._clock())
        done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        if not done:
            return None
        self._reading = None
        return reading.result()

    async def _drop_read(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._reading

    def _receive(self, data: bytes) -> list[Action]:
        undecided = self._stream.decision is None
        began_s = self._clock()
        actions = self._stream.receive(decode(data), began_s)
        if undecided and self._stream.decision is not None:
            self._observer.on_decision(self._stream.decision, self._clock() - began_s)
        return actions

    async def _send(self, actions: list[Action]) -> bool:
        """Carry out actions in order; True when the stream is finished."""
        for action in actions:
            match action:
                case Finish():
                    return True
                case Report():
                    self._observer.on_error(action.phase.value, action.error)
                case Refuse():
                    self._observer.on_refused(action.error)
                    await self._context.write(encode(action))
                case Continue() | EchoBody():
                    decides = action.decision is not None
                    self.delivered = self.delivered and not decides
                    await self._context.write(encode(action))
                    self.delivered = self.delivered or decides
                case _:
                    assert_never(action)
        return False
