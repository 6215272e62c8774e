"""Endpoints join and die in mid-run: how long it takes until nobody notices.

Each run with a change is held against the same run without it, window by window.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from bench.cases import PRODUCT, Case, play
from extproc.simulation.outcome import quantile
from extproc.simulation.run import Change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.simulation.outcome import Outcome, Served

# Workload, and when the fleet changes: after the warm-up, a minute before arrivals end.
CHANGES_AT_S = {"agent": 120.0, "chat": 120.0, "api": 68.0, "mixed": 120.0}
JOINING, ENDPOINTS = 2, 8
SETTLED_S, WINDOW_S = 60.0, 10.0
# The bars.
FAIR_SHARE, HIT_DIP, P95_RATIO = 0.5, 0.03, 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """One workload and seed. `fair_share` is what the new endpoints serve of theirs in the
    last window of the first minute; `hit_dip` the most that a window of that minute loses;
    `p95_ratio` compares TTFT p95 from a minute after a death on with the undisturbed run."""

    fair_share: float
    hit_dip: float
    p95_ratio: float


def measure(seeds: Sequence[int], *, workers: int) -> list[str]:
    """Run all and give the table, medians of the seeds."""
    jobs = [(name, seed) for name in CHANGES_AT_S for seed in seeds]
    with ProcessPoolExecutor(workers) as pool:
        results = dict(zip(jobs, pool.map(_compare, *zip(*jobs, strict=True)), strict=True))
    lines = [
        "| workload | +2 on 8: share | hit rate dips by | 1 of 8 dies: TTFT p95 | bars |",
        "|---|---|---|---|---|",
    ]
    for name in CHANGES_AT_S:
        found = [results[name, seed] for seed in seeds]
        share = median([one.fair_share for one in found])
        dip = median([one.hit_dip for one in found])
        ratio = median([one.p95_ratio for one in found])
        kept = share >= FAIR_SHARE and dip <= HIT_DIP and ratio <= P95_RATIO
        lines.append(
            f"| {name} | {share:.0%} | {100 * dip:.1f} points | x {ratio:.2f} | "
            f"{'kept' if kept else 'MISSED'} |"
        )
    return lines


def _compare(name: str, seed: int) -> Elastic:
    at_s = CHANGES_AT_S[name]
    case = Case(part="elastic", workload=name, label=PRODUCT, seed=seed)
    plain = play(case)
    grown = play(replace(case, changes=(Change(at_s=at_s, add=JOINING),)))
    shrunk = play(replace(case, changes=(Change(at_s=at_s, kill=0),)))
    settled_s = at_s + SETTLED_S
    late = _sent(grown, settled_s - WINDOW_S, settled_s)
    new = list(grown.utilization)[ENDPOINTS:]
    fair = JOINING / (ENDPOINTS + JOINING)
    share = sum(served.endpoint in new for served in late) / max(1, len(late)) / fair
    windows = [at_s + WINDOW_S * n for n in range(int(SETTLED_S / WINDOW_S))]
    dips = [
        _hit_rate(_sent(plain, begin_s, begin_s + WINDOW_S))
        - _hit_rate(_sent(grown, begin_s, begin_s + WINDOW_S))
        for begin_s in windows
    ]
    before, after = (
        quantile(sorted(served.ttft_s for served in _sent(outcome, settled_s, float("inf"))), 0.95)
        for outcome in (plain, shrunk)
    )
    return Elastic(fair_share=share, hit_dip=max(dips), p95_ratio=after / before)


def _sent(outcome: Outcome, from_s: float, to_s: float) -> list[Served]:
    return [served for served in outcome.measured if from_s <= served.at_s < to_s]


def _hit_rate(served: list[Served]) -> float:
    return sum(s.cached_tokens for s in served) / max(1, sum(s.prompt_tokens for s in served))
