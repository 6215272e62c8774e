"""The server Envoy calls: ext_proc, gRPC health and access log over a transport of choice.

`h2` is our own listener (adapters/http2), `grpc` the gRPC library; both carry the same
exchanges (adapters/exchange.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from extproc.adapters.exchange import Exchanges, Observer, SilentObserver
from extproc.adapters.grpc_server import GrpcServer
from extproc.adapters.http2.server import Http2Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.adapters.exchange import Sink
    from extproc.core.intake import IntakeSettings
    from extproc.core.phases import StreamSettings
    from extproc.core.stream import Routing

Transport = Literal["h2", "grpc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where to serve (`host:port`, port 0 for a free one, or `unix:/path`), how, and how much."""

    address: str = "127.0.0.1:0"
    transport: Transport = "h2"
    max_streams: int = 10_000


class _Carrier(Protocol):
    address: str

    async def start(self) -> None: ...

    async def set_serving(self, *, serving: bool) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


class ExtProcServer:
    """ext_proc and gRPC health, with sinks such as the access log beside them.

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
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._exchanges = Exchanges(
            router=router,
            intake=intake,
            stream=stream,
            clock=clock,
            observer=observer or SilentObserver(),
            max_streams=settings.max_streams,
        )
        self._carrier: _Carrier
        if settings.transport == "grpc":
            self._carrier = GrpcServer(settings.address, self._exchanges, sinks)
        else:
            self._carrier = Http2Server(
                settings.address, self._exchanges, sinks, max_streams=settings.max_streams
            )

    @property
    def address(self) -> str:
        """The address served, with the real port once started."""
        return self._carrier.address

    @property
    def streams(self) -> int:
        """Streams now open."""
        return self._exchanges.open

    async def start(self) -> None:
        """Listen and serve; raise ListenError when the address is not to be had."""
        await self._carrier.start()

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checks whether requests are routed; liveness is not touched."""
        await self._carrier.set_serving(serving=serving)

    async def stop(self, grace_s: float) -> None:
        """Drain: report not serving, take no new streams, end the rest after `grace_s`."""
        await self._carrier.set_serving(serving=False)
        await self._carrier.stop(grace_s)
