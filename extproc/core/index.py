"""The approximate index: which prefix blocks each endpoint is believed to hold.

Invariant: what an endpoint holds is closed under prefixes. A record touches the deepest
block first, so a block is never older than its children and the least recently used
block is always a leaf. A match is therefore found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice, repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.decision import BlockHash, Chain
    from extproc.core.endpoint import Endpoint

# Finding the front of a dict skips the slots of deleted entries; evicting a small share
# at a time makes that skipping a constant per eviction.
_EVICTED_SHARE = 64


class ApproximateIndex:
    """Leaf-first LRU of block hashes for each endpoint, learned from our own decisions.

    `capacity` is in blocks per endpoint, as large as the endpoint's own cache; `max_blocks`
    bounds all endpoints together and shrinks each one's capacity when there are many.
    """

    def __init__(self, *, capacity: int, max_blocks: int | None = None) -> None:
        self._default_capacity = capacity
        self._max_blocks = max_blocks
        self._held: dict[Endpoint, dict[BlockHash, None]] = {}
        self._capacities: dict[Endpoint, int] = {}

    def match(self, chain: Chain) -> dict[Endpoint, int]:
        """Count the leading blocks of `chain` that each known endpoint holds."""
        deepest_first = chain[::-1]
        return {
            endpoint: _leading_run(deepest_first, held) for endpoint, held in self._held.items()
        }

    def match_all(self, chains: Sequence[Chain]) -> dict[Endpoint, int]:
        """Count the leading blocks of several chains, summed, that each endpoint holds."""
        if len(chains) == 1:
            return self.match(chains[0])
        total: dict[Endpoint, int] = {}
        for chain in chains:
            for endpoint, count in self.match(chain).items():
                total[endpoint] = total.get(endpoint, 0) + count
        return total

    def record(self, chain: Chain, endpoint: Endpoint) -> None:
        """Note that `endpoint` computes `chain`; a chain above its capacity keeps its head."""
        held = self._held.setdefault(endpoint, {})
        capacity = self.capacity(endpoint)
        kept = chain[:capacity]
        # Both loops run in C: `pop` gives None for every block, so `any` reaches the last.
        any(map(held.pop, kept, repeat(None)))
        held.update(dict.fromkeys(reversed(kept)))
        excess = len(held) - capacity
        if excess > 0:
            spare = len(held) - len(kept)
            count = max(excess, min(capacity // _EVICTED_SHARE, spare))
            for block in list(islice(held, count)):
                del held[block]

    def resize(self, endpoint: Endpoint, capacity: int) -> None:
        """Set the capacity of one endpoint in blocks; it takes effect with the next record."""
        self._capacities[endpoint] = capacity

    def forget(self, endpoint: Endpoint) -> None:
        """Drop all that is known of an endpoint: it left, or lost its cache."""
        self._held.pop(endpoint, None)
        self._capacities.pop(endpoint, None)

    def capacity(self, endpoint: Endpoint) -> int:
        """Give the blocks this endpoint may hold here."""
        own = self._capacities.get(endpoint, self._default_capacity)
        if self._max_blocks is None:
            return own
        return max(1, min(own, self._max_blocks // max(1, len(self._held))))

    def blocks(self, endpoint: Endpoint) -> int:
        """Count the blocks an endpoint is believed to hold."""
        return len(self._held.get(endpoint, ()))


def _leading_run(deepest_first: Chain, held: dict[BlockHash, None]) -> int:
    # From its end, a chain is first blocks that are not held, then blocks that are.
    if not deepest_first or deepest_first[-1] not in held:
        return 0
    return len(deepest_first) - bisect_left(deepest_first, 1, key=held.__contains__)
