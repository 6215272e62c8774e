from __future__ import annotations

import json
from itertools import count

from extproc.adapters.record import Recorder
from extproc.core.decision import Decision, DecisionId, Reason, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.simulation.traces import read_trace

A = Endpoint("10.0.0.1:8000")
_numbers = count()


def _decision(chain: tuple[int, ...], tier2: int = 7) -> Decision:
    return Decision(
        decision_id=DecisionId(f"r-{next(_numbers)}"),
        request=RoutingRequest(
            chains=(chain,),
            prompt_tokens=len(chain) * 128 + 5,
            tier1=3,
            tier1_tokens=256,
            tier2=tier2,
            session=True,
            model="canary-model",
        ),
        endpoints=(A,),
        policy="tiered",
        reason=Reason.HOME,
        matched_tokens=128,
    )


def _finish(recorder: Recorder, decision: Decision, duration_s: float) -> None:
    recorder.finished(decision.decision_id, served=A, status=200, attempts=1, duration_s=duration_s)


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_holds_only_what_its_conversation_added(tmp_path):
    recorder = Recorder(tmp_path / "r.jsonl", max_bytes=1 << 20, clock=lambda: 5.0)
    for chain in ((1, 2, 3), (1, 2, 3, 4), (1, 9)):
        recorder.routed(_decision(chain))
    recorder.close()
    assert [(row["keep"], len(row["blocks"])) for row in _rows(tmp_path / "r.jsonl")] == [
        (0, 32),
        (3, 12),
        (1, 12),
    ]


def test_what_is_recorded_can_be_replayed(tmp_path):
    times = iter([100.0, 102.0, 105.0, 106.0, 104.0])
    recorder = Recorder(tmp_path / "r.jsonl", max_bytes=1 << 20, clock=lambda: next(times))
    first, second, other = _decision((1, 2)), _decision((1, 2, 3)), _decision((1, 5), tier2=8)
    recorder.routed(first)
    _finish(recorder, first, 2.0)
    recorder.routed(second)
    _finish(recorder, second, 1.0)
    recorder.routed(other)
    recorder.close()
    workload = read_trace((tmp_path / "r.jsonl").read_text().splitlines(), name="own")
    assert workload.block_tokens == 128
    assert [one.start_s for one in workload.conversations] == [0.0, 4.0]
    turns = [
        [(t.chain, t.output_tokens, t.wait_s) for t in c.turns] for c in workload.conversations
    ]
    assert turns == [
        [((1, 2), 160, 0.0), ((1, 2, 3), 80, 3.0)],
        [((1, 5), 400, 0.0)],
    ]
    assert [(c.tier1, c.tier2, c.session) for c in workload.conversations] == [
        (3, 7, True),
        (3, 8, True),
    ]


def test_no_model_and_no_text_is_written(tmp_path):
    recorder = Recorder(tmp_path / "r.jsonl", max_bytes=1 << 20, clock=lambda: 5.0)
    recorder.routed(_decision((1, 2)))
    recorder.close()
    assert "canary" not in (tmp_path / "r.jsonl").read_text()


def test_the_files_stay_within_their_bytes(tmp_path):
    recorder = Recorder(tmp_path / "r.jsonl", max_bytes=20_000, clock=lambda: 5.0)
    for number in range(200):
        recorder.routed(_decision((number,), tier2=number))
    recorder.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["r.jsonl", "r.jsonl.1"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
