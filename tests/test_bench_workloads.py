from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.text import BLOCK_TOKENS, Text
from bench.workloads import (
    SUITE,
    TRACE_FILES,
    offered_load,
    runnable,
    traces_path,
    traces_present,
)

GENERATED = [name for name in SUITE if name not in TRACE_FILES]
pieces = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 200)), max_size=6)


@cache
def spec_of(name, seed=1):
    return SUITE[name](seed)


def conversations_of(name, seed=1):
    return spec_of(name, seed).workload.conversations


def first_turn(conversation):
    return next(iter(conversation.turns))


def common(chain, other):
    pairs = enumerate(zip(chain, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(chain), len(other)))


def written(parts):
    """Every token of a text by its source and place there."""
    return [(source, place) for source, tokens in parts for place in range(tokens)]


def text_of(parts):
    text = Text()
    for source, tokens in parts:
        text.add(source, tokens)
    return text


# Texts


@given(pieces, pieces, pieces)
def test_texts_share_exactly_the_full_blocks_of_their_common_beginning(start, one, other):
    tokens, others = written(start + one), written(start + other)
    chain, another = text_of(start + one).chain(), text_of(start + other).chain()

    assert len(chain) == len(tokens) // BLOCK_TOKENS
    blocks = min(len(chain), len(another), common(tokens, others) // BLOCK_TOKENS)
    assert common(chain, another) == blocks


@given(pieces, pieces)
def test_a_copy_grows_apart_from_its_original(start, more):
    original = text_of(start)
    before = original.chain(), original.tokens
    copy = original.copy()
    for source, tokens in more:
        copy.add(source, tokens)

    assert (original.chain(), original.tokens) == before
    assert (copy.chain(), copy.tokens) == (
        text_of(start + more).chain(),
        len(written(start + more)),
    )


# Every generated workload


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_makes_the_same_workload_again(name):
    assert spec_of(name) == SUITE[name](1)


def test_another_seed_makes_another_workload():
    assert spec_of("agent") != spec_of("agent", seed=2)


@pytest.mark.parametrize("name", GENERATED)
def test_conversations_come_in_order_within_the_run(name):
    starts = [conversation.start_s for conversation in conversations_of(name)]

    assert starts == sorted(starts)
    assert 0.0 <= starts[0] < spec_of(name).workload.warmup_s < starts[-1] < 240.0


@pytest.mark.parametrize("name", GENERATED)
def test_turns_fill_their_blocks_and_extend_the_turn_and_answer_before(name):
    assert spec_of(name).workload.block_tokens == BLOCK_TOKENS
    for conversation in conversations_of(name):
        for turn in conversation.turns:
            assert len(turn.chain) == turn.prompt_tokens // BLOCK_TOKENS
            told = (turn.prompt_tokens + turn.output_tokens) // BLOCK_TOKENS
            assert len(turn.chain) + len(turn.answer_chain) == told
        for turn, later in pairwise(conversation.turns):
            assert later.chain[: len(turn.chain)] == turn.chain
            assert common(later.chain, turn.chain + turn.answer_chain) == min(
                len(later.chain), len(turn.chain + turn.answer_chain)
            )


@pytest.mark.parametrize("name", GENERATED)
def test_conversations_share_their_instructions_with_those_of_the_same_tier1_key_alone(name):
    by_key = {}
    for conversation in conversations_of(name):
        by_key.setdefault(conversation.tier1, []).append(conversation)
    heads = {key: first_turn(found[0]).chain[0] for key, found in by_key.items()}

    assert len(set(heads.values())) == len(heads)
    for found in by_key.values():
        blocks = found[0].tier1_tokens // BLOCK_TOKENS
        instructions = first_turn(found[0]).chain[:blocks]
        assert all(first_turn(c).chain[:blocks] == instructions for c in found)


OFFERED = {
    "agent": (0.30, 0.40),
    "chat": (0.50, 0.75),
    "api": (0.50, 0.75),
    "rag": (0.50, 0.75),
    "viral": (0.30, 0.40),
    "flash": (0.50, 0.75),
    "mixed": (0.50, 0.75),
    "agent-no-session": (0.30, 0.40),
    "chat-no-session": (0.50, 0.75),
}


@pytest.mark.parametrize("name", GENERATED)
def test_size_and_offered_load_are_as_stated(name):
    requests = sum(len(list(c.turns)) for c in conversations_of(name))
    low, high = OFFERED[name]

    assert 2_000 <= requests <= 9_000
    assert low <= offered_load(spec_of(name)) <= high


# What each is about


def test_two_agents_share_their_instructions_and_nothing_else():
    agents = conversations_of("agent")
    assert len({c.tier1 for c in agents}) == 3
    assert all(c.session for c in agents)
    assert len({c.tier2 for c in agents}) == len(agents)
    blocks = Counter(h for c in agents for h in {h for turn in c.turns for h in turn.chain})
    shared = {h for h, users in blocks.items() if users > 1}
    instructions = {
        h for c in agents for h in first_turn(c).chain[: c.tier1_tokens // BLOCK_TOKENS]
    }

    assert shared == instructions
    assert all(12_000 <= c.tier1_tokens <= 16_000 for c in agents)


def test_agents_that_begin_within_the_run_have_up_to_thirty_turns_after_thinking():
    turns = [list(c.turns) for c in conversations_of("agent")]

    assert 20 <= max(len(found) for found in turns) <= 30
    assert all(found[0].wait_s == 0.0 for found in turns)
    assert all(0.0 < turn.wait_s <= 60.0 for found in turns for turn in found[1:])


def test_agents_under_way_bring_their_past_in_their_first_prompt():
    early = [first_turn(c) for c in conversations_of("agent") if c.start_s < 40.0]
    late = [first_turn(c) for c in conversations_of("agent") if c.start_s > 60.0]

    assert max(turn.prompt_tokens for turn in early) > 30_000
    assert max(turn.prompt_tokens for turn in late) <= 17_500


def test_chat_has_forty_prefixes_of_unequal_use():
    counts = Counter(c.tier1 for c in conversations_of("chat")).most_common()

    assert 35 <= len(counts) <= 40
    assert counts[0][1] > 10 * counts[-1][1]


def test_api_requests_are_single_turns_under_prefixes_that_no_endpoint_can_hold():
    spec = spec_of("api")
    sizes = {c.tier1: c.tier1_tokens for c in spec.workload.conversations}

    assert all(len(list(c.turns)) == 1 for c in spec.workload.conversations)
    assert not any(c.session for c in spec.workload.conversations)
    assert 5 * spec.kv_tokens < sum(sizes.values()) < spec.endpoints * spec.kv_tokens


def test_rag_prompts_share_the_system_prompt_and_the_documents_that_lead_alike():
    chains = [first_turn(c).chain for c in conversations_of("rag")[:300]]
    depths = Counter(common(a, b) for a, b in pairwise(chains))

    assert min(depths) == 1_500 // BLOCK_TOKENS
    # Two documents that differ cost what one shares: 800 tokens.
    assert depths[1_500 // BLOCK_TOKENS] > 200
    assert max(depths) >= (1_500 + 800) // BLOCK_TOKENS


def test_half_of_viral_traffic_has_one_prefix():
    counts = Counter(c.tier1 for c in conversations_of("viral")).most_common()

    assert counts[0][1] / sum(n for _, n in counts) == pytest.approx(0.5, abs=0.03)
    assert len(counts) == 101


def test_a_flash_crowd_starts_five_times_as_many_conversations():
    starts = [c.start_s for c in conversations_of("flash")]
    before = sum(60.0 <= s < 120.0 for s in starts) / 60.0
    within = sum(130.0 <= s < 170.0 for s in starts) / 40.0
    after = sum(180.0 <= s < 235.0 for s in starts) / 55.0

    assert within / before == pytest.approx(5.0, rel=0.25)
    assert after / before == pytest.approx(1.0, rel=0.25)


def test_the_peak_of_a_flash_crowd_is_just_about_servable():
    load = offered_load(spec_of("flash"), begin_s=140.0, end_s=180.0)

    assert 0.8 <= load <= 1.05
    assert offered_load(spec_of("flash"), begin_s=60.0, end_s=120.0) <= 0.4


def test_mixed_traffic_is_of_three_kinds():
    turns = Counter(
        "api" if c.tier1_tokens == 6_000 else "agent" if c.tier1_tokens > 10_000 else "chat"
        for c in conversations_of("mixed")
        for _ in c.turns
    )

    assert all(turns[kind] > 500 for kind in ("agent", "chat", "api"))


@pytest.mark.parametrize("name", ["agent", "chat"])
def test_without_sessions_traffic_is_the_same_but_for_openings_that_collide(name):
    named, nameless = conversations_of(name), conversations_of(f"{name}-no-session")
    uses = Counter((c.tier1, c.tier2) for c in nameless)
    colliding = sum(count for count in uses.values() if count > 1)

    assert [c.start_s for c in named] == [c.start_s for c in nameless]
    assert [c.tier1 for c in named] == [c.tier1 for c in nameless]
    assert [len(c.turns) for c in named] == [len(c.turns) for c in nameless]
    assert not any(c.session for c in nameless)
    assert colliding / len(nameless) == pytest.approx(0.15, abs=0.05)


def test_conversations_of_one_opening_share_its_blocks():
    by_key = {}
    for c in conversations_of("agent-no-session"):
        by_key.setdefault(c.tier2, []).append(c)
    alike = next(found for found in by_key.values() if len(found) > 1)
    shared = common(*[first_turn(c).chain for c in alike[:2]])

    assert shared == (alike[0].tier1_tokens + 1_200) // BLOCK_TOKENS


# Traces


def test_traces_are_left_out_where_they_are_not(monkeypatch, tmp_path):
    monkeypatch.setenv("PROMPT_TRACES", str(tmp_path))

    assert not traces_present()
    assert runnable() == GENERATED


def test_traces_are_looked_for_where_the_environment_says(monkeypatch, tmp_path):
    for file in TRACE_FILES.values():
        (tmp_path / file).touch()
    monkeypatch.setenv("PROMPT_TRACES", str(tmp_path))

    assert traces_path() == tmp_path
    assert runnable() == list(SUITE)


@pytest.mark.skipif(not traces_present(), reason="the traces are not here")
@pytest.mark.parametrize(
    ("name", "requests"),
    [("mooncake-conversation", 12_031), ("mooncake-synthetic", 3_993), ("coding-agent", 7_000)],
)
def test_traces_are_sized_for_eight_large_endpoints(name, requests):
    spec = SUITE[name](1)
    counted = sum(1 for c in spec.workload.conversations for _ in c.turns)

    assert requests <= counted <= requests + 600
    assert (spec.endpoints, spec.kv_tokens, spec.prefill_tokens_per_s) == (8, 2_000_000, 7_500.0)
