import gzip
import json
import subprocess
import sys

import pytest

from extproc.cli import main
from extproc.core.policies import POLICIES


def mooncake_rows(count=120):
    """Conversations of three openings, each three turns, in Mooncake's format."""
    for number in range(count):
        opening, turn = number % 3, number // 3
        ids = [0, 1 + opening, *(100 * (opening + 1) + depth for depth in range(1 + turn % 5))]
        yield {
            "timestamp": number * 250,
            "input_length": len(ids) * 512,
            "output_length": 20,
            "hash_ids": ids,
        }


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "small_trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in mooncake_rows()) + "\n")
    return path


def figures(capsys, *arguments):
    assert main(["simulate", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_policies_are_set_side_by_side(capsys, trace):
    found = figures(capsys, trace, "--policy", "round-robin,tiered", "--endpoints", "3")

    assert list(found) == ["round-robin", "tiered"]
    assert found["tiered"]["hit_rate"] > found["round-robin"]["hit_rate"]
    assert found["tiered"]["requests"] == 120
    assert found["tiered"]["hit_rate"] <= found["tiered"]["ideal_hit_rate"]


def test_every_policy_can_be_simulated(capsys, trace):
    assert list(figures(capsys, trace, "--policy", ",".join(POLICIES))) == list(POLICIES)


def test_a_gzip_trace_reads_as_the_plain_one(capsys, trace, tmp_path):
    packed = tmp_path / "small_trace.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))

    assert figures(capsys, packed) == figures(capsys, trace)


def test_the_table_names_what_was_simulated(capsys, trace):
    main(["simulate", str(trace), "--policy", "tiered", "--routers", "4"])
    shown = " ".join(capsys.readouterr().out.split())

    assert "small_trace: 8 endpoints, 4 router(s)" in shown
    for row in ("hit rate", "prefill saved", "TTFT p99", "max / mean", "conversations moved"):
        assert row in shown


def test_events_change_the_fleet(capsys, trace):
    plain = figures(capsys, trace, "--policy", "tiered")
    changed = figures(capsys, trace, "--policy", "tiered", "--add", "2@5s", "--kill", "1@10")

    assert plain != changed
    assert changed["tiered"]["requests"] == 120


def test_options_change_what_is_simulated(capsys, trace):
    tight = figures(capsys, trace, "--policy", "tiered", "--kv-tokens", "4096")
    slow = figures(capsys, trace, "--policy", "tiered", "--prefill-rate", "2000")
    plain = figures(capsys, trace, "--policy", "tiered")

    assert tight["tiered"]["hit_rate"] < plain["tiered"]["hit_rate"]
    assert slow["tiered"]["ttft_mean_s"] > plain["tiered"]["ttft_mean_s"]


def test_limit_and_warm_up_leave_requests_out(capsys, trace):
    assert figures(capsys, trace, "--limit", "30", "--policy", "tiered")["tiered"]["requests"] == 30
    warm = figures(capsys, trace, "--warmup", "20", "--policy", "tiered")

    assert warm["tiered"]["requests"] == 40


def test_a_plot_is_drawn(trace, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "runs.png"

    assert main(["simulate", str(trace), "--json", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the trace is empty"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"\x1f\x8bnot gzip", "not a gzip file"),
        (b'{"a": 1}\n', "no known format"),
        (b"[1]\n", "no JSON object"),
    ],
)
def test_an_unusable_trace_is_named_in_one_line(capsys, tmp_path, content, reason):
    path = tmp_path / "trace"
    path.write_bytes(content)

    assert main(["simulate", str(path)]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert told.count("\n") == 1


def test_a_missing_trace_is_named(capsys, tmp_path):
    assert main(["simulate", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--policy", "random"),
        ("--policy", ","),
        ("--endpoints", "0"),
        ("--add", "2"),
        ("--kill", "0@5"),
        ("--prefill-rate", "0"),
        ("--gamma", "-1"),
        ("--gamma", "x"),
    ],
)
def test_a_wrong_option_is_refused(capsys, trace, arguments):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", str(trace), *arguments])

    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_command_prints_nothing_but_json(trace):
    done = subprocess.run(
        [sys.executable, "-m", "extproc", "simulate", str(trace), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert json.loads(done.stdout)
    assert done.stderr == ""
