from hypothesis import given
from hypothesis import strategies as st

from extproc.core.endpoint import Endpoint
from extproc.core.events import Observed
from extproc.core.prediction import Predictions, Tally

A, B = (Endpoint.parse(f"10.0.0.{n}:8000") for n in (1, 2))


def see(hits, queries, endpoint=A):
    return Observed(endpoint=endpoint, prefix_hits=hits, prefix_queries=queries)


def route(predictions, count, *, share, tokens=2_000, endpoint=A):
    for _ in range(count):
        predictions.count(endpoint, predicted=int(share * tokens), routed=tokens)


def windows(predictions, *, predicted, actual, count=1):
    """Route windows of 50 requests of 2,000 tokens; give each verdict."""
    verdicts = [predictions.observe(see(0.0, 0.0))]
    for number in range(1, count + 1):
        route(predictions, 50, share=predicted)
        verdicts.append(predictions.observe(see(actual * number * 1e5, number * 1e5)))
    return verdicts[1:]


def test_counts_are_kept_by_endpoint_from_when_the_engine_was_first_seen():
    predictions = Predictions()
    route(predictions, 2, share=0.5)
    predictions.observe(see(700.0, 1_000.0))
    predictions.observe(see(900.0, 1_500.0))

    assert predictions.tally(A) == Tally(
        requests=2, predicted=2_000, routed=4_000, hits=200.0, queries=500.0
    )
    assert predictions.tally(B) == Tally()


def test_an_engine_that_tells_no_hits_is_not_judged():
    predictions = Predictions()
    route(predictions, 200, share=1.0)

    assert not predictions.observe(see(None, 5e5))
    assert not predictions.observe(see(5e5, None))


def test_a_good_index_is_never_wrong():
    assert windows(Predictions(), predicted=0.9, actual=0.85, count=6) == [False] * 6


def test_finding_more_than_predicted_is_no_fault():
    assert windows(Predictions(), predicted=0.1, actual=0.9, count=6) == [False] * 6


def test_two_windows_of_far_fewer_hits_than_predicted_are_a_fault():
    found = windows(Predictions(), predicted=0.9, actual=0.1, count=4)

    assert found == [False, True, False, True]


def test_a_single_wrong_window_is_forgiven():
    predictions = Predictions()
    windows(predictions, predicted=0.9, actual=0.1)
    route(predictions, 50, share=0.5)
    assert not predictions.observe(see(0.1e5 + 0.5e5, 2e5))
    route(predictions, 50, share=0.9)

    assert not predictions.observe(see(0.1e5 + 0.5e5 + 0.1e5, 3e5))


def test_few_requests_or_tokens_are_no_window():
    predictions = Predictions()
    predictions.observe(see(0.0, 0.0))
    route(predictions, 49, share=1.0)
    assert not predictions.observe(see(0.0, 1e6))

    few = Predictions()
    few.observe(see(0.0, 0.0))
    route(few, 500, share=1.0)
    assert not few.observe(see(0.0, 40_000.0))


def test_a_restart_begins_anew():
    predictions = Predictions()
    windows(predictions, predicted=0.9, actual=0.1)
    predictions.forget(A)
    predictions.forget(B)

    assert predictions.tally(A) == Tally()
    assert windows(predictions, predicted=0.9, actual=0.1) == [False]


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 60)), max_size=20))
def test_counters_that_jump_never_make_counts_fall(steps):
    predictions = Predictions()
    before = Tally()
    for hits, queries, requests in steps:
        route(predictions, requests, share=0.5)
        predictions.observe(see(hits, queries))
        now = predictions.tally(A).copy()
        gained = now.since(before)
        assert min(gained.hits, gained.queries, gained.predicted, gained.routed) >= 0
        before = now
