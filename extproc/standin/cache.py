"""A prefix cache as vLLM keeps it: whole blocks, pinned while in use, else least recent out.

At any time: pinned blocks + free blocks + room reserved for blocks not yet computed is at
most the capacity, and a held block's predecessor is held too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.standin.tokens import StoredHash


class BlockCache:
    """Blocks by hash, at most `capacity_blocks` of them."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._pins: dict[StoredHash, int] = {}
        self._free: OrderedDict[StoredHash, None] = OrderedDict()
        self._reserved_blocks = 0

    def __len__(self) -> int:
        return len(self._pins) + len(self._free)

    def __contains__(self, block: object) -> bool:
        return block in self._pins or block in self._free

    @property
    def used_blocks(self) -> int:
        """Blocks that running sequences hold, computed or not."""
        return len(self._pins) + self._reserved_blocks

    def match(self, chain: Sequence[StoredHash]) -> int:
        """Return how many leading blocks of the chain are here."""
        for count, block in enumerate(chain):
            if block not in self:
                return count
        return len(chain)

    def reserve(
        self, chain: Sequence[StoredHash], *, match_at_most: int, blocks: int
    ) -> Lease | None:
        """Pin what is here of the chain and make room for the rest of `blocks`.

        None when running sequences leave too little room. A sequence longer than the whole
        cache is let in when it is alone; what does not fit is computed but not kept.
        """
        matched = chain[: min(self.match(chain), match_at_most)]
        newly_pinned = sum(block not in self._pins for block in matched)
        wanted = min(blocks, self.capacity_blocks) - len(matched)
        room = max(0, wanted)
        if self.used_blocks + newly_pinned + room > self.capacity_blocks:
            return None
        for block in matched:
            self._pin(block)
        self._reserved_blocks += room
        while len(self) + self._reserved_blocks > self.capacity_blocks:
            self._free.popitem(last=False)
        return Lease(self, list(matched), room)

    def clear(self) -> None:
        """Forget every block that no running sequence holds."""
        self._free.clear()

    def _pin(self, block: StoredHash) -> None:
        self._free.pop(block, None)
        self._pins[block] = self._pins.get(block, 0) + 1

    def _unpin(self, block: StoredHash) -> None:
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
            self._free[block] = None


class Lease:
    """One running sequence's hold on the cache; `release` gives everything back, once."""

    def __init__(self, cache: BlockCache, held: list[StoredHash], room_blocks: int) -> None:
        self.matched_blocks = len(held)
        self._cache = cache
        self._held = held
        self._room_blocks = room_blocks

    def store(self, blocks: Iterable[StoredHash]) -> None:
        """Keep the next computed blocks, in order; others may use them from here on."""
        for block in blocks:
            if not self._room_blocks:
                return
            self._room_blocks -= 1
            self._cache._reserved_blocks -= 1  # noqa: SLF001 - a lease is part of its cache
            self._cache._pin(block)  # noqa: SLF001 - likewise
            self._held.append(block)

    def release(self) -> None:
        """Unpin all blocks, the last first, so that the tail of a prefix is evicted first."""
        self._cache._reserved_blocks -= self._room_blocks  # noqa: SLF001 - likewise
        self._room_blocks = 0
        while self._held:
            self._cache._unpin(self._held.pop())  # noqa: SLF001 - likewise
