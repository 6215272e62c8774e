"""The stand-in's tokens: four rendered bytes each, so that counting costs nothing.

Written apart from the router's own reading of prompts, which it serves to judge: nothing
here is imported from the core.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, NewType

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

BYTES_PER_TOKEN = 4

StoredHash = NewType("StoredHash", int)
"""Hash of one cache block, all before it, and its namespace."""

_WORDS = (
    *("sun ", "sea ", "oak ", "fox ", "red ", "ice ", "owl ", "map "),
    *("tea ", "sky ", "ash ", "bee ", "gem ", "ink ", "jar ", "key "),
)


def count_tokens(size_bytes: int) -> int:
    """Tokens in that many rendered bytes; the last one may be cut short."""
    return -(-size_bytes // BYTES_PER_TOKEN)


def namespace_seed(model: str, adapter: str, salt: str) -> StoredHash:
    """Return where a chain starts: prompts of different namespaces share no block."""
    text = json.dumps([model, adapter, salt])
    return StoredHash(xxhash.xxh3_64_intdigest(text.encode()))


def hash_blocks(data: bytes, start: StoredHash, block_tokens: int) -> list[StoredHash]:
    """Return the hashes of the full blocks of `data`, the first one chained to `start`."""
    block_bytes = block_tokens * BYTES_PER_TOKEN
    last = start
    hashes = []
    view = memoryview(data)
    digest = xxhash.xxh3_64_intdigest
    for begin, end in pairwise(range(0, len(data) + 1, block_bytes)):
        last = StoredHash(digest(view[begin:end], seed=last))
        hashes.append(last)
    return hashes


def write_words(seed: int, count: int, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """Return the answer to a prompt as tokens, and whether a stop string ended it early.

    The same seed gives the same words; every token but a cut last one has four bytes.
    """
    words = list(_words(seed, count))
    if not stop:
        return words, False
    text = "".join(words)
    found = [at for mark in stop if mark and (at := text.find(mark)) >= 0]
    if not found:
        return words, False
    text = text[: min(found)]
    cut = [text[at : at + BYTES_PER_TOKEN] for at in range(0, len(text), BYTES_PER_TOKEN)]
    return cut, True


def _words(seed: int, count: int) -> Iterator[str]:
    mask = len(_WORDS) - 1
    for position in range(count):
        yield _WORDS[((seed >> (4 * (position & mask))) + (position >> 4)) & mask]
