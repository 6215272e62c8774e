import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.segments import (
    CutError,
    CutList,
    CutObject,
    CutText,
    Segment,
    content_segments,
    json_segment,
    message_segments,
    speaker_of,
    text_segment,
    token_segment,
)


def read(message):
    """Give what is known of a message, as (kind, text) pairs."""
    return [(segment.kind, segment.data.decode()) for segment in known(message)]


def known(message):
    segments = []
    try:
        segments.extend(message_segments(message))
    except CutError:
        segments.append(Segment("cut", b""))
    return segments


def part(**fields):
    return {"role": "user", "content": [fields]}


def call(**fields):
    return {"role": "assistant", "content": None, "tool_calls": [fields]}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param({"role": "user", "content": "hi"}, [("user", "hi")], id="text"),
        pytest.param({"role": "user", "content": None}, [], id="null content"),
        pytest.param({"role": "user"}, [], id="no content"),
        pytest.param({"role": "user", "content": 7}, [("user", "7")], id="a number as content"),
        pytest.param({"content": "hi"}, [("user", "hi")], id="no role is the user's"),
        pytest.param({"role": 5, "content": "hi"}, [("user", "hi")], id="a role that is no text"),
        pytest.param("hi", [("user", "hi")], id="a bare text"),
        pytest.param(5, [("user", "5")], id="a bare number"),
        pytest.param({"role": "user", "content": ["hi"]}, [("user", "hi")], id="bare text part"),
        pytest.param({"role": "user", "content": [5]}, [("user", "5")], id="bare number part"),
        pytest.param(part(type="text", text="hi"), [("user", "hi")], id="OpenAI text part"),
        pytest.param(part(type="input_text", text="hi"), [("user", "hi")], id="responses part"),
        pytest.param(part(text="hi"), [("user", "hi")], id="a part without a type"),
        pytest.param(part(type="refusal", refusal="no"), [("user", "no")], id="refusal"),
        pytest.param(part(type="thinking", thinking="hm"), [("user", "hm")], id="thinking"),
        pytest.param(
            part(type="text", text=[1]), [("user/text", '{"text":[1],"type":"text"}')], id="no text"
        ),
        pytest.param(
            part(type="new", x=1), [("user/new", '{"type":"new","x":1}')], id="a type of tomorrow"
        ),
        pytest.param(part(type=[], text="hi"), [("user", "hi")], id="a type that is no text"),
        pytest.param(
            {"type": {}, "x": 1}, [("tool/", '{"type":{},"x":1}')], id="an item of no known type"
        ),
        pytest.param(
            {"role": "developer", "content": "hi"}, [("system", "hi")], id="developer is system"
        ),
    ],
)
def test_content_is_read(message, expected):
    assert read(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(
            call(id="1", type="function", function={"name": "f", "arguments": '{"a":1}'}),
            id="OpenAI chat",
        ),
        pytest.param(
            {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a":1}'}},
            id="OpenAI chat before tools",
        ),
        pytest.param(
            call(id="2", type="custom", custom={"name": "f", "input": '{"a":1}'}),
            id="OpenAI custom tool",
        ),
        pytest.param(
            {"type": "function_call", "call_id": "3", "name": "f", "arguments": '{"a":1}'},
            id="OpenAI responses",
        ),
        pytest.param(
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "4", "name": "f", "input": {"a": 1}}],
            },
            id="Anthropic",
        ),
    ],
)
def test_a_tool_call_is_its_name_and_arguments_in_every_dialect(message):
    assert read(message) == [("assistant/call", 'f\0{"a":1}')]


@pytest.mark.parametrize("strange", [5, {"id": "1"}, {"name": 5}, {"function": {"name": None}}])
def test_a_strange_tool_call_still_counts(strange):
    message = {"role": "assistant", "content": None, "tool_calls": [strange]}

    assert read(message) == [("assistant/call", json.dumps(strange, separators=(",", ":")))]


def test_tool_calls_follow_the_content():
    message = {**call(name="f", arguments="{}"), "content": "let me see"}

    assert [segment.kind for segment in known(message)] == ["assistant", "assistant/call"]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"role": "tool", "content": "42"}, id="OpenAI chat"),
        pytest.param({"role": "function", "name": "f", "content": "42"}, id="before tools"),
        pytest.param({"type": "function_call_output", "output": "42"}, id="OpenAI responses"),
        pytest.param(part(type="tool_result", tool_use_id="1", content="42"), id="Anthropic"),
        pytest.param(
            part(type="tool_result", content=[{"type": "text", "text": "42"}]), id="as a list"
        ),
    ],
)
def test_a_tool_result_is_its_content_in_every_dialect(message):
    assert read(message) == [("tool", "42")]


@pytest.mark.parametrize(
    ("kind", "field", "shown"),
    [
        ("image_url", "image_url", "image"),
        ("input_image", "image_url", "image"),
        ("image", "source", "image"),
        ("input_audio", "input_audio", "audio"),
        ("video_url", "video_url", "video"),
        ("document", "source", "file"),
    ],
)
def test_binary_content_counts_by_its_hash(kind, field, shown):
    one, same, other = (
        known(part(type=kind, **{field: {"url": "data:" + data * 1000}}, **more))
        for data, more in [("a", {}), ("a", {"cache_control": {"type": "ephemeral"}}), ("b", {})]
    )

    assert one == same != other
    assert one[0].kind == f"user/{shown}"
    assert len(one[0].data) == 32


def test_json_is_blind_to_key_order_but_not_to_values():
    assert json_segment({"a": 1, "b": 2}, "tools") == json_segment({"b": 2, "a": 1}, "tools")
    assert json_segment({"a": 1}, "tools") != json_segment({"a": 2}, "tools")


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_take_four_bytes_each(tokens):
    assert token_segment(tokens) == Segment("tokens", struct.pack(f"<{len(tokens)}I", *tokens))


@pytest.mark.parametrize("tokens", [[1, -1], [2**32], [1, "a"], [1, None]])
def test_what_is_no_token_id_still_counts(tokens):
    assert json.loads(token_segment(tokens).data) == tokens
    with pytest.raises(CutError):
        token_segment(CutList(tokens))


def test_lone_surrogates_are_no_fault():
    assert text_segment("\ud800", "user").data == b"\xed\xa0\x80"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(CutObject(), [], id="nothing yet"),
        pytest.param(CutObject(role=CutText("us")), [], id="in the role"),
        pytest.param(CutObject(role="user"), [], id="before the content"),
        pytest.param(CutObject(content="hi"), [], id="content before its role"),
        pytest.param(CutObject(type=CutText("mess")), [], id="in the type of an item"),
        pytest.param(CutObject(role="user", content=CutText("h")), [("user", "h")], id="in a text"),
        pytest.param(
            CutObject(role="user", content=CutList(["a", CutText("b")])),
            [("user", "a"), ("user", "b")],
            id="in a text part",
        ),
        pytest.param(
            CutObject(role="user", content=CutList(["a", CutObject(text="b")])),
            [("user", "a")],
            id="in a part of unknown type",
        ),
        pytest.param(
            CutObject(role="user", content=CutList([CutObject(type="text", text=CutText("b"))])),
            [("user", "b")],
            id="in the text of a part",
        ),
        pytest.param(
            CutObject(role="user", content=CutList([CutObject(type="image", source=CutObject())])),
            [],
            id="in an image",
        ),
        pytest.param(
            CutObject(role="user", content=CutList([CutObject(type="tool_result")])),
            [],
            id="before a result",
        ),
        pytest.param(
            CutObject(type="function_call_output", output=CutText("4")),
            [("tool", "4")],
            id="in a result",
        ),
        pytest.param(
            CutObject(type="function_call", name=CutText("f")), [], id="in the name of a call"
        ),
        pytest.param(CutObject(type="function_call", name="f"), [], id="before the arguments"),
        pytest.param(
            CutObject(type="function_call", name="f", arguments=CutText('{"a')),
            [("assistant/call", 'f\0{"a')],
            id="in the arguments",
        ),
        pytest.param(
            CutObject(type="tool_use", name="f", input=CutObject(a=1)), [], id="in an input object"
        ),
        pytest.param(
            CutObject(role="assistant", content="a", tool_calls=CutList([5, CutObject()])),
            [("assistant", "a"), ("assistant/call", "5")],
            id="in a later call",
        ),
    ],
)
def test_what_lies_at_the_cut_is_read_as_far_as_it_is_certain(message, expected):
    assert read(message) == [*expected, ("cut", "")]


def test_only_a_text_that_may_go_on_is_incomplete():
    assert [s.complete for s in known(CutObject(role="user", content=CutList(["a"])))] == [1, 1]
    assert not known(CutObject(role="user", content=CutText("a")))[0].complete


def test_roles_have_one_name_each():
    assert [speaker_of({"role": role}) for role in ("developer", "ipython", "assistant")] == [
        "system",
        "tool",
        "assistant",
    ]
    assert speaker_of("no message") == "user"


@given(st.text())
def test_a_text_equals_its_one_part_list(text):
    parts = [{"type": "text", "text": text}]

    assert list(content_segments(text, "user")) == list(content_segments(parts, "user"))
