"""The stand-in's metrics in vLLM's names, labels and text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from extproc.standin.engine import Engine

# vLLM 0.32's own type, which its text has always followed.
CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_REASONS = ("stop", "length", "abort")

# The buckets of vLLM 0.32 for the time to the first token.
_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)


@dataclass(slots=True)
class Counters:
    """Everything that only grows, in tokens and sequences."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rejections: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))
    ttft_buckets: list[int] = field(default_factory=lambda: [0] * (len(_TTFT_BUCKETS_S) + 1))
    ttft_sum_s: float = 0.0

    def record_first_token(self, ttft_s: float) -> None:
        """Count one sequence's time to first token."""
        self.ttft_buckets[bisect_left(_TTFT_BUCKETS_S, ttft_s)] += 1
        self.ttft_sum_s += ttft_s

    def record_end(self, reason: str) -> None:
        """Count one sequence's end: stop, length or abort."""
        self.ended[reason] += 1


class EngineMetrics(Collector):
    """The metrics page of one engine; `render` gives its text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._labels = {"engine": "0", "model_name": engine.settings.model}
        self._start_time_s = time.time()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Return the page in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its value of this instant."""
        engine, counters = self._engine, self._engine.counters
        start = GaugeMetricFamily("process_start_time_seconds", "Start time of the process.")
        start.add_metric([], self._start_time_s)
        yield start
        used = engine.cache.used_blocks / engine.cache.capacity_blocks
        yield self._gauge("vllm:num_requests_running", engine.running)
        yield self._gauge("vllm:num_requests_waiting", engine.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", used)
        yield self._counter("vllm:prefix_cache_queries", counters.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", counters.prefix_hits)
        yield self._counter("vllm:prompt_tokens", counters.prompt_tokens)
        yield self._counter("vllm:prompt_tokens_cached", counters.prefix_hits)
        yield self._counter("vllm:generation_tokens", counters.generation_tokens)
        yield self._by_reason("vllm:request_success", "finished_reason", counters.ended)
        yield self._by_reason(
            "vllm:admission_rejections", "reason", {"max_num_queued_reqs": counters.rejections}
        )
        yield self._ttft()
        yield self._cache_config()

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, "As in vLLM.", labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(name, "As in vLLM.", labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by_reason(self, name: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, "As in vLLM.", labels=[*self._labels, label])
        for reason, value in values.items():
            family.add_metric([*self._labels.values(), reason], value)
        return family

    def _ttft(self) -> Metric:
        counters = self._engine.counters
        bounds = [*map(str, _TTFT_BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(counters.ttft_buckets), strict=True))
        family = HistogramMetricFamily(
            "vllm:time_to_first_token_seconds", "As in vLLM.", labels=list(self._labels)
        )
        family.add_metric(list(self._labels.values()), buckets, counters.ttft_sum_s)
        return family

    def _cache_config(self) -> Metric:
        settings = self._engine.settings
        labels = {
            "block_size": str(settings.block_tokens),
            "enable_prefix_caching": "True",
            "engine": "0",
            "kv_cache_size_tokens": str(settings.cache_blocks * settings.block_tokens),
            "num_gpu_blocks": str(settings.cache_blocks),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "As in vLLM.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family
