"""Memory of a router process whose index and other tables are full.

Every case runs in its own process, as memory given back by one would hide the next.
`python -m bench.memory CASE` prints the resident bytes after each step as JSON.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.decision import random_chain, routed_to
from bench.figures import Figure
from extproc.app import App
from extproc.config.sections import Config
from extproc.core.decision import DecisionId, KeyHash
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp, Finished, Routed
from extproc.core.router import RouterSettings

if TYPE_CHECKING:
    from extproc.core.router import Router

_BUDGET_MB = 300.0
_MB = 1_000_000
_DEFAULTS = RouterSettings()
_LIMIT_S = 300
# Blocks of a 16 KB prompt, the conversation most leases and sessions are of.
_PROMPT_BLOCKS = 32
# Full at the default capacity of an endpoint; spread over more; a tenth for a quick look.
_SPREADS = (64, 100)
_QUICK_SHARE = 10


def measure(*, quick: bool) -> list[Figure]:
    """Fill the index with the default number of blocks, then the other tables as well."""
    blocks = _DEFAULTS.max_index_blocks // (_QUICK_SHARE if quick else 1)
    figures: list[Figure] = []
    for endpoints in _SPREADS[: 1 if quick else None]:
        figures += _figures(endpoints, _run_apart(endpoints, blocks))
    return figures


def _figures(endpoints: int, seen: dict[str, int]) -> list[Figure]:
    case = f"{seen['blocks']:,} blocks on {endpoints} endpoints"
    tokens = seen["blocks"] * _DEFAULTS.block_tokens
    each = (seen["index"] - seen["empty"]) / seen["blocks"]
    in_flight = "· and 2,000 requests of 4,096 tokens in flight, RSS"
    return [
        _rss(f"{case}, RSS", seen["index"], budget=_BUDGET_MB),
        _rss("· before, RSS", seen["empty"]),
        Figure(part="memory", case="· capacity", value=seen["blocks"], unit="blocks"),
        Figure(part="memory", case="· capacity", value=tokens / 1e6, unit="M tokens"),
        Figure(part="memory", case="· per block and endpoint", value=each, unit="B"),
        _rss("· with full session and tier-1 tables, RSS", seen["tables"], budget=_BUDGET_MB),
        _rss(in_flight, seen["leases"], budget=_BUDGET_MB),
    ]


def _rss(case: str, value_bytes: int, budget: float | None = None) -> Figure:
    return Figure(part="memory", case=case, value=value_bytes / _MB, unit="MB", budget=budget)


def _run_apart(endpoints: int, blocks: int) -> dict[str, int]:
    command = [sys.executable, "-m", "bench.memory", str(endpoints), str(blocks)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S)
    return dict(json.loads(done.stdout))


def _fill(endpoints: int, blocks: int) -> dict[str, int]:
    router = App(Config()).router
    names = [Endpoint(f"10.0.0.{n}:8000") for n in range(endpoints)]
    for name in names:
        router.apply(EndpointUp(endpoint=name), 0.0)
    seen = {"empty": _resident_bytes()}
    chance = random.Random(1)
    share = min(blocks // endpoints, _DEFAULTS.cache_tokens // _DEFAULTS.block_tokens)
    _fill_index(router, names, share, chance)
    seen |= {
        "index": _resident_bytes(),
        "blocks": sum(view.blocks for view in router.snapshot(0.0)),
    }
    _fill_tables(router, names, chance)
    seen["tables"] = _resident_bytes()
    _fill_leases(router, names, chance)
    return seen | {"leases": _resident_bytes()}


def _fill_index(router: Router, names: list[Endpoint], share: int, chance: random.Random) -> None:
    """Record prompts on all endpoints in turn, twice what they hold, so that all evict."""
    for _ in range(2 * share // _PROMPT_BLOCKS):
        for name in names:
            event = routed_to(name, random_chain(chance, _PROMPT_BLOCKS))
            router.apply(event, 0.0)
            router.apply(Finished(decision_id=event.decision_id), 0.0)


def _fill_tables(router: Router, names: list[Endpoint], chance: random.Random) -> None:
    for number in range(_DEFAULTS.max_sessions):
        event = Routed(
            decision_id=DecisionId(f"router-{number}"),
            endpoint=names[number % len(names)],
            chains=(),
            prompt_tokens=4_096,
            matched_tokens=0,
            tier1=KeyHash(chance.getrandbits(64)),
            tier2=KeyHash(chance.getrandbits(64)),
        )
        router.apply(event, 0.0)
        router.apply(Finished(decision_id=event.decision_id), 0.0)


def _fill_leases(router: Router, names: list[Endpoint], chance: random.Random) -> None:
    for number in range(2_000):
        event = Routed(
            decision_id=DecisionId(f"router-{number}"),
            endpoint=names[number % len(names)],
            chains=(random_chain(chance, _PROMPT_BLOCKS),),
            prompt_tokens=4_096,
            matched_tokens=0,
            tier1=KeyHash(1),
            tier2=KeyHash(chance.getrandbits(64)),
        )
        router.apply(event, 0.0)


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1_024


if __name__ == "__main__":
    print(json.dumps(_fill(int(sys.argv[1]), int(sys.argv[2]))))
