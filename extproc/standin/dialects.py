"""The three engines a stand-in can pass for: owner, metrics page, and its habits.

Names and habits are those of vLLM 0.32, SGLang 0.5.23 and TensorRT-LLM 1.3: SGLang keeps
the gauges of its last batch when idle, TensorRT-LLM renews its own when requests end, and
reading its /metrics takes the statistics away from the next reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from extproc.standin.metrics import CONTENT_TYPE, EngineMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from extproc.standin.engine import Engine

_PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDialect:
    """What tells one engine from another: `owner` in /v1/models and the metrics page."""

    owner: str
    metrics_path: str
    content_type: str
    make_page: Callable[[Engine], Callable[[], bytes]]


def _page(collector: Collector) -> Callable[[], bytes]:
    registry = CollectorRegistry()
    registry.register(collector)
    return lambda: generate_latest(registry)


class _SglangMetrics(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._usage = 0.0
        self._labels = {
            "engine_type": "unified",
            "model_name": engine.settings.model,
            "tp_rank": "0",
        }

    def describe(self) -> list[Metric]:
        """Skip the collection that registering would otherwise do."""
        return []

    def collect(self) -> Iterator[Metric]:
        engine, counters, settings = self._engine, self._engine.counters, self._engine.settings
        if engine.inflight:
            self._usage = engine.cache.used_blocks / engine.cache.capacity_blocks
        computed = counters.prefix_queries - counters.prefix_hits
        gauges = {
            "num_running_reqs": engine.running,
            "num_queue_reqs": engine.waiting,
            "num_grammar_queue_reqs": 0,
            "token_usage": self._usage,
            "max_total_num_tokens": settings.cache_blocks * settings.block_tokens,
            "page_size": settings.block_tokens,
        }
        for name, value in gauges.items():
            yield self._add(GaugeMetricFamily, name, value)
        yield self._add(CounterMetricFamily, "prompt_tokens", counters.prompt_tokens)
        if counters.prefix_hits:
            yield self._add(CounterMetricFamily, "cached_tokens", counters.prefix_hits)
        labels = [*self._labels, "mode"]
        realtime = CounterMetricFamily("sglang:realtime_tokens", "As in SGLang.", labels=labels)
        modes = {
            "prefill_compute": computed,
            "prefill_cache": counters.prefix_hits,
            "decode": counters.generation_tokens,
        }
        for mode, value in modes.items():
            realtime.add_metric([*self._labels.values(), mode], value)
        yield realtime

    def _add(
        self, family: type[GaugeMetricFamily | CounterMetricFamily], name: str, value: float
    ) -> Metric:
        made = family(f"sglang:{name}", "As in SGLang.", labels=list(self._labels))
        made.add_metric(list(self._labels.values()), value)
        return made


class _TrtllmMetrics(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ended = -1
        self._gauges: dict[str, float] = {}
        self._labels = {"model_name": engine.settings.model, "engine_type": "undefined"}

    def describe(self) -> list[Metric]:
        """Skip the collection that registering would otherwise do."""
        return []

    def collect(self) -> Iterator[Metric]:
        engine, counters, settings = self._engine, self._engine.counters, self._engine.settings
        ended = sum(counters.ended.values())
        if ended != self._ended:
            self._ended = ended
            self._gauges = {
                "num_requests_running": engine.running,
                "num_requests_waiting": engine.waiting,
                "kv_cache_utilization": engine.cache.used_blocks / engine.cache.capacity_blocks,
            }
        sizes = {
            "kv_cache_max_blocks": settings.cache_blocks,
            "kv_cache_tokens_per_block": settings.block_tokens,
        }
        for name, value in {**self._gauges, **sizes}.items():
            yield self._add(GaugeMetricFamily, name, value)
        counts = {
            "request_success": ended,
            "prompt_tokens": counters.prompt_tokens,
            "prompt_cached_tokens": counters.prefix_hits,
            "generation_tokens": counters.generation_tokens,
        }
        for name, value in counts.items():
            yield self._add(CounterMetricFamily, name, value)

    def _add(
        self, family: type[GaugeMetricFamily | CounterMetricFamily], name: str, value: float
    ) -> Metric:
        made = family(f"trtllm_{name}", "As in TensorRT-LLM.", labels=list(self._labels))
        made.add_metric(list(self._labels.values()), value)
        return made


ENGINE_DIALECTS: dict[str, EngineDialect] = {
    "vllm": EngineDialect(
        owner="vllm",
        metrics_path="/metrics",
        content_type=CONTENT_TYPE,
        make_page=lambda engine: EngineMetrics(engine).render,
    ),
    "sglang": EngineDialect(
        owner="sglang",
        metrics_path="/metrics",
        content_type=_PLAIN_TYPE,
        make_page=lambda engine: _page(_SglangMetrics(engine)),
    ),
    "trtllm": EngineDialect(
        owner="tensorrt_llm",
        metrics_path="/prometheus/metrics",
        content_type=_PLAIN_TYPE,
        make_page=lambda engine: _page(_TrtllmMetrics(engine)),
    ),
}
"""Every engine by its name in the settings."""
