"""`python -m bench.routers`: several routers as one, through real Envoys and a real log.

Parts: hits (1 and 4 routers, with and without a log), faults (a worker dies, the log dies,
both come back), restart (one router, in mid-run), log (its delay and its cost). Writes
bench/results/routers.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from bench import log_delay
from bench.figures import describe_machine
from bench.fleet import Fleet, run_fleet
from bench.processes import START_S
from extproc.conversations import Workload, converse, write_scripts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from extproc.conversations import Answer, ConversationError

RESULTS = Path(__file__).parent / "results" / "routers.json"
WORKLOADS = {
    "chat": Workload(conversations=80),
    "api": Workload(conversations=400, turns=1, prefixes=12),
}
_FLEETS = ((1, False), (4, True), (4, False))
_LIMIT_S = 300.0
# Of the faults: what is compared, and how long what is left behind may live.
_SETTLE_S, _GHOST_S = 30.0, 10.0
_LOG_RATE, _LOG_S = 1_000.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fleet on one workload; the median of its runs. Hit rates are the engines' own."""

    routers: int
    log: bool
    workload: str
    hit_rate: float
    ttft_p50_s: float
    failed: int
    log_delay_p99_ms: float | None


def main() -> None:
    options = _parse()
    found: dict[str, Any] = {"machine": describe_machine()}
    for name in options.part or _PARTS:
        found[name] = uvloop.run(_PARTS[name](options.runs, options.quick))
        print(f"{name}: {json.dumps(found[name], indent=1)}")
    if options.write:
        old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(old | found, indent=1) + "\n", encoding="utf-8")


async def _hits(runs: int, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, workload in WORKLOADS.items():
        used = replace(workload, conversations=16) if quick else workload
        found: dict[tuple[int, bool], list[Row]] = {fleet: [] for fleet in _FLEETS}
        for seed in range(1, runs + 1):
            for routers, log in _FLEETS:
                row = await _try(name, used, routers, seed, log=log)
                sys.stderr.write(f"{row}\n")
                found[routers, log].append(row)
        rows += [asdict(_median(group)) for group in found.values()]
    return rows


def _median(rows: Sequence[Row]) -> Row:
    delays = [row.log_delay_p99_ms for row in rows if row.log_delay_p99_ms is not None]
    return replace(
        rows[0],
        hit_rate=round(statistics.median(row.hit_rate for row in rows), 4),
        ttft_p50_s=round(statistics.median(row.ttft_p50_s for row in rows), 4),
        failed=sum(row.failed for row in rows),
        log_delay_p99_ms=statistics.median(delays) if delays else None,
    )


async def _try(name: str, workload: Workload, routers: int, seed: int, *, log: bool) -> Row:
    with tempfile.TemporaryDirectory(prefix="extproc-bench-") as folder:
        async with run_fleet(Path(folder), routers=routers, log=log) as fleet:
            answers, failures = await _converse(fleet, workload, seed)
            delay = _delay_p99_ms(await fleet.read("/metrics")) if log else None
    return Row(
        routers=routers,
        log=log,
        workload=name,
        hit_rate=_hit_rate(answers),
        ttft_p50_s=statistics.median(answer.ttft_s for answer in answers),
        failed=len(failures),
        log_delay_p99_ms=delay,
    )


async def _faults(runs: int, quick: bool) -> dict[str, Any]:
    """Kill a worker, then the log, start the log again, in one run of four workers."""
    del runs
    workload = replace(WORKLOADS["chat"], conversations=40 if quick else 400)
    pause_s = 2.0 if quick else 12.0
    with tempfile.TemporaryDirectory(prefix="extproc-bench-") as folder:
        async with run_fleet(Path(folder), routers=4, log=True) as fleet:
            marks: dict[str, float] = {}
            breaking = asyncio.create_task(_break(fleet, pause_s, marks))
            answers, failures = await _converse(fleet, workload, seed=1)
            breaking.cancel()
            await asyncio.gather(breaking, return_exceptions=True)
            ghosts_s = await _until_empty(fleet)
    return {
        "failed": len(failures),
        "seconds_until_no_load": ghosts_s,
        "hit_rate": _windows(answers, marks),
    }


async def _break(fleet: Fleet, pause_s: float, marks: dict[str, float]) -> None:
    assert fleet.valkey is not None  # noqa: S101 - the fleet has a log
    marks["start"] = time.monotonic()
    await asyncio.sleep(pause_s)
    marks["a worker killed"] = time.monotonic()
    os.kill(_last_child(fleet.routers[0].pid), signal.SIGKILL)
    await asyncio.sleep(pause_s)
    marks["the log killed"] = time.monotonic()
    await fleet.valkey.end(signal.SIGKILL)
    await asyncio.sleep(pause_s / 2)
    await fleet.valkey.start()
    marks["the log back"] = time.monotonic()
    await asyncio.sleep(pause_s)
    marks["afterwards"] = time.monotonic()


async def _restart(runs: int, quick: bool) -> list[dict[str, Any]]:
    """Restart the only router in mid-run, with a log and without."""
    del runs
    workload = replace(WORKLOADS["chat"], conversations=40 if quick else 160)
    rows = []
    for log in (True, False):
        with tempfile.TemporaryDirectory(prefix="extproc-bench-") as folder:
            async with run_fleet(Path(folder), routers=1, log=log) as fleet:
                marks: dict[str, float] = {}
                breaking = asyncio.create_task(
                    _restart_router(fleet, 3.0 if quick else 15.0, marks)
                )
                answers, failures = await _converse(fleet, workload, seed=1)
                await breaking
        windows = _windows(answers, marks)
        rows.append({"log": log, "failed": len(failures), "hit_rate": windows})
    return rows


async def _restart_router(fleet: Fleet, pause_s: float, marks: dict[str, float]) -> None:
    await asyncio.sleep(pause_s / 3)
    marks["before"] = time.monotonic()
    await asyncio.sleep(pause_s)
    marks["while it restarts"] = time.monotonic()
    await fleet.routers[0].end()
    await fleet.routers[0].start()
    await fleet.until_routing()
    marks["first 5 s"] = time.monotonic()
    marks["afterwards"] = marks["first 5 s"] + 5.0


async def _log(runs: int, quick: bool) -> list[dict[str, Any]]:
    """Measure 1, 2 and 4 routers at one rate together, with and without a log, in turn."""
    length_s = 1.0 if quick else _LOG_S
    rows: dict[tuple[int, bool], list[log_delay.LogCost]] = {}
    for _ in range(runs):
        for routers in (1, 2, 4):
            for log in (True, False):
                cost = await log_delay.measure(routers, log=log, rate=_LOG_RATE, length_s=length_s)
                rows.setdefault((routers, log), []).append(cost)
    return [
        asdict(sorted(group, key=lambda one: one.cpu_us)[len(group) // 2])
        for group in rows.values()
    ]


async def _converse(
    fleet: Fleet, workload: Workload, seed: int
) -> tuple[list[Answer], list[ConversationError]]:
    failures: list[ConversationError] = []
    answers = await converse(
        fleet.url,
        workload,
        write_scripts(workload, seed),
        seed=seed,
        limit_s=_LIMIT_S,
        on_failure=failures.append,
    )
    return answers, failures


async def _until_empty(fleet: Fleet) -> float | None:
    """Give the seconds until no router believes in a request in flight; None: too many."""
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < START_S:
        pages = [json.loads(page or "{}") for page in await fleet.read("/debug/endpoints")]
        if all(one["inflight"] < 1e-6 for page in pages for one in page.get("endpoints", ())):
            return round(passed_s, 1)
        await asyncio.sleep(0.1)
    return None


def _windows(answers: Sequence[Answer], marks: dict[str, float]) -> dict[str, float | None]:
    """Give the hit rate from each mark to the next."""
    names, ends = list(marks), [*list(marks.values())[1:], float("inf")]
    parts = {
        name: [one for one in answers if marks[name] <= one.ended_s < end]
        for name, end in zip(names, ends, strict=True)
    }
    return {name: round(_hit_rate(part), 3) if part else None for name, part in parts.items()}


def _hit_rate(answers: Sequence[Answer]) -> float:
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return sum(answer.cached_tokens for answer in answers) / max(1, prompt_tokens)


def _delay_p99_ms(pages: Sequence[str]) -> float | None:
    """Give the bound of the histogram's bucket in which the 99th of 100 delays lies."""
    counts: dict[float, float] = {}
    name = 'extproc_log_delay_seconds_bucket{le="'
    for line in "\n".join(pages).splitlines():
        if line.startswith(name):
            bound, _, count = line.removeprefix(name).partition('"} ')
            counts[float(bound)] = counts.get(float(bound), 0.0) + float(count)
    total = max(counts.values(), default=0.0)
    bounds = [bound for bound, count in sorted(counts.items()) if count >= 0.99 * total]
    return 1e3 * bounds[0] if total else None


def _last_child(pid: int) -> int:
    """Find the process that this one started last: of a supervisor, its last worker."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return max(int(child) for child in children.split())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.routers", description=__doc__)
    parser.add_argument("--part", action="append", choices=tuple(_PARTS), help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="alternating runs, default 3")
    parser.add_argument("--quick", action="store_true", help="rough figures")
    parser.add_argument("--write", action="store_true", help="write the results")
    return parser.parse_args()


_PARTS: dict[str, Callable[[int, bool], Awaitable[Any]]] = {
    "log": _log,
    "hits": _hits,
    "faults": _faults,
    "restart": _restart,
}

if __name__ == "__main__":
    main()
