"""Time from the bytes of a body to a decision, and of the steps between.

All measurements of one run take turns, a batch of calls each, so that a machine that slows
down slows all of them; each figure is the median over its batches.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from typing import TYPE_CHECKING

from bench.bodies import chat_body
from bench.figures import Figure
from extproc.core.blocks import canonical, hash_chain
from extproc.core.decision import BlockHash, Chain, DecisionId, KeyHash, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp, Finished, Routed
from extproc.core.index import ApproximateIndex
from extproc.core.intake import IntakeSettings, read_request
from extproc.core.policies import Tuning, View, tiered
from extproc.core.prompt import extract_prompt
from extproc.core.router import Router, RouterSettings

if TYPE_CHECKING:
    from collections.abc import Callable

_PATH = "/v1/chat/completions"
_SIZES = {"4 KB": 4_096, "16 KB": 16_384, "128 KB": 131_072, "1 MB": 1_048_576}
_BUDGET_US = {"16 KB": 300.0}
_POOLS = {(16, 200): 150.0, (128, 800): 1_000.0}
_INTAKE = IntakeSettings()
_CONVERSATIONS = 32
WARM_ID = DecisionId("warm")
_STEP_S = 0.005
# A batch this long holds enough calls of the quickest step for the clock's resolution.
_BATCH_S = 0.01


def measure(*, quick: bool) -> list[Figure]:
    """Measure every case."""
    fill = 1_000 if quick else RouterSettings().cache_tokens // RouterSettings().block_tokens
    cases: dict[tuple[str, str], Callable[[], object]] = {}
    for label, size in list(_SIZES.items())[: 2 if quick else None]:
        cases |= _body_cases(label, size, fill)
    for endpoints, blocks in _POOLS:
        cases[f"{endpoints} endpoints", f"route, {blocks} blocks"] = _pool_case(endpoints, blocks)
    times = medians_us(cases, rounds=3 if quick else 41)
    return [
        Figure(part=part, case=case, value=value, unit="µs", budget=_budget(part, case))
        for (part, case), value in times.items()
    ]


def _budget(part: str, case: str) -> float | None:
    if case.startswith("bytes to decision"):
        return _BUDGET_US.get(part)
    for (endpoints, blocks), budget in _POOLS.items():
        if (part, case) == (f"{endpoints} endpoints", f"route, {blocks} blocks"):
            return budget
    return None


def _body_cases(label: str, size: int, fill: int) -> dict[tuple[str, str], Callable[[], object]]:
    bodies = [chat_body(size, seed) for seed in range(_CONVERSATIONS)]
    decider = _Decider(16, fill)
    for body in bodies:
        decider.decide(body)
    turns = itertools.cycle(bodies)
    body = bodies[0]
    request = _read(body)
    prompt = extract_prompt(_PATH, body, complete=True)
    if prompt is None:
        raise AssertionError(body)
    text = canonical(prompt.sequences[0])
    matcher = decider.index_of(request.chains[0])
    candidates = list(decider.router.decide(request, decider.now_s).candidates)
    view = View(tuning=Tuning())
    return {
        (label, "bytes to decision, 16 endpoints"): lambda: decider.decide(next(turns)),
        (label, "· read_request"): lambda: _read(body),
        (label, "·· parse"): lambda: extract_prompt(_PATH, body, complete=True),
        (label, "·· canonical"): lambda: canonical(prompt.sequences[0]),
        (label, "·· chain"): lambda: hash_chain(text, block_bytes=512, max_blocks=1_024, seed=1),
        (label, "· route"): lambda: decider.route(request),
        (label, "·· match"): lambda: matcher.match_all(request.chains),
        (label, "·· choose"): lambda: tiered(request, candidates, view),
    }


def _pool_case(endpoints: int, blocks: int) -> Callable[[], object]:
    """Route a chain of which every endpoint holds another part."""
    decider = _Decider(endpoints, fill=0)
    chain = tuple(BlockHash(7_919 * number) for number in range(1, blocks + 1))
    request = RoutingRequest(chains=(chain,), prompt_tokens=blocks * 128)
    for number, endpoint in enumerate(decider.endpoints):
        decider.warm(endpoint, chain[: blocks * number // endpoints])
    return lambda: decider.route(request)


class _Decider:
    """A router whose endpoints hold `fill` blocks each; every call ends what it began."""

    def __init__(self, endpoints: int, fill: int) -> None:
        self.endpoints = [Endpoint(f"10.0.{n // 250}.{n % 250}:8000") for n in range(endpoints)]
        self.router = Router(RouterSettings(), router_id="bench")
        self.fill = fill
        self.now_s = 0.0
        chance = random.Random(1)
        for endpoint in self.endpoints:
            self.router.apply(EndpointUp(endpoint=endpoint), self.now_s)
            self.warm(endpoint, random_chain(chance, fill))

    def warm(self, endpoint: Endpoint, chain: Chain) -> None:
        self.router.apply(routed_to(endpoint, chain), self.now_s)
        self.router.apply(Finished(decision_id=WARM_ID), self.now_s)

    def index_of(self, chain: Chain) -> ApproximateIndex:
        """Fill an index alike; half of its endpoints hold half of the chain."""
        index = ApproximateIndex(capacity=self.fill)
        chance = random.Random(1)
        for number, endpoint in enumerate(self.endpoints):
            index.record(random_chain(chance, self.fill), endpoint)
            if number % 2:
                index.record(chain[: len(chain) // 2], endpoint)
        return index

    def decide(self, body: bytes) -> None:
        self.route(_read(body))

    def route(self, request: RoutingRequest) -> None:
        self.now_s += _STEP_S
        decision = self.router.route(request, self.now_s)
        self.router.apply(Finished(decision_id=decision.decision_id), self.now_s)


def random_chain(chance: random.Random, blocks: int) -> Chain:
    """Draw so many different hashes."""
    return tuple(BlockHash(chance.getrandbits(64)) for _ in range(blocks))


def routed_to(endpoint: Endpoint, chain: Chain) -> Routed:
    """Give the event that lets a router believe the endpoint holds the chain."""
    return Routed(
        decision_id=WARM_ID,
        endpoint=endpoint,
        chains=(chain,),
        prompt_tokens=len(chain) * 128,
        matched_tokens=0,
        tier1=KeyHash(0),
        tier2=KeyHash(0),
    )


def _read(body: bytes) -> RoutingRequest:
    return read_request(_PATH, {}, body, complete=True, subset=None, settings=_INTAKE)


def medians_us(
    cases: dict[tuple[str, str], Callable[[], object]], rounds: int
) -> dict[tuple[str, str], float]:
    counts = {name: max(1, int(_BATCH_S / _seconds(call, 1))) for name, call in cases.items()}
    times: dict[tuple[str, str], list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            times[name].append(_seconds(call, counts[name]) / counts[name])
    return {name: statistics.median(taken) * 1e6 for name, taken in times.items()}


def _seconds(call: Callable[[], object], count: int) -> float:
    # CPU time of this thread: other processes of the machine do not count.
    began_s = time.thread_time()
    for _ in range(count):
        call()
    return time.thread_time() - began_s
