"""Routers that decide at a fixed rate and share a real log: its delay and what it costs.

Each router is a process with the core and the log's client, without a server: what is
measured is the log alone, next to the same processes without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from prometheus_client import CollectorRegistry

from bench.fleet import run_valkey
from bench.processes import module
from extproc.adapters.decision_log import DecisionLog
from extproc.adapters.log_settings import LogSettings
from extproc.core.decision import BlockHash, KeyHash, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp, Finished
from extproc.core.router import Router, RouterSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.peers import Peers

_ENDPOINTS = 16
_CONVERSATIONS = 400
_BLOCKS_A_TURN, _TURNS = 8, 6
_WARM_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCost:
    """Over all routers: CPU a decision, and the log's delay; zero without a log."""

    routers: int
    log: bool
    decisions_per_s: float
    cpu_us: float
    delay_p50_ms: float
    delay_p99_ms: float
    dropped: int


async def measure(routers: int, *, log: bool, rate: float, length_s: float) -> LogCost:
    """Let so many routers decide at `rate` together."""
    async with contextlib.AsyncExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="extproc-bench-")))
        url = (await cleanup.enter_async_context(run_valkey(folder)))[1] if log else ""
        order = json.dumps({"url": url, "rate": rate / routers, "length_s": length_s})
        processes = [
            await asyncio.create_subprocess_exec(
                *module("bench.log_delay", order, str(number)), stdout=asyncio.subprocess.PIPE
            )
            for number in range(routers)
        ]
        found = [json.loads((await process.communicate())[0]) for process in processes]
    delays = sorted(delay for one in found for delay in one["delays_ms"])
    decided = sum(one["decided"] for one in found)
    return LogCost(
        routers=routers,
        log=log,
        decisions_per_s=round(decided / length_s, 1),
        cpu_us=round(1e6 * sum(one["cpu_s"] for one in found) / decided, 1),
        delay_p50_ms=_percentile(delays, 0.50),
        delay_p99_ms=_percentile(delays, 0.99),
        dropped=sum(one["dropped"] for one in found),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return round(ordered[int(share * (len(ordered) - 1))], 2) if ordered else 0.0


async def _decide(order: dict[str, float | str], number: int) -> dict[str, object]:
    """Be one router: decide, end requests after a while, and tell what it cost."""
    router_id = f"router-{number}"
    router: Router | Peers = Router(RouterSettings(slow_start_s=0.0), router_id=router_id)
    endpoints = tuple(Endpoint(f"10.0.0.{n}:8000") for n in range(1, _ENDPOINTS + 1))
    for endpoint in endpoints:
        router.apply(EndpointUp(endpoint=endpoint), time.monotonic())
    log, delays = None, list[float]()
    async with contextlib.AsyncExitStack() as cleanup:
        if order["url"]:
            log = DecisionLog(
                LogSettings(url=str(order["url"]), stream="bench"),
                router,  # type: ignore[arg-type]  # a Router until here
                router_id=router_id,
                clock=time.monotonic,
                is_known=frozenset(endpoints).__contains__,
                registry=CollectorRegistry(),
                on_delay=lambda delay_s: delays.append(1e3 * delay_s),
            )
            router = log.peers
            task = asyncio.create_task(log.run())
            cleanup.callback(task.cancel)
            await log.until_warm()
        await _pace(router, random.Random(number), float(order["rate"]), _WARM_S)
        delays.clear()
        before_s = time.process_time()
        length_s = float(order["length_s"])
        decided = await _pace(router, random.Random(number), float(order["rate"]), length_s)
        cpu_s = time.process_time() - before_s
        dropped = log.state().dropped if log else 0
    return {"decided": decided, "cpu_s": cpu_s, "delays_ms": delays, "dropped": dropped}


async def _pace(router: Router | Peers, chance: random.Random, rate: float, length_s: float) -> int:
    """Decide at moments drawn by chance; each request ends two decisions later."""
    loop = asyncio.get_running_loop()
    began_s = at_s = loop.time()
    decided, open_ = 0, []
    while at_s < began_s + length_s:
        await asyncio.sleep(max(0.0, at_s - loop.time()))
        decision = router.route(_request(chance), time.monotonic())
        decided += 1
        open_.append(decision)
        if len(open_) > 2:
            ended = open_.pop(0)
            event = Finished(decision_id=ended.decision_id, served=ended.destination, status=200)
            router.apply(event, time.monotonic())
        at_s += chance.expovariate(rate)
    return decided


def _request(chance: random.Random) -> RoutingRequest:
    """Make the next turn of any of the conversations, which all routers see."""
    conversation = chance.randrange(_CONVERSATIONS)
    blocks = _BLOCKS_A_TURN * chance.randint(1, _TURNS)
    chain = tuple(BlockHash(conversation * 1_000 + depth) for depth in range(blocks))
    return RoutingRequest(
        chains=(chain,),
        prompt_tokens=blocks * 128 + 9,
        tier1=KeyHash(conversation % 16),
        tier1_tokens=1_024,
        tier2=KeyHash(conversation),
    )


if __name__ == "__main__":

    async def _main() -> None:
        print(json.dumps(await _decide(json.loads(sys.argv[1]), int(sys.argv[2]))))

    uvloop.run(_main())
