import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.endpoint import Endpoint
from extproc.core.events import Observed
from extproc.core.load import LoadModel

A, B = Endpoint.parse("10.0.0.1:8000"), Endpoint.parse("10.0.0.2:8000")


def load_of(*acquired, rate=1000.0, max_leases=100, lease_ttl_s=60.0, suspect_s=0.0):
    """Acquire (id, uncached tokens) on A at time 0."""
    load = LoadModel(
        prefill_tokens_per_s=rate,
        max_leases=max_leases,
        lease_ttl_s=lease_ttl_s,
        suspect_s=suspect_s,
    )
    for decision_id, tokens in acquired:
        take(load, decision_id, tokens)
    return load


def take(load, decision_id, tokens, endpoint=A, now_s=0.0):
    load.acquire(decision_id, endpoint, uncached_tokens=tokens, chains=(), now_s=now_s)


def see(endpoint=A, **seen):
    return Observed(endpoint=endpoint, **seen)


def test_outstanding_prefill_drains_at_the_rate_and_stops_at_zero():
    load = load_of(("r1", 3000), ("r2", 1000))

    assert load.outstanding_tokens(A, 0.0) == 4000
    assert load.outstanding_tokens(A, 1.5) == 2500
    assert load.outstanding_tokens(A, 9.0) == 0


def test_a_first_byte_shows_that_only_later_arrivals_are_left():
    load = load_of(("r1", 30_000), ("r2", 500))
    load.begin("r1", 0.1)

    assert load.outstanding_tokens(A, 0.1) == 500


def test_an_end_counts_as_computed_too():
    load = load_of(("r1", 30_000), ("r2", 500))
    load.release("r1", 0.1)

    assert load.outstanding_tokens(A, 0.1) == 500
    assert load.inflight(A, 0.1) == 1


@pytest.mark.parametrize("believed", [600.0, 1400.0], ids=["rate 40 % low", "rate 40 % high"])
def test_ends_bound_the_error_of_a_wrong_rate(believed):
    """One request of 100 tokens each 0.1 s on a real rate of 1000: nothing may pile up."""
    load = load_of(rate=believed)
    for i in range(1000):
        take(load, i, 100, now_s=i * 0.1)
        load.release(i, (i + 1) * 0.1)

    assert load.outstanding_tokens(A, 100.0) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("arc")), max_size=60))
def test_inflight_is_what_was_acquired_and_not_released(steps):
    load, open_ids = load_of(max_leases=1000), set()
    for decision_id, step in steps:
        if step == "a":
            take(load, decision_id, 10)
            open_ids.add(decision_id)
        elif step == "r":
            load.release(decision_id, 0.0)
            open_ids.discard(decision_id)
        else:
            load.begin(decision_id, 0.0)

    assert load.inflight(A, 0.0) == len(open_ids) == len(load)


def test_leases_are_bounded_in_number_and_in_age():
    load = load_of(*[(i, 10) for i in range(150)])
    assert load.inflight(A, 0.0) == len(load) == 100

    take(load, "young", 10, now_s=30.0)
    load.expire(60.5)
    assert load.inflight(A, 60.5) == 1

    load.expire(100.0)
    assert len(load) == 0


def test_a_lease_on_a_forgotten_endpoint_ends_without_effect():
    load = load_of(("r1", 100))
    load.forget(A)
    take(load, "r2", 50)
    load.release("r1", 0.0)

    assert load.inflight(A, 0.0) == 1
    assert load.outstanding_tokens(A, 0.0) == 50


def test_an_unknown_endpoint_is_idle():
    load = load_of()

    assert (load.outstanding_tokens(B, 0.0), load.inflight(B, 0.0)) == (0.0, 0.0)


def test_a_fresh_scrape_counts_requests_we_did_not_send():
    load = load_of(("r1", 100))
    load.observe(see(running=5, waiting=2), 1.0)

    assert load.inflight(A, 1.0) == 7
    take(load, "r2", 10, now_s=1.1)
    assert load.inflight(A, 1.1) == 8
    load.release("r1", 1.2)
    load.release("r2", 1.2)
    assert load.inflight(A, 1.2) == 6


def test_an_end_told_late_does_not_hide_the_requests_still_running():
    load = load_of(("r1", 100), ("r2", 100))
    load.observe(see(running=1), 1.0)  # r1 has ended, its end is told afterwards
    load.release("r1", 1.05)

    assert load.inflight(A, 1.05) == 1


def test_where_ends_are_never_told_the_scrape_counts_alone():
    load = load_of(*[(i, 10) for i in range(20)])
    load.observe(see(running=2, waiting=0), 1.0)

    assert load.inflight(A, 1.0) == 2


def test_a_stale_scrape_gives_way_to_the_leases():
    load = load_of(("r1", 100))
    load.observe(see(running=50, waiting=20), 1.0)

    assert load.inflight(A, 7.0) == 1
    assert load.outstanding_tokens(A, 7.0) == 0


def test_waiting_requests_count_as_outstanding_prefill():
    load = load_of()
    load.observe(see(running=0, waiting=3), 0.0)

    assert load.outstanding_tokens(A, 0.0) == 3000
    assert load.outstanding_tokens(A, 1.0) == 2000


def test_a_full_kv_cache_counts_as_a_queue_even_with_none_seen():
    load = load_of()
    load.observe(see(running=3, waiting=0, kv_usage=0.85), 0.0)
    assert load.outstanding_tokens(A, 0.0) == 0

    load.observe(see(running=3, waiting=0, kv_usage=1.0), 0.0)
    assert load.outstanding_tokens(A, 0.0) == 1000


def test_a_scrape_that_does_not_tell_requests_leaves_the_leases():
    load = load_of(("r1", 100))
    load.observe(see(computed_tokens=5.0), 0.0)

    assert load.inflight(A, 0.0) == 1


def test_the_rate_is_learned_while_the_engine_is_busy():
    load = load_of()
    for second in range(40):
        load.observe(see(waiting=3, computed_tokens=second * 500.0), float(second))

    assert load.rate_tokens_per_s(A) == pytest.approx(500, rel=0.01)
    assert load.rate_tokens_per_s(B) == 1000


def test_an_idle_engine_can_only_raise_the_rate():
    load = load_of()
    for second, computed in enumerate([0.0, 10.0, 20.0, 4020.0, 4030.0]):
        load.observe(see(waiting=0, computed_tokens=computed), float(second))

    assert load.rate_tokens_per_s(A) == 4000


@pytest.mark.parametrize(
    ("before", "after", "elapsed_s"),
    [
        pytest.param(9e9, 0.0, 1.0, id="the counter was reset"),
        pytest.param(0.0, 1e12, 1.0, id="the counter jumped"),
        pytest.param(0.0, 500.0, 0.0, id="no time has passed"),
        pytest.param(None, 500.0, 1.0, id="nothing to compare with"),
        pytest.param(500.0, None, 1.0, id="the engine stopped telling"),
    ],
)
def test_a_senseless_counter_teaches_nothing(before, after, elapsed_s):
    load = load_of()
    load.observe(see(computed_tokens=before), 1.0)
    load.observe(see(computed_tokens=after), 1.0 + elapsed_s)

    assert load.rate_tokens_per_s(A) == 1000


def test_an_old_scrape_counts_from_when_it_was_so():
    load = load_of()
    load.observe(see(running=5, waiting=0, age_s=4.0), 10.0)

    assert load.inflight(A, 10.5) == 5
    assert load.inflight(A, 11.5) == 0


def stuck(load, *, since=1.0, until, **seen):
    """Scrape an engine each second that shows the same."""
    for second in range(int(since), int(until) + 1):
        load.observe(see(**{"running": 1, "waiting": 0, "progress": 7.0, **seen}), float(second))


def test_work_without_progress_makes_an_endpoint_suspect():
    load = load_of(("r1", 100), suspect_s=30.0)
    stuck(load, until=31.0)
    assert not load.is_held_back(A, 31.0)
    stuck(load, since=32.0, until=40.0)
    assert load.is_held_back(A, 40.0)
    assert load.levels(A, 40.0)[2]
    assert not load.is_held_back(B, 40.0)

    load.observe(see(running=1, progress=8.0), 41.0)
    assert not load.is_held_back(A, 41.0)


def test_without_a_limit_nobody_is_suspect():
    load = load_of(("r1", 100))
    stuck(load, until=59.0)

    assert not load.is_held_back(A, 59.0)


def test_an_endpoint_that_is_not_scraped_is_suspect_only_if_first_bytes_are_told():
    load = load_of(("r1", 100), ("r2", 100), suspect_s=30.0)
    assert not load.is_held_back(A, 50.0)

    load.begin("r1", 1.0)
    load.begin("unknown", 1.0)
    assert not load.is_held_back(A, 31.0)
    assert load.is_held_back(A, 31.5)


def test_work_after_a_pause_is_given_its_time():
    load = load_of(("r1", 100), suspect_s=30.0)
    stuck(load, until=2.0)
    load.release("r1", 3.0)
    stuck(load, since=3.0, until=99.0, running=0)
    take(load, "r2", 100, now_s=99.0)

    assert not load.is_held_back(A, 100.0)


def test_an_engine_that_says_it_is_idle_is_tried_with_one_request_at_a_time():
    load = load_of(("lost", 100), lease_ttl_s=600.0, suspect_s=30.0)
    stuck(load, until=40.0, running=0)
    assert not load.is_held_back(A, 40.0)

    take(load, "trial", 100, now_s=40.0)
    assert load.is_held_back(A, 40.5)
    stuck(load, since=41.0, until=71.0, running=0)
    assert not load.is_held_back(A, 71.0)


def test_a_refusal_holds_back_until_there_is_room():
    load = load_of(("r1", 100), ("r2", 100))
    load.refuse(A, 1.0)
    assert load.is_held_back(A, 1.5)

    load.release("r1", 1.6)
    assert not load.is_held_back(A, 1.6)
    take(load, "r3", 100, now_s=1.7)
    assert load.is_held_back(A, 1.8)
    assert not load.is_held_back(A, 3.1)


def test_a_refusal_by_an_endpoint_without_requests_of_ours_holds_nothing():
    load = load_of()
    load.refuse(A, 1.0)

    assert not load.is_held_back(A, 1.0)
