"""Peers that follow a key or the longest match: rendezvous, SGLang's guard, KubeAI's ring."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING

from xxhash import xxh64_intdigest

from bench.peers_sight import believed, reason_for
from extproc.core.decision import Reason
from extproc.core.policies import Ranking, least_request
from extproc.core.rendezvous import score

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from extproc.core.decision import Candidate, RoutingRequest
    from extproc.core.endpoint import Endpoint
    from extproc.core.policies import View


def session_rendezvous(
    request: RoutingRequest, candidates: Sequence[Candidate], view: View, /
) -> Ranking:
    """Rendezvous on the conversation's key alone, blind to load and cache.

    As AIBrix with `x-aibrix-session-key` (pkg/plugins/gateway/algorithms/
    simple_session_affinity.go) and vllm-project/router's `rendezvous_hash`, but with a
    finalised hash in place of AIBrix's plain FNV-1a, which skews shares by a quarter.
    Without a key the least busy, as vLLM production-stack's `session` does.
    """
    if not request.tier2:
        return Ranking(least_request(request, candidates, view).order, Reason.FALLBACK)
    order = sorted(candidates, key=lambda c: score(c.endpoint, request.tier2), reverse=True)
    return Ranking(order, Reason.HOME)


class LongestMatchGuard:
    """SGLang's router, `cache_aware` (model_gateway/src/policies/cache_aware.rs).

    Command line defaults: cache threshold 0.3, imbalance above 64 in flight and 1.5 times.
    When the fleet is imbalanced, or the longest match is at most the threshold of the prompt,
    the least loaded; else the longest match. Equal loads: the one sent fewest. Equal matches
    go to the less loaded one, as its event-fed index does; its tree takes any. Its tree may
    keep 2^26 characters for an endpoint; the engine's size, as here, serves it better.
    """

    threshold = 0.3
    imbalance_requests = 64
    imbalance_ratio = 1.5

    def __init__(self) -> None:
        self._sent: dict[Endpoint, int] = {}

    def __call__(
        self, request: RoutingRequest, candidates: Sequence[Candidate], view: View, /
    ) -> Ranking:
        self._sent = {c.endpoint: self._sent.get(c.endpoint, 0) for c in candidates}
        order = sorted(candidates, key=lambda c: (c.inflight, self._sent[c.endpoint]))
        least, most = order[0].inflight, order[-1].inflight
        imbalanced = most - least > self.imbalance_requests and most > self.imbalance_ratio * least
        longest = max(c.matched_tokens for c in candidates)
        if not imbalanced and longest > self.threshold * request.prompt_tokens:
            order.sort(key=lambda c: -c.matched_tokens)
        self._sent[order[0].endpoint] += 1
        return Ranking(order, reason_for(request, believed(request, order), view))


class BoundedRing:
    """KubeAI's PrefixHash (internal/loadbalancer/balance_chwbl.go), keyed by 256 tokens.

    Consistent hashing with bounded loads: 256 places for each endpoint on a ring of xxhash64;
    from the key's place on, the first endpoint whose load with this request is at most 1.25
    times the mean takes it (any load, on an idle fleet); none: the first one. The key is the
    prompt's first 256 tokens in whole blocks, as in SGLang's `prefix_hash`, for KubeAI's
    100 characters of the first user message; a prompt with no whole block has its session's.
    """

    prefix_tokens = 256
    load_factor = 1.25
    replication = 256

    def __init__(self) -> None:
        self._members: frozenset[Endpoint] = frozenset()
        self._ring: list[tuple[int, Endpoint]] = []

    def __call__(
        self, request: RoutingRequest, candidates: Sequence[Candidate], view: View, /
    ) -> Ranking:
        del view
        by_endpoint = {c.endpoint: c for c in candidates}
        self._fit(by_endpoint.keys())
        walk = [by_endpoint[endpoint] for endpoint in self._walk(self._key(request))]
        total = sum(c.inflight for c in walk)
        bound = self.load_factor * (total + 1) / len(walk) if total else inf
        below = [c for c in walk if c.inflight + 1 <= bound]
        above = [c for c in walk if c.inflight + 1 > bound]
        order = below + above
        return Ranking(order, Reason.HOME if order[0] is walk[0] else Reason.MOVED)

    def _key(self, request: RoutingRequest) -> int:
        chain = request.chains[0] if request.chains else ()
        depth = max(1, self.prefix_tokens // request.block_tokens)
        return chain[:depth][-1] if chain else request.tier2

    def _fit(self, endpoints: Collection[Endpoint]) -> None:
        """Take in those that joined, leave out those that left."""
        members = frozenset(endpoints)
        if members != self._members:
            self._members = members
            self._ring = sorted(
                (xxh64_intdigest(f"{endpoint}{number}".encode()), endpoint)
                for endpoint in members
                for number in range(self.replication)
            )

    def _walk(self, key: int) -> list[Endpoint]:
        """Order the endpoints as they are met on the ring from the key's place on."""
        place = xxh64_intdigest(key.to_bytes(8, "little"))
        start = bisect_left(self._ring, place, key=lambda point: point[0])
        met: dict[Endpoint, None] = {}
        for step in range(len(self._ring)):
            met[self._ring[(start + step) % len(self._ring)][1]] = None
            if len(met) == len(self._members):
                break
        return list(met)
