"""The KV cache of one engine: blocks shared by reference count, the unused ones in LRU order.

As in vLLM: a block in use is never evicted, a finished request frees its blocks deepest
first, and a freed block stays reusable until its memory is taken. So what is held is
closed under prefixes, and a match is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.decision import BlockHash, Chain


class BlockCache:
    """`capacity` blocks of memory: held ones, used or not, and reserved ones without a hash."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._users: dict[BlockHash, int] = {}
        self._unused: dict[BlockHash, None] = {}
        self._reserved = 0

    @property
    def available(self) -> int:
        """Blocks that can be had now, by eviction of unused ones if need be."""
        return self.capacity - self._reserved - len(self._users) + len(self._unused)

    @property
    def usage(self) -> float:
        """Share of memory in use by requests, 0..1, as engines report it."""
        return 1.0 - self.available / self.capacity

    def held_blocks(self, chain: Chain) -> int:
        """Count the leading blocks of `chain` that can be reused."""
        users = self._users
        if not chain or chain[0] not in users:
            return 0
        if chain[-1] in users:
            return len(chain)
        return bisect_left(chain, 1, key=lambda block: block not in users)

    def pin(self, held: Chain, *, reserve: int, spare: int = 0) -> bool:
        """Use held blocks and reserve `reserve` more, leaving `spare`.

        False, and nothing is done, where there is not that much room.
        """
        users, unused = self._users, self._unused
        freed = len([block for block in held if block in unused])
        if self.available - freed < reserve + spare:
            return False
        for block in held:
            users[block] += 1
            unused.pop(block, None)
        self.reserve(reserve)
        return True

    def reserve(self, count: int) -> None:
        """Take memory for `count` blocks, at most `available`; the least recently used go."""
        self._reserved += count
        excess = self._reserved + len(self._users) - self.capacity
        if excess > 0:
            for block in list(islice(self._unused, excess)):
                del self._unused[block], self._users[block]

    def write(self, computed: Chain) -> None:
        """Give reserved blocks their hashes: from now on they can be reused."""
        users = self._users
        for block in computed:
            users[block] = users.get(block, 0) + 1
            self._unused.pop(block, None)
        self._reserved -= len(computed)

    def release(self, used: Chain, *, reserved: int, answer: Chain = ()) -> None:
        """End a request: its blocks become unused, and of its reserved ones `answer` stays."""
        users, unused = self._users, self._unused
        self._reserved -= reserved
        for block in reversed(answer[:reserved]):
            if block not in users:
                users[block] = 0
                unused[block] = None
            elif not users[block]:
                unused[block] = unused.pop(block, None)
        for block in reversed(used):
            users[block] -= 1
            if not users[block]:
                unused[block] = None
