from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

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
