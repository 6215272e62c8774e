"""vLLM: /metrics of the API server, where it is always on.

Names from 0.8 to 0.32. Older releases count cache queries in blocks, which their help text
says, under names with `gpu_`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.adapters.engines.reading import (
    Dialect,
    Reading,
    as_count,
    as_share,
    as_size,
    difference,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.adapters.engines.samples import Samples

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
_CONFIG = "vllm:cache_config_info"
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_OLD_QUERIES = "vllm:gpu_prefix_cache_queries_total"
_OLD_HITS = "vllm:gpu_prefix_cache_hits_total"
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_PROMPT = "vllm:prompt_tokens_total"
_GENERATED = "vllm:generation_tokens_total"
_START = "process_start_time_seconds"

# Labels of the cache configuration: block sizes before and after hybrid models.
_BLOCK_LABELS = "block_size", "effective_attention_block_size"
_MAX_DIGITS = 12


def _interpret(samples: Samples) -> Reading:
    configs = [sample.labels for sample in samples.of(_CONFIG)]
    block_tokens = max(map(_block_tokens, configs), default=0)
    queries, hits = _prefix_cache(samples, block_tokens)
    computed = samples.total(_BY_SOURCE, source="local_compute")
    if computed is None:
        computed = difference(queries, hits)
    prompt = samples.total(_PROMPT)
    starts = [sample.value for sample in samples.of(_START)]
    return Reading(
        running=as_count(samples.total(_RUNNING)),
        waiting=as_count(samples.total(_WAITING)),
        kv_usage=as_share(samples.mean(*_USAGE)),
        cache_tokens=as_size(sum(map(_capacity, configs))),
        block_tokens=as_size(block_tokens),
        prefix_queries=queries,
        prefix_hits=hits,
        computed_tokens=prompt if computed is None else computed,
        progress=_sum(prompt, samples.total(_GENERATED)),
        start_time_s=max(starts, default=None),
    )


def _prefix_cache(samples: Samples, block_tokens: int) -> tuple[float | None, float | None]:
    queries, hits = samples.total(_QUERIES), samples.total(_HITS)
    if queries is not None and hits is not None:
        return queries, hits
    old, old_hits = samples.total(_OLD_QUERIES), samples.total(_OLD_HITS)
    if old is None or old_hits is None:
        return None, None
    if not samples.describes(_OLD_QUERIES, "blocks"):
        return old, old_hits
    return (old * block_tokens, old_hits * block_tokens) if block_tokens else (None, None)


def _capacity(labels: Mapping[str, str]) -> int:
    told = _number(labels, "kv_cache_size_tokens")
    return told or _number(labels, "num_gpu_blocks") * _block_tokens(labels)


def _block_tokens(labels: Mapping[str, str]) -> int:
    return next((size for name in _BLOCK_LABELS if (size := _number(labels, name))), 0)


def _number(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "")[:_MAX_DIGITS]
    return int(text) if text.isascii() and text.isdigit() else 0


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


VLLM = Dialect(
    name="vllm",
    owner="vllm",
    path="/metrics",
    prefix="vllm:",
    names=frozenset(
        {
            *(_RUNNING, _WAITING, *_USAGE, _CONFIG, _QUERIES, _HITS, _OLD_QUERIES, _OLD_HITS),
            *(_BY_SOURCE, _PROMPT, _GENERATED, _START),
        }
    ),
    interpret=_interpret,
)
