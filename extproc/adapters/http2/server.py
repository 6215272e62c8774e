"""Listens for Envoy's connections and gives their bytes to connection objects."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from extproc.adapters.exchange import (
    LIVENESS,
    PROCESS_METHOD,
    READY_SERVICES,
    ListenError,
)
from extproc.adapters.http2.calls import (
    CHECK_METHOD,
    WATCH_METHOD,
    Health,
    process_method,
    sink_method,
)
from extproc.adapters.http2.connection import Connection, Limits
from extproc.adapters.http2.inbox import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extproc.adapters.exchange import Exchanges, Sink
    from extproc.adapters.http2.stream import Call, Stream

_MAX_CONNECTIONS = 1_024
# Messages not yet whole, and answers not yet taken: at least four of the longest.
_HELD_BYTES = 512 * 1024 * 1024
_LONGEST_HELD = 4
_GREETING_S = 10.0
_PROBE_S = 30.0
# A client that takes none of our answers for so long is gone.
_STALL_S = 30.0
_WRITE_BUFFER_BYTES = 1024 * 1024
_CLOSING_S = 1.0


class Http2Server:
    """Serves at `host:port` or `unix:/path`, without TLS and without the gRPC library."""

    def __init__(
        self, address: str, exchanges: Exchanges, sinks: Sequence[Sink], *, max_streams: int
    ) -> None:
        self.address = address
        self._exchanges = exchanges
        # Streams above the limit are still answered, so a connection may have more.
        self._limits = Limits(
            max_streams=2 * max_streams + 100, max_message_bytes=exchanges.max_message_bytes
        )
        self._budget = Budget(max(_HELD_BYTES, _LONGEST_HELD * exchanges.max_message_bytes))
        self._sinks = sinks
        self._health = Health()
        self._peers: set[_Peer] = set()
        self._gone = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen and serve; raise ListenError when the address is not to be had."""
        loop = asyncio.get_running_loop()
        methods = self._methods(loop)
        self._health.set(LIVENESS, serving=True)
        await self.set_serving(serving=False)

        def accept() -> _Peer:
            return _Peer(self._connect(methods), self._peers, self._gone)

        try:
            if self.address.startswith("unix:"):
                path = self.address.removeprefix("unix:")
                self._server = await loop.create_unix_server(accept, path)
                return
            host, _, port = self.address.rpartition(":")
            name = host.removeprefix("[").removesuffix("]")
            self._server = await loop.create_server(accept, name, int(port))
        except OSError as error:
            message = f"cannot listen on {self.address}"
            raise ListenError(message) from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checks whether requests are routed; liveness is not touched."""
        for service in READY_SERVICES:
            self._health.set(service, serving=serving)

    async def stop(self, grace_s: float) -> None:
        """Take no new connections and streams, end the rest after `grace_s`."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self._health.end_watches()
        for peer in list(self._peers):
            peer.drain()
        await self._until_gone(grace_s)
        for peer in list(self._peers):
            peer.abort()
        await self._until_gone(_CLOSING_S)
        for peer in list(self._peers):
            peer.cut()

    async def _until_gone(self, limit_s: float) -> None:
        """Wait until no connection is left, but not longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while self._peers:
                    self._gone.clear()
                    await self._gone.wait()
        except TimeoutError:
            return

    def _methods(self, loop: asyncio.AbstractEventLoop) -> dict[str, Callable[[Stream], Call]]:
        return {
            PROCESS_METHOD: process_method(self._exchanges, loop.call_later),
            CHECK_METHOD: self._health.check,
            WATCH_METHOD: self._health.watch,
            **{sink.path: sink_method(sink) for sink in self._sinks},
        }

    def _connect(
        self, methods: Mapping[str, Callable[[Stream], Call]]
    ) -> Callable[[asyncio.Transport], Connection]:
        def connect(transport: asyncio.Transport) -> Connection:
            return Connection(
                methods,
                self._limits,
                budget=self._budget,
                clock=self._exchanges.clock,
                write=transport.write,
                disconnect=transport.close,
            )

        return connect


class _Peer(asyncio.Protocol):
    """The socket of one connection, and the times within which its client must do things."""

    def __init__(
        self,
        connect: Callable[[asyncio.Transport], Connection],
        peers: set[_Peer],
        gone: asyncio.Event,
    ) -> None:
        self._connect = connect
        self._peers = peers
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._connection: Connection | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports are no subclasses of asyncio's.
        self._transport = transport = cast("asyncio.Transport", transport)
        if len(self._peers) >= _MAX_CONNECTIONS:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._peers.add(self)
        self._connection = self._connect(transport)
        self._watch = self._loop.call_later(_GREETING_S, self._expect_greeting)

    def data_received(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.receive(data)

    def pause_writing(self) -> None:
        # Who does not read is not read either, so what waits for it does not grow.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._stall = self._loop.call_later(_STALL_S, self._transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        for timer in (self._watch, self._stall):
            if timer is not None:
                timer.cancel()
        if self._connection is not None:
            self._connection.lose()
        self._peers.discard(self)
        if not self._peers:
            self._gone.set()

    def drain(self) -> None:
        if self._connection is not None and self._connection.settled:
            self._connection.drain()
        else:
            self.abort()

    def abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _expect_greeting(self) -> None:
        if self._connection is None:
            return
        if not self._connection.settled:
            self._connection.abort()
        self._watch = self._loop.call_later(_PROBE_S, self._probe)

    def _probe(self) -> None:
        if self._connection is not None:
            self._connection.probe()
            self._watch = self._loop.call_later(_PROBE_S, self._probe)
