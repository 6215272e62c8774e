"""A stand-in model server: the modelled engine behind vLLM's and Anthropic's HTTP paths.

Every answer names the endpoint and the SHA-256 of the request body as it came
(`x-standin-endpoint`, `x-standin-body-sha256`; `unread` where the body was not taken in), so
that a test sees where a request went and that nothing changed it.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from aiohttp import web

from extproc.core.endpoint import Endpoint
from extproc.standin.engine import Engine
from extproc.standin.faults import Fault, Faults
from extproc.standin.paths import Paths

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.standin.settings import StandinSettings


class RunningStandin:
    """A stand-in that serves until `stop`; `engine` is its model, for tests to look into."""

    def __init__(self, endpoint: Endpoint, engine: Engine, paths: Paths) -> None:
        self.endpoint = endpoint
        self.engine = engine
        self._paths = paths

    @property
    def drained(self) -> int:
        """How often somebody read what reading takes away (TensorRT-LLM's /metrics)."""
        return self._paths.drained

    @property
    def url(self) -> str:
        """Its base URL, without a slash at the end."""
        return f"http://{self.endpoint}"

    def fail(self, fault: Fault) -> None:
        """Put a fault in force; `Fault()` ends it."""
        self._paths.faults.set(fault)

    async def stop(self) -> None:
        """Close the port, give open answers the grace of the settings, then cut them."""
        await self._paths.stop()


async def start_standin(
    settings: StandinSettings, host: str = "127.0.0.1", port: int = 0
) -> RunningStandin:
    """Start serving on `host` (0: a free port); OSError when the port can't be had."""
    engine = Engine(settings, asyncio.get_running_loop().time)
    paths = Paths(engine, Faults())
    runner = web.AppRunner(
        paths.application(),
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        shutdown_timeout=settings.shutdown_timeout_s,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
        address, bound_port = runner.addresses[0][:2]
        shown = f"[{address}]" if ":" in address else address
        endpoint = Endpoint.parse(f"{shown}:{bound_port}")
    except BaseException:
        await runner.cleanup()
        raise
    paths.open(endpoint, runner)
    return RunningStandin(endpoint, engine, paths)


async def run_standin(
    settings: StandinSettings,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    on_ready: Callable[[RunningStandin], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop cleanly; OSError when the port can't be had."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        standin = await start_standin(settings, host, port)
        try:
            if on_ready is not None:
                on_ready(standin)
            await stopping.wait()
        finally:
            await standin.stop()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
