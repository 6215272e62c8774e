from __future__ import annotations

import json

import pytest

from extproc.simulation.trace_rows import TraceError
from extproc.simulation.traces import read_trace


def _routed(**given) -> dict[str, object]:
    return {
        "event": "routed",
        "at": 1.0,
        "id": "r-1",
        "prompt_tokens": 1_000,
        "block_tokens": 128,
        "tier1": "0a",
        "tier1_tokens": 256,
        "tier2": "0b",
        "session": False,
        "keep": 0,
        "blocks": "AQAAAAAAAAA=",
    } | given


def _read(*rows: dict[str, object], **options):
    return read_trace([json.dumps(row) for row in rows], name="own", **options)


def test_a_record_that_begins_in_mid_conversation_keeps_its_sizes():
    one, other = (
        _read(_routed(keep=4, tier2=tier2)).conversations[0].turns[0].chain
        for tier2 in ("0b", "0c")
    )
    assert len(one) == len(other) == 5
    # The instruction prefix of two blocks is shared, what follows is not.
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_overlapping_requests_of_one_key_are_conversations_of_their_own():
    rows = (
        _routed(id="r-1", at=1.0),
        _routed(id="r-2", at=2.0, keep=1, blocks=""),
        {"event": "finished", "at": 9.0, "id": "r-1", "duration_s": 8.0},
    )
    assert [c.start_s for c in _read(*rows).conversations] == [0.0, 1.0]


def test_an_end_without_its_beginning_is_left_out():
    rows = (_routed(), {"event": "finished", "at": 9.0, "id": "r-0", "duration_s": 8.0})
    assert len(_read(*rows).conversations) == 1


def test_limit_counts_decisions():
    rows = [_routed(id=f"r-{n}", at=float(n), tier2=f"{n + 1:x}") for n in range(5)]
    assert len(_read(*rows, limit=2).conversations) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"blocks": "no base64"},
        {"blocks": "AQ=="},
        {"blocks": None},
        {"tier1": "no hash"},
        {"tier2": -1},
        {"keep": 90},
        {"keep": -1},
        {"block_tokens": 0},
        {"at": "soon"},
    ],
)
def test_a_broken_row_is_named_by_its_line(given):
    with pytest.raises(TraceError, match="line 2"):
        _read(_routed(), _routed(**given))
