from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.simulation.engine import Engine, EngineSettings, Job
from extproc.simulation.workload import Turn

_SETTINGS = EngineSettings(
    kv_tokens=1_000,
    block_tokens=10,
    prefill_tokens_per_s=1_000.0,
    step_tokens=100,
    slots=4,
    step_s=0.010,
    decode_s=0.001,
)


def _turn(root: int, prompt_tokens: int, output_tokens: int = 1) -> Turn:
    chain = tuple(root * 1_000 + depth for depth in range(prompt_tokens // 10))
    return Turn(chain=chain, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _drive(engine: Engine, arrivals: list[tuple[float, Job]]) -> dict[int, float]:
    """Play arrivals to the end; give the time each job ended."""
    ended: dict[int, float] = {}
    waiting = sorted(arrivals, key=lambda one: one[0])
    while waiting or engine.next_s < inf:
        if waiting and waiting[0][0] <= engine.next_s:
            at_s, job = waiting.pop(0)
            engine.submit(job, at_s)
        else:
            now_s = engine.next_s
            for job in engine.advance(now_s).finished:
                ended[job.tag] = now_s
    return ended


def test_a_lone_request_takes_its_prefill_steps_then_one_step_for_each_token():
    job = Job(_turn(1, 250, 11), 0)
    ended = _drive(Engine(_SETTINGS), [(0.0, job)])
    # Three steps of 100, 100 and 50 tokens, then ten that decode one request.
    assert job.first_token_s == pytest.approx(0.110 + 0.110 + 0.060)
    assert ended[0] == pytest.approx(0.280 + 10 * 0.011)


def test_a_repeated_prompt_computes_only_its_last_block():
    engine = Engine(_SETTINGS)
    first, second = Job(_turn(1, 200), 0), Job(_turn(1, 200), 1)
    _drive(engine, [(0.0, first), (1.0, second)])
    assert (first.cached_tokens, second.cached_tokens) == (0, 190)
    assert second.computed_tokens == 10


def test_blocks_can_be_reused_as_soon_as_they_are_computed():
    engine = Engine(_SETTINGS)
    long, late = Job(_turn(1, 850, 50), 0), Job(_turn(1, 900), 1)
    _drive(engine, [(0.0, long), (0.5, late)])
    # The step that computes the last 50 tokens of one has room to begin the other.
    assert late.cached_tokens == 800


def test_the_answer_can_be_reused_by_the_next_turn():
    engine = Engine(_SETTINGS)
    answer = (1_010, 1_011)
    first = Job(replace(_turn(1, 100, 20), answer_chain=answer), 0)
    second = Job(_turn(1, 150), 1)
    _drive(engine, [(0.0, first), (5.0, second)])
    assert second.cached_tokens == 120


def test_prefill_shares_its_step_with_decoding():
    alone = Job(_turn(1, 100), 0)
    _drive(Engine(_SETTINGS), [(0.0, alone)])
    beside = Job(_turn(2, 100), 2)
    _drive(Engine(_SETTINGS), [(0.0, Job(_turn(1, 10, 200), 1)), (1.0, beside)])
    assert alone.first_token_s == pytest.approx(0.110)
    assert beside.first_token_s is not None
    # One token of the step's budget is the other request's, so a second step is needed.
    assert beside.first_token_s - 1.0 > 0.120


def test_requests_above_the_slots_wait_for_one():
    engine = Engine(_SETTINGS)
    for tag in range(5):
        engine.submit(Job(_turn(tag, 10, 50), tag), 0.0)
    engine.advance(engine.next_s)
    assert (engine.running, engine.waiting) == (4, 1)


def test_a_full_cache_preempts_the_latest_and_still_finishes_all():
    engine = Engine(_SETTINGS)
    jobs = [Job(_turn(tag, 300, 300), tag) for tag in range(3)]
    ended = _drive(engine, [(0.0, job) for job in jobs])
    assert engine.preemptions > 0
    assert sorted(ended) == [0, 1, 2]
    assert all(job.produced == 300 for job in jobs)
    assert engine.cache.available == engine.cache.capacity


def test_a_request_larger_than_the_memory_does_not_fit():
    engine = Engine(_SETTINGS)
    assert engine.fits(_turn(1, 900, 80))
    assert not engine.fits(_turn(1, 900, 110))


def test_waiting_tokens_count_what_is_not_computed_yet():
    engine = Engine(_SETTINGS)
    engine.submit(Job(_turn(1, 250), 0), 0.0)
    assert engine.waiting_tokens == 250
    engine.advance(engine.next_s)
    assert engine.waiting_tokens == 150
    engine.submit(Job(_turn(1, 200), 1), 0.2)
    assert engine.waiting_tokens == 150 + 100


def test_an_idle_engine_has_nothing_to_do():
    engine = Engine(_SETTINGS)
    assert engine.next_s == inf
    assert engine.jobs() == []


_requests = st.tuples(
    st.integers(0, 2_000), st.integers(0, 3), st.integers(1, 400), st.integers(1, 60)
)


@given(st.lists(_requests, max_size=12))
def test_every_request_ends_once_and_leaves_nothing_behind(requests):
    engine = Engine(_SETTINGS)
    jobs = [Job(_turn(root, p, o), tag) for tag, (_, root, p, o) in enumerate(requests)]
    moments = [_moment(tag, ms) for tag, (ms, *_) in enumerate(requests)]
    ended = _drive(engine, list(zip(moments, jobs, strict=True)))
    assert sorted(ended) == list(range(len(jobs)))
    assert engine.cache.available == engine.cache.capacity
    assert engine.waiting_tokens == 0
    for at_s, job in zip(moments, jobs, strict=True):
        assert job.first_token_s is not None
        assert at_s < job.first_token_s <= ended[job.tag]
        assert job.cached_tokens is not None
        # Without preemption each prompt token is either found or computed.
        if not engine.preemptions:
            assert job.cached_tokens + job.computed_tokens == job.turn.prompt_tokens


@given(st.lists(_requests, min_size=1, max_size=8))
def test_taking_decode_steps_as_one_stretch_changes_no_result(requests):
    """Asking in the middle of a stretch cuts it: the ends must be those of single steps."""
    jobs, same = (
        [Job(_turn(root, p, o), tag) for tag, (_, root, p, o) in enumerate(requests)]
        for _ in range(2)
    )
    moments = [_moment(tag, ms) for tag, (ms, *_) in enumerate(requests)]
    arrivals = list(zip(moments, jobs, strict=True))
    again = list(zip(moments, same, strict=True))
    # With memory to spare: when it is short, a stretch looks ahead and preempts later.
    ample = replace(_SETTINGS, kv_tokens=10_000)
    stretches, steps = Engine(ample), _OneStepEngine(ample)
    expected = _drive(steps, again)
    ended = _drive(stretches, arrivals)
    assert ended == pytest.approx(expected)


def _moment(tag: int, ms: int) -> float:
    """Steps take whole milliseconds: of two requests, none comes at the end of a step."""
    return ms / 1_000 + tag * 0.000_013


class _OneStepEngine(Engine):
    def _plan(self, now_s: float) -> None:
        super()._plan(now_s)
        self._steps = min(self._steps, 1)
