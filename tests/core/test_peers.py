"""Routers that tell one another what they do, without a log between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.decision import RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointReset, EndpointUp, Finished, FirstByte, Routed
from extproc.core.journal import Batch
from extproc.core.peers import Peers, PeerSettings
from extproc.core.router import Router, RouterSettings

A, B = Endpoint.parse("10.0.0.1:8000"), Endpoint.parse("10.0.0.2:8000")
STRANGER = Endpoint.parse("10.9.9.9:8000")


def peers_of(router_id="r1", **settings):
    router = Router(RouterSettings(slow_start_s=0.0, lease_ttl_s=1e6), router_id=router_id)
    for endpoint in (A, B):
        router.apply(EndpointUp(endpoint=endpoint), 0.0)
    return Peers(
        router,
        router_id=router_id,
        is_known={A, B}.__contains__,
        settings=PeerSettings(**settings),
    )


def request(tier2=1, blocks=4):
    chain = tuple(tier2 * 1000 + n for n in range(1, blocks + 1))
    return RoutingRequest(chains=(chain,), prompt_tokens=128 * blocks, tier1=5, tier2=tier2)


def told(decision_id, endpoint=A, tier2=1):
    """Give the event another router tells of a decision."""
    return Routed(
        decision_id=decision_id,
        endpoint=endpoint,
        chains=(tuple(tier2 * 1000 + n for n in range(1, 5)),),
        prompt_tokens=512,
        matched_tokens=0,
        tier1=5,
        tier2=tier2,
    )


def batch(*events, router_id="r2", sequence=1):
    return Batch(router_id=router_id, sequence=sequence, events=events)


def inflight(peers, endpoint=A, now_s=0.0):
    return {view.endpoint: view.inflight for view in peers.snapshot(now_s)}[endpoint]


def ended(decision_id, served=None):
    return Finished(decision_id=decision_id, served=served, status=200)


def test_what_a_router_does_is_told_in_order():
    peers = peers_of()
    decision = peers.route(request(), 0.0)
    end = ended(decision.decision_id, A)
    first_byte = FirstByte(decision.decision_id)
    for event in (first_byte, end, EndpointReset(A), EndpointUp(endpoint=A)):
        peers.apply(event, 0.1)
    events = peers.take(100, 0.2)

    assert isinstance(events[0], Routed)
    assert events[0].decision_id == decision.decision_id
    assert events[1:] == [first_byte, end, EndpointReset(A)]
    assert (peers.take(100, 0.3), peers.waiting) == ([], 0)


def test_there_is_a_call_for_every_event_to_take():
    calls = []
    router = Router(RouterSettings(), router_id="r1")
    router.apply(EndpointUp(endpoint=A), 0.0)
    peers = Peers(
        router, router_id="r1", is_known={A}.__contains__, on_waiting=lambda: calls.append(1)
    )
    peers.route(request(), 0.0)
    peers.route(request(), 0.0)

    assert len(calls) == peers.waiting == 2
    assert len(peers.take(1, 0.0)) == 1


def test_events_that_nobody_takes_are_dropped_oldest_first_and_counted():
    peers = peers_of(max_waiting=2)
    ids = [peers.route(request(n), 0.0).decision_id for n in range(1, 4)]

    assert [event.decision_id for event in peers.take(10, 0.0)] == ids[1:]
    assert peers.dropped == 1


def test_a_conversation_of_another_router_is_continued_where_it_lives():
    one, two = peers_of("r1"), peers_of("r2")
    for tier2 in range(1, 9):
        first = one.route(request(tier2), 0.0)
        one.apply(ended(first.decision_id), 0.0)
        two.merge(batch(*one.take(9, 0.0), router_id="r1", sequence=tier2), 0.1)
        later = two.route(request(tier2, blocks=5), 0.2)

        assert later.destination == first.destination
        assert later.matched_tokens == 512


def test_load_is_the_sum_over_routers():
    one, two = peers_of("r1"), peers_of("r2")
    first = one.route(request(1), 0.0).destination
    two.merge(batch(*one.take(9, 0.0), router_id="r1"), 0.0)
    two.merge(batch(told("r3-1", first, tier2=9), router_id="r3"), 0.0)

    assert inflight(two, first) == 2


def test_own_events_are_not_applied_again():
    peers = peers_of("r1")
    destination = peers.route(request(), 0.0).destination

    assert not peers.merge(batch(*peers.take(9, 0.0), router_id="r1"), 0.0)
    assert inflight(peers, destination) == 1
    assert (peers.alive, peers.applied) == (0, 0)


def test_a_batch_that_comes_twice_counts_once():
    peers = peers_of()
    assert peers.merge(batch(told("r2-1"), ended("r2-1"), sequence=1), 0.0)
    assert peers.merge(batch(told("r2-2"), sequence=2), 0.0)

    assert not peers.merge(batch(told("r2-1"), sequence=1), 0.0)
    assert not peers.merge(batch(told("r2-2"), sequence=2), 0.0)
    assert (inflight(peers), peers.applied) == (1, 3)


def test_what_concerns_endpoints_of_others_is_left_out():
    peers = peers_of()
    peers.merge(batch(told("r2-1", STRANGER), ended("r2-1")), 0.0)

    assert {view.endpoint for view in peers.snapshot(0.0)} == {A, B}
    assert peers.route(request(), 0.0).matched_tokens == 0


@pytest.mark.parametrize("tells", ["the log", "the access log here", "both"])
def test_the_end_of_anothers_request_releases_it(tells):
    peers = peers_of()
    peers.merge(batch(told("r2-1")), 0.0)
    if tells != "the log":
        peers.apply(ended("r2-1"), 0.1)
    if tells != "the access log here":
        peers.merge(batch(ended("r2-1"), sequence=2), 0.2)

    assert inflight(peers) == 0


@pytest.mark.parametrize("tells", ["the log", "the access log here"])
def test_an_end_that_comes_before_its_beginning_leaves_no_load(tells):
    peers = peers_of()
    if tells == "the log":
        peers.merge(batch(ended("r2-1"), router_id="r3"), 0.0)
    else:
        peers.apply(ended("r2-1"), 0.0)
    peers.merge(batch(told("r2-1")), 0.1)

    assert inflight(peers) == 0
    assert peers.route(request(), 0.2).matched_tokens == 512


def test_the_end_of_anothers_request_is_told_when_that_router_does_not():
    peers = peers_of(forward_s=0.25)
    peers.merge(batch(told("r2-1")), 0.0)
    peers.apply(ended("r2-1", B), 1.0)
    peers.apply(ended("r2-1", B), 1.1)

    assert peers.take(9, 1.2) == []
    assert peers.take(9, 1.25) == [ended("r2-1", B)]
    assert peers.take(9, 9.0) == []


@pytest.mark.parametrize("log_first", [True, False], ids=["log first", "access log first"])
def test_an_end_that_its_router_tells_is_not_told_again(log_first):
    peers = peers_of()
    peers.merge(batch(told("r2-1")), 0.0)
    steps = [
        lambda: peers.merge(batch(ended("r2-1"), sequence=2), 1.0),
        lambda: peers.apply(ended("r2-1"), 1.0),
    ]
    for step in steps if log_first else reversed(steps):
        step()

    assert peers.take(9, 99.0) == []


def test_ends_to_forward_are_bounded_and_ids_that_are_none_are_left():
    peers = peers_of(max_ended=2)
    peers.apply(ended("x" * 300), 0.0)
    for n in range(3):
        peers.apply(ended(f"r2-{n}"), 0.0)

    assert [event.decision_id for event in peers.take(9, 9.0)] == ["r2-1", "r2-2"]
    assert peers.dropped == 1


def test_a_first_byte_of_another_router_shows_in_the_load():
    peers = peers_of()
    peers.merge(batch(told("r2-1")), 0.0)
    peers.merge(batch(FirstByte("r2-1"), sequence=2), 0.0)
    views = {view.endpoint: view for view in peers.snapshot(0.0)}

    assert (views[A].outstanding_tokens, views[A].inflight) == (0, 1)


def test_a_first_byte_of_anothers_request_is_not_told():
    peers = peers_of()
    peers.merge(batch(told("r2-1")), 0.0)
    peers.apply(FirstByte("r2-1"), 0.0)

    assert peers.take(9, 0.0) == []


def test_a_dead_router_leaves_no_load():
    peers = peers_of(silent_s=5.0)
    peers.apply(ended(peers.route(request(9), 0.0).decision_id), 0.0)
    peers.merge(batch(told("r2-1"), told("r2-2", B)), 0.0)
    peers.merge(batch(told("r3-1"), router_id="r3"), 0.0)
    peers.merge(batch(router_id="r3", sequence=2), 4.0)

    assert peers.expire(5.0) == []
    assert peers.expire(6.0) == ["r2"]
    assert (inflight(peers, A, 6.0), inflight(peers, B, 6.0)) == (1, 0)
    assert peers.alive == 1


def test_a_router_that_was_only_late_is_heard_again():
    peers = peers_of(silent_s=5.0)
    peers.merge(batch(told("r2-1"), ended("r2-9")), 0.0)
    peers.expire(6.0)
    peers.merge(batch(told("r2-2"), ended("r2-1"), sequence=2), 7.0)

    assert inflight(peers, A, 7.0) == 1


def test_where_no_end_is_told_a_dead_router_changes_nothing():
    """The scraped number of requests counts there, and leases are no floor under it."""
    peers = peers_of()
    peers.merge(batch(told("r2-1")), 0.0)
    peers.expire(99.0)

    assert (peers.alive, inflight(peers, A, 99.0)) == (0, 1)


def test_what_others_hold_ends_when_a_part_of_the_log_is_lost():
    peers = peers_of()
    peers.merge(batch(told("r2-1"), told("r2-2"), ended("r2-1")), 0.0)
    peers.lose(1.0)

    assert (inflight(peers, A, 1.0), peers.alive) == (0, 1)


def test_a_reset_is_applied_once_however_many_routers_see_it():
    peers = peers_of(reset_s=5.0)
    peers.apply(EndpointReset(A), 0.0)
    peers.take(9, 0.0)
    peers.merge(batch(told("r2-1"), EndpointReset(A)), 1.0)

    assert inflight(peers, A, 1.0) == 1

    peers.merge(batch(EndpointReset(A), sequence=2), 7.0)
    peers.merge(batch(told("r2-2"), sequence=3), 7.1)
    peers.apply(EndpointReset(A), 7.2)

    assert inflight(peers, A, 7.2) == 1
    assert peers.take(9, 7.2) == []


def test_all_that_is_remembered_of_others_is_bounded():
    peers = peers_of(max_peers=2, max_open=2, max_ended=1)
    peers.apply(EndpointReset(A), 0.0)
    peers.apply(EndpointReset(B), 0.0)
    peers.merge(batch(ended("x-1")), 0.0)
    for router in range(4):
        events = [told(f"q{router}-{n}") for n in range(3)]
        peers.merge(batch(*events, router_id=f"q{router}"), 1.0)

    assert peers.alive == 2
    # Two routers were let go with two requests each; of each the oldest was left to its lease.
    assert inflight(peers, A, 1.0) == 12 - 4


moves = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 5)), max_size=30)


@given(moves, st.randoms(use_true_random=False))
def test_whatever_way_ends_are_told_all_routers_end_without_load(steps, random):
    """Three routers decide; ends come to any of them; batches reach the others in order."""
    routers = [peers_of(f"r{n}", forward_s=0.0) for n in range(3)]
    sequences = [0, 0, 0]
    open_ids = []

    def tell(at, now_s):
        events = routers[at].take(99, now_s)
        sequences[at] += 1
        for other in routers:
            other.merge(batch(*events, router_id=f"r{at}", sequence=sequences[at]), now_s)

    for now_s, (at, ends, tier2) in enumerate(steps):
        if ends and open_ids:
            hearer = routers[random.randrange(3)]
            hearer.apply(ended(open_ids.pop(random.randrange(len(open_ids)))), float(now_s))
        else:
            open_ids.append(routers[at].route(request(tier2 + 1), float(now_s)).decision_id)
        if random.random() < 0.5:
            tell(random.randrange(3), float(now_s))
    for decision_id in open_ids:
        routers[random.randrange(3)].apply(ended(decision_id), 50.0)
    for at in (0, 1, 2):
        tell(at, 60.0)

    assert all(inflight(peers, e, 60.0) == 0 for peers in routers for e in (A, B))
