"""What a request is known by: which bodies share a chain, which share nothing."""

import json

import pytest

from extproc.core.intake import IntakeSettings, identify

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
COMPLETIONS = "/v1/completions"
SETTINGS = IntakeSettings()
SYSTEM = {"role": "system", "content": "Be brief and exact. " * 100}
QUESTION = {"role": "user", "content": "Where do rivers begin? " * 100}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def known(body, path=CHAT, headers=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return identify(path, headers or {}, data, complete=True, settings=SETTINGS)


def chat(*messages, **more):
    return {"model": "m", "messages": list(messages or (SYSTEM, QUESTION)), **more}


def common_blocks(one, other):
    """Count the leading blocks two chains share, and see that they never meet again."""
    pairs = list(zip(one.chains[0], other.chains[0], strict=False))
    count = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert all(a != b for a, b in pairs[count:])
    return count


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(json.dumps(chat(), indent=4).encode(), id="other spacing"),
        pytest.param(
            json.dumps(dict(reversed(chat().items()))).encode(), id="another order of keys"
        ),
        pytest.param(
            json.dumps(chat(*(dict(reversed(m.items())) for m in (SYSTEM, QUESTION)))).encode(),
            id="another order of keys in messages",
        ),
        pytest.param(
            json.dumps(chat(temperature=0.9, max_tokens=7, stream=True)).encode(),
            id="other sampling",
        ),
        pytest.param(
            json.dumps(chat()).replace("rivers", "\\u0072ivers").encode(), id="escaped letters"
        ),
    ],
)
def test_how_a_prompt_is_written_and_sampled_changes_no_key(same):
    one, other = known(chat()), known(same)

    assert len(one.chains[0]) > 5
    assert one.chains == other.chains
    assert (one.namespace, one.tier1, one.tier2) == (other.namespace, other.tier1, other.tier2)


@pytest.mark.parametrize("tools", [[TOOL], [TOOL, TOOL]], ids=["one more", "two more"])
def test_other_tools_leave_no_common_block(tools):
    one, other = known(chat()), known(chat(tools=tools))

    assert one.namespace == other.namespace
    assert common_blocks(one, other) == 0
    assert one.tier1 != other.tier1


def pictured(image):
    parts = [
        {"type": "text", "text": "Look at this. " * 100},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "What is it? " * 100},
    ]
    return known(chat({"role": "user", "content": parts}))


def test_chains_part_at_another_image():
    one, other = pictured("AAAA" * 200), pictured("AAAB" * 200)
    before_image = len("Look at this. " * 100) // SETTINGS.block_bytes

    assert common_blocks(one, other) == before_image
    assert len(one.chains[0]) > before_image + 1
    assert pictured("AAAA" * 200).chains == one.chains


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"cache_salt": "a"}, {"cache_salt": "b"}, id="salts"),
        pytest.param({}, {"cache_salt": "b"}, id="a salt and none"),
        pytest.param({"model": "m"}, {"model": "n"}, id="models"),
    ],
)
def test_other_namespaces_have_nothing_in_common(one, other):
    first, second = known(chat(**one)), known(chat(**other))

    assert common_blocks(first, second) == 0
    assert first.tier1 != second.tier1
    assert first.tier2 != second.tier2


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_text_and_a_list_of_that_one_text_are_the_same(role):
    text = f"I am the {role}. " * 100
    first = known(chat(SYSTEM, {"role": role, "content": text}, QUESTION))
    parts = [{"type": "text", "text": text}]
    second = known(chat(SYSTEM, {"role": role, "content": parts}, QUESTION))

    assert first.chains == second.chains
    assert first.tier2 == second.tier2


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(
            (
                QUESTION,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "found"},
            ),
            id="null content with tool calls",
        ),
        pytest.param(
            (SYSTEM, QUESTION, {"role": "system", "content": "Now be long."}, QUESTION),
            id="a system message in mid-conversation",
        ),
    ],
)
def test_what_clients_really_send_is_accepted_and_extends_what_was(messages):
    whole, start = known(chat(*messages)), known(chat(*messages[:-1]))

    assert whole.prompt_bytes > start.prompt_bytes
    assert common_blocks(whole, start) == len(start.chains[0])


def test_an_anthropic_system_is_a_text_or_a_list():
    text = "You know the sea. " * 100
    parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    first = known({"model": "m", "system": text, "messages": [QUESTION]}, MESSAGES)
    second = known({"model": "m", "system": parts, "messages": [QUESTION]}, MESSAGES)

    assert first.instruction_bytes > len(text)
    assert (first.chains, first.tier1) == (second.chains, second.tier1)


@pytest.mark.parametrize(
    ("prompt", "chains"),
    [
        pytest.param("word " * 300, 1, id="a text"),
        pytest.param(["word " * 300, "other " * 300, "third " * 300], 3, id="a list of texts"),
        pytest.param(list(range(600)), 1, id="token ids"),
        pytest.param([list(range(600)), list(range(1, 601))], 2, id="lists of token ids"),
    ],
)
def test_every_form_of_prompt_gives_one_chain_each(prompt, chains):
    identity = known({"model": "m", "prompt": prompt}, COMPLETIONS)

    assert len(identity.chains) == chains
    assert all(identity.chains)
    assert len({chain[0] for chain in identity.chains}) == chains


@pytest.mark.parametrize(
    "session_id", ["", "  \t ", "x" * 257], ids=["empty", "white space", "257 bytes"]
)
def test_an_unusable_session_id_is_as_if_absent(session_id):
    given, absent = known(chat(), headers={"x-session-id": session_id}), known(chat())

    assert given.session is None
    assert given.tier2 == absent.tier2


def test_a_session_id_of_256_bytes_counts():
    given, absent = known(chat(), headers={"x-session-id": "x" * 256}), known(chat())

    assert given.session is not None
    assert given.tier2 != absent.tier2


def test_a_session_id_in_a_header_beats_one_in_the_body():
    headers = {"x-session-id": "from the header"}
    both = known(chat(prompt_cache_key="from the body"), headers=headers)
    header, body = known(chat(), headers=headers), known(chat(prompt_cache_key="from the body"))

    assert both.tier2 == header.tier2
    assert both.tier2 != body.tier2
    assert body.session is not None


def test_one_session_keeps_its_key_over_unrelated_prompts():
    headers = {"x-session-id": "s"}
    other = chat({"role": "user", "content": "Something else. " * 100})

    assert known(chat(), headers=headers).tier2 == known(other, headers=headers).tier2
