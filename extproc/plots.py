"""Pictures of simulated runs; needs the extra `plot`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from extproc.simulation.outcome import quantile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from extproc.simulation.outcome import Outcome, Served

_BINS = 40


def plot_outcomes(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Draw hit rate and TTFT p50 over the time of sending, a line per policy; raise OSError."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    hits, ttfts = figure.subplots(2, 1, sharex=True)
    for policy, outcome in outcomes.items():
        bins = _bin(outcome)
        times = list(bins)
        hits.plot(times, [_hit_rate(served) for served in bins.values()], label=policy)
        medians = [quantile(sorted(s.ttft_s for s in served), 0.5) for served in bins.values()]
        ttfts.plot(times, medians, label=policy)
    hits.set(ylabel="hit rate (tokens)", ylim=(0, 1))
    hits.legend()
    ttfts.set(ylabel="TTFT p50 (s)", xlabel="time of sending (s)", yscale="log")
    figure.savefig(path)


def _bin(outcome: Outcome) -> dict[float, list[Served]]:
    first = min([s.at_s for s in outcome.measured], default=0.0)
    last = max([s.at_s for s in outcome.measured], default=0.0)
    width = max((last - first) / _BINS, 1e-9)
    bins: dict[float, list[Served]] = defaultdict(list)
    for served in sorted(outcome.measured, key=lambda s: s.at_s):
        bins[first + width * (int((served.at_s - first) / width) + 0.5)].append(served)
    return dict(bins)


def _hit_rate(served: list[Served]) -> float:
    return sum(s.cached_tokens for s in served) / max(1, sum(s.prompt_tokens for s in served))
