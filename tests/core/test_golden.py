"""Each golden request is known by the same hashes in every release, however it arrives."""

import json
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.intake import IntakeSettings, identify
from extproc.core.phases import (
    BodyMode,
    Continue,
    EchoBody,
    Opening,
    RequestBody,
    RequestHeaders,
    StreamSettings,
)
from extproc.core.stream import Stream

FOLDER = Path(__file__).parent.parent / "golden"
UPDATE = runpy.run_path(str(FOLDER / "update.py"))
CASES = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}
# A cut body whose tools or images come behind its turns has not shown them yet.
IN_ORDER = sorted(CASES.keys() - {"chat-turn-2", "generate-image", "responses-items"})
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def decide(case, bodies, mode):
    """Send a request through a stream in these parts; give the decision as golden files do."""
    stream = Stream(UPDATE["new_router"](), IntakeSettings(), StreamSettings())
    headers = {":method": "POST", ":path": case["path"]} | case["headers"]
    opening = Opening(request_mode=mode)
    events = [RequestHeaders(headers=headers, opening=opening)]
    events += [RequestBody(body=b, end_of_stream=n == len(bodies)) for n, b in enumerate(bodies, 1)]
    actions = [action for event in events for action in stream.receive(event, 0.0)]
    [made] = [a.decision for a in actions if isinstance(a, Continue | EchoBody) and a.decision]
    shown = {"endpoints": list(made.endpoints), "reason": made.reason}
    return shown, made.prompt_tokens, b"".join(a.body for a in actions if isinstance(a, EchoBody))


@each_case
def test_a_golden_request_keeps_its_hashes_and_its_decision(case):
    assert UPDATE["outcome"](case) == case["outcome"]


def test_golden_requests_of_one_conversation_share_its_chain_and_part_where_they_differ():
    first, second = (CASES[name]["outcome"] for name in ("chat-turn-1", "chat-turn-2"))
    chains = first["chains"][0], second["chains"][0]

    assert chains[0] == chains[1][: len(chains[0])]
    assert [first[key] for key in ("tier1", "tier2")] == [second[key] for key in ("tier1", "tier2")]


@each_case
@pytest.mark.parametrize(
    ("mode", "size"),
    [
        pytest.param(BodyMode.BUFFERED, 1 << 20, id="whole and buffered"),
        pytest.param(BodyMode.FULL_DUPLEX_STREAMED, 1 << 20, id="whole and streamed"),
        pytest.param(BodyMode.FULL_DUPLEX_STREAMED, 1, id="byte by byte"),
    ],
)
def test_a_golden_request_is_decided_the_same_however_it_arrives(case, mode, size):
    body = case["body"].encode()
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    shown, tokens, echoed = decide(case, parts, mode)

    assert shown == case["outcome"]["decision"]
    assert tokens == case["outcome"]["prompt_tokens"]
    assert echoed == (body if mode is BodyMode.FULL_DUPLEX_STREAMED else b"")


@settings(max_examples=60)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_a_golden_request_split_at_random_is_decided_the_same(name, data):
    case = CASES[name]
    body = case["body"].encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    shown, _, echoed = decide(case, parts, BodyMode.FULL_DUPLEX_STREAMED)

    assert shown == case["outcome"]["decision"]
    assert echoed == body


@given(st.sampled_from(IN_ORDER), st.data())
def test_a_golden_request_cut_anywhere_in_prompt_order_keeps_the_blocks_before_the_cut(name, data):
    case = CASES[name]
    body = case["body"].encode()
    shown = body[: data.draw(st.integers(0, len(body)))]
    known = identify(
        case["path"], case["headers"], shown, complete=False, settings=IntakeSettings()
    )

    for cut, whole in zip(known.chains if known else (), case["outcome"]["chains"], strict=False):
        assert [f"{block:016x}" for block in cut] == whole[: len(cut)]
