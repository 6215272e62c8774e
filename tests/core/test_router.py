import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.decision import Reason, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.errors import NoEndpointError, RequestRefusedError, SheddingError
from extproc.core.events import (
    EndpointDown,
    EndpointReset,
    EndpointUp,
    Finished,
    FirstByte,
    Observed,
    Routed,
)
from extproc.core.policies import POLICIES
from extproc.core.router import Router, RouterSettings, routed

A, B, C = ENDPOINTS = [Endpoint.parse(f"10.0.0.{i}:8000") for i in (1, 2, 3)]
OUTSIDE = Endpoint.parse("192.0.2.1:80")


def router_of(*endpoints, router_id="r", up=None, **fields):
    router = Router(RouterSettings(**{"slow_start_s": 0.0, **fields}), router_id=router_id)
    for endpoint in endpoints:
        router.apply(EndpointUp(endpoint=endpoint, **(up or {})), 0.0)
    return router


def prompt(blocks=8, start=0, tier1=1, tier2=2, **fields):
    chain = tuple(range(start, start + blocks))
    return RoutingRequest(
        chains=(chain,), prompt_tokens=blocks * 128 + 40, tier1=tier1, tier2=tier2, **fields
    )


def view(router, endpoint, now_s=0.0):
    return next(v for v in router.snapshot(now_s) if v.endpoint == endpoint)


def test_a_growing_conversation_stays_where_its_prefix_is():
    router = router_of(A, B, C)
    first = router.route(prompt(blocks=20), 0.0)
    router.apply(Finished(decision_id=first.decision_id), 1.0)
    second = router.route(prompt(blocks=24), 2.0)

    assert first.reason is Reason.COLD
    assert second.reason is Reason.HOME
    assert second.destination == first.destination
    assert second.matched_tokens == 20 * 128


def test_every_decision_names_fallbacks_in_order():
    decision = router_of(A, B, C).route(prompt(), 0.0)

    assert set(decision.endpoints) == {A, B, C}
    assert decision.header_value == ",".join(decision.endpoints)


def test_decision_ids_are_unique_and_name_the_router():
    router = router_of(A, router_id="r7")
    ids = {router.route(prompt(), 0.0).decision_id for _ in range(50)}

    assert len(ids) == 50
    assert all(i.startswith("r7-") for i in ids)


def test_thirty_concurrent_conversations_on_one_system_prompt_use_every_endpoint():
    router = router_of(A, B, C)
    for conversation in range(30):
        router.route(prompt(blocks=4, tier2=100 + conversation, tier1_tokens=512), 0.0)
    counts = [view(router, e).inflight for e in ENDPOINTS]

    assert min(counts) > 0
    assert max(counts) <= 20


def observed(router, endpoint, waiting, kv_usage):
    router.apply(Observed(endpoint=endpoint, running=0, waiting=waiting, kv_usage=kv_usage), 0.0)


def test_nothing_indexed_goes_to_the_shortest_queue():
    router = router_of(A, B, C)
    for endpoint, waiting, kv_usage in ((A, 3, 0.2), (B, 0, 0.1), (C, 10, 0.2)):
        observed(router, endpoint, waiting, kv_usage)

    assert router.route(prompt(), 0.0).destination == B


def holds(router, endpoint, request):
    router.apply(
        Routed(
            decision_id="earlier",
            endpoint=endpoint,
            chains=request.chains,
            prompt_tokens=request.prompt_tokens,
            matched_tokens=request.prompt_tokens,
            tier1=request.tier1,
            tier2=request.tier2,
        ),
        0.0,
    )
    router.apply(Finished(decision_id="earlier"), 0.0)


def test_a_short_prompt_leaves_a_long_queue():
    router = router_of(A, B)
    holds(router, A, prompt(blocks=8))
    observed(router, A, 10, 0.4)
    decision = router.route(prompt(blocks=8), 0.0)

    assert (decision.destination, decision.reason) == (B, Reason.MOVED)


def test_a_long_prompt_waits_in_a_short_queue():
    router = router_of(A, B)
    holds(router, A, prompt(blocks=234))
    observed(router, A, 1, 0.4)

    assert router.route(prompt(blocks=242), 0.0).destination == A


def test_a_subset_hint_is_obeyed_whatever_the_load():
    router = router_of(A, B, C)
    observed(router, C, 50, 0.9)

    assert router.route(prompt(subset=frozenset({C})), 0.0).endpoints == (C,)


@pytest.mark.parametrize("subset", [frozenset(), frozenset({OUTSIDE})], ids=["empty", "outside"])
def test_a_subset_without_a_member_is_refused_with_503(subset):
    with pytest.raises(NoEndpointError) as caught:
        router_of(A, B).route(prompt(subset=subset), 0.0)

    assert caught.value.status == 503


def test_no_endpoint_is_refused_with_503():
    with pytest.raises(NoEndpointError):
        router_of().route(prompt(), 0.0)


def test_a_full_fleet_sheds_and_an_end_makes_room():
    router = router_of(A, B, up={"max_inflight": 2})
    decisions = [router.route(prompt(tier2=n), 0.0) for n in range(4)]
    with pytest.raises(SheddingError) as caught:
        router.route(prompt(), 0.0)
    router.apply(Finished(decision_id=decisions[0].decision_id), 0.0)

    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    assert router.route(prompt(), 0.0).destination == decisions[0].destination


def test_a_session_of_an_endpoint_that_left_rebinds_and_stays_there():
    router = router_of(A, B, C, policy="session")
    home = router.route(prompt(), 0.0).destination
    router.apply(EndpointDown(home, gone=True), 0.0)
    refuge = router.route(prompt(start=100), 1.0).destination
    router.apply(EndpointUp(endpoint=home), 2.0)

    assert refuge != home
    assert router.route(prompt(start=200), 3.0).destination == refuge


def test_the_same_session_with_unrelated_prompts_keeps_its_endpoint():
    router = router_of(A, B, C, policy="session")
    seen = set()
    for n in range(20):
        decision = router.route(prompt(start=n * 50, session=True), float(n))
        router.apply(Finished(decision_id=decision.decision_id), float(n))
        seen.add(decision.destination)

    assert len(seen) == 1


def test_an_idle_session_is_unbound_after_the_ttl():
    router = router_of(A, B, C, policy="session")
    home = router.route(prompt(), 0.0).destination
    router.apply(EndpointDown(home), 0.0)
    refuge = router.route(prompt(), 1.0).destination
    router.apply(EndpointUp(endpoint=home), 2.0)

    assert router.route(prompt(), 1801.0 - 0.5).destination == refuge
    assert router.route(prompt(), 1800.0 * 3).destination == home


def test_an_unreadable_prompt_follows_its_session():
    router = router_of(A, B, C)
    home = router.route(prompt(blocks=100, session=True), 0.0).destination
    for n in range(3):
        router.route(prompt(start=1000 * n + 500, tier2=50 + n), 0.0)
    unread = RoutingRequest(prompt_tokens=12_000, tier2=2, session=True, readable=False)
    decision = router.route(unread, 0.0)

    assert (decision.destination, decision.reason) == (home, Reason.HOME)
    assert decision.matched_tokens == 12_000


def test_an_unreadable_prompt_of_an_unknown_session_goes_by_load():
    decision = router_of(A, B).route(RoutingRequest(readable=False), 0.0)

    assert decision.reason is Reason.FALLBACK


def test_a_reset_endpoint_holds_nothing_and_starts_slowly():
    router = router_of(A, B, slow_start_s=10.0)
    home = router.route(prompt(blocks=50), 100.0).destination
    router.apply(EndpointReset(home), 100.0)

    assert view(router, home).blocks == 0
    assert router.route(prompt(blocks=50), 100.0).destination != home


def test_an_endpoint_that_left_is_forgotten():
    router = router_of(A)
    router.route(prompt(), 0.0)
    router.apply(EndpointDown(A, gone=True), 0.0)
    router.apply(EndpointUp(endpoint=A), 0.0)

    assert view(router, A).blocks == 0
    assert view(router, A).inflight == 0


def test_an_unhealthy_endpoint_keeps_what_it_holds():
    router = router_of(A)
    router.route(prompt(), 0.0)
    router.apply(EndpointDown(A), 0.0)
    assert not view(router, A).ready

    router.apply(EndpointUp(endpoint=A), 0.0)
    assert view(router, A).blocks == 8


def test_a_draining_endpoint_keeps_its_conversations_and_takes_no_new_ones():
    router = router_of(A, B)
    home = router.route(prompt(blocks=50), 0.0).destination
    router.apply(EndpointUp(endpoint=home, draining=True), 0.0)

    assert router.route(prompt(blocks=51), 1.0).destination == home
    assert router.route(prompt(blocks=50, tier2=9), 1.0).destination != home


def test_a_prompt_served_by_a_fallback_is_known_to_be_there():
    router = router_of(A, B)
    decision = router.route(prompt(), 0.0)
    router.apply(Finished(decision_id=decision.decision_id, served=decision.endpoints[1]), 1.0)

    assert view(router, decision.endpoints[1]).blocks == 8


def test_an_address_outside_the_pool_is_never_learned():
    router = router_of(A)
    decision = router.route(prompt(), 0.0)
    router.apply(Finished(decision_id=decision.decision_id, served=OUTSIDE), 1.0)
    router.apply(Observed(endpoint=OUTSIDE, running=3), 1.0)

    assert [v.endpoint for v in router.snapshot(1.0)] == [A]


def test_a_first_byte_shows_that_prefill_is_done():
    router = router_of(A)
    decision = router.route(prompt(blocks=80), 0.0)
    assert view(router, A).outstanding_tokens > 10_000

    router.apply(FirstByte(decision.decision_id), 0.0)
    assert view(router, A).outstanding_tokens == 0


def test_the_index_follows_the_capacity_an_engine_reports():
    router = router_of(A)
    router.apply(Observed(endpoint=A, cache_tokens=4 * 128), 0.0)
    router.route(prompt(blocks=20), 0.0)

    assert view(router, A).blocks == 4


def test_scraped_queues_shed_where_the_limit_is_known():
    router = router_of(A, up={"max_inflight": 5})
    router.apply(Observed(endpoint=A, running=4, waiting=1), 0.0)

    with pytest.raises(SheddingError):
        router.route(prompt(), 0.0)


def test_deciding_records_nothing():
    router = router_of(A, B, C)
    before = router.snapshot(0.0)
    router.decide(prompt(), 0.0)

    assert router.snapshot(0.0) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_a_router_fed_by_events_alone_decides_as_the_one_that_made_them(policy):
    first, second = (router_of(A, B, C, policy=policy) for _ in range(2))
    for n in range(60):
        request = prompt(blocks=4 + n % 7, start=(n % 5) * 100, tier1=n % 2, tier2=n % 9 + 1)
        mine = first.route(request, float(n))
        theirs = second.decide(request, float(n))
        second.apply(routed(mine), float(n))
        assert theirs.endpoints == mine.endpoints


@pytest.mark.parametrize("router_pair", [("r1", "r2")])
def test_routers_sharing_nothing_agree_under_prefix(router_pair):
    one, two = (router_of(A, B, C, policy="prefix", router_id=r) for r in router_pair)
    for n in range(1000):
        request = prompt(start=n * 100)
        decisions = one.route(request, 0.0), two.route(request, 0.0)
        for router, decision in zip((one, two), decisions, strict=True):
            router.apply(Finished(decision_id=decision.decision_id), 0.0)
        assert decisions[0].destination == decisions[1].destination


def test_a_new_endpoint_moves_at_most_its_share_under_prefix():
    ten = [Endpoint.parse(f"10.1.0.{i}:80") for i in range(1, 11)]
    router = router_of(*ten, policy="prefix")
    before = [router.decide(prompt(start=n * 100), 0.0).destination for n in range(2000)]
    router.apply(EndpointUp(endpoint=C), 0.0)
    grown = [router.decide(prompt(start=n * 100), 0.0).destination for n in range(2000)]
    router.apply(EndpointDown(C, gone=True), 0.0)
    restored = [router.decide(prompt(start=n * 100), 0.0).destination for n in range(2000)]
    moved = [new for old, new in zip(before, grown, strict=True) if old != new]

    assert set(moved) == {C}
    assert len(moved) / 2000 < 1 / 11 + 0.02  # two standard deviations of 2,000 draws
    assert restored == before


endpoints = st.sampled_from([*ENDPOINTS, OUTSIDE])
ids = st.sampled_from([f"r-{n}" for n in range(12)])
chains = st.lists(st.integers(0, 5), max_size=6).map(tuple)
maybe = st.none() | st.integers(0, 10**7)
any_event = st.one_of(
    st.builds(
        Routed,
        decision_id=ids,
        endpoint=endpoints,
        chains=st.lists(chains, max_size=2).map(tuple),
        prompt_tokens=st.integers(0, 10**6),
        matched_tokens=st.integers(0, 10**6),
        tier1=st.integers(0, 3),
        tier2=st.integers(0, 3),
    ),
    st.builds(FirstByte, ids),
    st.builds(Finished, decision_id=ids, served=st.none() | endpoints, status=st.integers(0, 999)),
    st.builds(EndpointUp, endpoint=endpoints, weight=st.floats(0.1, 10), draining=st.booleans()),
    st.builds(EndpointDown, endpoints, gone=st.booleans()),
    st.builds(EndpointReset, endpoints),
    st.builds(
        Observed,
        endpoint=endpoints,
        running=maybe,
        waiting=maybe,
        kv_usage=st.none() | st.floats(0, 1),
        cache_tokens=maybe,
        computed_tokens=st.none() | st.floats(0, 1e12),
    ),
    st.builds(
        RoutingRequest,
        chains=st.lists(chains, max_size=2).map(tuple),
        prompt_tokens=st.integers(0, 10**6),
        tier1=st.integers(0, 3),
        tier2=st.integers(0, 3),
        readable=st.booleans(),
        session=st.booleans(),
        subset=st.none() | st.frozensets(endpoints, max_size=2),
    ),
)


@settings(max_examples=300)
@given(
    st.sampled_from(list(POLICIES)),
    st.lists(st.tuples(any_event, st.floats(0, 1000)), max_size=40),
)
def test_any_order_of_events_ends_in_a_decision_among_the_ready_or_a_known_error(policy, steps):
    router = Router(RouterSettings(policy=policy, max_index_blocks=4), router_id="r")
    for event, now_s in steps:
        if not isinstance(event, RoutingRequest):
            router.apply(event, now_s)
            continue
        ready = {v.endpoint for v in router.snapshot(now_s) if v.ready}
        allowed = ready if event.subset is None else ready & event.subset
        try:
            decision = router.route(event, now_s)
        except RequestRefusedError:
            assert not allowed
        else:
            assert set(decision.endpoints) <= allowed
    for state in router.snapshot(2000.0):
        assert state.inflight >= 0
        assert state.outstanding_tokens >= 0
        assert state.blocks <= 4


def instructed(key, tier2):
    """A new conversation of one of 60 instruction prefixes, seven blocks of eight."""
    chain = (*(key * 100 + depth for depth in range(7)), tier2)
    tier1 = key * (2**64 // 60)
    return RoutingRequest(
        chains=(chain,), prompt_tokens=1024, tier1=tier1, tier1_tokens=7 * 128, tier2=tier2
    )


def destinations(router, now_s, tier2):
    found = []
    for key in range(60):
        decision = router.route(instructed(key, tier2 + key), now_s + key)
        router.apply(Finished(decision_id=decision.decision_id), now_s + key)
        found.append(decision.destination)
    return found


def test_a_newcomer_takes_over_its_share_of_the_instruction_prefixes():
    router = router_of(A, B)
    destinations(router, 0.0, 1_000)
    before = destinations(router, 100.0, 2_000)
    router.apply(EndpointUp(endpoint=C), 200.0)
    after = destinations(router, 250.0, 3_000)

    moved = [key for key in range(60) if after[key] != before[key]]
    assert all(after[key] == C for key in moved)
    assert 12 <= len(moved) <= 28


def test_prefixes_stay_where_they_are_while_nobody_joins():
    router = router_of(A, B, C)
    destinations(router, 0.0, 1_000)

    assert destinations(router, 100.0, 2_000) == destinations(router, 200.0, 3_000)


def refused(decision, **fields):
    return Finished(decision_id=decision.decision_id, **fields)


def test_an_endpoint_that_refused_is_spared_while_it_has_no_room():
    router = router_of(A, B, policy="round-robin")
    held = {router.route(prompt(tier2=n), 0.0).destination for n in range(2)}
    assert held == {A, B}
    third = router.route(prompt(tier2=3), 0.0)
    other = B if third.destination == A else A
    router.apply(refused(third, served=other, status=200), 0.1)

    assert view(router, third.destination, 0.2).held_back
    assert {router.route(prompt(tier2=n), 0.2).destination for n in range(10, 14)} == {other}
    after = {router.route(prompt(tier2=n), 5.0).destination for n in range(20, 24)}
    assert after == {A, B}


def test_refusals_by_all_refuse_nobody():
    router = router_of(A)
    router.route(prompt(tier2=1), 0.0)
    second = router.route(prompt(tier2=2), 0.0)
    router.apply(refused(second, served=A, status=503), 0.1)

    assert view(router, A, 0.2).held_back
    assert router.route(prompt(tier2=3), 0.2).destination == A


def test_a_hung_endpoint_gets_no_new_requests_until_it_moves():
    router = router_of(A, B, policy="round-robin", suspect_s=10.0)
    for n in range(2):
        router.route(prompt(tier2=n), 0.0)
    for second in range(15):
        for endpoint, progress in ((A, 5.0), (B, float(second))):
            seen = Observed(endpoint=endpoint, running=1, waiting=0, progress=progress)
            router.apply(seen, float(second))

    assert view(router, A, 14.0).held_back
    assert {router.route(prompt(tier2=n), 14.0).destination for n in range(10, 14)} == {B}
    router.apply(Observed(endpoint=A, running=1, progress=6.0), 15.0)
    assert {router.route(prompt(tier2=n), 15.0).destination for n in range(20, 24)} == {A, B}


def test_an_index_that_is_wrong_about_an_endpoint_forgets_it():
    router = router_of(A, policy="round-robin")
    for window in range(2):
        seen = Observed(endpoint=A, prefix_hits=0.0, prefix_queries=window * 100_000.0)
        router.apply(seen, float(window))
        for n in range(50):
            ended = router.route(prompt(blocks=20, tier2=n), float(window))
            router.apply(Finished(decision_id=ended.decision_id), float(window))
    assert view(router, A, 3.0).blocks == 20
    assert view(router, A, 3.0).cached.hits == 0

    router.apply(Observed(endpoint=A, prefix_hits=0.0, prefix_queries=200_000.0), 3.0)
    assert (view(router, A, 3.0).blocks, view(router, A, 3.0).healed) == (0, 1)
    router.apply(EndpointDown(A, gone=True), 4.0)
    router.apply(EndpointUp(endpoint=A), 4.0)
    assert (view(router, A, 4.0).cached.routed, view(router, A, 4.0).healed) == (0, 0)
