import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.partial import parse_object
from extproc.core.segments import is_cut

halves = st.sampled_from([r"\ud83d", r"\uDE00", r"\ud83d\ude00", r"\\ud83d", r"\n", "a", r"\u0061"])
texts = st.lists(halves, max_size=6).map("".join)


def parse(text, *, complete=True):
    return parse_object(text.encode(), complete=complete)


@pytest.mark.parametrize(
    "text", ["", "x", "[]", '"a"', "1", '{"a":', '{"a":"\\x"}', '{"a":"\\ud83d']
)
def test_what_is_no_whole_object_is_none(text):
    assert parse(text) is None


@pytest.mark.parametrize(
    "text", ["", "x", "[1", '"a', '{"a":x', '{"a":"\\x"}', '{"a":"\\ud83d", x']
)
def test_what_begins_no_object_is_none(text):
    assert parse(text, complete=False) is None


@pytest.mark.parametrize(
    ("written", "read"),
    [
        pytest.param(r"a\ud83db", "a\ufffdb", id="a first half"),
        pytest.param(r"a\uDE00b", "a\ufffdb", id="a second half"),
        pytest.param(r"\ude00\ud83d", "\ufffd\ufffd", id="halves in the wrong order"),
        pytest.param(r"\ud83d\ud83d\ude00", "\ufffd\U0001f600", id="a half before a pair"),
        pytest.param(r"\\ud83d\ud83d", "\\ud83d\ufffd", id="an escaped backslash begins none"),
    ],
)
def test_a_half_of_a_surrogate_pair_is_read_as_unknown(written, read):
    assert parse(f'{{"a":"{written}"}}') == {"a": read}


@given(texts)
def test_every_half_is_mended_and_nothing_else(text):
    expected = json.loads(f'"{text}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    got = parse(f'{{"a":"{text}"}}')["a"]

    if "\ufffd" not in expected:
        assert got == expected
    assert got.replace("\ufffd", "") == "".join(
        c for c in json.loads(f'"{text}"') if not "\ud800" <= c <= "\udfff"
    )


@given(texts)
def test_a_body_with_halves_can_be_cut_anywhere(text):
    body = f'{{"a":"{text}","b":"{text}"}}'
    whole = parse(body)
    for size in range(1, len(body) + 1):
        cut = parse(body[:size], complete=False)

        assert all(whole[name].startswith(value) for name, value in cut.items())


def test_what_may_go_on_behind_the_cut_is_marked_and_nothing_else():
    cut = parse('{"a":{"x":["1"]},"b":["1",["2"],{"c":"3', complete=False)
    innermost = cut["b"][2]

    assert cut == {"a": {"x": ["1"]}, "b": ["1", ["2"], {"c": "3"}]}
    assert [is_cut(v) for v in (cut, cut["b"], innermost, innermost["c"])] == [True] * 4
    assert not any(is_cut(v) for v in (cut["a"], cut["a"]["x"], cut["b"][0], cut["b"][1]))


@pytest.mark.parametrize(
    ("text", "known"),
    [
        pytest.param('{"a":12', {}, id="a number may have more digits"),
        pytest.param('{"a":[1,2', {"a": [1]}, id="also in a list"),
        pytest.param('{"a":nul', {}, id="a name half written"),
        pytest.param('{"a":{', {"a": {}}, id="an object that begins"),
        pytest.param('{"a":[', {"a": []}, id="a list that begins"),
        pytest.param('{"a":"1","b', {"a": "1"}, id="a key half written"),
        pytest.param("{", {}, id="nothing yet"),
    ],
)
def test_only_what_is_certain_is_read(text, known):
    assert parse(text, complete=False) == known


def test_of_a_repeated_key_the_last_value_counts():
    assert parse('{"a":1,"a":2}') == {"a": 2}


def test_a_whole_object_has_no_marks():
    whole = parse('{"a":["1"]}')

    assert [type(v) for v in (whole, whole["a"], whole["a"][0])] == [dict, list, str]
