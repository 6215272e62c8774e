"""Reads the engines' own metrics, each in its dialect, and tells what they show.

An engine that restarted has lost its cache: seen by another start time, or by a counter
that went back. Then an EndpointReset comes before the Observed. What can't be read is not
told: an endpoint without metrics is routed to like any other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import aiohttp

from extproc.adapters.engines.reading import Reading, restarted
from extproc.adapters.engines.recognition import (
    DIALECTS,
    MODELS_PATH,
    PAGES,
    recognise_models,
    recognise_page,
)
from extproc.core.events import EndpointDown, EndpointReset, EndpointUp, Observed

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.adapters.engines.reading import Dialect
    from extproc.core.endpoint import Endpoint

_LOG = logging.getLogger(__name__)
_MAX_CONCURRENT = 64
# The pages of vLLM and SGLang are about 100 KB for one model; this is no metrics page.
_MAX_PAGE_BYTES = 4 * 1024 * 1024
# Scrapes that began together drift apart, so that they do not all come at once for ever.
_JITTER = 0.1
# Who could not be recognised is asked again after this many intervals.
_ASK_AGAIN = 10
# Gauges that lag are believed this long after the engine last moved.
_LAG_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeSettings:
    """GET the dialect's page, or `path` instead, of every endpoint each `interval_s`.

    `dialect` is `auto` (asked of the endpoint itself) or the name of one.
    """

    dialect: str = "auto"
    path: str | None = None
    interval_s: float = 1.0
    timeout_s: float = 1.0


@dataclass(slots=True)
class _Engine:
    """What is known of one endpoint between scrapes."""

    dialect: Dialect | None
    wait: int = 0
    """Scrapes to leave out before it is asked again who it is."""
    last: Reading | None = None
    moved_at_s: float = 0.0
    """When its counters or gauges last changed."""


class Scraper:
    """Follows the pool's membership and reports each member's metrics to `apply`."""

    def __init__(
        self,
        settings: ScrapeSettings,
        apply: Callable[[Observed | EndpointReset], None],
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._apply = apply
        self._chance = chance
        self._engines: dict[Endpoint, _Engine] = {}
        self._changed = asyncio.Event()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    def update(self, event: EndpointUp | EndpointDown) -> None:
        """Take in what discovery says of the membership."""
        if isinstance(event, EndpointUp):
            if event.endpoint not in self._engines:
                self._engines[event.endpoint] = _Engine(DIALECTS.get(self._settings.dialect))
        elif event.gone:
            self._engines.pop(event.endpoint, None)
        self._changed.set()

    def dialect_of(self, endpoint: Endpoint) -> str | None:
        """Give the dialect an endpoint was found to speak, None while unknown."""
        engine = self._engines.get(endpoint)
        return engine.dialect.name if engine and engine.dialect else None

    async def run(self) -> None:
        """Scrape until cancelled, each endpoint at a pace of its own."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        followed: dict[Endpoint, asyncio.Task[None]] = {}
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            try:
                while True:
                    self._changed.clear()
                    for endpoint in followed.keys() - self._engines.keys():
                        followed.pop(endpoint).cancel()
                    for endpoint in self._engines.keys() - followed.keys():
                        task = asyncio.create_task(self._follow(session, endpoint))
                        followed[endpoint] = task
                    await self._changed.wait()
            finally:
                for task in followed.values():
                    task.cancel()
                await asyncio.gather(*followed.values(), return_exceptions=True)

    async def scrape_all(self, session: aiohttp.ClientSession) -> None:
        """Read every member's page once."""
        await asyncio.gather(*(self._scrape(session, one) for one in list(self._engines)))

    async def _follow(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await self._scrape(session, endpoint)
            except Exception:  # noqa: BLE001 - one odd engine must not end the others' scrapes
                _LOG.exception("metrics of %s could not be taken in", endpoint)
            pause_s = self._settings.interval_s * (1.0 + _JITTER * (2.0 * self._chance() - 1.0))
            await asyncio.sleep(max(0.0, began_s + pause_s - loop.time()))

    async def _scrape(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        engine = self._engines.get(endpoint)
        if engine is None:
            return
        async with self._slots:
            if engine.dialect is None and not await self._meet(session, endpoint, engine):
                return
            asked_s = asyncio.get_running_loop().time()
            page = await self._fetch(session, endpoint, self._path(engine.dialect))
        if self._engines.get(endpoint) is engine and page is not None:
            self._take(endpoint, engine, page, asked_s)

    async def _meet(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, engine: _Engine
    ) -> bool:
        """Find out which dialect an endpoint speaks; False when it is not to be found."""
        if engine.wait:
            engine.wait -= 1
            return False
        engine.wait = _ASK_AGAIN
        models = await self._fetch(session, endpoint, MODELS_PATH)
        engine.dialect = None if models is None else recognise_models(models)
        paths = (self._settings.path,) if self._settings.path else PAGES
        for path in paths if engine.dialect is None else ():
            page = await self._fetch(session, endpoint, path)
            engine.dialect = None if page is None else recognise_page(page)
            if engine.dialect is not None:
                break
        if engine.dialect is None:
            _LOG.debug("metrics of %s: no engine that we know", endpoint)
            return False
        _LOG.info("endpoint %s speaks %s", endpoint, engine.dialect.name)
        engine.wait = 0
        return True

    def _path(self, dialect: Dialect | None) -> str:
        return self._settings.path or (dialect.path if dialect else MODELS_PATH)

    def _take(self, endpoint: Endpoint, engine: _Engine, page: str, asked_s: float) -> None:
        if engine.dialect is None:
            return
        reading = engine.dialect.read(page)
        if reading == Reading() and self._settings.dialect == "auto":
            _LOG.warning("endpoint %s no longer speaks %s", endpoint, engine.dialect.name)
            engine.dialect, engine.wait = None, 0
            return
        now_s = asyncio.get_running_loop().time()
        before, engine.last = engine.last, reading
        if reading != before:
            engine.moved_at_s = now_s
        if before is not None and restarted(before, reading):
            _LOG.warning("endpoint %s restarted: its cache is empty", endpoint)
            self._apply(EndpointReset(endpoint))
        if engine.dialect.lags and now_s - engine.moved_at_s > _LAG_S:
            reading = replace(reading, running=None, waiting=None, kv_usage=None)
        self._apply(_observed(endpoint, reading, age_s=now_s - asked_s))

    async def _fetch(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, path: str
    ) -> str | None:
        url = f"http://{endpoint}{path}"
        try:
            async with session.get(url, allow_redirects=False) as response:
                if response.status != 200:  # noqa: PLR2004 - HTTP's OK
                    _LOG.debug("%s: status %d", url, response.status)
                    return None
                page = bytearray()
                async for part in response.content.iter_any():
                    page += part
                    if len(page) > _MAX_PAGE_BYTES:
                        _LOG.warning("%s: more than %d bytes", url, _MAX_PAGE_BYTES)
                        return None
                return page.decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _LOG.debug("%s: %s", url, type(error).__name__)
            return None


def _observed(endpoint: Endpoint, reading: Reading, *, age_s: float) -> Observed:
    return Observed(
        endpoint=endpoint,
        running=reading.running,
        waiting=reading.waiting,
        kv_usage=reading.kv_usage,
        cache_tokens=reading.cache_tokens,
        computed_tokens=reading.computed_tokens,
        block_tokens=reading.block_tokens,
        prefix_queries=reading.prefix_queries,
        prefix_hits=reading.prefix_hits,
        progress=reading.progress,
        start_time_s=reading.start_time_s,
        age_s=age_s,
    )
