import pytest

from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp
from extproc.core.pool import Pool

A, B, C = (Endpoint.parse(f"10.0.0.{n}:8000") for n in (1, 2, 3))


def pool_of(*ups, slow_start_s=10.0):
    pool = Pool(slow_start_s=slow_start_s)
    for endpoint, now_s in ups:
        pool.up(EndpointUp(endpoint=endpoint), now_s)
    return pool


def ramp(pool, now_s):
    ready = pool.ready()
    return dict(zip([m.endpoint for m in ready], pool.ramps(ready, now_s), strict=True))


def test_a_fleet_that_starts_together_is_not_held_back():
    assert ramp(pool_of((A, 0.0), (B, 0.0)), 0.0) == {A: 1.0, B: 1.0}


def test_a_newcomer_ramps_up():
    pool = pool_of((A, 0.0), (B, 100.0))

    assert ramp(pool, 100.0) == {A: 1.0, B: pytest.approx(0.1)}
    assert ramp(pool, 105.0) == {A: 1.0, B: pytest.approx(0.6)}
    assert ramp(pool, 110.0) == {A: 1.0, B: 1.0}


def test_without_slow_start_everyone_counts_fully():
    assert ramp(pool_of((A, 0.0), (B, 100.0), slow_start_s=0.0), 100.0) == {A: 1.0, B: 1.0}


def test_hearing_again_that_an_endpoint_is_up_does_not_restart_its_ramp():
    pool = pool_of((A, 0.0), (B, 100.0), (B, 109.0))

    assert ramp(pool, 110.0)[B] == 1.0


def test_an_endpoint_that_returns_ramps_again():
    pool = pool_of((A, 0.0), (B, 0.0))
    pool.down(B, gone=False)
    pool.up(EndpointUp(endpoint=B), 100.0)

    assert ramp(pool, 100.0)[B] == pytest.approx(0.1)


def test_a_restarted_engine_ramps_again():
    pool = pool_of((A, 0.0), (B, 0.0))
    pool.restart_ramp(B, 100.0)

    assert ramp(pool, 100.0)[B] == pytest.approx(0.1)


def test_down_keeps_the_member_and_gone_removes_it():
    pool = pool_of((A, 0.0), (B, 0.0))
    pool.down(A, gone=False)
    pool.down(B, gone=True)

    assert A in pool
    assert B not in pool
    assert pool.ready() == []


def test_events_about_strangers_change_nothing():
    pool = pool_of((A, 0.0))
    pool.down(B, gone=False)
    pool.down(B, gone=True)
    pool.restart_ramp(B, 1.0)

    assert [m.endpoint for m in pool] == [A]


def test_a_subset_leaves_only_its_ready_members():
    pool = pool_of((A, 0.0), (B, 0.0))

    assert [m.endpoint for m in pool.ready(frozenset({B, "10.9.9.9:1"}))] == [B]
    assert pool.ready(frozenset()) == []


def newcomers(pool, now_s):
    return pool.newcomers(pool.ready(), now_s)


def test_a_fleet_that_starts_together_has_no_newcomers():
    assert newcomers(pool_of((A, 0.0), (B, 9.0)), 9.0) == {}


def test_a_newcomer_claims_its_keys_one_after_the_other():
    pool = pool_of((A, 0.0), (B, 100.0))

    assert newcomers(pool, 100.0) == {B: 0.0}
    assert newcomers(pool, 110.0) == {B: 0.25}
    assert newcomers(pool, 200.0) == {B: 1.0}


def test_a_newcomer_settles():
    assert newcomers(pool_of((A, 0.0), (B, 100.0)), 500.0) == {}


def test_one_that_joined_before_the_last_newcomer_settles_by_its_own_time():
    pool = pool_of((A, 0.0), (B, 100.0), (C, 300.0))

    assert newcomers(pool, 390.0) == {C: 1.0}


def test_nobody_is_a_newcomer_among_none():
    assert Pool().newcomers([], 0.0) == {}
