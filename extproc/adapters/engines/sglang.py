"""SGLang: /metrics, served with --enable-metrics only.

Gauges are set by the scheduler after a batch, so an idle engine shows those of its last
one. No start time is told (its metrics come from several processes): a restart shows in
counters that went back.
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

_RUNNING = "sglang:num_running_reqs"
# Requests that wait for room, and those whose grammar is being compiled.
_WAITING = "sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs"
_USAGE = "sglang:token_usage"
_CAPACITY = "sglang:max_total_num_tokens"
_PAGE_SIZE = "sglang:page_size"
_REALTIME = "sglang:realtime_tokens_total"
_PROMPT = "sglang:prompt_tokens_total"
_CACHED = "sglang:cached_tokens_total"


def _interpret(samples: Samples) -> Reading:
    running = as_count(samples.total(_RUNNING))
    queued = [count for name in _WAITING if (count := samples.total(name)) is not None]
    waiting = as_count(sum(queued)) if queued else None
    usage = as_share(samples.mean(_USAGE))
    queries, hits, computed = _prefix_cache(samples)
    return Reading(
        running=running,
        waiting=waiting,
        # What is in use is what running requests hold; the gauge keeps its last value.
        kv_usage=0.0 if usage is not None and running == 0 and not waiting else usage,
        cache_tokens=as_size(samples.total(_CAPACITY)),
        block_tokens=as_size(samples.mean(_PAGE_SIZE)),
        prefix_queries=queries,
        prefix_hits=hits,
        computed_tokens=computed,
        progress=samples.total(_REALTIME),
    )


def _prefix_cache(samples: Samples) -> tuple[float | None, float | None, float | None]:
    """Give queries, hits and computed tokens.

    The realtime counters move as batches are computed; the older ones when a request
    ends, which moves bursts of work to one instant.
    """
    computed = samples.total(_REALTIME, mode="prefill_compute")
    if computed is not None:
        hits = samples.total(_REALTIME, mode="prefill_cache") or 0.0
        return computed + hits, hits, computed
    queries, cached = samples.total(_PROMPT), samples.total(_CACHED)
    if queries is not None and cached is None:
        cached = 0.0  # the series begins with the first hit
    return queries, cached, difference(queries, cached)


SGLANG = Dialect(
    name="sglang",
    owner="sglang",
    path="/metrics",
    prefix="sglang:",
    names=frozenset(
        {_RUNNING, *_WAITING, _USAGE, _CAPACITY, _PAGE_SIZE, _REALTIME, _PROMPT, _CACHED}
    ),
    interpret=_interpret,
    # dp_rank is not among them: those ranks are engines of their own.
    ranks=frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid"}),
    lags=True,
)
