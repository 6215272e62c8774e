"""Time that the router adds to a request through a real Envoy, against plain Envoy.

Both Envoys have the same configuration but for the ext_proc filter and the access log to
the router; they run at the same time and are asked in turn, round by round. Router,
engines and client are processes of their own. The client sends at a fixed rate whether or
not answers come, so a queue shows as time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import uvloop
import yaml

from bench.bodies import chat_body
from bench.figures import Figure
from bench.processes import START_S, child, cpu_s, first_line, free_port, module
from extproc.adapters.envoy_config import bootstrap, to_yaml
from extproc.adapters.envoy_process import find_envoy, start_envoy
from extproc.config import load_config
from extproc.core.endpoint import Endpoint
from extproc.settings import gateway_settings
from extproc.standin.server import start_standin
from extproc.standin.settings import StandinSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

_RATE_PER_S = 200.0
_BODY_BYTES = 16_384
_ENGINES = 4
_CONVERSATIONS = 200
_BUDGET_MS = 2.0
_REQUEST_S = 10.0
_WARM_S = 1.0
_EXT_PROC = "envoy.filters.http.ext_proc"


@dataclass(frozen=True, slots=True)
class _Plan:
    rounds: int
    round_s: float


def measure(*, quick: bool) -> list[Figure]:
    """Run the rounds and compare."""
    plan = _Plan(rounds=1, round_s=0.5) if quick else _Plan(rounds=9, round_s=5.0)
    times, decided, cpu_s = uvloop.run(_run(plan))
    figures = [
        Figure(part="through Envoy", case=f"{name}, {label}", value=value, unit="ms")
        for name, rounds in times.items()
        for label, value in _summaries(rounds).items()
    ]
    plain, routed = (_summaries(times[name]) for name in ("plain", "routed"))
    for label in plain:
        budget = _BUDGET_MS if label == "p50" else None
        added = routed[label] - plain[label]
        figures += [
            Figure(
                part="through Envoy", case=f"added {label}", value=added, unit="ms", budget=budget
            ),
            Figure(
                part="through Envoy",
                case=f"ratio {label}",
                value=routed[label] / plain[label],
                unit="x",
            ),
        ]
    share = 100.0 * decided / sum(map(len, times["routed"]))
    return [
        *figures,
        Figure(part="through Envoy", case="decided by us", value=share, unit="%"),
        Figure(
            part="through Envoy",
            case="router's CPU per decision",
            value=1e3 * cpu_s / max(1.0, decided),
            unit="ms",
        ),
    ]


def _summaries(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Give the medians over rounds of each round's percentiles, in milliseconds."""
    return {
        label: 1e3 * statistics.median(_percentile(times, share) for times in rounds)
        for label, share in (("p50", 0.50), ("p99", 0.99))
    }


def _percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[max(0, math.ceil(share * len(times)) - 1)]


async def _run(plan: _Plan) -> tuple[dict[str, list[list[float]]], float, float]:
    """Give the times of every round, the decisions made, and the router's CPU seconds."""
    bodies = [chat_body(_BODY_BYTES, seed) for seed in range(_CONVERSATIONS)]
    async with contextlib.AsyncExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="extproc-bench-")))
        endpoints = json.loads(
            await first_line(await cleanup.enter_async_context(child(*module("bench.gateway"))))
        )
        admin_port = free_port()
        config_path = folder / "config.yaml"
        config = _config(folder, endpoints, admin_port)
        config_path.write_text(yaml.safe_dump(config), encoding="utf-8")
        serve = module("extproc", "serve", "--config", str(config_path))
        router = await cleanup.enter_async_context(child(*serve))
        urls = await _start_envoys(folder, config_path, endpoints, cleanup)
        limit = aiohttp.ClientTimeout(total=_REQUEST_S)
        session = await cleanup.enter_async_context(aiohttp.ClientSession(timeout=limit))
        admin_url = f"http://127.0.0.1:{admin_port}"
        await _until_routed(session, urls["routed"], admin_url, bodies[0])
        for url in urls.values():
            await _send_all(session, url, bodies, _WARM_S)
        before, spent_s = await decisions(session, admin_url), cpu_s(router.pid)
        times: dict[str, list[list[float]]] = {"plain": [], "routed": []}
        for number in range(plan.rounds):
            for name in ("plain", "routed") if number % 2 else ("routed", "plain"):
                times[name].append(await _send_all(session, urls[name], bodies, plan.round_s))
        decided = await decisions(session, admin_url) - before
        return times, decided, cpu_s(router.pid) - spent_s


def _config(folder: Path, endpoints: list[str], admin_port: int) -> dict[str, Any]:
    return {
        "listen": {"address": f"unix:{folder}/router.sock"},
        "endpoints": {"static": [{"address": endpoint} for endpoint in endpoints]},
        "metrics": {"address": f"127.0.0.1:{admin_port}"},
        "logging": {"level": "warning"},
        "gateway": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
    }


async def _start_envoys(
    folder: Path, config_path: Path, endpoints: list[str], cleanup: contextlib.AsyncExitStack
) -> dict[str, str]:
    """Start Envoy with and without us; give the URL of each."""
    settings = gateway_settings(load_config(config_path), [Endpoint.parse(e) for e in endpoints])
    whole = to_yaml(bootstrap(settings))
    urls = {}
    for name, text in (("plain", without_us(whole)), ("routed", whole)):
        envoy = await start_envoy(
            find_envoy(), text, log_path=folder / f"{name}.log", concurrency=1
        )
        cleanup.push_async_callback(envoy.stop)
        host, port = envoy.listen
        urls[name] = f"http://{host}:{port}/v1/chat/completions"
    return urls


def without_us(bootstrap_yaml: str) -> str:
    """Take the ext_proc filter, what routes say of it, and our access log out."""
    config = yaml.safe_load(bootstrap_yaml)
    listener = config["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [one for one in manager["http_filters"] if one["name"] != _EXT_PROC]
    del manager["access_log"]
    for host in manager["route_config"]["virtual_hosts"]:
        for route in host["routes"]:
            route.get("typed_per_filter_config", {}).pop(_EXT_PROC, None)
    return yaml.safe_dump(config)


async def decisions(session: aiohttp.ClientSession, admin_url: str) -> float:
    """Read how many decisions the router has made; 0 while it does not answer."""
    try:
        async with session.get(f"{admin_url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    except aiohttp.ClientError:
        return 0.0
    counts = [line for line in lines if line.startswith("extproc_decision_seconds_count")]
    return float(counts[0].rsplit(" ", 1)[1]) if counts else 0.0


async def _until_routed(
    session: aiohttp.ClientSession, url: str, admin_url: str, body: bytes
) -> None:
    async with asyncio.timeout(START_S):
        while not await decisions(session, admin_url):
            await _ask(session, url, body)
            await asyncio.sleep(0.1)


async def _send_all(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], length_s: float
) -> list[float]:
    """Send at the fixed rate; give the seconds from each request's time to its whole answer."""
    loop = asyncio.get_running_loop()
    tasks = []
    began_s = loop.time()
    for number in range(int(length_s * _RATE_PER_S)):
        await asyncio.sleep(began_s + number / _RATE_PER_S - loop.time())
        tasks.append(loop.create_task(_ask(session, url, bodies[number % len(bodies)])))
    return list(await asyncio.gather(*tasks))


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    began_s = time.perf_counter()
    headers = {"content-type": "application/json"}
    async with session.post(url, data=body, headers=headers) as answer:
        await answer.read()
        answer.raise_for_status()
    return time.perf_counter() - began_s


async def _run_engines() -> None:
    """Run stand-ins that never wait, until killed; print their endpoints as one JSON line."""
    settings = StandinSettings(
        prefill_tokens_per_s=math.inf, decode_tokens_per_s=math.inf, first_token_overhead_s=0.0
    )
    engines = [await start_standin(settings) for _ in range(_ENGINES)]
    print(json.dumps([engine.endpoint for engine in engines]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_run_engines())
