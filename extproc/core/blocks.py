"""From segments to bytes to hashes: what makes two prompts share a prefix.

A block's hash covers all blocks before it, so equal hashes mean equal prefixes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from xxhash import xxh3_64_intdigest

from extproc.core.decision import KeyHash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.decision import Chain
    from extproc.core.segments import Segment

# UTF-8 never holds these bytes, so no content can imitate the frame around it.
_KIND, _CONTENT, _LENGTH = b"\xff", b"\xfe", b"\xfd"


def canonical(segments: Iterable[Segment]) -> bytes:
    """Join segments: kind, content, and behind it its length.

    The length comes last so that a cut segment is a prefix of the whole one.
    """
    pieces: list[bytes] = []
    for segment in segments:
        pieces += (_KIND, segment.kind.encode("utf-8", "surrogatepass"), _CONTENT, segment.data)
        if segment.complete:
            pieces += (_LENGTH, b"%d" % len(segment.data))
    return b"".join(pieces)


def hash_chain(data: bytes, *, block_bytes: int, max_blocks: int, seed: int) -> Chain:
    """Hash the full blocks of `data`, at most `max_blocks`, each with all before it.

    `seed` is what must differ for nothing to be shared: deployment secret and namespace.
    """
    chain = []
    link = seed
    end = min(len(data) // block_bytes, max_blocks) * block_bytes
    for start in range(0, end, block_bytes):
        link = xxh3_64_intdigest(data[start : start + block_bytes], link)
        chain.append(link)
    return cast("Chain", tuple(chain))


def key_hash(seed: int, *parts: bytes) -> KeyHash:
    """Hash parts in order; each part's end counts, so `ab`, `c` differs from `a`, `bc`."""
    link = seed
    for part in parts:
        link = xxh3_64_intdigest(part, link)
    return KeyHash(link)


def seed_from(secret: str) -> int:
    """Turn a deployment's secret into the seed of all its hashes."""
    return xxh3_64_intdigest(secret.encode("utf-8", "surrogatepass"))
