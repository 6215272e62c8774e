import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core import prompt as prompts
from extproc.core.blocks import canonical
from extproc.core.prompt import extract_prompt
from extproc.core.session import SESSION_FIELDS

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATHS = [CHAT, COMPLETIONS, RESPONSES, "/v1/embeddings", "/v1/messages", "/generate", "/tokenize"]
HI = {"role": "user", "content": "hi"}


def extract(body, path=CHAT, *, complete=True, fields=()):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return extract_prompt(path, data, complete=complete, fields=fields)


def read(body, path=CHAT, *, complete=True):
    """Give each sequence as (kind, text) pairs."""
    prompt = extract(body, path, complete=complete)
    return [[(s.kind, s.data.decode("latin-1")) for s in seq] for seq in prompt.sequences]


def texts(prompt):
    return [canonical(sequence) for sequence in prompt.sequences]


words = st.text(max_size=12)
parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, words),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, words),
    st.builds(lambda text: {"type": "tool_result", "content": text}, words),
    st.builds(lambda name, x: {"type": "tool_use", "name": name, "input": {"x": x}}, words, words),
)
calls = st.builds(
    lambda name, arguments: {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    words,
    words,
)
messages = st.builds(
    lambda role, content, more: {"role": role, "content": content} | more,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.none() | words | st.lists(parts, max_size=2),
    st.just({}) | st.lists(calls, max_size=2).map(lambda made: {"tool_calls": made}),
)
instructions = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "tools": st.lists(st.dictionaries(words, words, max_size=2), max_size=2),
        "system": words | st.lists(parts, max_size=2),
    },
)
chats = st.builds(
    lambda head, turns, tail: head | {"messages": turns} | tail,
    instructions,
    st.lists(messages, max_size=3),
    st.fixed_dictionaries({}, optional={"temperature": st.floats(0, 2), "stream": st.booleans()}),
)
completions = st.builds(
    lambda prompt: {"model": "m", "prompt": prompt, "n": 12},
    words
    | st.lists(words, min_size=1, max_size=3)
    | st.lists(st.integers(0, 300_000), min_size=1, max_size=4)
    | st.lists(st.lists(st.integers(0, 300_000), max_size=3), min_size=1, max_size=3),
)
written = st.builds(
    lambda body, escaped: json.dumps(body, ensure_ascii=escaped).encode(),
    chats | completions,
    st.booleans(),
)

NAMES = ["messages", "tools", "functions", "system", "role", "content", "type", "text", "prompt"]
NAMES += ["input", "input_ids", "instructions", "tool_calls", "function", "name", "arguments"]
NAMES += ["tool_result", "tool_use", "image_url", "function_call", "model", "user", "custom"]
odd_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(NAMES)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=2), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(st.sampled_from(PATHS), st.binary(max_size=60), st.booleans())
def test_any_bytes_are_survived(path, body, complete):
    extract(body, path, complete=complete)
    extract(b'{"messages":[' + body, path, complete=complete)


@settings(max_examples=150)
@given(
    st.sampled_from(PATHS),
    st.dictionaries(st.sampled_from(NAMES), odd_json, min_size=1, max_size=4),
    st.integers(0, 200),
)
def test_any_json_is_survived_whole_and_cut(path, body, size):
    data = json.dumps(body).encode()

    for complete, shown in [(True, data), (False, data), (False, data[:size])]:
        prompt = extract(shown, path, complete=complete, fields=SESSION_FIELDS)
        assert prompt is None or texts(prompt)


@pytest.mark.parametrize("opened", ['[{"type":"tool_result","content":', "[", '{"a":', '["'])
@pytest.mark.parametrize("depth", [40, 150, 100_000])
def test_any_depth_is_survived(opened, depth):
    body = ('{"messages":' + opened * depth).encode()

    for complete in (True, False):
        extract(body, complete=complete)


@settings(max_examples=25, deadline=None)
@given(written)
def test_a_cut_body_is_a_prefix_of_the_whole_wherever_it_is_cut(body):
    whole, now = texts(extract(body, complete=True)), []
    for size in range(len(body) + 1):
        prompt = extract(body[:size], complete=False)
        now = texts(prompt) if prompt else []
        assert len(now) <= len(whole)
        assert all(all_of.startswith(part) for part, all_of in zip(now, whole, strict=False))

    assert len(now) == len(whole)
    assert sum(map(len, now)) >= 0.5 * sum(map(len, whole)) - 60  # the cut costs a tail only


def test_a_cut_inside_a_character_or_an_escape_loses_no_more_than_it():
    body = json.dumps({"messages": [{"role": "user", "content": "a€b"}]}, ensure_ascii=False)
    for data, sign in [
        (body.encode(), "€".encode()),
        (body.replace("€", r"\u20ac").encode(), b"\\"),
    ]:
        at = data.index(sign)

        assert read(data[: at + 1], complete=False) == [[("user", "a")]]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        pytest.param(
            CHAT,
            {"messages": [{"role": "system", "content": "s"}, HI], "tools": [{"a": 1}]},
            [[("tools", '{"a":1}'), ("system", "s"), ("user", "hi")]],
            id="chat: tools first",
        ),
        pytest.param(
            CHAT,
            {"messages": [HI], "functions": [{"a": 1}]},
            [[("tools", '{"a":1}'), ("user", "hi")]],
            id="chat before tools",
        ),
        pytest.param(
            CHAT,
            {"messages": [HI, {"role": "system", "content": "s"}, HI]},
            [[("user", "hi"), ("system", "s"), ("user", "hi")]],
            id="chat: system in mid-conversation",
        ),
        pytest.param(
            "/v1/messages",
            {"messages": [HI], "system": "s", "tools": {"a": 1}},
            [[("tools", '{"a":1}'), ("system", "s"), ("user", "hi")]],
            id="messages: system is a text",
        ),
        pytest.param(
            "/v1/messages",
            {"messages": [HI], "system": [{"type": "text", "text": "s", "cache_control": {}}]},
            [[("system", "s"), ("user", "hi")]],
            id="messages: system is a list",
        ),
        pytest.param(COMPLETIONS, {"prompt": "hi"}, [[("text", "hi")]], id="a text"),
        pytest.param(
            COMPLETIONS, {"prompt": ["a", "b"]}, [[("text", "a")], [("text", "b")]], id="texts"
        ),
        pytest.param(
            COMPLETIONS, {"prompt": [1, 2]}, [[("tokens", "\1\0\0\0\2\0\0\0")]], id="token ids"
        ),
        pytest.param(
            COMPLETIONS,
            {"prompt": [[1], [2]]},
            [[("tokens", "\1\0\0\0")], [("tokens", "\2\0\0\0")]],
            id="lists of token ids",
        ),
        pytest.param(COMPLETIONS, {"prompt": [{"a": 1}]}, [[("text", '{"a":1}')]], id="odd prompt"),
        pytest.param(RESPONSES, {"input": "hi"}, [[("user", "hi")]], id="responses: a text"),
        pytest.param(
            RESPONSES,
            {
                "input": [
                    {
                        "type": "message",
                        "role": "user",
                        "content": [{"type": "input_text", "text": "hi"}],
                    },
                    {"type": "function_call", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "output": "42"},
                ],
                "instructions": "s",
            },
            [[("system", "s"), ("user", "hi"), ("assistant/call", "f\0{}"), ("tool", "42")]],
            id="responses: items",
        ),
        pytest.param(
            "/other",
            {"input": "hi", "instructions": "s"},
            [[("system", "s"), ("user", "hi")]],
            id="responses behind another path",
        ),
        pytest.param("/v1/embeddings", {"input": "hi"}, [[("text", "hi")]], id="embeddings"),
        pytest.param(
            "/v1/embeddings?x=1",
            {"input": ["a", "b"]},
            [[("text", "a")], [("text", "b")]],
            id="embeddings of texts",
        ),
        pytest.param("/generate", {"text": "hi"}, [[("text", "hi")]], id="SGLang: a text"),
        pytest.param(
            "/generate/", {"input_ids": [1]}, [[("tokens", "\1\0\0\0")]], id="SGLang: ids"
        ),
        pytest.param(
            "/other",
            {"text": "hi", "sampling_params": {}},
            [[("text", "hi")]],
            id="SGLang behind another path",
        ),
        pytest.param("/tokenize", {"prompt": "hi"}, [[("text", "hi")]], id="vLLM tokenize, a text"),
        pytest.param("/tokenize", {"messages": [HI]}, [[("user", "hi")]], id="vLLM tokenize, chat"),
        pytest.param(CHAT, {"messages": []}, [[]], id="no messages"),
        pytest.param(
            CHAT,
            b'{"messages":[{"role":"user","content":"a","content":"b"}]}',
            [[("user", "b")]],
            id="a repeated key: the last counts",
        ),
    ],
)
def test_every_kind_of_body_is_read(path, body, expected):
    assert read(body, path) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b""),
        (CHAT, b"not json"),
        (CHAT, b"\xff\xfe"),
        (CHAT, b'{"messages": [{"role": "user"'),
        (CHAT, []),
        (CHAT, {}),
        (CHAT, {"messages": "hi"}),
        (CHAT, {"input": "hi"}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
        (RESPONSES, {"input": 5}),
        ("/v1/embeddings", {"input": 5}),
        ("/generate", {"text": None}),
    ],
)
def test_what_is_no_llm_body_gives_no_prompt(path, body):
    assert extract(body, path) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            b'{"tools":[{"a":1},{"b":2', [[("tools", '{"a":1}')]], id="before the messages"
        ),
        pytest.param(
            b'{"tools":[{"a":1}],"system":"s","messages":[',
            [[("tools", '{"a":1}'), ("system", "s")]],
            id="before the first message",
        ),
        pytest.param(
            b'{"messages":[],"tools":[{"a":1},{"b":2', [[("tools", '{"a":1}')]], id="in the tools"
        ),
        pytest.param(b'{"messages":[],"tools":[', [[]], id="before the first tool"),
        pytest.param(b'{"messages":["a"],"system":"s', [[("system", "s")]], id="in the system"),
        pytest.param(b'{"prompt":["a","b', [[("text", "a")], [("text", "b")]], id="in a prompt"),
        pytest.param(b'{"prompt":[1,25', [[("tokens", "\1\0\0\0")]], id="in a token id"),
        pytest.param(b'{"prompt":[1,"a', [[]], id="in what is no token id"),
        pytest.param(b'{"prompt":["a",{"b":1', [[("text", "a")], []], id="in an odd prompt"),
        pytest.param(
            b'{"prompt":[[1],[', [[("tokens", "\1\0\0\0")], [("tokens", "")]], id="in ids"
        ),
    ],
)
def test_a_cut_body_is_read_as_far_as_it_is_certain(body, expected):
    prompt = extract(body, complete=False)

    assert (prompt and read(body, complete=False)) == expected


def test_model_salt_and_adapter_are_told():
    prompt = extract({"messages": [HI], "model": "m", "cache_salt": "s", "lora_path": "l"})

    assert (prompt.model, prompt.salt, prompt.adapter) == ("m", "s", "l")


def test_what_is_no_text_or_may_go_on_is_unknown():
    odd = extract({"messages": [HI], "model": 5, "lora_path": ["l"]})
    cut = extract(b'{"messages":[],"model":"gp', complete=False)

    assert odd.model == odd.salt == odd.adapter == cut.model == ""


@pytest.mark.parametrize(
    ("more", "person"),
    [({"user": "u", "safety_identifier": "s"}, "u"), ({"safety_identifier": "s"}, "s"), ({}, "")],
)
def test_who_asks_is_told(more, person):
    assert extract({"messages": [HI], **more}).person == person


def test_asked_for_fields_are_kept_when_they_are_texts():
    body = {"messages": [HI], "a": {"b": "1"}, "c": 2, "d": "", "e": "5", "f": "6"}
    prompt = extract(body, fields=("a.b", "a", "c", "d", "e", "e.x", "none"))

    assert prompt.fields == {"a.b": "1", "e": "5"}


@pytest.mark.parametrize(
    ("turns", "leading", "opening"),
    [
        pytest.param([], 1, 1, id="no turn"),
        pytest.param(["system"], 2, 2, id="instructions alone"),
        pytest.param(["user"], 1, 2, id="a user alone"),
        pytest.param(["system", "user", "assistant", "user"], 2, 3, id="a conversation"),
        pytest.param(["system", "assistant", "user", "user"], 2, 4, id="the assistant opens"),
        pytest.param(["user", "system", "user"], 1, 2, id="later system messages are turns"),
        pytest.param(["system", "assistant"], 2, 3, id="no user"),
    ],
)
def test_instructions_and_opening_are_found(turns, leading, opening):
    body = {"tools": [{}], "messages": [{"role": role, "content": "x"} for role in turns]}
    prompt = extract(body)

    assert (prompt.instructions, prompt.opening) == (leading, opening)


def test_a_plain_text_has_neither():
    prompt = extract({"prompt": "hi"})

    assert not prompt.conversational
    assert (prompt.instructions, prompt.opening) == (0, 0)


def test_the_work_for_one_body_is_bounded(monkeypatch):
    monkeypatch.setattr(prompts, "MAX_SEGMENTS", 5)
    monkeypatch.setattr(prompts, "MAX_SEQUENCES", 2)
    many = [{"role": "user", "content": "x"}] * 9
    in_one = [{"role": "user", "content": ["x"] * 9}]

    for body in (
        {"messages": many},
        {"messages": in_one},
        {"tools": [{}] * 9, "system": "s", "messages": many},
        {"system": ["s"] * 9, "messages": many},
    ):
        assert len(extract(body).sequences[0]) == 5
    assert len(extract({"prompt": ["a", "b", "c"]}).sequences) == 2


def common_prefix(path, one, other):
    """Tell where two bodies part, by the kinds of the segments they share."""
    pairs = zip(extract(one, path).sequences[0], extract(other, path).sequences[0], strict=False)
    kinds = []
    for mine, theirs in pairs:
        if mine != theirs:
            break
        kinds.append(mine.kind)
    return kinds


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"previous_response_id": "r1"}, {"previous_response_id": "r2"}),
        ({"previous_response_id": "r1"}, {}),
        ({"conversation": "c1"}, {"conversation": {"id": "c2"}}),
    ],
)
def test_what_a_response_continues_comes_between_instructions_and_input(one, other):
    body = {"instructions": "s", "input": "go on"}

    assert common_prefix(RESPONSES, body | one, body | other) == ["system"]


@pytest.mark.parametrize("name", ["image_data", "video_data", "audio_data"])
def test_media_of_sglang_come_before_the_text(name):
    one, other = ({"text": "what is it?", name: data} for data in ("aaaa", ["bbbb"]))

    assert common_prefix("/generate", one, other) == []
    assert [s.kind for s in extract(one, "/generate").sequences[0]] == [name, "text"]


def test_a_text_is_not_read_where_the_media_before_it_are_cut():
    prompt = extract(b'{"text":"a","image_data":"aaaa', "/generate", complete=False)

    assert prompt.sequences == ()


@pytest.mark.parametrize(
    ("shown", "kinds"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"system": "s"}, [], id="system without tools, which lead"),
        pytest.param({"tools": [{"a": 1}]}, ["tools"], id="tools"),
        pytest.param({"tools": [{"a": 1}], "system": "s"}, ["tools", "system"], id="both"),
        pytest.param(
            {"tools": [{"a": 1}], "instructions": "s"}, ["tools", "system"], id="both, responses"
        ),
    ],
)
def test_before_the_turns_only_what_is_certain_to_lead_is_read(shown, kinds):
    data = json.dumps({"model": "m", **shown, "stop": "x"}).encode()[:-2]

    assert [s.kind for s in extract(data, complete=False).sequences[0]] == kinds


def test_a_cut_body_of_another_path_without_tools_is_no_prompt():
    assert extract(b'{"model":"m","stop":"x', "/v1/files", complete=False) is None


def test_an_extra_key_separates_like_a_salt():
    salts = [
        extract({"messages": [HI], **more}).salt
        for more in (
            {},
            {"extra_key": "x"},
            {"cache_salt": "s"},
            {"cache_salt": "s", "extra_key": "x"},
        )
    ]

    assert len(set(salts)) == 4


def test_a_stored_prompt_of_a_response_is_no_completion():
    assert read({"prompt": {"id": "p"}, "input": "hi"}, RESPONSES) == [[("user", "hi")]]
    assert read({"input_ids": None, "text": "hi"}, "/generate") == [[("text", "hi")]]


def test_a_cache_mark_on_a_tool_changes_nothing():
    marked, plain = ({"name": "f"} | mark for mark in ({"cache_control": {"type": "x"}}, {}))

    assert extract({"messages": [], "tools": [marked]}) == extract(
        {"messages": [], "tools": [plain]}
    )


def test_keys_are_made_of_the_turns_where_instructions_are_cut():
    turns = [{"role": "system", "content": "s"}, HI, {"role": "assistant", "content": "a"}]
    data = json.dumps({"messages": turns, "tools": [{"a": 1}, {"b": 2}]}).encode()[:-3]
    prompt = extract(data, complete=False)

    assert [s.kind for s in prompt.sequences[0]] == ["tools"]
    assert [s.kind for s in prompt.head] == ["system", "user"]
    assert (prompt.instructions, prompt.opening) == (1, 2)
    assert prompt.behind_bytes == len("shia")
