"""Peers that weigh cache against load in one figure: llm-d's scorers, Dynamo, LMetric."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.peers_sight import believed, cheapest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from bench.peers_sight import Look, Sight
    from extproc.core.decision import BlockHash, Candidate, Chain, RoutingRequest
    from extproc.core.endpoint import Endpoint
    from extproc.core.policies import Ranking, View

# Requests in flight on one endpoint whose prompts are remembered; engines run far fewer.
_RUNNING_LIMIT = 1_024


@dataclass(frozen=True, slots=True)
class WeightedScorers:
    """llm-d's endpoint picker, the weighted sum of three scorers with weights 3, 2 and 2.

    prefix-cache-scorer (matched share of the prompt), queue-scorer and running-requests (both
    min-max over the candidates: least 1, most 0, all equal 1), max-score-picker (ties by
    chance); weights of its charts and kubernetes-sigs/gateway-api-inference-extension#1827.
    Without scrapes outstanding tokens stand for the queue, in-flight requests for running.
    Its index: 31,250 blocks of 64 tokens for each endpoint (approximateprefix/types.go).
    """

    chance: Random
    weights: tuple[float, float, float] = (3.0, 2.0, 2.0)

    def __call__(
        self, request: RoutingRequest, candidates: Sequence[Candidate], view: View, /
    ) -> Ranking:
        queues = _freedom([c.outstanding_tokens for c in candidates])
        running = _freedom([c.inflight for c in candidates])
        tokens = max(1, request.prompt_tokens)
        prefix, queue, run = self.weights
        costs = [
            -(prefix * c.matched_tokens / tokens + queue * q + run * r)
            for c, q, r in zip(candidates, queues, running, strict=True)
        ]
        return cheapest(request, believed(request, candidates), costs, view, self.chance)


class ExpectedTtft:
    """NVIDIA Dynamo's KV router (lib/kv-router/src/scheduling/selector/default.rs).

    Least of 1.0 x prefill blocks + decode blocks, ties by chance (temperature 0). Prefill:
    tokens waiting there and uncached ones of this prompt. Decode: distinct prompt blocks of
    the requests that run there, this one included. Overlap credit 1.0, prefill scale 1.0,
    no decay and no cost per request, as by default. Which requests run is this rule's own
    record in either view; the exact one knows their number.
    """

    prefill_scale = 1.0

    def __init__(self, look: Look, chance: Random) -> None:
        self._look = look
        self._chance = chance
        self._running: dict[Endpoint, _Running] = {}

    def __call__(
        self, request: RoutingRequest, candidates: Sequence[Candidate], view: View, /
    ) -> Ranking:
        sights = self._look(request, candidates)
        known = self._running
        self._running = {c.endpoint: known.get(c.endpoint) or _Running() for c in candidates}
        costs = [self._cost(request, sight) for sight in sights]
        ranking = cheapest(request, sights, costs, view, self._chance)
        self._running[ranking.order[0].endpoint].add(request.chains)
        return ranking

    def _cost(self, request: RoutingRequest, sight: Sight) -> float:
        running = self._running[sight.candidate.endpoint]
        running.keep(int(sight.requests))
        prefill_tokens = sight.waiting_tokens + request.prompt_tokens - sight.matched_tokens
        decode_blocks = running.blocks + running.missing(request.chains)
        return self.prefill_scale * prefill_tokens / request.block_tokens + decode_blocks


@dataclass(frozen=True, slots=True)
class LMetric:
    """LMetric (Zhang et al., "Simple is better", arXiv 2603.15202): the least product.

    New prefill tokens (those waiting there and the uncached ones of this prompt) times the
    batch size with this request; no constants. Equal products, so both nothing to compute:
    the smaller batch, then chance.
    """

    look: Look
    chance: Random

    def __call__(
        self, request: RoutingRequest, candidates: Sequence[Candidate], view: View, /
    ) -> Ranking:
        sights = self.look(request, candidates)
        costs = [
            (
                (s.waiting_tokens + request.prompt_tokens - s.matched_tokens) * (s.requests + 1),
                s.requests,
            )
            for s in sights
        ]
        return cheapest(request, sights, costs, view, self.chance)


class _Running:
    """The prompts that run on one endpoint: the last ones sent, as many as are in flight.

    A rule is not told which requests ended; they are taken to end in the order they came.
    Of several routers each counts its own prompts in place of the others'.
    """

    __slots__ = ("_sent", "_users")

    def __init__(self) -> None:
        self._sent: deque[tuple[Chain, ...]] = deque()
        self._users: dict[BlockHash, int] = {}

    @property
    def blocks(self) -> int:
        return len(self._users)

    def missing(self, chains: tuple[Chain, ...]) -> int:
        """Count the blocks of `chains` after what running prompts have in common with them."""
        users = self._users
        return sum(len(c) - bisect_left(c, 1, key=lambda b: b not in users) for c in chains)

    def add(self, chains: tuple[Chain, ...]) -> None:
        self.keep(_RUNNING_LIMIT - 1)
        self._sent.append(chains)
        for chain in chains:
            for block in chain:
                self._users[block] = self._users.get(block, 0) + 1

    def keep(self, count: int) -> None:
        """End all but the last `count`."""
        while len(self._sent) > count:
            for chain in self._sent.popleft():
                for block in chain:
                    self._users[block] -= 1
                    if not self._users[block]:
                        del self._users[block]


def _freedom(values: Sequence[float]) -> list[float]:
    """Score each value within the range of all: 1 for the least, 0 for the most."""
    low, high = min(values), max(values)
    return [(high - value) / (high - low) if high > low else 1.0 for value in values]
