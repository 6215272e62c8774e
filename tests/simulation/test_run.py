from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from extproc.core.decision import KeyHash
from extproc.core.router import RouterSettings
from extproc.simulation.engine import EngineSettings
from extproc.simulation.outcome import Outcome, quantile, summarize
from extproc.simulation.run import Change, Run, RunSettings
from extproc.simulation.workload import Conversation, Turn, Workload

_ENGINE = EngineSettings(kv_tokens=64_000, prefill_tokens_per_s=10_000.0)
_SETTINGS = RunSettings(
    endpoints=4,
    engine=_ENGINE,
    router=RouterSettings(cache_tokens=64_000, prefill_tokens_per_s=10_000.0),
)


def _workload(count: int = 40, turns: int = 4, seed: int = 1, warmup_s: float = 0.0) -> Workload:
    random = Random(seed)
    conversations = []
    at_s = 0.0
    for number in range(count):
        at_s += random.expovariate(2.0)
        root = number % 3 + 1
        chain = tuple(root * 10_000 + depth for depth in range(16))
        sent = []
        for _ in range(turns):
            chain += tuple(random.getrandbits(62) for _ in range(3))
            sent.append(
                Turn(chain=chain, prompt_tokens=len(chain) * 128 + 7, output_tokens=20, wait_s=1.0)
            )
        conversations.append(
            Conversation(
                start_s=at_s,
                turns=tuple(sent),
                tier1=KeyHash(root),
                tier1_tokens=2_048,
                tier2=KeyHash(1_000 + number),
                session=True,
            )
        )
    return Workload(name="small", conversations=conversations, warmup_s=warmup_s)


def _play(workload: Workload, settings: RunSettings = _SETTINGS) -> Outcome:
    return Run(workload, settings).execute()


def test_every_request_is_answered_once():
    outcome = _play(_workload())
    assert len(outcome.measured) == 160
    assert (outcome.refused, outcome.unanswered) == (0, 0)


def test_a_run_repeats_itself_exactly():
    first, second = (_play(_workload()) for _ in range(2))
    assert first == second


def test_nothing_stays_in_flight_at_any_router():
    settings = replace(_SETTINGS, routers=3)
    run = Run(_workload(), settings)
    run.execute()
    # The last ends are told after the last answer: play out what is left on the agenda.
    while run._agenda:
        at_s, _, act = run._agenda.pop(0)
        act(at_s)
    for router in run._routers:
        assert [view.inflight for view in router.snapshot(1e6)] == [0.0] * 4


def test_tiered_keeps_conversations_where_their_cache_is():
    policies = ("round-robin", "tiered")
    figures = {
        policy: summarize(
            _play(_workload(), replace(_SETTINGS, router=replace(_SETTINGS.router, policy=policy)))
        )
        for policy in policies
    }
    assert figures["round-robin"].moved > 0.6
    assert figures["tiered"].moved < 0.1
    assert figures["tiered"].hit_rate > figures["round-robin"].hit_rate
    assert figures["tiered"].hit_rate <= figures["tiered"].ideal_hit_rate


def test_a_client_waits_for_its_answer_before_the_next_turn():
    workload = _workload(count=1, turns=3)
    served = _play(workload).measured
    gaps = [after.at_s - before.at_s for before, after in pairwise(served)]
    assert all(gap > 1.0 + before.ttft_s for gap, before in zip(gaps, served, strict=False))


def test_routers_that_hear_of_each_other_decide_like_one():
    shared = summarize(_play(_workload(), replace(_SETTINGS, routers=4)))
    alone = summarize(_play(_workload(), replace(_SETTINGS, routers=4, log_delay_s=None)))
    one = summarize(_play(_workload()))
    assert shared.hit_rate == pytest.approx(one.hit_rate, abs=0.02)
    assert alone.hit_rate < one.hit_rate - 0.03
    assert alone.moved > one.moved + 0.2


def test_requests_of_a_dead_engine_are_sent_again_and_none_is_lost():
    settings = replace(_SETTINGS, changes=(Change(at_s=8.0, kill=0),))
    outcome = _play(_workload(), settings)
    assert len(outcome.measured) == 160
    assert len(outcome.utilization) == 3


def test_an_added_engine_is_used():
    settings = replace(_SETTINGS, endpoints=2, changes=(Change(at_s=5.0, add=2),))
    outcome = _play(_workload(count=80), settings)
    assert len(outcome.utilization) == 4
    assert all(share > 0 for share in outcome.utilization.values())


def test_a_request_too_large_for_any_engine_is_refused_and_its_client_goes_on():
    large = Turn(chain=tuple(range(1, 600)), prompt_tokens=76_700, output_tokens=10)
    small = Turn(chain=(), prompt_tokens=100, output_tokens=10)
    workload = Workload(
        name="large", conversations=[Conversation(start_s=0.0, turns=(large, small))]
    )
    outcome = _play(workload)
    assert outcome.refused == 1
    assert len(outcome.measured) == 1


def test_without_any_endpoint_requests_are_refused():
    outcome = _play(_workload(count=3), replace(_SETTINGS, endpoints=0))
    assert outcome.refused == 12


def test_requests_of_the_warm_up_are_not_measured():
    measured = _play(_workload(warmup_s=10.0)).measured
    assert 0 < len(measured) < 160
    assert min(served.at_s for served in measured) >= 10.0


def test_an_overloaded_fleet_is_called_unsteady():
    slow = replace(_ENGINE, prefill_tokens_per_s=50.0)
    summary = summarize(_play(_workload(count=60), replace(_SETTINGS, engine=slow)))
    assert not summary.stable


def test_progress_counts_conversations():
    told: list[int] = []
    Run(_workload(count=5), _SETTINGS, on_progress=told.append).execute()
    assert told == [1, 2, 3, 4, 5]


def test_scrapes_show_the_routers_what_waits():
    run = Run(_workload(), replace(_SETTINGS, scrape_interval_s=0.5))
    outcome = run.execute()
    assert len(outcome.measured) == 160
    assert all(load.observed is not None for load in run._routers[0]._load._loads.values())


def test_an_empty_workload_gives_zeros():
    summary = summarize(_play(Workload(name="none", conversations=[])))
    assert (summary.requests, summary.hit_rate, summary.ttft_p99_s) == (0, 0.0, 0.0)


def test_a_quantile_is_a_value_of_the_sequence():
    assert quantile([], 0.5) == 0.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert quantile([1.0], 0.99) == 1.0
