"""What was predicted to be cached, against what the engines say was: the index's honesty.

Predictions are our estimates in tokens, hits the engine's own, so shares are compared and
never counts. Requests in flight are in one and not yet in the other: a verdict needs two
windows of many requests, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.endpoint import Endpoint
    from extproc.core.events import Observed

# A window ends with as many requests and tokens, so that those in flight weigh little.
_WINDOW_REQUESTS = 50
_WINDOW_TOKENS = 50_000.0
# Approximate block borders and the last block, always recomputed, cost far less than this.
_WRONG_SHARE = 0.5
_WRONG_WINDOWS = 2


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one endpoint since it joined or restarted; all but requests in tokens.

    `predicted` of `routed` by our estimate, `hits` of `queries` as the engine tells.
    """

    requests: int = 0
    predicted: float = 0.0
    routed: float = 0.0
    hits: float = 0.0
    queries: float = 0.0

    def since(self, before: Tally) -> Tally:
        """Give what was counted after `before`."""
        return Tally(
            requests=self.requests - before.requests,
            predicted=self.predicted - before.predicted,
            routed=self.routed - before.routed,
            hits=self.hits - before.hits,
            queries=self.queries - before.queries,
        )

    def copy(self) -> Tally:
        """Keep the counts of this moment."""
        return self.since(Tally())


@dataclass(slots=True, kw_only=True)
class _Ledger:
    tally: Tally
    window: Tally
    """The counts when the present window began."""
    wrong: int = 0
    hits: float | None = None
    queries: float | None = None
    """The engine's counters when last seen."""


class Predictions:
    """Tallies of the endpoints that requests were routed to; bounded by the pool."""

    def __init__(self) -> None:
        self._ledgers: dict[Endpoint, _Ledger] = {}

    def tally(self, endpoint: Endpoint) -> Tally:
        """Give an endpoint's counts."""
        ledger = self._ledgers.get(endpoint)
        return ledger.tally if ledger else Tally()

    def count(self, endpoint: Endpoint, *, predicted: int, routed: int) -> None:
        """Count a routed request: so many of its tokens were believed to be cached."""
        tally = self._ledger(endpoint).tally
        tally.requests += 1
        tally.predicted += predicted
        tally.routed += routed

    def observe(self, seen: Observed) -> bool:
        """Take in the engine's counters; True if the index is wrong about this endpoint."""
        if seen.prefix_hits is None or seen.prefix_queries is None:
            return False
        ledger = self._ledger(seen.endpoint)
        if ledger.hits is None or ledger.queries is None:
            # What was looked up before we came is no matter of ours.
            ledger.window = ledger.tally.copy()
        else:
            ledger.tally.hits += max(0.0, seen.prefix_hits - ledger.hits)
            ledger.tally.queries += max(0.0, seen.prefix_queries - ledger.queries)
        ledger.hits, ledger.queries = seen.prefix_hits, seen.prefix_queries
        return self._judge(ledger)

    def forget(self, endpoint: Endpoint) -> None:
        """Drop the counts of an endpoint that restarted or left."""
        self._ledgers.pop(endpoint, None)

    def _ledger(self, endpoint: Endpoint) -> _Ledger:
        ledger = self._ledgers.get(endpoint)
        if ledger is None:
            ledger = self._ledgers[endpoint] = _Ledger(tally=Tally(), window=Tally())
        return ledger

    @staticmethod
    def _judge(ledger: _Ledger) -> bool:
        window = ledger.tally.since(ledger.window)
        if window.requests < _WINDOW_REQUESTS or window.queries < _WINDOW_TOKENS:
            return False
        ledger.window = ledger.tally.copy()
        gap = window.predicted / max(1.0, window.routed) - window.hits / window.queries
        ledger.wrong = ledger.wrong + 1 if gap > _WRONG_SHARE else 0
        if ledger.wrong < _WRONG_WINDOWS:
            return False
        ledger.wrong = 0
        return True
