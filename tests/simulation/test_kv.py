from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.simulation.kv import BlockCache


def test_a_finished_requests_blocks_stay_reusable_until_their_memory_is_taken():
    cache = BlockCache(4)
    cache.pin((), reserve=3)
    cache.write((1, 2, 3))
    cache.release((1, 2, 3), reserved=0)
    assert cache.held_blocks((1, 2, 3, 9)) == 3
    cache.reserve(2)
    assert cache.held_blocks((1, 2, 3)) == 2


def test_blocks_in_use_are_not_evicted():
    cache = BlockCache(4)
    cache.pin((), reserve=3)
    cache.write((1, 2, 3))
    assert not cache.pin((), reserve=2)
    assert cache.held_blocks((1, 2, 3)) == 3


def test_a_shared_block_takes_memory_once():
    cache = BlockCache(4)
    cache.pin((), reserve=2)
    cache.write((1, 2))
    assert cache.pin((1, 2), reserve=2)
    assert cache.available == 0
    cache.release((1, 2), reserved=2)
    assert cache.available == 2


def test_a_block_computed_twice_at_once_is_stored_once():
    cache = BlockCache(4)
    cache.pin((), reserve=2)
    cache.pin((), reserve=2)
    cache.write((1, 2))
    cache.write((1, 2))
    assert cache.available == 2


def test_a_pin_without_room_changes_nothing():
    cache = BlockCache(2)
    cache.pin((), reserve=2)
    cache.write((1, 2))
    cache.release((1, 2), reserved=0)
    assert not cache.pin((1,), reserve=1, spare=1)
    assert cache.held_blocks((1, 2)) == 2
    assert cache.usage == 0.0


def test_an_answers_blocks_stay_reusable_after_the_prompts():
    cache = BlockCache(4)
    cache.pin((), reserve=4)
    cache.write((1, 2))
    cache.release((1, 2), reserved=2, answer=(3, 4))
    assert cache.held_blocks((1, 2, 3, 4)) == 4
    cache.reserve(1)
    assert cache.held_blocks((1, 2, 3, 4)) == 3


def test_an_empty_chain_matches_nothing():
    assert BlockCache(4).held_blocks(()) == 0


@st.composite
def _plays(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    # (root, length, requests kept running)
    play = st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 2))
    return draw(st.lists(play, max_size=40))


@given(capacity=st.integers(1, 24), plays=_plays())
def test_memory_is_never_exceeded_and_what_is_held_is_closed_under_prefixes(capacity, plays):
    cache = BlockCache(capacity)
    running: list[tuple[int, ...]] = []
    for root, length, keep in plays:
        # Prompts of one root share their first half; the other half belongs to the length.
        chain = tuple(
            root * 1_000 + depth if depth < 4 else root * 1_000 + length * 100 + depth
            for depth in range(length)
        )
        held = cache.held_blocks(chain)
        if cache.pin(chain[:held], reserve=length - held):
            cache.write(chain[held:])
            running.append(chain)
        while len(running) > keep:
            cache.release(running.pop(0), reserved=0)
        for one in running:
            assert cache.held_blocks(one) == len(one)
        assert 0 <= cache.available <= capacity
        for depth in range(1, length + 1):
            if chain[depth - 1] in cache._users:
                assert cache.held_blocks(chain[:depth]) == depth
    for one in running:
        cache.release(one, reserved=0)
    assert cache.available == capacity
