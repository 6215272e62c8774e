"""Several router processes on one host: started, watched, started again, drained.

The supervisor carries no request and shares no memory with its workers: what they know of
each other comes through the decision log. A worker whose supervisor is gone drains and ends.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.app import serve
from extproc.core.errors import ExtprocError
from extproc.running import run_loop, set_up_logging

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from extproc.config.sections import Config

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
# A worker that served so long ended for a reason of its own, not for one of its start.
_SETTLED_S = 10.0
# Beyond its drain time, before it is killed.
_EXTRA_S = 5.0
_FAILED = 2


class WorkerError(ExtprocError):
    """A worker that can't be started."""


async def serve_workers(configs: Sequence[Config]) -> None:
    """Serve with a process for each config until SIGTERM or SIGINT, then drain them.

    Raise WorkerError if one ends before all have served; from then on each is started again.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    workers = [_Worker(config, number) for number, config in enumerate(configs)]
    try:
        if await _all_serve(workers, stopping):
            await _keep_all(workers, stopping)
    finally:
        await asyncio.gather(*[worker.stop() for worker in workers])


async def _all_serve(workers: Sequence[_Worker], stopping: asyncio.Event) -> bool:
    """Start all; tell whether they serve, or whether we are to stop before that."""
    for worker in workers:
        worker.start()
    starting = asyncio.gather(*[worker.until_serving() for worker in workers])
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        failed = [str(n) for n, serves in enumerate(starting.result()) if not serves]
    finally:
        starting.cancel()
        stop.cancel()
    if failed:
        message = f"worker {', '.join(failed)} of {len(workers)} ended at its start"
        raise WorkerError(message)
    return True


async def _keep_all(workers: Sequence[_Worker], stopping: asyncio.Event) -> None:
    tasks = [asyncio.create_task(worker.keep_serving()) for worker in workers]
    await stopping.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Running:
    process: SpawnProcess
    link: Connection
    """Tells that the worker serves; its end closes with the supervisor."""
    started_s: float


class _Worker:
    def __init__(self, config: Config, number: int) -> None:
        self._config = config
        self._number = number
        self._running: _Running | None = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(self._config, theirs), name=f"worker-{self._number}"
        )
        process.start()
        theirs.close()
        self._running = _Running(process, ours, time.monotonic())

    async def until_serving(self) -> bool:
        """Wait until it serves; False if it ended before."""
        running = self._require()
        await _until_readable(running.link.fileno())
        try:
            running.link.recv_bytes()
        except EOFError:
            return False
        _LOG.info("worker %d serves as process %d", self._number, running.process.pid)
        return True

    async def keep_serving(self) -> None:
        """Start it again whenever it ends, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            running = self._require()
            await _until_readable(running.process.sentinel)
            running.process.join()
            if time.monotonic() - running.started_s > _SETTLED_S:
                pause_s = _FIRST_PAUSE_S
            code = running.process.exitcode
            _LOG.warning(
                "worker %d ended with %s: starting it in %.2f s", self._number, code, pause_s
            )
            self._release()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.start()
            await self.until_serving()

    async def stop(self) -> None:
        """Let it drain, but not for ever."""
        if self._running is None:
            return
        process = self._running.process
        if process.is_alive():
            process.terminate()
            try:
                async with asyncio.timeout(self._config.listen.drain_s + _EXTRA_S):
                    await _until_readable(process.sentinel)
            except TimeoutError:
                _LOG.warning("worker %d did not drain in time: killed", self._number)
                process.kill()
        process.join()
        self._release()

    def _release(self) -> None:
        running = self._require()
        running.link.close()
        running.process.close()
        self._running = None

    def _require(self) -> _Running:
        assert self._running is not None  # noqa: S101 - a fault of ours
        return self._running


def _work(config: Config, link: Connection) -> None:
    """Be a worker process."""
    from extproc.adapters.allocator import keep_freed_memory  # noqa: PLC0415

    name = multiprocessing.current_process().name
    set_up_logging(config.logging.level, process=name)
    keep_freed_memory()
    try:
        run_loop(serve(config, supervisor=link))
    except (ExtprocError, OSError) as error:
        sys.stderr.write(f"extproc: {name}: {error}\n")
        sys.exit(_FAILED)


async def _until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
