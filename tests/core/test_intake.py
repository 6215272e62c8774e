"""What is not in the hashes: lengths, keys named by the client, bodies that can't be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.blocks import canonical
from extproc.core.errors import UnreadableBodyError
from extproc.core.intake import IntakeSettings, identify, read_request
from extproc.core.prompt import extract_prompt

CHAT = "/v1/chat/completions"
TOOLS = [{"name": f"tool {n}", "description": "d" * 300} for n in range(9)]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where do rivers begin? " * 30},
    {"role": "assistant", "content": "In springs. " * 30},
]


def written(body):
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def request(body, path=CHAT, *, headers=None, complete=True, subset=None, **settings):
    return read_request(
        path,
        headers or {},
        written(body),
        complete=complete,
        subset=subset,
        settings=IntakeSettings(**settings),
    )


def chat(**more):
    return {"model": "m", "messages": TURNS, **more}


@given(st.binary(max_size=40), st.booleans(), st.text(max_size=8))
def test_any_request_is_read(body, complete, declared):
    read = request(body, headers={"content-length": declared}, complete=complete)

    assert read.prompt_tokens >= 0


@pytest.mark.parametrize("body", [b"", b"no json", b'{"x":1}', b"--boundary\r\n"])
def test_what_is_no_prompt_is_known_by_its_length_and_session(body):
    read = request(body, headers={"content-length": "4000", "x-session-id": "s"})

    assert not read.readable
    assert read.chains == ()
    assert read.prompt_tokens == 1000
    assert read.session
    assert read.tier2 == request(b"other", headers={"x-session-id": "s"}).tier2 != 0
    assert request(body).tier2 == 0


def test_what_is_no_prompt_is_refused_where_settings_say_so():
    with pytest.raises(UnreadableBodyError):
        request(b"no json", refuse_unreadable=True)
    assert not request(b"", refuse_unreadable=True).readable
    assert request(chat(), refuse_unreadable=True).readable


def test_a_body_cut_before_its_prompt_tells_only_its_session():
    blank = b'{"model":"m","metadata":{"session_id":"s"},"stop":["x"'
    anonymous = b'{"model":"m","stop":["x"'
    cut = request(blank, complete=False, refuse_unreadable=True)

    assert cut.readable
    assert cut.session
    assert not request(anonymous, complete=False, refuse_unreadable=True).readable


def test_the_subset_hint_is_passed_on():
    assert request(chat(), subset=frozenset({"a"})).subset == {"a"}
    assert request(b"", subset=frozenset()).subset == frozenset()


@pytest.mark.parametrize("declared", ["", "x", "-5", "٣", "3", "9" * 40, "1e9"])
def test_a_declared_length_that_can_not_be_is_ignored(declared):
    whole = written(chat())
    plain = request(whole[:-9], complete=False)

    assert request(whole[:-9], complete=False, headers={"content-length": declared}) == plain


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_the_length_of_a_cut_prompt_is_judged_by_that_of_the_body(share):
    turns = [{"role": "user", "content": "some words " * 20} for _ in range(200)]
    whole = written({"model": "m", "messages": turns})
    length = request(whole).prompt_tokens
    headers = {"content-length": str(len(whole))}
    cut = request(whole[: int(len(whole) * share)], headers=headers, complete=False)

    assert cut.prompt_tokens == pytest.approx(length, rel=0.05)


def test_turns_sent_before_cut_tools_count_for_the_length():
    cut = written(chat(tools=TOOLS))[:-400]

    assert request(cut, complete=False).prompt_tokens * 4 > len(cut) * 0.8


def test_prompts_beyond_the_ones_read_count_for_the_length():
    few, many = ({"prompt": ["word " * 10] * count} for count in (100, 1000))
    path = "/v1/completions"

    tokens = request(few, path).prompt_tokens

    assert request(many, path).prompt_tokens == pytest.approx(10 * tokens, rel=0.15)
    assert len(request(many, path).chains) == 128


def test_keys_stay_the_same_wherever_instructions_behind_the_turns_are_cut():
    """Else a growing body would change the keys of its conversation at every turn."""
    whole = written(chat(tools=TOOLS))
    start = whole.index(b'"tools"')
    cuts = [request(whole[:size], complete=False) for size in range(start, len(whole) - 2, 97)]

    assert len({(cut.tier1, cut.tier2) for cut in cuts}) == 1
    assert request(whole).tier1 != cuts[0].tier1


def test_conversations_differ_where_their_instructions_are_cut():
    other = [TURNS[0], {"role": "user", "content": "Where do they end?"}]
    one, another = (
        request(written({"model": "m", "messages": turns, "tools": TOOLS})[:-50], complete=False)
        for turns in (TURNS, other)
    )

    assert one.tier1 == another.tier1
    assert one.tier2 != another.tier2


def test_the_first_tier_is_the_one_the_client_names():
    settings = {"tier1_header": "x-task", "tier1_field": "task.name"}
    by_header = request(chat(), headers={"x-task": "t"}, **settings)
    by_field = request({**chat(), "task": {"name": "t"}}, **settings)
    bare = {"model": "m", "messages": TURNS[1:]}

    assert by_header.tier1 == by_field.tier1 != request(chat(), **settings).tier1
    assert request(bare, headers={"x-task": "t"}, **settings).tier1 == by_header.tier1
    assert request(chat(), headers={"x-task": " "}, **settings).tier1 == request(chat()).tier1
    assert request(chat(), headers={"x-task": "t"}).tier1 == request(chat()).tier1


def test_the_default_model_stands_in_for_an_unknown_one():
    named, unnamed = chat(), {"messages": TURNS}

    assert request(unnamed, default_model="m").chains == request(named).chains
    assert request(unnamed).namespace != request(named).namespace


def test_a_person_parts_conversations_that_open_alike_but_not_their_blocks():
    one, other = (request(chat(user=user)) for user in "ab")

    assert one.tier2 != other.tier2
    assert (one.tier1, one.chains) == (other.tier1, other.chains)


def test_the_opening_of_a_conversation_counts_to_32_kib_and_of_a_text_to_2():
    def second_tier(length, path, make):
        one, other = (request(make("x" * length + tail), path).tier2 for tail in "ab")
        return one != other

    def turn(text):
        return {"messages": [{"role": "user", "content": text}]}

    def plain(text):
        return {"prompt": text}

    assert second_tier(32_000, CHAT, turn)
    assert not second_tier(33_000, CHAT, turn)
    assert second_tier(2_000, "/v1/completions", plain)
    assert not second_tier(2_100, "/v1/completions", plain)


def test_a_chain_ends_at_the_cap_and_the_prompt_is_still_counted():
    long = {"prompt": "word " * 2000}
    read = request(long, "/v1/completions", max_prompt_tokens=1024)

    assert len(read.chains[0]) == 1024 // 128
    assert read.prompt_tokens > 2000


def test_lengths_add_up():
    body = written(chat(tools=TOOLS))
    identity = identify(CHAT, {}, body, complete=True, settings=IntakeSettings())
    read = request(body)

    assert read.tier1_tokens == identity.instruction_bytes // 4
    assert read.prompt_tokens == -(-identity.prompt_bytes // 4)
    assert read.block_tokens == 128
    assert len(read.chains[0]) == identity.prompt_bytes // 512


turns = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant"]),
        st.text(max_size=60),
    ),
    max_size=4,
)


@given(turns, turns, turns)
def test_common_leading_messages_are_common_leading_blocks(head, one, other):
    prompt = extract_prompt(CHAT, written({"messages": head}), complete=True)
    least = len(canonical(prompt.sequences[0])) // 16
    a, b = (
        request({"messages": head + tail}, block_bytes=16, complete=True).chains[0]
        for tail in (one, other)
    )
    pairs = list(zip(a, b, strict=False))
    shared = next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))

    assert shared >= least
    assert set(a[shared:]).isdisjoint(b[shared:])


@given(turns, st.data())
def test_a_cut_body_shares_all_its_blocks_with_the_whole(messages, data):
    body = written({"model": "m", "tools": TOOLS[:1], "messages": messages})
    size = data.draw(st.integers(body.index(b"[") + 1, len(body)))
    whole, cut = request(body, block_bytes=16), request(body[:size], block_bytes=16, complete=False)

    for chain in cut.chains:
        assert chain == whole.chains[0][: len(chain)]
    assert cut.namespace == whole.namespace
