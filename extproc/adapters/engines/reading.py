"""What one metrics page says, in words that all dialects share; and what a dialect is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.adapters.engines.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Callable

# Clocks of process start times have a resolution of 10 ms, read with rounding.
_SAME_START_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One page, summed over the engines behind an endpoint; None where it does not say.

    Queries, hits and computed are counters in prompt tokens. `progress` is a counter that
    moves while an engine works, and stands still when it hangs.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    cache_tokens: int | None = None
    block_tokens: int | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    computed_tokens: float | None = None
    progress: float | None = None
    start_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one engine is read: where its page is, which names count, what they mean.

    `owner` is `owned_by` in /v1/models. `prefix` begins the names that only it has. `ranks`
    are labels of processes that tell the same. `lags`: its gauges are set after work, so
    they keep the last value when work ends.
    """

    name: str
    owner: str
    path: str
    prefix: str
    names: frozenset[str]
    interpret: Callable[[Samples], Reading]
    ranks: frozenset[str] = frozenset()
    lags: bool = False

    def read(self, page: str) -> Reading:
        """Read a page; lines that are no samples, or of no interest, are left out."""
        return self.interpret(Samples(page, self.names, ranks=self.ranks))


def restarted(before: Reading, after: Reading) -> bool:
    """Tell whether the process behind an endpoint is another one than before."""
    if before.start_time_s is not None and after.start_time_s is not None:
        return abs(after.start_time_s - before.start_time_s) > _SAME_START_S
    counters = (
        (before.computed_tokens, after.computed_tokens),
        (before.prefix_queries, after.prefix_queries),
        (before.progress, after.progress),
    )
    return any(old is not None and new is not None and new < old for old, new in counters)


def as_count(value: float | None) -> int | None:
    """Give a gauge of requests or tokens as a whole number, at least 0."""
    return None if value is None else max(0, round(value))


def as_share(value: float | None) -> float | None:
    """Give a gauge of a share within 0..1."""
    return None if value is None else min(1.0, max(0.0, value))


def as_size(value: float | None) -> int | None:
    """Give a size in tokens; None for 0, which engines show before they know it."""
    return as_count(value) or None


def difference(whole: float | None, part: float | None) -> float | None:
    """Give what is left of one counter without another; None when either is unknown."""
    return None if whole is None or part is None else max(0.0, whole - part)
