import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.endpoint import Endpoint
from extproc.core.memory import Demand, Home, Sessions

A = Endpoint.parse("10.0.0.1:8000")


def sessions_of(*binds, capacity=10, ttl_s=100.0):
    sessions = Sessions(capacity=capacity, ttl_s=ttl_s)
    for key, at_s in binds:
        sessions.bind(key, Home(A, 7, at_s))
    return sessions


def test_a_session_is_forgotten_after_its_ttl():
    sessions = sessions_of((1, 0.0))

    assert sessions.find(1, 100.0) == Home(A, 7, 0.0)
    assert sessions.find(1, 100.1) is None


def test_use_renews_a_session():
    assert sessions_of((1, 0.0), (1, 90.0)).find(1, 150.0) is not None


def test_expired_sessions_free_their_memory():
    sessions = sessions_of((1, 0.0), (2, 50.0))
    sessions.expire(120.0)

    assert len(sessions) == 1
    sessions.expire(500.0)
    assert len(sessions) == 0


@given(st.lists(st.integers(0, 30), max_size=60))
def test_the_session_map_is_bounded_and_drops_the_least_recent(keys):
    sessions = sessions_of(*[(key, 0.0) for key in keys], capacity=4)
    recent = list(dict.fromkeys(reversed(keys)))[:4]

    assert len(sessions) == len(recent)
    assert all(sessions.find(key, 0.0) for key in recent)


def demand_of(*turns, capacity=10):
    """Count (key, new, uncached) at time 0."""
    demand = Demand(capacity=capacity)
    for key, new, uncached in turns:
        demand.count(key, new=new, uncached_tokens=uncached, now_s=0.0)
    return demand


def test_single_turn_traffic_has_no_future():
    assert demand_of(*[(1, True, 5000)] * 50).future_tokens(1) == 0.0


def test_the_future_is_the_later_work_of_one_conversation():
    turns = [(1, True, 9000), *[(1, False, 300)] * 4] * 100

    assert demand_of(*turns).future_tokens(1) == pytest.approx(1200, rel=0.02)


def test_an_unknown_key_is_expected_to_be_like_the_others():
    demand = demand_of(*[(1, True, 9000), (1, False, 500)] * 100)

    assert demand.future_tokens(2) == pytest.approx(500, rel=0.02)


def test_the_prior_yields_to_what_is_learned():
    chat = [(1, True, 100), (1, False, 500)] * 50
    demand = demand_of(*chat, *[(2, True, 100)] * 50)

    assert demand.future_tokens(2) < 0.05 * demand.future_tokens(1)


def test_old_traffic_weighs_less():
    demand = demand_of(*[(1, True, 100), (1, False, 1000)] * 100)
    for _ in range(100):
        demand.count(1, new=True, uncached_tokens=100, now_s=6000.0)

    assert demand.future_tokens(1) < 20


@given(st.lists(st.integers(0, 30), max_size=60))
def test_the_demand_map_is_bounded(keys):
    demand = demand_of(*[(key, True, 1) for key in keys], capacity=4)

    assert len(demand) == min(4, len(set(keys)))
