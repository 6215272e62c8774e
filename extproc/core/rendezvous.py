"""Weighted rendezvous hashing: all routers rank endpoints for a key alike, sharing nothing."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from extproc.core.endpoint import Endpoint

# 53 of the 64 hash bits: what a float holds exactly, so the share lies strictly in (0, 1).
_UNUSED_BITS = 11
_UNIT = 1.0 / (1 << 53)


def score(endpoint: Endpoint, key: int, weight: float = 1.0) -> float:
    """Give the rendezvous score of one endpoint for a key; the highest score is its home.

    -w / ln(u) makes an endpoint's share of the keys proportional to its weight, and a
    changed weight moves only the keys it gains or loses (Schindelhauer and Schomaker,
    "Weighted distributed hash tables", 2005).
    """
    share = ((xxh3_64_intdigest(endpoint.encode(), seed=key) >> _UNUSED_BITS) + 0.5) * _UNIT
    return -weight / log(share)
