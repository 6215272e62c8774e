import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.decision import Candidate, Reason, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.policies import POLICIES, Tuning, View, least_request, round_robin, tiered
from extproc.core.policies import prefix as prefix_policy
from extproc.core.policies import session as session_policy

A, B, C = (Endpoint.parse(f"10.0.0.{i}:8000") for i in (1, 2, 3))

candidates_lists = st.lists(
    st.builds(
        Candidate,
        endpoint=st.sampled_from([Endpoint.parse(f"10.0.0.{i}:8000") for i in range(1, 9)]),
        weight=st.floats(0.1, 10),
        matched_tokens=st.integers(0, 1000),
        outstanding_tokens=st.floats(0, 1e6),
        inflight=st.integers(0, 50).map(float),
        takes_new=st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda c: c.endpoint,
)
requests = st.builds(
    RoutingRequest,
    chains=st.lists(st.lists(st.integers(0, 9), max_size=20).map(tuple), max_size=2).map(tuple),
    prompt_tokens=st.integers(1000, 10_000),
    tier1=st.integers(0, 9),
    tier1_tokens=st.integers(0, 1000),
    tier2=st.integers(0, 9),
    session=st.booleans(),
    readable=st.booleans(),
)
views = st.builds(
    View,
    tuning=st.just(Tuning()),
    sequence=st.integers(0, 100),
    home=st.sampled_from([None, A, B]),
    future_tokens=st.floats(0, 1e5),
)


def fleet(*inflight, **fields):
    return [
        Candidate(endpoint=e, inflight=float(n), **fields)
        for e, n in zip((A, B, C), inflight, strict=False)
    ]


def view(**fields):
    return View(tuning=Tuning(), **fields)


def request(tokens=1000, **fields):
    return RoutingRequest(prompt_tokens=tokens, **fields)


def names(ranking):
    return [c.endpoint for c in ranking.order]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@given(requests, candidates_lists, views)
def test_a_ranking_holds_eligible_candidates_once_each(policy, request_, candidates, view_):
    ranking = policy(request_, candidates, view_)

    assert ranking.order
    assert len(set(names(ranking))) == len(ranking.order)
    assert set(names(ranking)) <= {c.endpoint for c in candidates}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@given(requests, candidates_lists, views)
def test_a_new_conversation_goes_to_a_draining_endpoint_only_when_all_drain(
    policy, request_, candidates, view_
):
    new_view = View(tuning=view_.tuning, sequence=view_.sequence)
    chosen = policy(request_, candidates, new_view).order[0]

    assert chosen.takes_new or not any(c.takes_new for c in candidates)


@pytest.mark.parametrize("name", ["prefix", "tiered", "session"])
@given(requests, candidates_lists, views)
def test_two_routers_with_the_same_view_agree(name, request_, candidates, view_):
    forwards = POLICIES[name](request_, candidates, view_)
    backwards = POLICIES[name](request_, candidates[::-1], view_)

    assert request_.readable is False or names(forwards) == names(backwards)


def test_round_robin_takes_turns():
    leaders = [round_robin(request(), fleet(0, 9, 0), view(sequence=n)).order[0] for n in range(4)]

    assert [c.endpoint for c in leaders] == [A, B, C, A]


def test_least_request_counts_requests_by_weight():
    busy = fleet(4, 3, 5)
    busy[2].weight = 10.0

    assert names(least_request(request(), busy, view())) == [C, B, A]


def test_least_request_takes_turns_among_equals():
    leaders = {
        least_request(request(), fleet(0, 0, 0), view(sequence=n)).order[0].endpoint
        for n in range(3)
    }

    assert leaders == {A, B, C}


def test_a_remembered_session_stays():
    for home in (A, B, C):
        ranking = session_policy(request(tier2=7), fleet(3, 3, 3), view(home=home))
        assert (names(ranking)[0], ranking.reason) == (home, Reason.HOME)


def test_a_remembered_session_leaves_an_overloaded_endpoint_only():
    """Total 41, mean 13.7: a remembered session bears 2 x 1.25 x mean = 35 requests."""
    stays = session_policy(request(tier2=7), fleet(34, 3, 3), view(home=A))
    moves = session_policy(request(tier2=7), fleet(100, 3, 3), view(home=A))

    assert names(stays)[0] == A
    assert names(moves)[0] != A
    assert names(moves)[-1] == A
    assert moves.reason is Reason.MOVED


def test_an_idle_fleet_is_not_scattered_by_the_load_bound():
    home = names(prefix_policy(request(tier2=5), fleet(0, 0, 0), view()))[0]
    busy = [Candidate(endpoint=e, inflight=3.0 if e == home else 0.0) for e in (A, B, C)]

    assert names(prefix_policy(request(tier2=5), busy, view()))[0] == home


def test_prefix_moves_on_when_its_home_is_above_the_bound():
    home = names(prefix_policy(request(tier2=5), fleet(0, 0, 0), view()))[0]
    busy = [Candidate(endpoint=e, inflight=9.0 if e == home else 1.0) for e in (A, B, C)]
    ranking = prefix_policy(request(tier2=5), busy, view())

    assert names(ranking)[0] != home
    assert ranking.reason is Reason.MOVED


def test_everyone_above_the_bound_leaves_the_order_alone():
    light = [Candidate(endpoint=e, inflight=50.0, weight=0.1) for e in (A, B)]
    ranking = prefix_policy(request(tier2=5), light, view())

    assert len(ranking.order) == 2


def test_prefix_hashes_the_chain_at_its_depth():
    chain = tuple(range(100, 120))
    tuning = Tuning(prefix_tokens=512)
    views = View(tuning=tuning)
    same_head = chain[:4] + tuple(range(50))
    first = prefix_policy(request(chains=(chain,), tier2=1), fleet(0, 0, 0), views)
    second = prefix_policy(request(chains=(same_head,), tier2=2), fleet(0, 0, 0), views)

    assert names(first) == names(second)


def priced(tokens, *state, **fields):
    """Rank endpoints given as (endpoint, matched, outstanding, inflight)."""
    candidates = [
        Candidate(endpoint=e, matched_tokens=m, outstanding_tokens=float(o), inflight=float(i))
        for e, m, o, i in state
    ]
    tier1_tokens = fields.pop("tier1_tokens", 0)
    asked = request(tokens, tier1=1, tier2=2, tier1_tokens=tier1_tokens)
    return tiered(asked, candidates, view(**fields))


@pytest.mark.parametrize(
    ("tokens", "state", "fields", "destination", "reason"),
    [
        pytest.param(
            1000,
            [(A, 1000, 5000, 0), (B, 0, 0, 0)],
            {"home": A},
            A,
            Reason.HOME,
            id="waiting 5,000 tokens and 6 x 128 is cheaper than 6 x 1,000 anew",
        ),
        pytest.param(
            1000,
            [(A, 1000, 5500, 0), (B, 0, 0, 0)],
            {"home": A},
            B,
            Reason.MOVED,
            id="waiting 5,500 tokens and 6 x 128 is dearer than 6 x 1,000 anew",
        ),
        pytest.param(
            1000,
            [(A, 1000, 0, 9), (B, 0, 0, 0)],
            {"home": A},
            A,
            Reason.HOME,
            id="a live conversation stays with 9 requests",
        ),
        pytest.param(
            1000,
            [(A, 1000, 0, 90), (B, 0, 0, 0), (C, 0, 9, 0)],
            {"home": A},
            B,
            Reason.MOVED,
            id="a crowd of 90 is 22 too many and moves it",
        ),
        pytest.param(
            1000,
            [(A, 1000, 0, 3), (B, 1000, 0, 2)],
            {"home": A},
            B,
            Reason.MATCH,
            id="of two that hold it all the less busy one is taken",
        ),
        pytest.param(
            1000,
            [(A, 500, 0, 1), (B, 500, 0, 0)],
            {},
            B,
            Reason.MATCH,
            id="equal matches go by load",
        ),
        pytest.param(
            1000,
            [(A, 1000, 0, 3), (B, 0, 0, 1)],
            {},
            A,
            Reason.MATCH,
            id="a new conversation without a future follows the match",
        ),
        pytest.param(
            1000,
            [(A, 600, 0, 9), (B, 200, 0, 1)],
            {},
            B,
            Reason.MOVED,
            id="3 x 400 at 9 requests is slower than 3 x 800 at 1",
        ),
        pytest.param(
            1000,
            [(A, 1000, 0, 3), (B, 0, 0, 1)],
            {"future_tokens": 1000.0},
            B,
            Reason.MOVED,
            id="one with a future of 1,000 pays 4 x 1,000 x (3/2 - 1) = 2,000 more than average",
        ),
        pytest.param(
            1000,
            [(A, 1000, 0, 3), (B, 0, 0, 1)],
            {"future_tokens": 1000.0, "home": A},
            A,
            Reason.HOME,
            id="an old conversation does not pay for the future again",
        ),
        pytest.param(
            1000,
            [(A, 900, 0, 3), (B, 0, 0, 0)],
            {"claimant": B, "tier1_tokens": 800},
            B,
            Reason.MOVED,
            id="a newcomer counts as holding the instructions it claims",
        ),
    ],
)
def test_the_rule_of_tiered_term_by_term(tokens, state, fields, destination, reason):
    ranking = priced(tokens, *state, **fields)

    assert (names(ranking)[0], ranking.reason) == (destination, reason)


def test_the_cost_is_the_sum_of_its_terms():
    chosen = priced(1000, (A, 400, 50, 2), (B, 0, 0, 2), future_tokens=10.0).order[0]

    assert chosen.endpoint == A
    assert chosen.terms == (50, 3 * 600, (50 + 1800) * 2 / 5, 0)
    assert chosen.cost == sum(chosen.terms)


def test_a_heavier_endpoint_bears_more():
    strong = Candidate(endpoint=A, weight=4.0, inflight=7.0)
    weak = Candidate(endpoint=B, weight=1.0, inflight=2.0)

    assert names(tiered(request(100), [weak, strong], view()))[0] == A


def test_cold_prompts_of_one_tier_1_key_share_an_endpoint():
    homes = {
        names(tiered(request(tier1=9, tier1_tokens=500, tier2=n), fleet(0, 0, 0), view()))[0]
        for n in range(20)
    }

    assert len(homes) == 1


def test_conversations_with_too_short_instructions_to_share_spread():
    homes = {
        names(tiered(request(tier1=9, tier1_tokens=100, tier2=n), fleet(0, 0, 0), view()))[0]
        for n in range(20)
    }

    assert homes == {A, B, C}


@pytest.mark.parametrize("policy", [session_policy, prefix_policy, tiered])
def test_an_unreadable_prompt_goes_by_load(policy):
    ranking = policy(request(readable=False), fleet(2, 1, 3), view())

    assert (names(ranking), ranking.reason) == ([B, A, C], Reason.FALLBACK)


def test_unreadable_prompts_on_an_idle_fleet_take_turns():
    leaders = {
        names(tiered(request(readable=False), fleet(0, 0, 0), view(sequence=n)))[0]
        for n in range(3)
    }

    assert leaders == {A, B, C}
