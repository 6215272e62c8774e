"""Throughput, CPU and latency of a request through each hop, side by side in one run.

64 chat bodies that share their first half are sent in turn: as fast as 32 connections go,
and at a fixed rate. Hops take turns, round by round; a figure is the median over rounds.
Every hop's answers are counted, and that it keeps a prompt's engine is looked at between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import uvloop

from bench.bodies import chat_body
from bench.figures import Figure, describe_machine
from bench.hops import ENGINE_HEADER, PEERS, Hop, start_engines, start_envoys, start_peer
from bench.processes import cpu_s

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZES = (1_024, 16_384, 131_072, 1_048_576)
# What a second can carry on two cores with the engines and the client beside.
_RATE_PER_S = {1_024: 500, 16_384: 500, 131_072: 500, 1_048_576: 50}
_MODES = ("buffered", "streamed", "full-duplex-streamed")
_MODE_SIZE = 16_384
_PROMPTS = 64
_CONNECTIONS = 32
_LOAD = Path(__file__).with_name("load.lua")
_RESULTS = Path(__file__).with_name("results") / "speed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One hop at one size: all it computes per request, and the router's part of that."""

    variant: str
    body_bytes: int
    rps: float
    cpu_us: float
    router_cpu_us: float
    rate_per_s: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    failed: int
    kept_engine: float


@dataclass(frozen=True, slots=True)
class _Plan:
    sizes: Sequence[int]
    rounds: int
    round_s: float
    peers: Sequence[str]


def measure(*, quick: bool) -> list[Figure]:
    """Run the comparison; a whole run is kept in bench/results/speed.json."""
    if shutil.which("wrk") is None:
        print(
            "speed is left out: it needs wrk, the load generator (apt install wrk)", file=sys.stderr
        )
        return []
    plan = _Plan(_SIZES, 3, 2.0, PEERS)
    if quick:
        plan = _Plan(_SIZES[:1], 1, 1.0, ())
    rows = uvloop.run(_run(plan))
    if not quick:
        result = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        _RESULTS.parent.mkdir(exist_ok=True)
        _RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return [figure for row in rows for figure in _figures(row)]


def _figures(row: Row) -> list[Figure]:
    case = f"{row.variant}, {row.body_bytes // 1024} KB"
    values = {
        "requests/s": (row.rps, ""),
        "CPU": (row.cpu_us, "µs"),
        "p50": (row.p50_ms, "ms"),
        "p99": (row.p99_ms, "ms"),
    }
    return [
        Figure(part="speed", case=f"{case}: {name}", value=value, unit=unit)
        for name, (value, unit) in values.items()
    ]


async def _run(plan: _Plan) -> list[Row]:
    rows = []
    async with contextlib.AsyncExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="extproc-bench-")))
        endpoints = await start_engines(cleanup, folder)
        hops = await start_envoys(cleanup, folder, endpoints, "buffered-partial")
        for name in plan.peers:
            peer = await start_peer(cleanup, folder, endpoints, name)
            if peer is None:
                print(f"{name} is left out: it could not be installed or started", file=sys.stderr)
            else:
                hops.append(peer)
        for size in plan.sizes:
            rows += await _compare(plan, hops, size, folder)
    if plan.peers:
        rows += await _compare_modes(plan)
    return rows


async def _compare_modes(plan: _Plan) -> list[Row]:
    async with contextlib.AsyncExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="extproc-bench-")))
        endpoints = await start_engines(cleanup, folder)
        hops = []
        for mode in _MODES:
            hops += await start_envoys(cleanup, folder, endpoints, mode)
        return await _compare(plan, hops, _MODE_SIZE, folder)


async def _compare(plan: _Plan, hops: Sequence[Hop], size: int, folder: Path) -> list[Row]:
    bodies = [chat_body(size, seed, shared_bytes=size // 2) for seed in range(_PROMPTS)]
    place = folder / f"bodies-{size}"
    place.mkdir()
    for number, body in enumerate(bodies):
        (place / str(number)).write_bytes(body)
    kept = {hop.name: await _kept_engine(hop, bodies) for hop in hops}
    parts: dict[str, list[Row]] = {hop.name: [] for hop in hops}
    for number in range(plan.rounds):
        for hop in hops if number % 2 else reversed(hops):
            row = await _measure_hop(hop, size, place, plan.round_s, kept[hop.name])
            parts[hop.name].append(row)
    return [_median(rows) for rows in parts.values()]


async def _measure_hop(hop: Hop, size: int, place: Path, length_s: float, kept: float) -> Row:
    before = [cpu_s(pid) for pid in hop.pids]
    full = await _load(hop.url, place, length_s, pause_ms=0)
    spent = [cpu_s(pid) - was for pid, was in zip(hop.pids, before, strict=True)]
    rate = _RATE_PER_S[size]
    slow = await _load(hop.url, place, length_s, pause_ms=1_000 * _CONNECTIONS // rate)
    requests = max(1, full["requests"])
    return Row(
        variant=hop.name,
        body_bytes=size,
        rps=full["requests"] / full["duration_us"] * 1e6,
        cpu_us=sum(spent) / requests * 1e6,
        router_cpu_us=sum(spent[1:]) / requests * 1e6,
        rate_per_s=rate,
        p50_ms=slow["p50_us"] / 1e3,
        p95_ms=slow["p95_us"] / 1e3,
        p99_ms=slow["p99_us"] / 1e3,
        failed=full["failed"] + slow["failed"],
        kept_engine=kept,
    )


def _median(rows: Sequence[Row]) -> Row:
    values = {
        name: statistics.median(getattr(row, name) for row in rows)
        for name in ("rps", "cpu_us", "router_cpu_us", "p50_ms", "p95_ms", "p99_ms")
    }
    fixed = asdict(rows[0]) | {"failed": sum(row.failed for row in rows)}
    return Row(**fixed | {name: round(value, 3) for name, value in values.items()})


async def _load(url: str, place: Path, length_s: float, *, pause_ms: int) -> dict[str, int]:
    options = ("-t1", f"-c{_CONNECTIONS}", f"-d{length_s:.0f}s", "--timeout", "10s")
    arguments = ("-s", str(_LOAD), url, "--", str(place), str(_PROMPTS), str(pause_ms))
    process = await asyncio.create_subprocess_exec(
        "wrk", *options, *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), length_s + 30.0)
    result: dict[str, int] = json.loads(out.splitlines()[-1])
    return result


async def _kept_engine(hop: Hop, bodies: Sequence[bytes]) -> float:
    """Send each prompt three times, the last two in turn; give how many kept their engine."""
    engines: dict[int, list[str]] = {}
    async with aiohttp.ClientSession() as session:
        for number, body in [*enumerate(bodies)] * 3:
            headers = {"content-type": "application/json"}
            async with session.post(hop.url, data=body, headers=headers) as answer:
                await answer.read()
                answer.raise_for_status()
                engines.setdefault(number, []).append(answer.headers.get(ENGINE_HEADER, ""))
    return sum(second == third for _, second, third in engines.values()) / len(bodies)
