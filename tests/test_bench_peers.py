from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.peers import PEERS
from extproc.core.decision import Candidate, Reason, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.policies import Tuning, View
from extproc.core.router import RouterSettings
from extproc.simulation.engine import EngineSettings
from extproc.simulation.run import Change, Run, RunSettings
from extproc.simulation.workload import Conversation, Turn, Workload

ENDPOINTS = [Endpoint.parse(f"10.0.0.{i}:8000") for i in range(1, 9)]
A, B, C, D = ENDPOINTS[:4]
BLOCK_TOKENS = 128

candidates_lists = st.lists(
    st.builds(
        Candidate,
        endpoint=st.sampled_from(ENDPOINTS),
        weight=st.floats(0.1, 10),
        matched_tokens=st.integers(0, 1000),
        outstanding_tokens=st.floats(0, 1e6),
        inflight=st.integers(0, 200).map(float),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda c: c.endpoint,
)
requests = st.builds(
    RoutingRequest,
    chains=st.lists(st.lists(st.integers(0, 9), max_size=20).map(tuple), max_size=2).map(tuple),
    prompt_tokens=st.integers(0, 10_000),
    tier2=st.integers(0, 9),
    readable=st.booleans(),
)
rounds = st.lists(st.tuples(requests, candidates_lists), min_size=1, max_size=3)


@dataclass
class Engines:
    """Exact knowledge, by endpoint: blocks held of any chain, tokens waiting, requests."""

    held: dict = field(default_factory=dict)
    waiting: dict = field(default_factory=dict)
    busy: dict = field(default_factory=dict)
    dead: frozenset = frozenset()

    def held_blocks(self, endpoint, chain):
        if endpoint in self.dead:
            raise KeyError(endpoint)
        return min(self.held.get(endpoint, 0), len(chain))

    def waiting_tokens(self, endpoint):
        return float(self.waiting.get(endpoint, 0))

    def requests(self, endpoint):
        return self.busy.get(endpoint, 0)


def peer(name, *, engines=None, seed=1):
    return PEERS[name].make(engines or Engines(), Random(seed))


def request(tokens=1000, chain=(), **fields):
    return RoutingRequest(prompt_tokens=tokens, chains=(tuple(chain),), **fields)


def fleet(inflight, matched=(), outstanding=()):
    """Candidates A, B, … with these requests, and these tokens matched and outstanding."""
    return [
        Candidate(
            endpoint=endpoint,
            inflight=float(busy),
            matched_tokens=matched[i] if matched else 0,
            outstanding_tokens=float(outstanding[i]) if outstanding else 0.0,
        )
        for i, (endpoint, busy) in enumerate(zip(ENDPOINTS, inflight, strict=False))
    ]


def view(**fields):
    return View(tuning=Tuning(), **fields)


def order(rule, request_, candidates):
    return [c.endpoint for c in rule(request_, candidates, view()).order]


def first(rule, request_, candidates):
    return order(rule, request_, candidates)[0]


# All of them


@pytest.mark.parametrize("name", PEERS)
@settings(max_examples=25)
@given(history=rounds, seed=st.integers(0, 3))
def test_a_peer_ranks_every_candidate_once_and_alike_with_the_same_seed(name, history, seed):
    rule, again = peer(name, seed=seed), peer(name, seed=seed)
    for request_, candidates in history:
        ranked = order(rule, request_, candidates)

        assert sorted(ranked) == sorted(c.endpoint for c in candidates)
        assert order(again, request_, candidates) == ranked


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_listed_under_its_name(name):
    assert PEERS[name].name == name


def test_only_the_rules_called_exact_see_the_engines():
    assert {n for n, p in PEERS.items() if p.exact} == {n for n in PEERS if n.endswith("-exact")}
    for name in PEERS:
        engines = Engines(held={A: 8})
        chosen = {
            first(peer(name, engines=engines, seed=s), request(1024, range(8)), fleet((0, 0, 0)))
            for s in range(20)
        }

        assert not PEERS[name].exact or chosen == {A}


def test_only_llm_ds_index_has_a_size_of_its_own():
    sizes = {name: p.cache_tokens for name, p in PEERS.items() if p.cache_tokens is not None}

    assert sizes == {"weighted-3-2-2": 2_000_000}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_plays_a_workload_in_which_an_engine_dies(name):
    chains = {n: tuple(range(100 * n, 100 * n + 8)) for n in range(4)}
    conversations = [
        Conversation(
            start_s=n / 10,
            turns=[Turn(chain=chains[n % 4], prompt_tokens=1100, output_tokens=5, wait_s=1.0)] * 3,
            tier2=n + 1,
        )
        for n in range(12)
    ]
    run_settings = RunSettings(
        endpoints=3,
        engine=EngineSettings(kv_tokens=20_000, block_tokens=BLOCK_TOKENS),
        router=RouterSettings(block_tokens=BLOCK_TOKENS),
        routers=2,
        changes=(Change(at_s=1.5, kill=0), Change(at_s=2.5, add=1)),
    )
    workload = Workload(name="small", conversations=conversations, block_tokens=BLOCK_TOKENS)
    outcome = Run(workload, run_settings, make_policy=PEERS[name].make).execute()

    assert len(outcome.measured) == 36


# session-rendezvous


@pytest.mark.parametrize("key", range(1, 20))
def test_a_session_stays_home_whatever_the_load_and_the_fleet(key):
    rule = peer("session-rendezvous")
    whole = order(rule, request(tier2=key), fleet((0, 0, 0, 0)))
    home = ENDPOINTS.index(whole[0])
    loaded = [0, 0, 0, 0]
    loaded[home] = 500
    others_gone = [c for c in fleet(loaded) if c.endpoint in whole[:2]]

    assert order(rule, request(tier2=key), fleet(loaded)) == whole
    assert order(rule, request(tier2=key), others_gone) == whole[:2]


def test_sessions_spread_over_the_fleet():
    rule = peer("session-rendezvous")
    homes = [first(rule, request(tier2=key), fleet((0,) * 8)) for key in range(1, 1601)]

    assert all(140 <= homes.count(endpoint) <= 260 for endpoint in ENDPOINTS)


def test_a_request_without_a_session_goes_where_least_is_in_flight():
    ranking = peer("session-rendezvous")(request(), fleet((3, 1, 2)), view())

    assert ranking.order[0].endpoint == B
    assert ranking.reason == Reason.FALLBACK


# longest-match-guard


@pytest.mark.parametrize(
    ("inflight", "matched", "expected"),
    [
        pytest.param((9, 0, 1), (301, 0, 300), A, id="more than 0.3 of the prompt is followed"),
        pytest.param((9, 0, 1), (300, 0, 0), B, id="0.3 of it is not: the least loaded"),
        pytest.param((2, 1, 3), (0, 900, 900), B, id="of equal matches the less loaded"),
        pytest.param((64, 0, 0), (900, 0, 0), A, id="64 requests apart is balanced"),
        pytest.param((65, 1, 0), (900, 0, 0), C, id="65 apart is not: the least loaded"),
        pytest.param((200, 134, 190), (900, 0, 0), A, id="66 apart, but less than 1.5 times"),
        pytest.param((204, 135, 190), (900, 0, 0), B, id="69 apart, and more than 1.5 times"),
    ],
)
def test_the_longest_match_leads_unless_short_or_the_fleet_imbalanced(inflight, matched, expected):
    assert first(peer("longest-match-guard"), request(), fleet(inflight, matched)) == expected


def test_equally_loaded_endpoints_take_cold_prompts_in_turn():
    rule = peer("longest-match-guard")
    sent = [first(rule, request(), fleet((0, 0, 0))) for _ in range(6)]

    assert sorted(sent) == [A, A, B, B, C, C]


# weighted-3-2-2


@pytest.mark.parametrize(
    ("inflight", "matched", "outstanding", "expected"),
    [
        pytest.param((5, 0), (1000, 0), (0, 0), A, id="3 for the prompt beat 2 for running"),
        pytest.param((0, 0), (1000, 0), (9, 0), A, id="3 for the prompt beat 2 for the queue"),
        pytest.param((5, 0), (1000, 0), (9, 0), B, id="2 and 2 for both beat 3 for the prompt"),
        pytest.param((5, 0), (660, 0), (0, 0), B, id="2 for running beat 3 for 0.66 of it"),
        pytest.param((5, 0), (670, 0), (0, 0), A, id="3 for 0.67 of it beat 2 for running"),
        pytest.param((0, 0), (660, 0), (9, 0), B, id="2 for the queue beat 3 for 0.66 of it"),
        pytest.param((0, 0), (670, 0), (9, 0), A, id="3 for 0.67 of it beat 2 for the queue"),
        pytest.param((1, 0), (500, 0), (0, 0), B, id="a range of one request counts in full"),
    ],
)
def test_the_scores_weigh_3_2_2(inflight, matched, outstanding, expected):
    rule = peer("weighted-3-2-2")

    assert first(rule, request(), fleet(inflight, matched, outstanding)) == expected


def test_a_load_between_the_extremes_scores_in_proportion():
    # 3 x 0.5 + 2 + 2 x 0.5 against 0 + 2 + 2, then one token less of the prompt.
    rule = peer("weighted-3-2-2")

    assert first(rule, request(), fleet((5, 0, 10), (334, 0, 0))) == A
    assert first(rule, request(), fleet((5, 0, 10), (333, 0, 0))) == B


# chwbl-256


def prompts(key, tail=0):
    return request(1000, (10 * key, 10 * key + 1, tail), tier2=key)


def ring_order(rule, key, names=4):
    return order(rule, prompts(key), fleet((0,) * names))


def test_the_ring_is_keyed_by_the_first_256_tokens_alone():
    rule, idle = peer("chwbl-256"), fleet((0,) * 8)
    homes = {key: first(rule, prompts(key), idle) for key in range(100)}

    assert all(first(rule, prompts(key, tail=7), idle) == homes[key] for key in homes)
    assert len({first(rule, request(1000, (1, second)), idle) for second in range(100)}) == 8


def test_the_ring_spreads_its_keys():
    rule = peer("chwbl-256")
    homes = [ring_order(rule, key)[0] for key in range(1600)]

    assert all(300 <= homes.count(endpoint) <= 500 for endpoint in (A, B, C, D))


@pytest.mark.parametrize(
    ("others", "stays"),
    [
        pytest.param((5, 5, 1), True, id="1.25 x (15 + 1) / 4 = 5 with this request"),
        pytest.param((5, 4, 1), False, id="1.25 x (14 + 1) / 4 = 4.7 with this request"),
    ],
)
@pytest.mark.parametrize("key", range(8))
def test_a_home_over_the_bound_passes_to_the_next_on_the_ring_below_it(key, others, stays):
    rule = peer("chwbl-256")
    walk = ring_order(rule, key)
    loads = dict(zip(walk, (4, *others), strict=True))
    ranking = rule(prompts(key), fleet([loads[e] for e in (A, B, C, D)]), view())
    expected = walk if stays else [walk[3], *walk[:3]]

    assert ranking.order[0].endpoint == expected[0]
    assert ranking.reason == (Reason.HOME if stays else Reason.MOVED)


@pytest.mark.parametrize("key", range(8))
def test_the_home_keeps_a_request_when_the_bound_leaves_nobody(key):
    # One request on four endpoints: 1.25 x (1 + 1) / 4 is less than one.
    rule = peer("chwbl-256")

    assert order(rule, prompts(key), fleet((0, 0, 1, 0))) == ring_order(rule, key)


def test_an_endpoint_that_joins_the_ring_takes_its_share_and_moves_nothing_else():
    rule = peer("chwbl-256")
    before = [ring_order(rule, key, 3)[0] for key in range(800)]
    after = [ring_order(rule, key, 4)[0] for key in range(800)]
    back = [ring_order(rule, key, 3)[0] for key in range(800)]

    assert {new for old, new in zip(before, after, strict=True) if new != old} == {D}
    assert 140 <= after.count(D) <= 260
    assert back == before


def test_a_prompt_shorter_than_a_block_is_keyed_by_its_session():
    rule = peer("chwbl-256")
    homes = {first(rule, request(50, tier2=key), fleet((0,) * 8)) for key in range(100)}

    assert len(homes) == 8


# expected-ttft


@pytest.mark.parametrize(
    ("matched", "outstanding", "expected"),
    [
        pytest.param((512, 0), (0, 0), A, id="cached blocks are not computed"),
        pytest.param((512, 0), (512 + 128, 0), B, id="a block more waits than is cached"),
        pytest.param((512, 0), (512 - 128, 0), A, id="a block less waits than is cached"),
    ],
)
def test_prefill_blocks_are_those_that_wait_and_the_uncached(matched, outstanding, expected):
    rule = peer("expected-ttft")
    candidates = fleet((0, 0), matched, outstanding)

    assert first(rule, request(1024, range(8)), candidates) == expected


@pytest.mark.parametrize("seed", range(8))
def test_running_prompts_count_as_decode_blocks_until_they_end(seed):
    rule = peer("expected-ttft", seed=seed)
    busy = first(rule, request(1024, range(8)), fleet((0, 0)))
    other = B if busy == A else A
    inflight = [int(e == busy) for e in (A, B)]
    # Seven blocks wait at the other: less than the eight that decode here, but not nothing.
    waiting = [7 * BLOCK_TOKENS * (e == other) for e in (A, B)]
    cold = request(1024, range(100, 108))

    assert first(rule, cold, fleet(inflight, (), waiting)) == other
    assert first(rule, cold, fleet((0, 0), (), waiting)) == busy


@pytest.mark.parametrize("seed", range(8))
def test_blocks_that_a_running_prompt_shares_count_once(seed):
    rule = peer("expected-ttft", seed=seed)
    prompt = request(1024, range(8))
    busy = first(rule, prompt, fleet((0, 0)))
    inflight = [int(e == busy) for e in (A, B)]
    matched = [1024 * (e == busy) for e in (A, B)]
    # Decode is 8 blocks on either side, prefill 7 against 8.
    waiting = [7 * BLOCK_TOKENS * (e == busy) for e in (A, B)]

    assert first(rule, prompt, fleet(inflight, matched, waiting)) == busy


def test_equal_costs_are_settled_by_chance():
    chosen = {
        first(peer("expected-ttft", seed=seed), request(), fleet((0, 0, 0))) for seed in range(30)
    }

    assert chosen == {A, B, C}


def test_what_is_remembered_of_running_prompts_is_bounded():
    rule = peer("expected-ttft")
    for number in range(3_000):
        first(rule, request(128, (number,)), fleet((9_999,)))

    assert rule._running[A].blocks == 1_024


# lmetric


@pytest.mark.parametrize(
    ("inflight", "matched", "outstanding", "expected"),
    [
        pytest.param((8, 0), (900, 0), (0, 0), A, id="100 x 9 is less than 1000 x 1"),
        pytest.param((9, 0), (901, 0), (10, 0), B, id="109 x 10 is more than 1000 x 1"),
        pytest.param((1, 0), (900, 0), (450, 0), B, id="550 x 2 is more than 1000 x 1"),
        pytest.param((2, 1), (1000, 1000), (0, 0), B, id="of two zeros the smaller batch"),
    ],
)
def test_the_product_of_new_prefill_and_batch_decides(inflight, matched, outstanding, expected):
    assert first(peer("lmetric"), request(), fleet(inflight, matched, outstanding)) == expected


# Exact views


def exact_case(**state):
    """An engine state that the candidates' believed values contradict."""
    return Engines(**state), fleet((0, 90), (1024, 0), (0, 99_999))


@pytest.mark.parametrize("name", ["expected-ttft-exact", "lmetric-exact"])
@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"held": {B: 4}}, id="what is cached"),
        pytest.param({"waiting": {A: 500}}, id="what waits"),
    ],
)
def test_an_exact_rule_goes_by_the_engines_not_by_belief(name, state):
    engines, candidates = exact_case(**state)

    assert first(peer(name, engines=engines), request(1024, range(8)), candidates) == B


def test_the_exact_product_counts_the_requests_on_the_engine():
    engines, candidates = exact_case(held={A: 4}, busy={A: 2})

    assert first(peer("lmetric-exact", engines=engines), request(1024, range(8)), candidates) == B


@pytest.mark.parametrize("name", ["expected-ttft-exact", "lmetric-exact"])
def test_an_exact_rule_puts_a_dead_engine_last(name):
    engines = Engines(waiting={B: 50_000, C: 60_000}, busy={B: 50, C: 60}, dead=frozenset({A}))
    rule = peer(name, engines=engines)

    assert order(rule, request(1024, range(8)), fleet((0, 0, 0))) == [B, C, A]


# Reasons


@pytest.mark.parametrize("name", ["longest-match-guard", "weighted-3-2-2", "lmetric"])
@pytest.mark.parametrize(
    ("fields", "inflight", "matched", "home", "expected"),
    [
        pytest.param({}, (0, 0), (0, 0), A, Reason.COLD, id="nobody holds any of it"),
        pytest.param({}, (0, 0), (900, 0), B, Reason.MATCH, id="the longest match elsewhere"),
        pytest.param({}, (0, 0), (900, 0), A, Reason.HOME, id="the longest match at home"),
        pytest.param({}, (99, 0), (500, 0), A, Reason.MOVED, id="the holder is too loaded"),
        pytest.param({"readable": False}, (0, 0), (0, 0), A, Reason.FALLBACK, id="unreadable"),
    ],
)
def test_a_ranking_says_why_its_first_leads(name, fields, inflight, matched, home, expected):
    ranking = peer(name)(request(**fields), fleet(inflight, matched), view(home=home))

    assert ranking.reason == expected
