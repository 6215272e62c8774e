from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from extproc.standin.cache import BlockCache
from extproc.standin.tokens import hash_blocks, namespace_seed

SEED = namespace_seed("m", "", "")

# Few letters and short prompts, so that prefixes are often shared.
chains = st.lists(st.sampled_from([b"aaaa", b"bbbb"]), max_size=6).map(
    lambda words: tuple(hash_blocks(b"".join(words), SEED, 1))
)
steps = st.lists(st.tuples(chains, st.integers(0, 3), st.booleans()), max_size=25)


def run(cache, chain, extra=0):
    """Compute a whole sequence and leave it in the cache."""
    lease = cache.reserve(chain, match_at_most=len(chain), blocks=len(chain) + extra)
    lease.store(chain[lease.matched_blocks :])
    lease.release()
    return lease


def play(cache, history):
    """Reserve and store in order; a True ends the oldest lease first."""
    open_leases = []
    parent = {}
    for chain, extra, end_one in history:
        parent.update(zip(chain[1:], chain, strict=False))
        if end_one and open_leases:
            open_leases.pop(0).release()
        lease = cache.reserve(chain, match_at_most=len(chain), blocks=len(chain) + extra)
        if lease is not None:
            lease.store(chain[lease.matched_blocks :])
            open_leases.append(lease)
        yield parent
    for lease in open_leases:
        lease.release()


@given(steps, st.integers(1, 8))
def test_blocks_and_room_never_exceed_the_capacity(history, capacity):
    cache = BlockCache(capacity)
    for _ in play(cache, history):
        assert len(cache) <= capacity
        assert 0 <= cache.used_blocks <= capacity


@given(steps, st.integers(1, 8))
def test_a_held_block_has_its_predecessor_held(history, capacity):
    cache = BlockCache(capacity)
    for parent in play(cache, history):
        assert all(parent[block] in cache for block in parent if block in cache)


@given(steps, st.integers(1, 8))
def test_when_all_have_ended_nothing_is_in_use(history, capacity):
    cache = BlockCache(capacity)
    for _ in play(cache, history):
        pass

    assert cache.used_blocks == 0


@given(steps, chains, st.integers(1, 8))
def test_a_chain_just_computed_matches_as_far_as_it_fits(history, chain, capacity):
    cache = BlockCache(capacity)
    for _ in play(cache, history):
        pass
    run(cache, chain)

    assert cache.match(chain) == min(len(chain), capacity)


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 6))
def test_single_blocks_leave_in_order_of_last_use(uses, capacity):
    cache, expected = BlockCache(capacity), OrderedDict()
    for block in uses:
        run(cache, (block,))
        expected[block] = None
        expected.move_to_end(block)
        if len(expected) > capacity:
            expected.popitem(last=False)

        assert [b for b in range(10) if b in cache] == sorted(expected)


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    cache = BlockCache(4)
    run(cache, (1, 2, 3, 4))
    run(cache, (9,))

    assert cache.match((1, 2, 3, 4)) == 3


def test_blocks_in_use_are_not_evicted_for_others():
    cache = BlockCache(4)
    lease = cache.reserve((1, 2, 3), match_at_most=3, blocks=3)
    lease.store((1, 2, 3))

    assert cache.reserve((7, 8), match_at_most=2, blocks=2) is None
    lease.release()
    assert cache.reserve((7, 8), match_at_most=2, blocks=2) is not None


def test_a_sequence_longer_than_the_cache_keeps_its_head():
    cache = BlockCache(2)
    run(cache, (1, 2, 3, 4))

    assert cache.match((1, 2, 3, 4)) == 2


def test_clearing_spares_what_is_in_use():
    cache = BlockCache(4)
    run(cache, (9,))
    lease = cache.reserve((1,), match_at_most=1, blocks=1)
    lease.store((1,))
    cache.clear()

    assert 1 in cache
    assert 9 not in cache
