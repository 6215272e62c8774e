import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.prompt import Prompt
from extproc.core.session import (
    MAX_ID_BYTES,
    SESSION_FIELDS,
    SESSION_HEADERS,
    ClientSession,
    SessionRules,
    client_session,
    usable_id,
)

UUID = "0b0e8c3e-92b5-4a7e-a1f5-1c2d3e4f5a6b"


def find(headers=None, fields=None, rules=None):
    prompt = Prompt(model="", salt="", adapter="", sequences=((),), fields=fields or {})
    return client_session(headers or {}, prompt, rules or SessionRules())


def field_value(name):
    return f"user_1_account_2_session_{UUID}" if name == "metadata.user_id" else f"id of {name}"


@pytest.mark.parametrize("first", range(len(SESSION_HEADERS)))
def test_the_first_header_of_the_list_wins(first):
    later = dict.fromkeys(SESSION_HEADERS[first:], "other") | {SESSION_HEADERS[first]: "mine"}

    assert find(later) == ClientSession("mine", SESSION_HEADERS[first])


@pytest.mark.parametrize("first", range(len(SESSION_FIELDS)))
def test_the_first_body_field_of_the_list_wins(first):
    found = find(fields={name: field_value(name) for name in SESSION_FIELDS[first:]})

    assert found.source == SESSION_FIELDS[first]


def test_a_header_beats_a_body_field():
    found = find({SESSION_HEADERS[-1]: "header"}, {SESSION_FIELDS[0]: "body"})

    assert found == ClientSession("header", SESSION_HEADERS[-1])


@pytest.mark.parametrize("unusable", ["", "  \t ", "a" * 257, "é" * 129, "a\x00b", "\ud800"])
def test_an_unusable_id_is_as_if_absent(unusable):
    assert find({"x-session-id": unusable}) is None
    assert find({"x-session-id": unusable}, {"conversation": unusable}) is None
    assert find({"x-session-key": unusable, "x-session-id": "b"}).value == "b"


def test_an_id_is_trimmed_and_may_have_256_bytes():
    assert find({"x-session-id": f" {'a' * 256} "}).value == "a" * 256


@given(st.text())
def test_a_usable_id_is_short_printable_and_stable(text):
    usable = usable_id(text)

    assert len(usable.encode()) <= MAX_ID_BYTES
    assert usable.isprintable()
    assert usable_id(usable) == usable


@pytest.mark.parametrize(
    "name",
    ["x-request-id", "authorization", "cookie", "x-forwarded-for", "traceparent", "rid", "user"],
)
def test_what_names_a_request_a_person_or_a_place_is_no_session(name):
    assert find({name: "a"}, {name: "a"}) is None


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        pytest.param(f"user_ab12_account_cd_session_{UUID}", UUID, id="the older form"),
        pytest.param(json.dumps({"device_id": "d", "session_id": UUID}), UUID, id="JSON"),
        pytest.param("user_ab12", None, id="a user alone"),
        pytest.param("user_a_session_", None, id="an empty session"),
        pytest.param("{}", None, id="JSON without a session"),
        pytest.param('{"session_id": 5}', None, id="JSON with a number for it"),
        pytest.param('{"session_id"', None, id="broken JSON"),
        pytest.param('{"a":' * 100_000, None, id="JSON that nests too deep"),
        pytest.param("", None, id="empty"),
    ],
)
def test_the_session_is_taken_out_of_an_anthropic_user_id(user_id, session):
    found = find(fields={"metadata.user_id": user_id})

    assert (found and found.value) == session


def test_rules_replace_the_lists():
    rules = SessionRules(headers=("x-mine",), fields=("mine",))

    assert find({"x-session-id": "a"}, {"conversation": "b"}, rules) is None
    assert find({"x-mine": "a"}, {"mine": "b"}, rules).value == "a"
    assert find({}, {"mine": "b"}, rules) == ClientSession("b", "mine")


def test_without_a_prompt_headers_still_count():
    assert client_session({"x-session-id": "a"}, None, SessionRules()).value == "a"
    assert client_session({}, None, SessionRules()) is None
