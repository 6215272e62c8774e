"""What became of the requests of one run, and the figures that sum it up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.endpoint import Endpoint

# A run whose requests wait this long on average, or whose engines still had this much
# prefill to do for each of them when the last request came, has no steady state.
UNSTABLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request that was answered; `predicted_tokens` is the match the router saw.

    `later`: it was not its conversation's first; `moved`: nor was it sent where the
    request before it was.
    """

    at_s: float
    endpoint: Endpoint
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    predicted_tokens: int
    ideal_tokens: int
    later: bool
    moved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything one run left. `measured` has the requests sent after the warm-up.

    `utilization` is the share of each endpoint's prefill capacity that was used;
    `backlog_s` the prefill time per endpoint still to do when the last request came;
    `refused` counts requests too large for any engine or without a ready endpoint,
    `unanswered` those still under way when the run was given up.
    """

    measured: Sequence[Served]
    utilization: dict[Endpoint, float]
    backlog_s: float
    preemptions: int
    refused: int
    unanswered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run. Rates are shares 0..1, of tokens unless named otherwise.

    `ideal_hit_rate` is that of one cache that never forgets; `prefill_saved` the prompt
    tokens that were not computed, recomputing after preemption counted; `utilization` is of
    prefill capacity, the mean of all endpoints, and `utilization_max_over_mean` and
    `requests_max_over_mean` compare endpoints; `moved` is the share of later requests that
    changed their endpoint.
    """

    requests: int
    hit_rate: float
    ideal_hit_rate: float
    prefill_saved: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    utilization: float
    utilization_max_over_mean: float
    requests_max_over_mean: float
    moved: float
    preemptions: int
    refused: int
    stable: bool


def summarize(outcome: Outcome) -> Summary:
    """Sum up a run; one without measured requests gives zeros."""
    served = outcome.measured
    prompt = max(1, sum([s.prompt_tokens for s in served]))
    ttfts = sorted([s.ttft_s for s in served])
    later = [s for s in served if s.later]
    mean_s = sum(ttfts) / max(1, len(ttfts))
    by_endpoint = Counter(s.endpoint for s in served)
    counts = [by_endpoint.get(endpoint, 0) for endpoint in outcome.utilization]
    used = list(outcome.utilization.values())
    return Summary(
        requests=len(served),
        hit_rate=sum([s.cached_tokens for s in served]) / prompt,
        ideal_hit_rate=sum([s.ideal_tokens for s in served]) / prompt,
        prefill_saved=1.0 - sum([s.computed_tokens for s in served]) / prompt if served else 0.0,
        ttft_mean_s=mean_s,
        ttft_p50_s=quantile(ttfts, 0.50),
        ttft_p90_s=quantile(ttfts, 0.90),
        ttft_p95_s=quantile(ttfts, 0.95),
        ttft_p99_s=quantile(ttfts, 0.99),
        utilization=sum(used) / max(1, len(used)),
        utilization_max_over_mean=_max_over_mean(used),
        requests_max_over_mean=_max_over_mean(counts),
        moved=sum(s.moved for s in later) / max(1, len(later)),
        preemptions=outcome.preemptions,
        refused=outcome.refused,
        stable=max(mean_s, outcome.backlog_s) < UNSTABLE_S and not outcome.unanswered,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Give the value that `share` of an ordered sequence does not exceed; 0 for none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _max_over_mean(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 0.0
