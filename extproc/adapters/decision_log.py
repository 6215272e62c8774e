"""The decision log on Valkey streams: writes our events in batches, applies the others'.

Requests never wait for it: events are queued in the core, and everything here happens in
tasks of its own. Whatever the server does, the router goes on alone, says so, and comes
back with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from extproc.adapters.log_state import LogCounts, LogMetrics, LogState
from extproc.adapters.log_stream import FAILURES, EntryId, LogStream, connect
from extproc.core.journal import Journal
from extproc.core.packing import JournalError
from extproc.core.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from extproc.adapters.log_settings import LogSettings
    from extproc.core.endpoint import Endpoint
    from extproc.core.router import Router

_LOG = logging.getLogger(__name__)
_READING, _WRITING = "reading", "writing"
_START = EntryId()
# Below it the p99 delay stays under 20 ms; above it batches would save little.
_FLUSH_S = 0.005
_BATCH_EVENTS = 128
# Reading each batch of each router alone would cost more than what is in it.
_GATHER_S = 0.004
# Read at once, between which requests have their turn.
_READ_ENTRIES = 64
_MAX_ENTRY_BYTES = 8 * 1024 * 1024
_HEARTBEAT_S = 1.0
# Trimming by age is a matter of minutes; it need not be asked for with every batch.
_TRIM_EVERY = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_MAX_UNRETURNED = 1_024
_MAX_REASON_CHARS = 200


class DecisionLog:
    """One router's reader and writer of the log, joining it to its peers.

    `clock` gives monotonic seconds; `is_known` says whether an endpoint is ours too. The
    log's metrics are added to `registry`, and `on_delay` is told how long, in seconds, each
    of our batches took to come back.
    """

    def __init__(
        self,
        settings: LogSettings,
        router: Router,
        *,
        router_id: str,
        clock: Callable[[], float],
        is_known: Callable[[Endpoint], bool],
        registry: CollectorRegistry | None = None,
        on_delay: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.peers = Peers(router, router_id=router_id, is_known=is_known, on_waiting=self._wake)
        """The router to use in place of the one given."""
        self._settings = settings
        self._router_id = router_id
        self._clock = clock
        self._journal = Journal()
        self._counts = LogCounts()
        self._on_delay = on_delay
        self._metrics = LogMetrics(registry or CollectorRegistry(), self.state)
        self._waiting = asyncio.Event()
        self._waiting_since_s = 0.0
        self._flushed = asyncio.Event()
        self._warm = asyncio.Event()
        self._sequence = 0
        self._pending: tuple[bytes, int] | None = None
        self._unreturned: OrderedDict[int, float] = OrderedDict()
        self._lag_s = 0.0
        self._position = _START

    def state(self) -> LogState:
        """Show the log as it is now."""
        counts, peers = self._counts, self.peers
        oldest_s = next(iter(self._unreturned.values()), None)
        lag_s = self._lag_s if oldest_s is None else max(self._lag_s, self._clock() - oldest_s)
        connected = len(counts.connected) == len((_READING, _WRITING))
        return LogState(
            connected=connected,
            reason="" if connected else counts.reason or "connecting",
            lag_ms=round(lag_s * 1e3, 3),
            peers=peers.alive,
            waiting=peers.waiting,
            written=counts.written,
            applied=peers.applied,
            dropped=peers.dropped,
            replayed=counts.replayed,
            unreadable=counts.unreadable,
            unknown_chains=counts.unknown_chains,
            gaps=counts.gaps,
        )

    async def until_warm(self) -> None:
        """Wait until the log was replayed, or could not be reached."""
        await self._warm.wait()

    async def flush(self) -> None:
        """Wait until everything that waits is written, without a limit."""
        self._flushed.clear()
        self._wake()
        await self._flushed.wait()

    async def run(self) -> None:
        """Write, read and drop dead routers, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_connected(_WRITING, self._write))
            tasks.create_task(self._keep_connected(_READING, self._follow))
            tasks.create_task(self._watch())

    def _wake(self) -> None:
        if not self._waiting.is_set():
            self._waiting_since_s = self._clock()
            self._waiting.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for router_id in self.peers.expire(self._clock()):
                _LOG.warning("router %s is silent: what it held is dropped", router_id)

    async def _keep_connected(self, name: str, run: Callable[[LogStream], Awaitable[None]]) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s = self._clock()
            try:
                async with connect(self._settings) as stream:
                    await run(stream)
            except FAILURES as error:
                self._note_failure(name, error)
            finally:
                self._counts.connected.discard(name)
            held = self._clock() - began_s > 2 * self._settings.timeout_s
            pause_s = _FIRST_PAUSE_S if held else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _note_connected(self, name: str) -> None:
        if name not in self._counts.connected:
            self._counts.connected.add(name)
            _LOG.info("%s the decision log %s", name, self._settings.stream)

    def _note_failure(self, name: str, error: Exception) -> None:
        if name == _READING:
            self._warm.set()
        reason = f"{name}: {str(error) or type(error).__name__}"[:_MAX_REASON_CHARS]
        if name in self._counts.connected or not self._counts.reason:
            _LOG.warning("routing without the decision log: %s", reason)
        self._counts.reason = reason

    async def _write(self, stream: LogStream) -> None:
        self._journal.restart()
        while True:
            await self._write_waiting(stream)
            self._flushed.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._waiting.wait()
                    await asyncio.sleep(_FLUSH_S)

    async def _write_waiting(self, stream: LogStream) -> None:
        """Write all that waits, or that we live."""
        while True:
            if self._pending is None:
                self._encode()
            assert self._pending is not None  # noqa: S101 - just encoded
            data, count = self._pending
            written = await stream.append(data)
            self._pending = None
            self._note_connected(_WRITING)
            self._counts.written += count
            self._counts.batches += 1
            if self._counts.batches % _TRIM_EVERY == 0:
                await stream.trim(written)
            if not self.peers.waiting:
                return

    def _encode(self) -> None:
        since_s = self._waiting_since_s if self._waiting.is_set() else self._clock()
        self._waiting.clear()
        events = self.peers.take(_BATCH_EVENTS, self._clock())
        if self.peers.waiting:
            self._wake()
        self._sequence += 1
        data = self._journal.encode(self._router_id, self._sequence, events, self._clock())
        self._pending = (data, len(events))
        self._unreturned[self._sequence] = since_s
        if len(self._unreturned) > _MAX_UNRETURNED:
            self._unreturned.popitem(last=False)

    async def _follow(self, stream: LogStream) -> None:
        await self._catch_up(stream)
        self._note_connected(_READING)
        self._warm.set()
        while True:
            for entry_id, data in await stream.read(self._position, _READ_ENTRIES, wait=True):
                self._take_in(entry_id, data, self._clock())
            await asyncio.sleep(_GATHER_S)

    async def _catch_up(self, stream: LogStream) -> None:
        """Apply what was written while we were away, each entry as of its time."""
        ahead_s = await stream.time_s() - self._clock()
        bounds = await stream.bounds()
        if self._position != _START and not bounds.first <= self._position <= bounds.last:
            self._counts.gaps += 1
            _LOG.warning("a part of the decision log was lost unread: going on with the rest")
            self.peers.lose(self._clock())
            if self._position > bounds.last:
                self._position = _START
        while self._position < bounds.last:
            entries = await stream.read(self._position, _READ_ENTRIES)
            if not entries:
                return
            for entry_id, data in entries:
                at_s = min(self._clock(), entry_id.milliseconds / 1e3 - ahead_s)
                self._take_in(entry_id, data, at_s)
                self._counts.replayed += 1
            await asyncio.sleep(0)

    def _take_in(self, entry_id: EntryId, data: bytes, at_s: float) -> None:
        self._position = entry_id
        try:
            # Bytes beyond any batch of ours are not worth the time to find out.
            batch = self._journal.decode(data[:_MAX_ENTRY_BYTES], at_s)
        except JournalError as error:
            self._counts.unreadable += 1
            if self._counts.unreadable == 1:
                _LOG.warning("an entry of the decision log is left out: %s", error)
            return
        if batch.router_id == self._router_id:
            self._note_return(batch.sequence)
        elif self.peers.merge(batch, at_s):
            self._counts.unknown_chains += batch.unknown

    def _note_return(self, sequence: int) -> None:
        """Take note that our batch came back, and with it whatever we wrote before."""
        while self._unreturned:
            oldest, since_s = next(iter(self._unreturned.items()))
            if oldest > sequence:
                return
            del self._unreturned[oldest]
            if oldest == sequence:
                self._lag_s = self._clock() - since_s
                self._metrics.delay_s.observe(self._lag_s)
                self._on_delay(self._lag_s)
