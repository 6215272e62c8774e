import io
import json

import pytest
from rich.console import Console

from extproc.config.sections import Config
from extproc.core.endpoint import Endpoint
from extproc.explain import (
    EXAMPLE_FLEET,
    RequestFileError,
    Sample,
    explain,
    print_explanation,
    read_sample,
)

A, B = Endpoint.parse("10.0.0.1:8000"), Endpoint.parse("10.0.0.2:8000")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "secret " * 400}]}


def write(folder, content):
    file = folder / "request.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def printed(explanation):
    console = Console(file=io.StringIO(), width=100)
    print_explanation(explanation, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("content", "path"),
    [
        pytest.param(CHAT, "/v1/chat/completions", id="chat"),
        pytest.param({"prompt": "a"}, "/v1/completions", id="completion"),
        pytest.param({"input": "a"}, "/v1/responses", id="responses"),
        pytest.param({"text": "a"}, "/generate", id="generate"),
        pytest.param({"other": "a"}, "/", id="no LLM body"),
        pytest.param([1], "/", id="a list"),
        pytest.param(b"\xff not JSON", "/", id="not JSON"),
    ],
)
def test_a_plain_body_is_taken_byte_for_byte_and_its_path_guessed(tmp_path, content, path):
    file = write(tmp_path, content)

    assert read_sample(file) == Sample(path=path, body=file.read_bytes())
    assert read_sample(file, "/x").path == "/x"


def test_a_request_with_headers_is_unwrapped(tmp_path):
    file = write(tmp_path, {"path": "/v1/messages", "headers": {"X-Session-Id": "s"}, "body": CHAT})
    sample = read_sample(file)

    assert (sample.path, sample.headers) == ("/v1/messages", {"x-session-id": "s"})
    assert json.loads(sample.body) == CHAT


def test_a_body_given_as_text_is_taken_as_it_is(tmp_path):
    assert read_sample(write(tmp_path, {"body": '{"a":  1}'})).body == b'{"a":  1}'


@pytest.mark.parametrize(
    "wrong", [{"headers": [1]}, {"headers": {"a": 1}}, {"path": 1}], ids=["list", "number", "path"]
)
def test_a_wrong_request_file_is_refused(tmp_path, wrong):
    with pytest.raises(RequestFileError, match=r"request\.json: (headers|path): should"):
        read_sample(write(tmp_path, {"body": {}, **wrong}))


def test_a_missing_request_file_is_named(tmp_path):
    with pytest.raises(RequestFileError, match="no such file"):
        read_sample(tmp_path / "none.json")


def test_keys_chain_and_decision_are_shown_and_content_is_not(tmp_path):
    sample = read_sample(write(tmp_path, CHAT))
    explanation = explain(sample, Config(), (A, B))
    text = printed(explanation)

    assert explanation.decision.destination in {A, B}
    assert len(explanation.decision.candidates) == 2
    assert f"{explanation.request.tier2:016x}" in text
    assert "5 blocks of 128 tokens" in text
    assert "recompute" in text
    assert "secret" not in text


def test_a_body_without_a_prompt_is_decided_by_load():
    explanation = explain(Sample(path="/", body=b"{}"), Config(), (A,))

    assert "no prompt was found" in printed(explanation)
    assert explanation.decision.destination == A


def test_without_endpoints_an_example_fleet_is_decided_over(tmp_path):
    explanation = explain(read_sample(write(tmp_path, CHAT)), Config(), ())

    assert explanation.decision.destination in EXAMPLE_FLEET
    assert "example fleet" in printed(explanation)


def test_a_long_conversation_is_shown_by_its_ends(tmp_path):
    turns = [{"role": "user", "content": str(n)} for n in range(100)]
    text = printed(explain(read_sample(write(tmp_path, {"messages": turns})), Config(), ()))

    assert "60 more" in text
