"""Reads the engines' own metrics (vLLM's names) and tells what they show.

An engine that restarted has lost its cache: seen by a later start time, or by a counter
that went back. Then an EndpointReset comes before the Observed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from extproc.core.events import EndpointDown, EndpointReset, EndpointUp, Observed

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.endpoint import Endpoint

_LOG = logging.getLogger(__name__)
_MAX_CONCURRENT = 64
# vLLM's page is about 100 KB for one model; larger than this is no metrics page.
_MAX_PAGE_BYTES = 4 * 1024 * 1024
# Clocks of process start times have a resolution of 10 ms, read with rounding.
_SAME_START_S = 1.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeSettings:
    """GET `path` every `interval_s`."""

    path: str = "/metrics"
    interval_s: float = 1.0
    timeout_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one metrics page says, summed over its engines; None where it does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    cache_tokens: int | None = None
    computed_tokens: float | None = None
    start_time_s: float | None = None


class Scraper:
    """Follows the pool's membership and reports each member's metrics to `apply`."""

    def __init__(
        self, settings: ScrapeSettings, apply: Callable[[Observed | EndpointReset], None]
    ) -> None:
        self._settings = settings
        self._apply = apply
        self._last: dict[Endpoint, Reading | None] = {}
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    def update(self, event: EndpointUp | EndpointDown) -> None:
        """Take in what discovery says of the membership."""
        if isinstance(event, EndpointUp):
            self._last.setdefault(event.endpoint, None)
        elif event.gone:
            self._last.pop(event.endpoint, None)

    async def run(self) -> None:
        """Scrape until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                await self.scrape_all(session)
                await asyncio.sleep(self._settings.interval_s)

    async def scrape_all(self, session: aiohttp.ClientSession) -> None:
        """Read every member's page once."""
        await asyncio.gather(*(self._scrape(session, one) for one in list(self._last)))

    async def _scrape(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        async with self._slots:
            page = await self._fetch(session, endpoint)
        if page is None or endpoint not in self._last:
            return
        reading = read_metrics(page)
        before, self._last[endpoint] = self._last[endpoint], reading
        if before is not None and restarted(before, reading):
            _LOG.warning("endpoint %s restarted: its cache is empty", endpoint)
            self._apply(EndpointReset(endpoint))
        self._apply(
            Observed(
                endpoint=endpoint,
                running=reading.running,
                waiting=reading.waiting,
                kv_usage=reading.kv_usage,
                cache_tokens=reading.cache_tokens,
                computed_tokens=reading.computed_tokens,
            )
        )

    async def _fetch(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
        url = f"http://{endpoint}{self._settings.path}"
        try:
            async with session.get(url, allow_redirects=False) as response:
                if response.status != 200:  # noqa: PLR2004 - HTTP's OK
                    _LOG.debug("metrics of %s: status %d", endpoint, response.status)
                    return None
                page = bytearray()
                async for part in response.content.iter_any():
                    page += part
                    if len(page) > _MAX_PAGE_BYTES:
                        _LOG.warning("metrics of %s: more than %d bytes", endpoint, _MAX_PAGE_BYTES)
                        return None
                return page.decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _LOG.debug("metrics of %s: %s", endpoint, type(error).__name__)
            return None


def restarted(before: Reading, after: Reading) -> bool:
    """Tell whether the process behind an endpoint is another one than before."""
    if before.start_time_s is not None and after.start_time_s is not None:
        return abs(after.start_time_s - before.start_time_s) > _SAME_START_S
    if before.computed_tokens is not None and after.computed_tokens is not None:
        return after.computed_tokens < before.computed_tokens
    return False


def read_metrics(page: str) -> Reading:
    """Read a page in the Prometheus text format; lines that are no samples are skipped."""
    samples: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for line in page.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line)
        if found is None or found[1] not in _NAMES:
            continue
        value = _number(found[3])
        if value is not None:
            samples[found[1]].append((found[2] or "", value))
    usage = [value for _, value in samples["vllm:kv_cache_usage_perc"]]
    starts = [value for _, value in samples["process_start_time_seconds"]]
    return Reading(
        running=_count(samples["vllm:num_requests_running"]),
        waiting=_count(samples["vllm:num_requests_waiting"]),
        kv_usage=min(1.0, max(0.0, sum(usage) / len(usage))) if usage else None,
        cache_tokens=_capacity(samples["vllm:cache_config_info"]),
        computed_tokens=_computed(samples),
        start_time_s=max(starts) if starts else None,
    )


_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_NAMES = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "process_start_time_seconds",
        _BY_SOURCE,
        _QUERIES,
        _HITS,
    }
)


def _computed(samples: dict[str, list[tuple[str, float]]]) -> float | None:
    by_source = [
        value
        for labels, value in samples[_BY_SOURCE]
        if dict(_LABEL.findall(labels)).get("source") == "local_compute"
    ]
    if by_source:
        return sum(by_source)
    if not samples[_QUERIES] or not samples[_HITS]:
        return None
    looked_up = sum(value for _, value in samples[_QUERIES])
    return max(0.0, looked_up - sum(value for _, value in samples[_HITS]))


def _capacity(samples: list[tuple[str, float]]) -> int | None:
    tokens = 0
    for labels, _ in samples:
        label = dict(_LABEL.findall(labels))
        blocks, size = label.get("num_gpu_blocks", ""), label.get("block_size", "")
        if blocks.isascii() and blocks.isdigit() and size.isascii() and size.isdigit():
            tokens += int(blocks[:12]) * int(size[:12])
    return tokens or None


def _count(samples: list[tuple[str, float]]) -> int | None:
    return max(0, int(sum(value for _, value in samples))) if samples else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
