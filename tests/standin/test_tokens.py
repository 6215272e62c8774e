from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.standin.tokens import count_tokens, hash_blocks, namespace_seed, write_words

SEED = namespace_seed("m", "", "")


@given(st.binary(max_size=200), st.binary(max_size=100))
def test_a_longer_prompt_keeps_the_hashes_of_its_prefix(prompt, more):
    short, long = hash_blocks(prompt, SEED, 4), hash_blocks(prompt + more, SEED, 4)

    assert long[: len(short)] == short
    assert len(short) == len(prompt) // 16


@given(st.binary(min_size=16, max_size=80), st.integers(0, 4))
def test_hashing_can_be_resumed_at_a_block_border(prompt, blocks):
    whole = hash_blocks(prompt, SEED, 4)
    at = min(blocks, len(whole))
    start = whole[at - 1] if at else SEED

    assert whole[:at] + hash_blocks(prompt[at * 16 :], start, 4) == whole


def test_model_adapter_and_salt_each_separate_the_cache():
    seeds = {
        namespace_seed(*names)
        for names in [("m", "", ""), ("n", "", ""), ("m", "a", ""), ("m", "", "a"), ("ma", "", "")]
    }

    assert len(seeds) == 5


@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_an_answer_has_the_tokens_asked_for(seed, count):
    words, stopped = write_words(seed, count)

    assert not stopped
    assert count_tokens(len("".join(words))) == len(words) == count
    assert write_words(seed, count)[0] == words


@given(st.integers(0, 2**64 - 1), st.integers(0, 39), st.integers(1, 6))
def test_a_stop_string_ends_the_answer_before_itself(seed, begin, size):
    text = "".join(write_words(seed, 40)[0])
    mark = text[begin : begin + size]
    words, stopped = write_words(seed, 40, (mark,))

    assert stopped
    assert text.startswith("".join(words))
    assert mark not in "".join(words)
