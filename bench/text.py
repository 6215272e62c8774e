"""Prompts without words: tokens known by their source, and the chain of blocks they fill."""

from __future__ import annotations

from struct import pack
from typing import TYPE_CHECKING, cast

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from extproc.core.decision import Chain

BLOCK_TOKENS = 128


class Text:
    """Grows at its end. Equal tokens from the beginning on give equal blocks, and no others.

    A source stands for endless text of its own; `add` takes the first tokens of it.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._links: list[int] = []
        self._rest: list[tuple[int, int, int]] = []

    def copy(self) -> Text:
        """Begin another text like this one; the blocks of both are the same objects."""
        other = Text()
        other.tokens = self.tokens
        other._links = self._links.copy()
        other._rest = self._rest.copy()
        return other

    def add(self, source: int, tokens: int) -> None:
        """Write the first `tokens` tokens of a source, known by 64 bits."""
        offset = 0
        while offset < tokens:
            count = min(tokens - offset, BLOCK_TOKENS - self.tokens % BLOCK_TOKENS)
            self._rest.append((source, offset, count))
            offset += count
            self.tokens += count
            if self.tokens % BLOCK_TOKENS == 0:
                block = b"".join([pack("<QQQ", *piece) for piece in self._rest])
                before = self._links[-1] if self._links else 0
                self._links.append(xxh3_64_intdigest(block, before))
                self._rest.clear()

    def chain(self) -> Chain:
        """Give the full blocks."""
        return cast("Chain", tuple(self._links))
