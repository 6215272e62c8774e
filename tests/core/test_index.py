import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.endpoint import Endpoint
from extproc.core.index import ApproximateIndex

A, B = Endpoint.parse("10.0.0.1:8000"), Endpoint.parse("10.0.0.2:8000")


def chain_of(text):
    """Make a chain as hashing does: each block stands for all text up to it."""
    return tuple(text[: i + 1] for i in range(len(text)))


texts = st.text("ab", max_size=12)
chains = texts.map(chain_of)
records = st.lists(st.tuples(chains, st.sampled_from([A, B])), max_size=20)


def index_of(history, capacity=5, **settings):
    index = ApproximateIndex(capacity=capacity, **settings)
    for chain, endpoint in history:
        index.record(chain, endpoint)
    return index


@given(chains, st.integers(1, 12))
def test_a_chain_longer_than_the_capacity_keeps_its_head(chain, capacity):
    index = index_of([(chain, A)], capacity)

    assert index.match(chain)[A] == min(len(chain), capacity)


@given(records, chains)
def test_a_match_is_a_prefix(history, chain):
    index = index_of(history)

    for endpoint, n in index.match(chain).items():
        assert 0 <= n <= min(len(chain), 5)
        assert all(index.match(chain[:k])[endpoint] == k for k in range(n + 1))


@given(records, chains)
def test_a_match_is_the_unbroken_leading_run(history, chain):
    """Bisection agrees with counting block by block."""
    index = index_of(history)

    for endpoint, n in index.match(chain).items():
        held = index._held[endpoint]
        run = next((i for i, block in enumerate(chain) if block not in held), len(chain))
        assert n == run


@given(records, chains)
def test_a_forgotten_endpoint_matches_nothing(history, chain):
    index = index_of(history)
    index.forget(A)

    assert A not in index.match(chain)


@given(records)
def test_an_endpoint_never_holds_more_than_its_capacity(history):
    index = index_of(history)

    assert index.blocks(A) <= 5
    assert index.blocks(B) <= 5


@given(records, st.integers(2, 9))
def test_all_endpoints_together_stay_below_the_global_bound(history, bound):
    index = index_of([*history, ("a", A), ("a", B), *history], capacity=100, max_blocks=bound)
    for endpoint in (A, B):
        index.record(("b",), endpoint)

    assert index.blocks(A) + index.blocks(B) <= bound


def test_the_leaf_least_recently_used_goes_first():
    index = index_of([(chain_of("abc"), A), (chain_of("aX"), A)], capacity=4)
    index.record(chain_of("aY"), A)

    assert index.match(chain_of("abc"))[A] == 2
    assert index.match(chain_of("aX"))[A] == 2
    assert index.match(chain_of("aY"))[A] == 2


def test_a_head_outlives_its_tail():
    index = index_of([(chain_of("abc"), A), (chain_of("x"), A)], capacity=3)

    assert index.match(chain_of("abc"))[A] == 2


@pytest.mark.parametrize("size", [64, 1000])
def test_a_full_index_gives_way_in_small_steps(size):
    index = ApproximateIndex(capacity=size)
    for block in range(3 * size):
        index.record((block,), A)
        assert size - size // 64 <= index.blocks(A) <= size or block < size


@given(st.lists(st.lists(st.integers(0, 6), max_size=8).map(tuple), max_size=6))
def test_the_capacity_holds_for_any_hashes_even_colliding_ones(chains_):
    index = index_of([(chain, A) for chain in chains_], capacity=4)

    assert index.blocks(A) <= 4


def test_a_resized_endpoint_shrinks_with_its_next_record():
    index = index_of([(chain_of("abcde"), A)])
    index.resize(A, 2)
    index.record(chain_of("a"), A)

    assert index.blocks(A) == 2
    assert index.capacity(B) == 5


def test_the_blocks_of_several_chains_add_up():
    index = index_of([(chain_of("ab"), A), (chain_of("x"), A), (chain_of("x"), B)])

    assert index.match_all([chain_of("abc"), chain_of("xy")]) == {A: 3, B: 1}
