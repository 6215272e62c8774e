from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_benchmark_runs_and_gives_every_part_it_promises():
    command = [sys.executable, "-m", "bench", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, check=False)

    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    values = {(one["part"], one["case"]): one["value"] for one in result["figures"]}
    assert result["machine"]["cores"]
    parts = {"4 KB", "16 KB", "through Envoy", "memory", "parts, 1 KB"}
    assert parts <= {part for part, _ in values}
    if shutil.which("wrk"):
        assert values["speed", "Envoy + extproc, 1 KB: requests/s"] > 0
    assert values["through Envoy", "decided by us"] > 50
    assert all(value > 0 for (_, case), value in values.items() if not case.startswith("added"))


def test_the_log_benchmark_runs_and_gives_its_figures():
    if not (shutil.which("valkey-server") or shutil.which("redis-server")):
        pytest.skip("no valkey-server or redis-server here")
    command = [sys.executable, "-m", "bench.routers", "--part", "log", "--quick", "--runs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, check=False)

    assert done.returncode == 0, done.stderr.decode()
    rows = json.loads(done.stdout.decode().removeprefix("log: "))
    assert [(row["routers"], row["log"]) for row in rows] == [
        (routers, log) for routers in (1, 2, 4) for log in (True, False)
    ]
    assert all(row["decisions_per_s"] > 0 and row["cpu_us"] > 0 for row in rows)
    assert all((row["delay_p99_ms"] > 0) == row["log"] and not row["dropped"] for row in rows)
