from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.simulation.trace_rows import TraceError
from extproc.simulation.traces import read_trace

SHARED = Path(os.environ.get("PROMPT_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


def chat(timestamp=0, tokens=1024, ids=(1, 2), **others):
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": 9, "hash_ids": ids}
    return json.dumps(row | others)


def header(trace=1, **others):
    row = {"trace": trace, "block": 64, "tool": 100, "sys": 60, "models": ["m"], "scope": "local"}
    return json.dumps(row | others)


def helper(number=1, t=0.0, **others):
    return json.dumps({"sub": number, "t": t, "tool": 64, "sys": 64, "ty": "subagent"} | others)


def call(t=0.0, tokens=256, runs=((1, 4),), **others):
    row = {"s": 1, "a": 0, "t": t, "in": tokens, "out": 9, "think": 1.0, "api": 2.0, "h": runs}
    return json.dumps(row | others)


def read(*lines, **options):
    return read_trace(lines, name="test", **options)


def only_turns(*lines):
    (conversation,) = read(header(), *lines).conversations
    return list(conversation.turns)


def common(chain, other):
    return next(
        (n for n, (a, b) in enumerate(zip(chain, other, strict=False)) if a != b),
        min(len(chain), len(other)),
    )


# Mooncake


def test_a_chat_row_is_a_conversation_of_one_turn():
    workload = read(chat(timestamp=1500, tokens=1100, ids=[1, 2, 3]))

    (conversation,) = workload.conversations
    (turn,) = conversation.turns
    assert workload.block_tokens == 512
    assert conversation.start_s == 1.5
    assert (turn.prompt_tokens, turn.output_tokens, len(turn.chain)) == (1100, 9, 2)
    assert (turn.answer_chain, turn.wait_s) == ((), 0.0)
    assert not conversation.session


def test_chat_rows_share_as_many_blocks_as_they_have_leading_ids_in_common():
    workload = read(
        chat(tokens=1536, ids=[1, 2, 3]),
        chat(tokens=1536, ids=[1, 2, 4]),
        chat(tokens=1536, ids=[4, 2, 3]),
    )

    first, second, third = (next(iter(c.turns)).chain for c in workload.conversations)
    assert common(first, second) == 2
    assert not {*first} & {*third}


def test_keys_of_a_chat_row_are_those_of_its_first_block_and_its_first_two():
    workload = read(*[chat(tokens=1536, ids=ids) for ids in ([1, 2, 3], [1, 2, 4], [1, 5, 3])])

    one, alike, other = workload.conversations
    assert one.tier1 == alike.tier1 == other.tier1 == next(iter(one.turns)).chain[0]
    assert one.tier1_tokens == 512
    assert one.tier2 == alike.tier2 != other.tier2


def test_a_prompt_without_a_full_block_has_no_chain_but_a_name():
    workload = read(chat(tokens=100, ids=[1]), chat(tokens=100, ids=[2]))

    one, other = workload.conversations
    assert next(iter(one.turns)).chain == ()
    assert one.tier1_tokens == 0
    assert one.tier2 != other.tier2


def test_rows_of_one_bucket_are_spread_evenly_over_it():
    rows = [chat(timestamp=t) for t in (0, 0, 0, 3000, 3000, 30_000, 30_000)]
    starts = [conversation.start_s for conversation in read(*rows).conversations]

    assert starts == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.5, 30.0, 31.5])


def test_equal_times_are_spread_no_further_than_the_next_time():
    rows = [chat(timestamp=t) for t in (0, 0, 40)]
    starts = [conversation.start_s for conversation in read(*rows).conversations]

    assert starts == pytest.approx([0.0, 0.02, 0.04])


def test_a_limit_takes_the_earliest_chat_rows():
    workload = read(*[chat(timestamp=t) for t in (9000, 3000, 6000)], limit=2)

    assert [conversation.start_s for conversation in workload.conversations] == [3.0, 6.0]


# Coding agents


def test_a_session_is_a_closed_loop_of_its_requests():
    workload = read(
        header(),
        call(t=0.0),
        call(t=30.0, think=12.5, tokens=300, out=7),
        call(t=9000.0, think=8000.0),
    )

    (conversation,) = workload.conversations
    turns = list(conversation.turns)
    assert workload.block_tokens == 128
    assert conversation.session
    assert [turn.wait_s for turn in turns] == [0.0, 12.5, 300.0]
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in turns[:2]] == [(256, 9), (300, 7)]


def test_turns_are_the_same_each_time_they_are_iterated():
    lines = [header(), call(), call(runs=[[1, 2], [9, 4]], tokens=384), call(runs=[[1, 4]])]
    (conversation,) = read(*lines).conversations

    assert list(conversation.turns) == list(conversation.turns)


def test_two_ids_make_a_block_and_an_odd_one_is_left_out():
    first, second = only_turns(
        call(tokens=64 * 5, runs=[[1, 5]]), call(tokens=64 * 6, runs=[[1, 5], [9, 1]])
    )

    assert (len(first.chain), len(second.chain)) == (2, 3)
    assert first.chain == second.chain[:2]


run_lists = st.lists(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), max_size=5), min_size=1, max_size=5
)


@given(run_lists)
def test_prompts_share_exactly_the_blocks_of_their_leading_ids(prompts):
    ids = [[first + i for first, count in runs for i in range(count)] for runs in prompts]
    turns = only_turns(
        *[call(tokens=64 * len(one), runs=runs) for one, runs in zip(ids, prompts, strict=True)]
    )

    for one, turn in zip(ids, turns, strict=True):
        assert len(turn.chain) == len(one) // 2
        for other, another in zip(ids, turns, strict=True):
            blocks = min(len(turn.chain), len(another.chain), common(one, other) // 2)
            assert common(turn.chain, another.chain) == blocks


def test_ids_mean_nothing_outside_their_trace():
    workload = read(header(trace=1), call(), header(trace=2), call())

    one, other = workload.conversations
    assert not {*next(iter(one.turns)).chain} & {*next(iter(other.turns)).chain}
    assert one.tier1 != other.tier1
    assert one.tier2 != other.tier2


def test_an_answer_completes_the_blocks_that_the_next_prompt_repeats_and_it_can_fill():
    first, second = only_turns(
        call(tokens=256, runs=[[1, 4]], out=140), call(tokens=640, runs=[[1, 10]])
    )

    assert first.answer_chain == second.chain[2:3]
    assert second.answer_chain == ()


def test_nothing_of_an_answer_is_repeated_after_a_prompt_that_is_not():
    first, _ = only_turns(
        call(tokens=256, runs=[[1, 4]], out=900), call(tokens=640, runs=[[1, 3], [20, 7]])
    )

    assert first.answer_chain == ()


def test_tier1_is_the_block_that_ends_tools_and_system():
    workload = read(
        header(tool=200, sys=60),
        helper(1, tool=128, sys=0),
        call(a=1, tokens=64 * 4, runs=[[1, 2], [7, 2]]),
        call(tokens=64 * 6, runs=[[1, 6]]),
    )

    by_tokens = {c.tier1_tokens: c for c in workload.conversations}
    main, side = by_tokens[260], by_tokens[128]
    assert main.tier1 == next(iter(main.turns)).chain[1]
    assert side.tier1 == next(iter(side.turns)).chain[0] == next(iter(main.turns)).chain[0]
    assert main.tier2 != side.tier2


def test_a_helper_begins_when_its_session_says_with_long_pauses_shortened():
    workload = read(
        header(),
        call(t=0.0),
        call(t=100.0),
        helper(1, t=5_010.0),
        call(a=1, t=2.0),
        call(t=5_000.0),
    )

    main, side = workload.conversations
    assert side.start_s - main.start_s == pytest.approx(100.0 + 300.0 + 12.0)


def test_sessions_begin_within_the_spread_as_the_seed_draws():
    lines = [line for n in range(40) for line in (header(trace=n), call())]
    starts = [c.start_s for c in read(*lines, spread_s=50.0).conversations]
    again = [c.start_s for c in read(*lines, spread_s=50.0).conversations]
    others = [c.start_s for c in read(*lines, spread_s=50.0, seed=1).conversations]

    assert starts == again == sorted(starts)
    assert starts != others
    assert 0.0 <= starts[0] < 10.0
    assert 40.0 < starts[-1] <= 50.0


def test_a_limit_takes_whole_conversations_until_it_is_reached():
    lines = [line for n in range(9) for line in (header(trace=n), call(), call())]
    whole, cut = read(*lines), read(*lines, limit=5)

    assert sum(len(list(c.turns)) for c in cut.conversations) == 6
    assert [c.start_s for c in cut.conversations] == [c.start_s for c in whole.conversations[:3]]


def test_a_pause_that_was_not_recorded_is_what_the_answer_left_of_the_gap():
    turns = only_turns(
        call(t=0.0, api=2.0, think=None),
        call(t=10.0, api=None, think=None),
        call(t=13.0, think=None),
    )

    assert [turn.wait_s for turn in turns] == [0.0, 8.0, 3.0]


# Malformed rows

BAD = [
    pytest.param([], 1, "empty", id="nothing at all"),
    pytest.param(["{"], 1, "JSON", id="half an object"),
    pytest.param(["[1]"], 1, "object", id="no object"),
    pytest.param(["[" * 100_000], 1, "JSON", id="deep nesting"),
    pytest.param(['{"a": 1}'], 1, "format", id="an unknown format"),
    pytest.param([chat(), "\ud800"], 2, "JSON", id="no UTF-8"),
    pytest.param([chat(), "", "{}"], 3, "input_length", id="a missing field"),
    pytest.param([chat(input_length=-1)], 1, "input_length", id="a negative length"),
    pytest.param([chat(input_length=True)], 1, "input_length", id="a boolean length"),
    pytest.param([chat(input_length=10**12)], 1, "input_length", id="an endless prompt"),
    pytest.param([chat(timestamp="1")], 1, "timestamp", id="a time in quotes"),
    pytest.param([chat().replace(": 0,", ": 1e999,")], 1, "timestamp", id="an infinite time"),
    pytest.param([chat(timestamp=10**400)], 1, "timestamp", id="a time beyond floats"),
    pytest.param([chat(hash_ids=7)], 1, "hash_ids", id="ids that are no list"),
    pytest.param([chat(hash_ids=[1, "2"])], 1, "hash_ids", id="an id in quotes"),
    pytest.param([chat(hash_ids=[1])], 1, "fewer", id="fewer ids than full blocks"),
    pytest.param([header(block=0)], 1, "block", id="blocks of nothing"),
    pytest.param([header(block=100)], 1, "block", id="blocks that do not fit ours"),
    pytest.param([header(tool=None)], 1, "tool", id="a header without tools"),
    pytest.param([header(), call(h=[[1]])], 2, "`h`", id="a run without its count"),
    pytest.param([header(), call(h=[[1, 2]])], 2, "`h`", id="fewer blocks than the prompt"),
    pytest.param([header(), call(h=[[1, 10**6]])], 2, "`h`", id="more blocks than the prompt"),
    pytest.param([header(), call(t=5.0), call(t=4.0)], 3, "`t`", id="time that goes back"),
    pytest.param([header(), helper(t=-1.0)], 2, "`t`", id="a helper before its session"),
]


@pytest.mark.parametrize(("lines", "line", "reason"), BAD)
def test_a_malformed_row_is_named_by_its_line(lines, line, reason):
    with pytest.raises(TraceError, match=reason) as caught:
        read(*lines)

    assert caught.value.line == line
    assert str(caught.value).startswith(f"line {line}: ")


rows = st.dictionaries(
    st.sampled_from([*"sath", "in", "out", "think", "api", "trace", "block", "tool", "sub"]),
    st.none()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
)


@given(st.lists(rows.map(json.dumps), max_size=4), st.sampled_from([header(), chat(), call()]))
def test_any_rows_end_in_a_workload_or_the_error(others, first):
    try:
        workload = read(first, *others)
    except TraceError:
        return
    for conversation in workload.conversations:
        assert all(turn.output_tokens > 0 for turn in conversation.turns)


# The real files: published figures, which hold for the whole of them


@pytest.mark.skipif(not SHARED.is_dir(), reason="the traces are not here")
@pytest.mark.parametrize(
    ("file", "limit", "requests", "reusable"),
    [
        ("conversation_trace", None, 12_031, 0.374),
        ("synthetic_trace", None, 3_993, 0.651),
        ("cc_v8_739", 3_000, 3_000, 0.96),
    ],
)
def test_real_traces_have_their_known_size_and_reuse(file, limit, requests, reusable):
    with gzip.open(SHARED / f"{file}.jsonl.gz", "rt", encoding="utf-8") as lines:
        workload = read_trace(lines, name=file, limit=limit)
    seen, counts = set(), Counter()
    for conversation in workload.conversations:
        for turn in conversation.turns:
            counts["requests"] += 1
            counts["tokens"] += turn.prompt_tokens
            counts["reused"] += workload.block_tokens * sum(h in seen for h in turn.chain)
            seen.update(turn.chain)

    assert requests <= counts["requests"] <= requests * 1.1
    assert counts["reused"] / counts["tokens"] == pytest.approx(reusable, abs=0.015)
