"""What a peer's rule sees of the candidates, believed or exact, and how it ranks them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

from extproc.core.decision import Reason
from extproc.core.policies import Ranking

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from extproc.core.decision import Candidate, RoutingRequest
    from extproc.core.policies import View
    from extproc.simulation.view import FleetView


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One candidate as a rule sees it: believed by the router, or exact."""

    candidate: Candidate
    matched_tokens: int
    waiting_tokens: float
    requests: float


class Look(Protocol):
    """A way to see the candidates, in their order."""

    def __call__(self, request: RoutingRequest, candidates: Sequence[Candidate], /) -> list[Sight]:
        """See what each holds of this request's prompt, and what it has to do."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """See the engines themselves; one that died but is still a candidate looks endless."""

    fleet: FleetView

    def __call__(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Sight]:
        return [self._inspect(request, c) for c in candidates]

    def _inspect(self, request: RoutingRequest, candidate: Candidate) -> Sight:
        fleet, endpoint = self.fleet, candidate.endpoint
        try:
            held_blocks = sum(fleet.held_blocks(endpoint, chain) for chain in request.chains)
            waiting_tokens, requests = fleet.waiting_tokens(endpoint), fleet.requests(endpoint)
        except KeyError:
            held_blocks, waiting_tokens, requests = 0, inf, 0
        return Sight(
            candidate=candidate,
            matched_tokens=min(held_blocks * request.block_tokens, request.prompt_tokens),
            waiting_tokens=waiting_tokens,
            requests=requests,
        )


def believed(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Sight]:
    """See what the router believes."""
    del request
    return [
        Sight(
            candidate=c,
            matched_tokens=c.matched_tokens,
            waiting_tokens=c.outstanding_tokens,
            requests=c.inflight,
        )
        for c in candidates
    ]


def cheapest(
    request: RoutingRequest,
    sights: Sequence[Sight],
    costs: Sequence[float] | Sequence[tuple[float, float]],
    view: View,
    chance: Random,
) -> Ranking:
    """Rank by the least cost, one for each sight; equal costs in an order drawn by chance."""
    keys = [(cost, chance.random()) for cost in costs]
    order = [sights[i] for i in sorted(range(len(sights)), key=keys.__getitem__)]
    return Ranking([s.candidate for s in order], reason_for(request, order, view))


def reason_for(request: RoutingRequest, order: Sequence[Sight], view: View) -> Reason:
    """Name why the first of `order` leads, by what it holds against the others."""
    if not request.readable:
        return Reason.FALLBACK
    longest = max(s.matched_tokens for s in order)
    if not longest:
        return Reason.COLD
    if order[0].matched_tokens < longest:
        return Reason.MOVED
    return Reason.HOME if order[0].candidate.endpoint == view.home else Reason.MATCH
