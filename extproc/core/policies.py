"""The five policies: functions that order candidates, without side effects.

Each takes the request, the candidates and a View, and returns a Ranking. Recording what
was chosen is the router's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from extproc.core.decision import Candidate, Reason, RoutingRequest
from extproc.core.rendezvous import score

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.core.endpoint import Endpoint

# Costs closer than this many tokens are equal: below it, order is rounding.
_TIE_TOKENS = 1e-6
# A new conversation takes a busy endpoint for slower by a share of this for each request:
# so many requests more double the cost. Where few are in flight, their count is chance.
_DOUBLING_REQUESTS = 5.0
# What one in-flight request costs where the prompt can't be read, and one too many where a
# conversation lives: more than so many times the mean, and so many at all.
_REQUEST_TOKENS = 400.0
_CROWDED_FACTOR, _CROWDED_FLOOR = 2.0, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The constants of the rules; design and evidence in docs/routing.md.

    `gamma` weighs recomputing against waiting for the turns of a live conversation, and
    `gamma_new` for its first one; `phi` weighs the later work of a new conversation;
    `load_factor` bounds an endpoint's in-flight count to that multiple of the mean in
    `session` and `prefix`, with `load_floor` below which nobody is moved; `prefix_tokens`
    is the depth `prefix` hashes at.
    """

    gamma: float = 6.0
    gamma_new: float = 3.0
    phi: float = 4.0
    load_factor: float = 1.25
    load_floor: int = 4
    prefix_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy may know besides the candidates.

    `sequence` counts this router's decisions; `home` is where the conversation lives, None
    when it is new; `future_tokens` what a new conversation of this tier-1 key still brings;
    `claimant` the endpoint that joined lately and whose turn it is to take this tier-1 key.
    """

    tuning: Tuning
    sequence: int = 0
    home: Endpoint | None = None
    future_tokens: float = 0.0
    claimant: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates from best to worst, and why the first one leads."""

    order: list[Candidate]
    reason: Reason


class Policy(Protocol):
    """Order the candidates, of which there is at least one, for a request."""

    def __call__(
        self, request: RoutingRequest, candidates: Sequence[Candidate], view: View, /
    ) -> Ranking:
        """Rank for one request; the candidates' cost and terms may be filled in."""
        ...


def round_robin(request: RoutingRequest, candidates: Sequence[Candidate], view: View, /) -> Ranking:
    """Take turns, blind to load and prompt: the baseline."""
    del request
    return Ranking(_rotated(_settled(candidates), view.sequence), Reason.ROUND_ROBIN)


def least_request(
    request: RoutingRequest, candidates: Sequence[Candidate], view: View, /
) -> Ranking:
    """Take the fewest in-flight requests for its weight; take turns among equals."""
    del request
    turned = _rotated(_settled(candidates), view.sequence)
    return Ranking(sorted(turned, key=_busyness), Reason.LEAST_REQUEST)


def session(request: RoutingRequest, candidates: Sequence[Candidate], view: View, /) -> Ranking:
    """Keep a session where it is while it is remembered; else its rendezvous home."""
    if not request.readable and not request.session:
        return _by_load(candidates, view)
    is_home = _equals(view.home)
    if view.home is None:
        candidates = _settled(candidates)
    order = sorted(
        candidates,
        key=lambda c: (is_home(c), score(c.endpoint, request.tier2, c.weight)),
        reverse=True,
    )
    # A remembered session has a cache to lose, so it moves at twice the bound only.
    slack = 2.0 if is_home(order[0]) else 1.0
    return _bounded(order, view.tuning, slack=slack)


def prefix(request: RoutingRequest, candidates: Sequence[Candidate], view: View, /) -> Ranking:
    """Rendezvous on the chain at a fixed depth, with bounded load; remembers nothing.

    Bounded loads: Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded
    loads" (2016). A prompt shorter than the depth is keyed by all its blocks.
    """
    if not request.readable:
        return _by_load(candidates, view)
    key: int = request.tier2
    if request.chains and request.chains[0]:
        depth = max(1, view.tuning.prefix_tokens // request.block_tokens)
        key = request.chains[0][:depth][-1]
    order = sorted(
        _settled(candidates), key=lambda c: score(c.endpoint, key, c.weight), reverse=True
    )
    return _bounded(order, view.tuning, slack=1.0)


def tiered(request: RoutingRequest, candidates: Sequence[Candidate], view: View, /) -> Ranking:
    """Take the least cost in tokens of prefill: what waits there, and what is computed anew.

    A turn of a live conversation: outstanding + gamma x uncached, and + 400 for each
    request in flight beyond twice the mean + 8, which only a crowd on one prompt reaches.
    A new conversation: (outstanding + gamma_new x uncached) x (1 + inflight / 5), since it
    may go where few are, + phi x future x (inflight / mean inflight - 1), since its later
    turns follow it. Each by the endpoint's weight. At least one block is always computed.
    The forms that were compared: docs/decisions/0006-load-terms.md.
    """
    if not request.readable and view.home is None:
        return _by_load(candidates, view)
    if view.home is None:
        candidates = _settled(candidates)
        _price_new(request, candidates, view)
    else:
        _price_turn(request, candidates, view.tuning.gamma)
    order = sorted(candidates, key=attrgetter("cost"))
    _settle_ties(order, request)
    chosen = order[0]
    longest = max(c.matched_tokens for c in candidates)
    if longest == 0:
        reason = Reason.COLD
    elif chosen.matched_tokens < longest:
        reason = Reason.MOVED
    else:
        reason = Reason.HOME if chosen.endpoint == view.home else Reason.MATCH
    return Ranking(order, reason)


POLICIES: dict[str, Policy] = {
    "round-robin": round_robin,
    "least-request": least_request,
    "session": session,
    "prefix": prefix,
    "tiered": tiered,
}


def _price_turn(request: RoutingRequest, candidates: Sequence[Candidate], gamma: float) -> None:
    crowded = _CROWDED_FACTOR * _mean_inflight(candidates) + _CROWDED_FLOOR
    for c in candidates:
        busyness = c.inflight / c.weight
        waiting = c.outstanding_tokens / c.weight
        recompute = gamma * _uncached(request, c.matched_tokens) / c.weight
        crowd = _REQUEST_TOKENS * max(0.0, busyness - crowded)
        # Among endpoints that hold the same, one token decides for the less busy.
        c.terms = (waiting, recompute, busyness, crowd)
        c.cost = waiting + recompute + busyness + crowd


def _price_new(request: RoutingRequest, candidates: Sequence[Candidate], view: View) -> None:
    gamma, mean = view.tuning.gamma_new, _mean_inflight(candidates)
    crowding = view.tuning.phi * view.future_tokens / mean if mean > 0 else 0.0
    for c in candidates:
        known_tokens = c.matched_tokens
        if c.endpoint == view.claimant:
            # It computes the instructions once, for all who share them.
            known_tokens = max(known_tokens, request.tier1_tokens)
        busyness = c.inflight / c.weight
        waiting = c.outstanding_tokens / c.weight
        recompute = gamma * _uncached(request, known_tokens) / c.weight
        slowdown = (waiting + recompute) * busyness / _DOUBLING_REQUESTS
        crowd = crowding * (busyness - mean)
        c.terms = (waiting, recompute, slowdown, crowd)
        c.cost = waiting + recompute + slowdown + crowd


def _uncached(request: RoutingRequest, known_tokens: int) -> int:
    return max(request.block_tokens, request.prompt_tokens - known_tokens)


def _mean_inflight(candidates: Sequence[Candidate]) -> float:
    return sum([c.inflight for c in candidates]) / sum([c.weight for c in candidates])


def _settle_ties(order: list[Candidate], request: RoutingRequest) -> None:
    """Put equally cheap leaders into rendezvous order: tier-1 key, tier-2 without one.

    Instructions shorter than a block can't be shared, so such conversations spread by
    their own key.
    """
    limit = order[0].cost + _TIE_TOKENS
    tied = next((i for i, c in enumerate(order) if c.cost > limit), len(order))
    if tied > 1:
        key = request.tier1 if request.tier1_tokens >= request.block_tokens else request.tier2
        order[:tied] = sorted(
            order[:tied], key=lambda c: score(c.endpoint, key, c.weight), reverse=True
        )


def _by_load(candidates: Sequence[Candidate], view: View) -> Ranking:
    for c in candidates:
        waiting, slowdown = c.outstanding_tokens / c.weight, _REQUEST_TOKENS * _busyness(c)
        c.terms = (waiting, 0.0, slowdown, 0.0)
        c.cost = waiting + slowdown
    turned = _rotated(_settled(candidates), view.sequence)
    return Ranking(sorted(turned, key=lambda c: c.cost), Reason.FALLBACK)


def _bounded(order: list[Candidate], tuning: Tuning, *, slack: float) -> Ranking:
    """Move the candidates above the load bound behind the others, keeping both in order."""
    total = 1.0 + sum(c.inflight for c in order)
    mean = total / sum(c.weight for c in order)
    bound = max(float(tuning.load_floor), ceil(tuning.load_factor * slack * mean))
    below = [c for c in order if (c.inflight + 1.0) / c.weight <= bound]
    above = [c for c in order if (c.inflight + 1.0) / c.weight > bound]
    reason = Reason.MOVED if below and below[0] is not order[0] else Reason.HOME
    return Ranking(below + above, reason)


def _settled(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out those that take no new conversations, unless nobody else is there."""
    return [c for c in candidates if c.takes_new] or list(candidates)


def _rotated(candidates: list[Candidate], sequence: int) -> list[Candidate]:
    turn = sequence % len(candidates)
    return candidates[turn:] + candidates[:turn]


def _busyness(candidate: Candidate) -> float:
    return candidate.inflight / candidate.weight


def _equals(home: Endpoint | None) -> Callable[[Candidate], bool]:
    return lambda candidate: candidate.endpoint == home
