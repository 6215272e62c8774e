from __future__ import annotations

import pytest

from extproc.standin.body import CallError
from extproc.standin.render import render_chat, render_prompts, render_responses

USER = {"role": "user", "content": "Hello"}


def test_the_next_turn_begins_with_the_prompt_and_its_answer():
    (first,) = render_chat({"messages": [USER]})
    answered = [USER, {"role": "assistant", "content": "sun sea "}, USER]
    (second,) = render_chat({"messages": answered})

    assert second.startswith(first + b"sun sea ")


def test_tools_come_before_the_turns_wherever_the_body_has_them():
    tools = [{"type": "function", "function": {"name": "f"}}]

    assert render_chat({"messages": [USER], "tools": tools}) == render_chat(
        {"tools": tools, "messages": [USER]}
    )
    assert render_chat({"messages": [USER], "tools": tools})[0].startswith(b"<tools>")


def test_a_system_message_reads_the_same_in_chat_messages_and_responses():
    chat = render_chat({"messages": [{"role": "system", "content": "Be brief"}, USER]})

    assert chat == render_chat({"system": "Be brief", "messages": [USER]})
    assert chat == render_responses({"instructions": "Be brief", "input": "Hello"})


def test_parts_of_text_are_the_text():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]

    assert b"user\nHel\nlo<" in render_chat({"messages": [{"role": "user", "content": parts}]})[0]


def test_null_content_and_lone_surrogates_are_rendered():
    assert render_chat({"messages": [{"role": "assistant", "content": None}]})
    assert render_chat({"messages": [{"role": "user", "content": "\ud800"}]})


@pytest.mark.parametrize(
    ("prompt", "sizes"),
    [
        pytest.param("abcd", [4], id="text"),
        pytest.param(["ab", "abc"], [2, 3], id="two texts are two prompts"),
        pytest.param([1, 2, 3], [12], id="a token id is one token"),
        pytest.param([[1], [2, 3]], [4, 8], id="two lists of ids are two prompts"),
    ],
)
def test_every_form_of_a_plain_prompt_is_read(prompt, sizes):
    assert list(map(len, render_prompts(prompt))) == sizes


@pytest.mark.parametrize("prompt", [None, [], {}, 7, [-1], [1, "a", None], [2**40], [[True]]])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(CallError):
        render_prompts(prompt)
