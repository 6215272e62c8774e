"""One run: clients, routers and engines in one virtual time, without chance but the seed's.

The routers are those of the product. They learn what a deployment's would: their own
decisions at once, each other's after the log's delay, the end of a request from the
access log, and scrapes only where asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import TYPE_CHECKING

from extproc.core.decision import RoutingRequest
from extproc.core.errors import RequestRefusedError
from extproc.core.events import EndpointDown, EndpointUp, Finished, Observed
from extproc.core.router import Router, RouterSettings, routed
from extproc.simulation.engine import EngineSettings, Job
from extproc.simulation.fleet import Fleet
from extproc.simulation.outcome import Outcome, Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extproc.core.decision import Chain, Decision, KeyHash
    from extproc.core.endpoint import Endpoint
    from extproc.core.events import Event
    from extproc.core.policies import Policy
    from extproc.simulation.engine import Engine
    from extproc.simulation.view import FleetView
    from extproc.simulation.workload import Conversation, Turn, Workload

# Nobody waits for the answers of an overloaded fleet for ever: virtual seconds after the
# last conversation began.
_PATIENCE_S = 86_400.0
# Until health checks take a dead engine out of the pool; Envoy retries elsewhere before.
_NOTICED_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """At `at_s`, `add` engines join, or the `kill`-th of those present dies."""

    at_s: float
    add: int = 0
    kill: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The fleet and its routers.

    `log_delay_s`: until a decision is known to the other routers; None for routers that
    share nothing. `end_delay_s`: until the access log tells a request's end.
    `scrape_interval_s`: None for no scrapes.
    """

    endpoints: int = 8
    engine: EngineSettings = field(default_factory=EngineSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    routers: int = 1
    log_delay_s: float | None = 0.02
    end_delay_s: float = 0.05
    scrape_interval_s: float | None = None
    changes: tuple[Change, ...] = ()
    seed: int = 0


@dataclass(slots=True, eq=False)
class _Client:
    """A conversation under way."""

    conversation: Conversation
    turns: Iterator[Turn]


@dataclass(slots=True, eq=False)
class _Flight:
    """A request under way: what its answer will be compared with."""

    client: _Client
    turn: Turn
    sent_s: float
    ideal_tokens: int
    decision: Decision
    endpoint: Endpoint
    later: bool
    moved: bool


class Run:
    """A workload against a fleet under one policy; `execute` plays it once.

    `make_policy` gives each router a rule of its own instead of the settings' policy;
    `on_progress` is told how many conversations have begun.
    """

    def __init__(
        self,
        workload: Workload,
        settings: RunSettings,
        *,
        make_policy: Callable[[FleetView, Random], Policy] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._workload = workload
        self._settings = settings
        self._random = Random(settings.seed)
        self._on_progress = on_progress
        self.fleet = Fleet(settings.engine)
        self._routers = [
            Router(
                settings.router,
                router_id=f"r{number}",
                policy=make_policy(self.fleet, Random(settings.seed)) if make_policy else None,
            )
            for number in range(settings.routers)
        ]
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._tags = count()
        self._open = len(workload.conversations)
        self._flights: dict[int, _Flight] = {}
        self._served: list[Served] = []
        self._seen: set[int] = set()
        self._lives: dict[KeyHash, Endpoint] = {}
        self._computed_before: dict[Endpoint, int] = {}
        self._backlog_s = 0.0
        self._preemptions = 0
        self._refused = 0

    def execute(self) -> Outcome:
        """Play the workload to its end, or until nobody would wait for it any more."""
        settings, conversations = self._settings, self._workload.conversations
        for _ in range(settings.endpoints):
            self._join(0.0)
        for change in settings.changes:
            self._at(change.at_s, partial(self._change, change))
        self._at(self._workload.warmup_s, self._end_warmup)
        if settings.scrape_interval_s is not None:
            self._at(settings.scrape_interval_s, self._scrape)
        if conversations:
            self._at(conversations[0].start_s, partial(self._begin, 0))
        patience_s = max([c.start_s for c in conversations], default=0.0) + _PATIENCE_S
        now_s = 0.0
        while self._open and self._agenda[0][0] < patience_s:
            now_s, _, act = heappop(self._agenda)
            act(now_s)
        return self._outcome(now_s)

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heappush(self._agenda, (at_s, next(self._order), act))

    def _begin(self, number: int, now_s: float) -> None:
        conversations = self._workload.conversations
        if self._on_progress:
            self._on_progress(number + 1)
        if number + 1 == len(conversations):
            todo = sum(engine.waiting_tokens for _, engine in self.fleet)
            rate = self._settings.engine.prefill_tokens_per_s * max(1, len(self.fleet))
            self._backlog_s = todo / rate
        else:
            self._at(conversations[number + 1].start_s, partial(self._begin, number + 1))
        conversation = conversations[number]
        self._next_turn(_Client(conversation, iter(conversation.turns)), now_s)

    def _next_turn(self, client: _Client, now_s: float) -> None:
        turn = next(client.turns, None)
        if turn is None:
            self._open -= 1
        else:
            at_s = now_s + turn.wait_s
            self._at(at_s, partial(self._send, client, turn, at_s))

    def _send(self, client: _Client, turn: Turn, sent_s: float, now_s: float) -> None:
        conversation, block_tokens = client.conversation, self._workload.block_tokens
        request = RoutingRequest(
            chains=(turn.chain,),
            prompt_tokens=turn.prompt_tokens,
            block_tokens=block_tokens,
            tier1=conversation.tier1,
            tier1_tokens=conversation.tier1_tokens,
            tier2=conversation.tier2,
            session=conversation.session,
        )
        number = self._random.randrange(len(self._routers)) if len(self._routers) > 1 else 0
        router = self._routers[number]
        try:
            decision = router.route(request, now_s)
        except RequestRefusedError:
            return self._refuse(client, now_s)
        endpoint = self._alive(decision)
        if endpoint is None or not self.fleet[endpoint].fits(turn):
            self._tell(Finished(decision_id=decision.decision_id), now_s)
            return self._refuse(client, now_s)
        self._share(number, routed(decision), now_s)
        before = self._lives.get(conversation.tier2)
        self._lives[conversation.tier2] = endpoint
        tag = next(self._tags)
        self._flights[tag] = _Flight(
            client=client,
            turn=turn,
            sent_s=sent_s,
            ideal_tokens=min(turn.prompt_tokens, self._ideal_blocks(turn.chain) * block_tokens),
            decision=decision,
            endpoint=endpoint,
            later=before is not None,
            moved=before is not None and before != endpoint,
        )
        engine = self.fleet[endpoint]
        engine.submit(Job(turn, tag), now_s)
        self._wake(endpoint, engine)
        return None

    def _refuse(self, client: _Client, now_s: float) -> None:
        self._refused += 1
        self._next_turn(client, now_s)

    def _alive(self, decision: Decision) -> Endpoint | None:
        """Give the endpoint Envoy reaches: the first of the list, else any other."""
        for endpoint in decision.endpoints:
            if endpoint in self.fleet:
                return endpoint
        present = [endpoint for endpoint, _ in self.fleet]
        return self._random.choice(present) if present else None

    def _ideal_blocks(self, chain: Chain) -> int:
        seen = self._seen
        known = bisect_left(chain, 1, key=lambda block: block not in seen)
        seen.update(chain[known:])
        return known

    def _wake(self, endpoint: Endpoint, engine: Engine) -> None:
        if engine.next_s < inf:
            self._at(engine.next_s, partial(self._advance, endpoint, engine))

    def _advance(self, endpoint: Endpoint, engine: Engine, now_s: float) -> None:
        if engine.next_s != now_s or endpoint not in self.fleet:
            return
        for job in engine.advance(now_s).finished:
            self._finish(job, now_s)
        self._wake(endpoint, engine)

    def _finish(self, job: Job, now_s: float) -> None:
        flight = self._flights.pop(job.tag)
        decision, turn = flight.decision, flight.turn
        self._seen.update(turn.answer_chain)
        self._tell(
            Finished(decision_id=decision.decision_id, served=flight.endpoint, status=200), now_s
        )
        if flight.sent_s >= self._workload.warmup_s:
            self._served.append(
                Served(
                    at_s=flight.sent_s,
                    endpoint=flight.endpoint,
                    ttft_s=(job.first_token_s or now_s) - flight.sent_s,
                    prompt_tokens=turn.prompt_tokens,
                    cached_tokens=job.cached_tokens or 0,
                    computed_tokens=job.computed_tokens,
                    predicted_tokens=decision.matched_tokens,
                    ideal_tokens=flight.ideal_tokens,
                    later=flight.later,
                    moved=flight.moved,
                )
            )
        self._next_turn(flight.client, now_s)

    def _tell(self, event: Event, now_s: float) -> None:
        """Let every router know what the access log says."""
        self._at(now_s + self._settings.end_delay_s, partial(self._apply, -1, event))

    def _share(self, author: int, event: Event, now_s: float) -> None:
        """Send a decision to the other routers through the log."""
        delay_s = self._settings.log_delay_s
        if len(self._routers) > 1 and delay_s is not None:
            self._at(now_s + delay_s, partial(self._apply, author, event))

    def _apply(self, author: int, event: Event, now_s: float) -> None:
        for number, router in enumerate(self._routers):
            if number != author:
                router.apply(event, now_s)

    def _join(self, now_s: float) -> None:
        endpoint = self.fleet.add()
        self._computed_before[endpoint] = 0
        self._apply(-1, EndpointUp(endpoint=endpoint), now_s)

    def _change(self, change: Change, now_s: float) -> None:
        for _ in range(change.add):
            self._join(now_s)
        present = [endpoint for endpoint, _ in self.fleet]
        if change.kill is not None and change.kill < len(present):
            self._kill(present[change.kill], now_s)

    def _kill(self, endpoint: Endpoint, now_s: float) -> None:
        """Take an engine away; clients send again what it had, as if it had been refused."""
        jobs = self.fleet.kill(endpoint)
        self._at(now_s + _NOTICED_S, partial(self._apply, -1, EndpointDown(endpoint, gone=True)))
        for job in jobs:
            flight = self._flights.pop(job.tag)
            self._tell(Finished(decision_id=flight.decision.decision_id, status=503), now_s)
            self._send(flight.client, flight.turn, flight.sent_s, now_s)

    def _scrape(self, now_s: float) -> None:
        for endpoint, engine in self.fleet:
            seen = Observed(
                endpoint=endpoint,
                running=engine.running,
                waiting=engine.waiting,
                kv_usage=engine.cache.usage,
                computed_tokens=float(engine.computed_tokens),
            )
            self._apply(-1, seen, now_s)
        self._at(now_s + (self._settings.scrape_interval_s or 1.0), self._scrape)

    def _end_warmup(self, now_s: float) -> None:
        del now_s
        self._computed_before |= {
            endpoint: engine.computed_tokens for endpoint, engine in self.fleet
        }

    def _outcome(self, now_s: float) -> Outcome:
        span_s = max(now_s - self._workload.warmup_s, 1e-9)
        capacity = span_s * self._settings.engine.prefill_tokens_per_s
        return Outcome(
            measured=self._served,
            utilization={
                endpoint: (engine.computed_tokens - self._computed_before[endpoint]) / capacity
                for endpoint, engine in self.fleet
            },
            backlog_s=self._backlog_s,
            preemptions=sum(engine.preemptions for _, engine in self.fleet),
            refused=self._refused,
            unanswered=len(self._flights),
        )
