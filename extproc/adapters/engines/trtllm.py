"""TensorRT-LLM: /prometheus/metrics, served with return_perf_metrics only.

Never /metrics: reading it takes the statistics away from whoever reads them next. Counters
and gauges are set when requests finish; releases to 1.2 tell KV usage and nothing else.
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
    from extproc.adapters.engines.samples import Samples

_RUNNING = "trtllm_num_requests_running"
_WAITING = "trtllm_num_requests_waiting"
_USAGE = "trtllm_kv_cache_utilization"
_MAX_BLOCKS = "trtllm_kv_cache_max_blocks"
_BLOCK_TOKENS = "trtllm_kv_cache_tokens_per_block"
_PROMPT = "trtllm_prompt_tokens_total"
_CACHED = "trtllm_prompt_cached_tokens_total"
_REUSED = "trtllm_kv_cache_reused_blocks_total"
_MISSED = "trtllm_kv_cache_missed_blocks_total"
_START = "process_start_time_seconds"
# Not read, but it tells the dialect where nothing else is there yet.
_ENDED = "trtllm_request_success_total"


def _interpret(samples: Samples) -> Reading:
    block_tokens = as_size(samples.mean(_BLOCK_TOKENS))
    blocks = samples.total(_MAX_BLOCKS)
    queries, hits = samples.total(_PROMPT), samples.total(_CACHED)
    if (queries is None or hits is None) and block_tokens is not None:
        missed, reused = samples.total(_MISSED), samples.total(_REUSED)
        if missed is not None and reused is not None:
            queries, hits = (missed + reused) * block_tokens, reused * block_tokens
    starts = [sample.value for sample in samples.of(_START)]
    return Reading(
        running=as_count(samples.total(_RUNNING)),
        waiting=as_count(samples.total(_WAITING)),
        kv_usage=as_share(samples.mean(_USAGE)),
        cache_tokens=as_size(blocks * block_tokens) if blocks and block_tokens else None,
        block_tokens=block_tokens,
        prefix_queries=queries if hits is not None else None,
        prefix_hits=hits if queries is not None else None,
        computed_tokens=difference(queries, hits),
        start_time_s=max(starts, default=None),
    )


TRTLLM = Dialect(
    name="trtllm",
    owner="tensorrt_llm",
    path="/prometheus/metrics",
    prefix="trtllm_",
    names=frozenset(
        {
            *(_RUNNING, _WAITING, _USAGE, _MAX_BLOCKS, _BLOCK_TOKENS, _PROMPT, _CACHED),
            *(_REUSED, _MISSED, _START, _ENDED),
        }
    ),
    interpret=_interpret,
    lags=True,
)
