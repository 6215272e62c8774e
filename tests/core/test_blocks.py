from hypothesis import given
from hypothesis import strategies as st

from extproc.core.blocks import canonical, hash_chain, key_hash, seed_from
from extproc.core.segments import Segment

seeds = st.integers(0, 2**64 - 1)
kinds = st.sampled_from(["user", "system", "tools"])
segment_lists = st.lists(st.builds(Segment, kinds, st.text("ab1").map(str.encode)), max_size=4)


def chain_of(data, block_bytes=4, max_blocks=100, seed=1):
    return hash_chain(data, block_bytes=block_bytes, max_blocks=max_blocks, seed=seed)


def common(one, other):
    """Count equal leading members."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(segment_lists, segment_lists)
def test_different_segments_have_different_bytes(one, other):
    assert (canonical(one) == canonical(other)) == (one == other)


@given(segment_lists, kinds, st.binary(), st.binary())
def test_a_segment_that_is_cut_is_a_prefix_of_the_whole(before, kind, known, unknown):
    cut = canonical([*before, Segment(kind, known, complete=False)])

    assert canonical([*before, Segment(kind, known + unknown)]).startswith(cut)


def test_role_and_length_frame_the_content():
    segments = [Segment("system", b"be brief"), Segment("user", b"hi", complete=False)]

    assert canonical(segments) == b"\xffsystem\xfebe brief\xfd8\xffuser\xfehi"


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40), st.integers(1, 9))
def test_common_bytes_are_common_blocks_and_no_more(head, one, other, block_bytes):
    a, b = head + one, head + other
    expected = common(a, b) // block_bytes
    shared = common(chain_of(a, block_bytes), chain_of(b, block_bytes))

    assert shared == expected


@given(st.binary(max_size=40), st.integers(1, 9), st.integers(0, 9))
def test_only_full_blocks_count_up_to_the_cap(data, block_bytes, max_blocks):
    chain = chain_of(data, block_bytes, max_blocks)

    assert len(chain) == min(len(data) // block_bytes, max_blocks)
    assert chain == chain_of(data, block_bytes)[:max_blocks]


@given(st.binary(min_size=1, max_size=40), seeds, seeds)
def test_another_seed_shares_no_block(data, one, other):
    chains = chain_of(data, 1, seed=one), chain_of(data, 1, seed=other)

    assert common(*chains) == (len(data) if one == other else 0)


def test_a_block_hash_covers_all_before_it():
    one, other = chain_of(b"aaaabbbbcccc"), chain_of(b"xxxxbbbbcccc")

    assert set(one).isdisjoint(other)


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_a_key_tells_where_each_part_ends(one, other):
    assert (key_hash(7, *one) == key_hash(7, *other)) == (one == other)


def test_secrets_part_deployments():
    assert seed_from("a") != seed_from("b")
    assert seed_from("\ud800") == seed_from("\ud800")


def test_hashes_are_a_wire_format():
    """Routers of different releases share a fleet: these may not change."""
    assert seed_from("extproc") == 6242381930884785409
    assert chain_of(b"aaaabbbb", seed=seed_from("extproc")) == (
        17485342356706035548,
        3648297766137219629,
    )
    assert key_hash(seed_from("extproc"), b"ab", b"c") == 13483091244629946740
