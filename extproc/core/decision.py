"""The values that pass between reading a request, choosing, recording and answering."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from extproc.core.endpoint import Endpoint

BlockHash = NewType("BlockHash", int)
"""Keyed, finalised 64-bit hash of one prefix block and everything before it."""

Chain = tuple[BlockHash, ...]
"""Hashes of the full blocks of one prompt, in order."""

KeyHash = NewType("KeyHash", int)
"""Keyed 64-bit hash of a tier-1 key, a tier-2 key or a namespace."""

DecisionId = NewType("DecisionId", str)


class Reason(StrEnum):
    """Why a decision fell on its destination endpoint."""

    ROUND_ROBIN = "round-robin"
    LEAST_REQUEST = "least-request"
    HOME = "home"
    """The endpoint that already serves this conversation, or its rendezvous home."""
    MATCH = "match"
    """It holds the longest part of the prompt among the least costly."""
    MOVED = "moved-for-load"
    """Another endpoint holds more of the prompt, but is too loaded."""
    COLD = "cold"
    """Nobody holds any of the prompt."""
    FALLBACK = "fallback"
    """No prompt could be read: chosen by load alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What the core knows of one request when it chooses.

    `chains` has one chain per prompt of the body (most bodies have one); `prompt_tokens`
    counts all of them, including tokens after the last full block. `readable` is False
    when no prompt was found, then chains are empty. `tier1_tokens` is the length of the
    instruction prefix behind the tier-1 key. `session`: the client sent the tier-2 key.
    `subset` is Envoy's subset hint: None for no hint, empty for a hint that allows nobody.
    """

    chains: tuple[Chain, ...] = ()
    prompt_tokens: int = 0
    block_tokens: int = 128
    namespace: KeyHash = KeyHash(0)
    tier1: KeyHash = KeyHash(0)
    tier1_tokens: int = 0
    tier2: KeyHash = KeyHash(0)
    session: bool = False
    readable: bool = True
    model: str = ""
    subset: frozenset[str] | None = None


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One ready endpoint as a policy sees it, made anew for every request.

    `weight` includes slow start; `outstanding_tokens` is uncached prefill routed to it
    and not yet computed; `matched_tokens` the part of this prompt it is believed to hold.
    `cost` and `terms` (outstanding, recompute, slowdown, crowding) are filled in, in
    tokens, by policies that compute them.
    """

    endpoint: Endpoint
    weight: float = 1.0
    matched_tokens: int = 0
    outstanding_tokens: float = 0.0
    inflight: float = 0.0
    takes_new: bool = True
    cost: float = 0.0
    terms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Our result for `request`: the ordered destinations, and why.

    `endpoints[0]` is the destination endpoint, the rest are fallbacks in order.
    """

    decision_id: DecisionId
    request: RoutingRequest
    endpoints: tuple[Endpoint, ...]
    policy: str
    reason: Reason
    matched_tokens: int
    candidates: tuple[Candidate, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt, estimated."""
        return self.request.prompt_tokens

    @property
    def destination(self) -> Endpoint:
        """The endpoint Envoy is asked to use."""
        return self.endpoints[0]

    @property
    def header_value(self) -> str:
        """The ordered list as the routing header carries it."""
        return ",".join(self.endpoints)
