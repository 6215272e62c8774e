import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.blocks import canonical, seed_from
from extproc.core.errors import UnreadableBodyError
from extproc.core.intake import IntakeSettings, identify, read_request
from extproc.core.prompt import extract_prompt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SMALL = IntakeSettings(block_bytes=16)
SYSTEM = {"role": "system", "content": "be brief " * 20}


def user(content="where do rivers begin?"):
    return {"role": "user", "content": content}


def chat(*turns, **more):
    return {"model": "m", **more, "messages": list(turns or (SYSTEM, user()))}


def data_of(body):
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def know(body, headers=None, path=CHAT, complete=True, rules=SMALL, **changed):
    rules = replace(rules, **changed)
    return identify(path, headers or {}, data_of(body), complete=complete, settings=rules)


def ask(body, headers=None, path=CHAT, complete=True, subset=None, **changed):
    return read_request(
        path,
        headers or {},
        data_of(body),
        complete=complete,
        subset=subset,
        settings=replace(SMALL, **changed),
    )


def shared_blocks(one, other):
    pairs = list(zip(one.chains[0], other.chains[0], strict=False))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))


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
    common = extract_prompt(CHAT, data_of({"messages": head}), complete=True)
    blocks = len(canonical(common.sequences[0])) // SMALL.block_bytes
    a, b = (know({"messages": head + tail}) for tail in (one, other))

    assert shared_blocks(a, b) >= blocks
    assert set(a.chains[0][shared_blocks(a, b) :]).isdisjoint(b.chains[0])


@given(turns.filter(bool), st.data())
def test_a_cut_body_shares_all_its_blocks_with_the_whole(messages, data):
    body = data_of(chat(*messages, tools=[{"name": "f"}]))
    size = data.draw(st.integers(body.index(b'"messages": [') + 13, len(body)))
    whole, cut = know(body), know(body[:size], complete=False)

    assert cut.chains[0] == whole.chains[0][: len(cut.chains[0])]
    assert cut.namespace == whole.namespace


@settings(max_examples=200)
@given(st.binary(max_size=80), st.booleans(), st.text(max_size=5), st.text(max_size=14))
def test_any_request_is_read_without_a_fault(body, complete, path, length):
    for shown in (body, b'{"messages":["' + body, b'{"prompt":[' + body):
        request = ask(shown, {"content-length": length}, path, complete)

        assert request.prompt_tokens >= 0
        assert request.readable or not request.chains


def test_namespaces_part_models_salts_adapters_and_deployments():
    bodies = [
        chat(),
        chat(model="n"),
        chat(cache_salt="a"),
        chat(cache_salt="b"),
        chat(lora_path="a"),
    ]
    known = [know(body) for body in bodies] + [know(chat(), seed=seed_from("another"))]

    for of in (
        lambda k: k.namespace,
        lambda k: k.tier1,
        lambda k: k.tier2,
        lambda k: k.chains[0][0],
    ):
        assert len(set(map(of, known))) == len(known)


def test_the_default_model_counts_where_the_body_names_none():
    unnamed = know({"messages": [user()]}, default_model="m")

    assert unnamed.model == "m"
    assert unnamed.namespace == know(chat(user())).namespace


def test_tier_1_is_tools_and_system_alone():
    one = know(chat(SYSTEM, user("a"), tools=[{"name": "f"}]))

    assert one.tier1 == know(chat(SYSTEM, user("b"), tools=[{"name": "f"}])).tier1
    assert one.tier1 != know(chat(SYSTEM, user("a"), tools=[{"name": "g"}])).tier1
    assert one.tier1 != know(chat(user("a"), tools=[{"name": "f"}])).tier1


def test_a_task_header_or_field_is_the_tier_1_key_when_sent():
    rules = {"tier1_header": "x-task", "tier1_field": "metadata.task"}
    field = {"metadata": {"task": "fix"}}
    by_header = know(chat(user("a")), {"x-task": " fix "}, **rules)
    by_field = know(chat(SYSTEM, user("b"), **field), **rules)
    both = know(chat(**field), {"x-task": "other"}, **rules)

    assert by_header.tier1 == by_field.tier1
    assert both.tier1 == know(chat(), {"x-task": "other"}, **rules).tier1 != by_field.tier1
    for unusable in ("", "  ", "a" * 257):
        assert know(chat(), {"x-task": unusable}, **rules).tier1 == know(chat()).tier1
    assert know(chat(**field), {"x-task": "fix"}).tier1 == know(chat()).tier1  # not asked for


def test_a_session_is_the_tier_2_key_whatever_is_said():
    session = {"x-session-id": "s"}
    known = know(chat(), session)

    assert known.tier2 == know(chat(user("other")), session).tier2
    assert known.tier2 == know({**chat(), "conversation": {"id": "s"}}).tier2
    assert known.tier2 != know(chat(), {"x-session-id": "t"}).tier2
    assert known.tier2 != know(chat(model="n"), session).tier2
    assert known.session.source == "x-session-id"


def test_without_a_session_tier_2_is_how_the_conversation_opens():
    one = know(chat())
    answer = {"role": "assistant", "content": "in springs"}

    assert one.tier2 == know(chat(SYSTEM, user(), answer, user("why?"))).tier2
    assert one.tier2 != know(chat(SYSTEM, user("another question"))).tier2
    assert one.tier2 != know(chat(user())).tier2
    assert one.session is None


def test_a_person_narrows_tier_2_only():
    one, other = know(chat(user="a")), know(chat(user="b"))

    assert one.tier2 != other.tier2
    assert (one.tier1, one.chains) == (other.tier1, other.chains)


@pytest.mark.parametrize(
    ("path", "made", "counted"),
    [
        pytest.param(CHAT, lambda text: chat(user(text)), 32 * 1024, id="the first user turn"),
        pytest.param(COMPLETIONS, lambda text: {"prompt": text}, 2 * 1024, id="a plain text"),
    ],
)
def test_the_opening_counts_up_to_a_limit(path, made, counted):
    same, inside, beyond = (
        know(made("x" * at + "!" + "x" * 40_000), path=path).tier2
        for at in (counted + 10, counted - 100, counted + 20)
    )

    assert same == beyond != inside


def test_a_body_has_one_chain_for_each_prompt():
    texts = ["a" * 100, "b" * 50, ""]
    many = know({"prompt": texts}, path=COMPLETIONS)
    single = [know({"prompt": text}, path=COMPLETIONS).chains[0] for text in texts]

    assert many.chains == tuple(single)


def test_a_chain_is_capped_but_its_tokens_are_counted():
    request = ask(chat(user("x" * 4000)), max_prompt_tokens=64)

    assert len(request.chains[0]) == 16
    assert request.prompt_tokens > 1000
    assert request.block_tokens == 4


def test_lengths_are_of_canonical_text():
    known, request = know(chat(SYSTEM, user("hi"))), ask(chat(SYSTEM, user("hi")))
    head = len(b"\xffsystem\xfe" + b"be brief " * 20 + b"\xfd180")

    assert known.instruction_bytes == head
    assert known.prompt_bytes == head + len(b"\xffuser\xfehi\xfd2")
    assert request.tier1_tokens == head // 4
    assert request.prompt_tokens == -(-known.prompt_bytes // 4)


@pytest.mark.parametrize(
    ("length", "scale"),
    [("4000", 4), ("", 1), ("10", 1), ("-4000", 1), ("4e3", 1), ("٤٠٠٠", 1), ("9" * 13, 1)],
)
def test_the_tokens_of_a_cut_body_are_scaled_up_to_its_declared_length(length, scale):
    cut = data_of(chat(user("x" * 5000)))[:1000]
    seen = know(cut, complete=False).prompt_bytes
    request = ask(cut, {"content-length": length}, complete=False)

    assert request.prompt_tokens == -(-seen * scale // 4)


def test_the_declared_length_of_a_whole_body_is_ignored():
    assert ask(chat(), {"content-length": "999999"}) == ask(chat())


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"{}", b'{"messages": [', b'[{"prompt": "a"}]'])
def test_an_unreadable_body_still_makes_a_request(body):
    headers = {"content-length": "400", "x-session-id": "s"}
    request = ask(body, headers, subset=frozenset({"a"}), default_model="m")

    assert not request.readable
    assert (request.chains, request.tier1, request.prompt_tokens) == ((), 0, 100)
    assert (request.session, request.model, request.subset) == (True, "m", frozenset({"a"}))
    assert request.tier2 == ask(chat(), headers).tier2  # the session keeps its home
    assert ask(body).tier2 == 0
    assert ask(body).prompt_tokens == len(body) // 4


def test_unreadable_bodies_are_refused_where_asked_but_never_empty_ones():
    with pytest.raises(UnreadableBodyError):
        ask(b"{}", refuse_unreadable=True)
    assert not ask(b"", refuse_unreadable=True).readable
    assert ask(chat(), refuse_unreadable=True).readable


def test_a_request_carries_what_is_known():
    known = know(chat(), {"x-session-id": "s"})
    request = ask(chat(), {"x-session-id": "s"}, subset=frozenset())

    assert request.readable
    for name in ("chains", "namespace", "tier1", "tier2", "model"):
        assert getattr(request, name) == getattr(known, name)
    assert (request.session, request.subset) == (True, frozenset())
