"""The router: takes a request, returns a decision, and keeps the state that events change.

`apply` is the one place where routing state changes; `route` decides and applies its own
Routed event. Nothing awaits between the two, so no lock is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from extproc.core.decision import Candidate, Decision, DecisionId, RoutingRequest
from extproc.core.errors import NoEndpointError, SheddingError
from extproc.core.events import (
    EndpointDown,
    EndpointReset,
    EndpointUp,
    Event,
    Finished,
    FirstByte,
    Observed,
    Routed,
)
from extproc.core.index import ApproximateIndex
from extproc.core.load import LoadModel
from extproc.core.memory import Demand, Home, Sessions
from extproc.core.policies import POLICIES, Policy, Tuning, View
from extproc.core.pool import Member, Pool
from extproc.core.prediction import Predictions, Tally
from extproc.core.rendezvous import score

if TYPE_CHECKING:
    from extproc.core.endpoint import Endpoint

# Key hashes are 64 bits, evenly spread.
_KEYS = 2.0**64
# What vLLM and SGLang answer when their queue is full.
_REFUSED = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How to choose, and the limits of everything remembered.

    `cache_tokens` is the prefix cache of one endpoint until its metrics tell;
    `fallbacks` the endpoints named after the destination; `suspect_s` how long an endpoint
    may have work without progress before others are preferred (0: for ever).
    """

    policy: str = "tiered"
    tuning: Tuning = field(default_factory=Tuning)
    block_tokens: int = 128
    cache_tokens: int = 2_000_000
    max_index_blocks: int = 1_000_000
    prefill_tokens_per_s: float = 6_000.0
    session_ttl_s: float = 1_800.0
    max_sessions: int = 100_000
    max_tier1_keys: int = 10_000
    lease_ttl_s: float = 600.0
    max_leases: int = 20_000
    slow_start_s: float = 10.0
    suspect_s: float = 30.0
    fallbacks: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointView:
    """What the router believes of one endpoint, for metrics and people."""

    endpoint: Endpoint
    weight: float
    ready: bool
    draining: bool
    outstanding_tokens: float
    inflight: float
    blocks: int
    held_back: bool
    """It refused a request, or is suspect: others are preferred."""
    cached: Tally
    """Cached tokens as predicted, and as the engine tells."""
    healed: int
    """How often the index was found wrong about it and forgot it."""


class Router:
    """One router. `router_id` makes its decision ids unique among routers.

    `policy` replaces the named one of the settings, to measure another rule.
    """

    def __init__(
        self, settings: RouterSettings, *, router_id: str, policy: Policy | None = None
    ) -> None:
        self._settings = settings
        self._choose = policy or POLICIES[settings.policy]
        self._router_id = router_id
        self._sequence = 0
        self._pool = Pool(slow_start_s=settings.slow_start_s)
        self._index = ApproximateIndex(
            capacity=max(1, settings.cache_tokens // settings.block_tokens),
            max_blocks=settings.max_index_blocks,
        )
        self._load = LoadModel(
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
            max_leases=settings.max_leases,
            lease_ttl_s=settings.lease_ttl_s,
            suspect_s=settings.suspect_s,
        )
        self._sessions = Sessions(capacity=settings.max_sessions, ttl_s=settings.session_ttl_s)
        self._predictions = Predictions()
        self._healed: dict[Endpoint, int] = {}
        self._demand = Demand(capacity=settings.max_tier1_keys)

    def route(self, request: RoutingRequest, now_s: float) -> Decision:
        """Choose endpoints for a request and record the choice.

        Raises NoEndpointError when no ready endpoint is a candidate, SheddingError when
        every candidate is at its limit of in-flight requests.
        """
        decision = self.decide(request, now_s)
        self.apply(routed(decision), now_s)
        return decision

    def decide(self, request: RoutingRequest, now_s: float) -> Decision:
        """Choose endpoints without recording it; errors as `route`."""
        home = self._sessions.find(request.tier2, now_s) if request.tier2 else None
        candidates = self._candidates(request, home, now_s)
        view = View(
            tuning=self._settings.tuning,
            sequence=self._sequence,
            home=home.endpoint if home else None,
            future_tokens=self._demand.future_tokens(request.tier1),
            claimant=self._claimant(request, candidates, now_s) if home is None else None,
        )
        self._sequence += 1
        ranking = self._choose(request, candidates, view)
        chosen = ranking.order[0]
        return Decision(
            decision_id=DecisionId(f"{self._router_id}-{self._sequence}"),
            request=request,
            endpoints=tuple(c.endpoint for c in ranking.order[: 1 + self._settings.fallbacks]),
            policy=self._settings.policy,
            reason=ranking.reason,
            matched_tokens=chosen.matched_tokens,
            candidates=tuple(ranking.order),
        )

    def apply(self, event: Event, now_s: float) -> None:
        """Change the state by one event, our own or another router's; never raises."""
        match event:
            case Routed():
                self._record(event, now_s)
            case FirstByte():
                self._load.begin(event.decision_id, now_s)
            case Finished():
                self._finish(event, now_s)
            case EndpointUp():
                self._pool.up(event, now_s)
            case EndpointDown():
                self._pool.down(event.endpoint, gone=event.gone)
                if event.gone:
                    self._index.forget(event.endpoint)
                    self._load.forget(event.endpoint)
                    self._predictions.forget(event.endpoint)
                    self._healed.pop(event.endpoint, None)
            case EndpointReset():
                self._index.forget(event.endpoint)
                self._load.forget(event.endpoint)
                self._predictions.forget(event.endpoint)
                self._pool.restart_ramp(event.endpoint, now_s)
            case Observed():
                self._observe(event, now_s)
            case _:
                assert_never(event)

    def snapshot(self, now_s: float) -> tuple[EndpointView, ...]:
        """Show every endpoint of the pool, in the order they joined."""
        return tuple(
            EndpointView(
                endpoint=member.endpoint,
                weight=member.weight,
                ready=member.ready,
                draining=member.draining,
                outstanding_tokens=self._load.outstanding_tokens(member.endpoint, now_s),
                inflight=self._load.inflight(member.endpoint, now_s),
                blocks=self._index.blocks(member.endpoint),
                held_back=self._load.is_held_back(member.endpoint, now_s),
                cached=self._predictions.tally(member.endpoint).copy(),
                healed=self._healed.get(member.endpoint, 0),
            )
            for member in self._pool
        )

    def _candidates(
        self, request: RoutingRequest, home: Home | None, now_s: float
    ) -> list[Candidate]:
        members = self._pool.ready(request.subset)
        if not members:
            message = "no ready endpoint serves this request"
            raise NoEndpointError(message)
        self._load.expire(now_s)
        matches = self._index.match_all(request.chains)
        ramps = self._pool.ramps(members, now_s)
        open_to = self._open_to(members, ramps, matches, request, now_s)
        if not open_to:
            message = "every endpoint is at its limit of requests"
            raise SheddingError(message)
        if home is not None and not request.readable:
            for candidate in open_to:
                if candidate.endpoint == home.endpoint:
                    candidate.matched_tokens = min(home.prompt_tokens, request.prompt_tokens)
        return open_to

    def _open_to(
        self,
        members: list[Member],
        ramps: list[float],
        matches: dict[Endpoint, int],
        request: RoutingRequest,
        now_s: float,
    ) -> list[Candidate]:
        """Give those below their limit of in-flight requests as candidates.

        Those that are held back count only where nobody else is left.
        """
        block_tokens, prompt_tokens = request.block_tokens, request.prompt_tokens
        candidates: list[Candidate] = []
        held_back: list[Candidate] = []
        for member, ramp in zip(members, ramps, strict=True):
            outstanding_tokens, inflight, held = self._load.levels(member.endpoint, now_s)
            if member.max_inflight is None or inflight < member.max_inflight:
                (held_back if held else candidates).append(
                    Candidate(
                        endpoint=member.endpoint,
                        weight=member.weight * ramp,
                        matched_tokens=min(
                            matches.get(member.endpoint, 0) * block_tokens, prompt_tokens
                        ),
                        outstanding_tokens=outstanding_tokens,
                        inflight=inflight,
                        takes_new=not member.draining,
                    )
                )
        return candidates or held_back

    def _claimant(
        self, request: RoutingRequest, candidates: list[Candidate], now_s: float
    ) -> Endpoint | None:
        """Name the newcomer that is this tier-1 key's rendezvous home, once it is its turn.

        Without it, prefixes that fit on the endpoints that hold them would stay there.
        """
        newcomers = self._pool.newcomers(self._pool.ready(request.subset), now_s)
        if not newcomers or request.tier1_tokens < request.block_tokens:
            return None
        home = max(candidates, key=lambda c: score(c.endpoint, request.tier1, c.weight)).endpoint
        return home if request.tier1 < newcomers.get(home, 0.0) * _KEYS else None

    def _record(self, event: Routed, now_s: float) -> None:
        for chain in event.chains:
            self._index.record(chain, event.endpoint)
        uncached = max(0, event.prompt_tokens - event.matched_tokens)
        if event.endpoint in self._pool:
            self._predictions.count(
                event.endpoint, predicted=event.matched_tokens, routed=event.prompt_tokens
            )
        self._load.acquire(
            event.decision_id,
            event.endpoint,
            uncached_tokens=uncached,
            chains=event.chains,
            now_s=now_s,
        )
        if event.tier2:
            new = self._sessions.find(event.tier2, now_s) is None
            self._demand.count(event.tier1, new=new, uncached_tokens=uncached, now_s=now_s)
            self._sessions.expire(now_s)
            self._sessions.bind(event.tier2, Home(event.endpoint, event.prompt_tokens, now_s))

    def _finish(self, event: Finished, now_s: float) -> None:
        lease = self._load.release(event.decision_id, now_s)
        if lease is None:
            return
        if event.served and event.served != lease.endpoint and event.served in self._pool:
            # Envoy fell back: the prompt is cached where it was served.
            for chain in lease.chains:
                self._index.record(chain, event.served)
        refused_by_all = event.status == _REFUSED and event.served is not None
        if refused_by_all or (event.served and event.served != lease.endpoint):
            self._load.refuse(lease.endpoint, now_s)

    def _observe(self, event: Observed, now_s: float) -> None:
        if event.endpoint not in self._pool:
            return
        self._load.observe(event, now_s)
        if self._predictions.observe(event):
            # It holds something else than we believe; what is routed from here on is known.
            self._index.forget(event.endpoint)
            self._healed[event.endpoint] = self._healed.get(event.endpoint, 0) + 1
        if event.cache_tokens:
            blocks = max(1, event.cache_tokens // self._settings.block_tokens)
            self._index.resize(event.endpoint, blocks)


def routed(decision: Decision) -> Routed:
    """Give the event that records a decision, here and at other routers."""
    request = decision.request
    return Routed(
        decision_id=decision.decision_id,
        endpoint=decision.destination,
        chains=request.chains,
        prompt_tokens=request.prompt_tokens,
        matched_tokens=decision.matched_tokens,
        tier1=request.tier1,
        tier2=request.tier2,
    )
