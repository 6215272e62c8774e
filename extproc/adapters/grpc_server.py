"""The gRPC library as the carrier of ext_proc, health and access log."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.adapters.exchange import (
    FAILED_TEXT,
    LIVENESS,
    PROCESS_METHOD,
    READY_SERVICES,
    ListenError,
    Outgoing,
    Sink,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.adapters.exchange import Exchange, Exchanges

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


class GrpcServer:
    """Serves at `host:port` or `unix:/path` with grpc.aio."""

    def __init__(self, address: str, exchanges: Exchanges, sinks: Sequence[Sink]) -> None:
        self._exchanges = exchanges
        self._sinks = sinks
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: grpc.aio.Server | None = None
        self.address = address

    async def start(self) -> None:
        """Listen and serve; raise ListenError when the address is not to be had."""
        sizes = [
            ("grpc.max_receive_message_length", self._exchanges.max_message_bytes),
            ("grpc.max_send_message_length", -1),
        ]
        server = grpc.aio.server(options=[*_OPTIONS, *sizes])
        process = grpc.stream_stream_rpc_method_handler(self._process)
        server.add_generic_rpc_handlers(
            (_handler(PROCESS_METHOD, process), *(_sink_handler(sink) for sink in self._sinks))
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = server.add_insecure_port(self.address)
        except RuntimeError as error:
            message = f"cannot listen on {self.address}"
            raise ListenError(message) from error
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(serving=False)
        await server.start()
        self._server = server

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checks whether requests are routed; liveness is not touched."""
        answer = health_pb2.HealthCheckResponse
        for service in READY_SERVICES:
            await self._health.set(service, answer.SERVING if serving else answer.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no new streams, end the rest after `grace_s`."""
        if self._server is None:
            return
        await self._server.stop(grace_s)
        self._server = None

    async def _process(self, _requests: object, context: Context) -> None:
        exchange = self._exchanges.begin()
        try:
            await _Carrier(exchange, context, self._exchanges).run()
        except Exception:
            # A write to an Envoy that left raises; nothing is to be said to it.
            if not context.done():
                raise
        finally:
            exchange.close()


class _Carrier:
    """Moves one stream's messages between the library and the exchange."""

    def __init__(self, exchange: Exchange, context: Context, exchanges: Exchanges) -> None:
        self._exchange = exchange
        self._context = context
        self._clock = exchanges.clock
        self._reading: asyncio.Future[object] | None = None

    async def run(self) -> None:
        """Answer until the exchange is finished or Envoy leaves."""
        exchange = self._exchange
        try:
            while not exchange.finished:
                data = await self._read()
                if data is None:
                    await self._send(exchange.expire())
                elif isinstance(data, bytes):
                    await self._send(exchange.receive(data))
                else:
                    return
        finally:
            await self._drop_read()
        if exchange.failed:
            await self._context.abort(grpc.StatusCode.INTERNAL, FAILED_TEXT)

    async def _read(self) -> object | None:
        """Wait for Envoy's next message; None when the stream may not wait that long.

        A read goes on when waiting ends, since cancelling one cancels the whole call.
        """
        until_s = self._exchange.hold_until_s
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

    async def _send(self, messages: list[Outgoing]) -> None:
        for message in messages:
            await self._context.write(message.data)
            self._exchange.delivered = self._exchange.delivered or message.decides


def _handler(path: str, method: grpc.RpcMethodHandler) -> grpc.GenericRpcHandler:
    _, service, name = path.split("/")
    handler: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(service, {name: method})
    return handler


def _sink_handler(sink: Sink) -> grpc.GenericRpcHandler:
    async def take_in(_requests: object, context: Context) -> bytes:
        while True:
            data: object = await context.read()
            if not isinstance(data, bytes):
                return sink.answer
            sink.record(data)

    return _handler(sink.path, grpc.stream_unary_rpc_method_handler(take_in))
