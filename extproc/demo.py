"""`extproc demo`: one seeded chat workload under two policies, through a real Envoy.

Each policy gets a fresh stack with empty caches and the same conversations. Hit rates are
the engines' own, from the usage of each answer; times are the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.conversations import Workload, converse, write_scripts
from extproc.local import StackSettings, run_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from extproc.conversations import Answer, Script

POLICIES = ("round-robin", "tiered")
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one policy made of the workload; `hit_rate` is of prompt tokens, 0 to 1."""

    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    wall_s: float
    requests: Mapping[str, int]


def main(arguments: Sequence[str], workload: Workload | None = None) -> int:
    """Run the command and print its table; 130 when interrupted, ExtprocError as raised."""
    options = _parser().parse_args(arguments)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            results = runner.run(_run(workload or Workload(), options.seed, options.envoy))
    except asyncio.CancelledError:
        return _INTERRUPTED
    if options.json:
        figures = {policy: asdict(result) for policy, result in results.items()}
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        Console(highlight=False).print(draw_table(results))
    return 0


async def compare(
    workload: Workload,
    *,
    seed: int = 1,
    envoy: str | None = None,
    on_answer: Callable[[str], None] = lambda _: None,
) -> dict[str, Result]:
    """Run the workload under each policy; `on_answer` is told the policy of each answer.

    Raises ConversationError, StackError or EnvoyError when a part does not work.
    """
    scripts = write_scripts(workload, seed)
    return {
        policy: await _try_policy(
            policy, workload, scripts, seed, envoy, partial(on_answer, policy)
        )
        for policy in POLICIES
    }


def summarize(answers: Sequence[Answer], endpoints: Iterable[str], wall_s: float) -> Result:
    """Sum up at least one answer; an endpoint that gave none counts 0."""
    counts = Counter(answer.endpoint for answer in answers)
    times = [answer.ttft_s for answer in answers]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return Result(
        hit_rate=sum(answer.cached_tokens for answer in answers) / max(1, prompt_tokens),
        ttft_p50_s=percentile(times, 0.50),
        ttft_p99_s=percentile(times, 0.99),
        wall_s=wall_s,
        requests={str(endpoint): 0 for endpoint in endpoints} | counts,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Give the least value that `share` of all do not exceed; ValueError without values."""
    if not values:
        message = "no values have no percentile"
        raise ValueError(message)
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def draw_table(results: Mapping[str, Result]) -> Table:
    """Set the policies side by side; the endpoints of each in the order they joined."""
    table = Table(title="The same conversations through Envoy")
    table.add_column("")
    for policy in results:
        table.add_column(policy, justify="right")
    rows: dict[str, Callable[[Result], str]] = {
        "hit rate (engines)": lambda one: f"{one.hit_rate:.1%}",
        "TTFT p50": lambda one: f"{one.ttft_p50_s:.3f} s",
        "TTFT p99": lambda one: f"{one.ttft_p99_s:.3f} s",
        "requests per endpoint": lambda one: " ".join(map(str, one.requests.values())),
        "wall time": lambda one: f"{one.wall_s:.1f} s",
    }
    for name, show in rows.items():
        table.add_row(name, *map(show, results.values()))
    return table


async def _try_policy(
    policy: str,
    workload: Workload,
    scripts: Sequence[Script],
    seed: int,
    envoy: str | None,
    on_answer: Callable[[], None],
) -> Result:
    settings = StackSettings(
        policy=policy,
        port=0,
        standins=workload.engines,
        standin=workload.engine,
        envoy=envoy,
        envoy_concurrency=1,
    )
    async with run_stack(settings) as stack:
        began_s = time.perf_counter()
        answers = await converse(stack.url, workload, scripts, seed=seed, on_answer=on_answer)
        return summarize(answers, stack.endpoints, time.perf_counter() - began_s)


async def _run(workload: Workload, seed: int, envoy: str | None) -> dict[str, Result]:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - for the type checker; a coroutine runs in a task
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        ) as progress:
            total = workload.conversations * workload.turns
            bars = {policy: progress.add_task(policy, total=total) for policy in POLICIES}
            return await compare(
                workload,
                seed=seed,
                envoy=envoy,
                on_answer=lambda policy: progress.advance(bars[policy]),
            )
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="extproc demo",
        description="compare round-robin with tiered on a seeded workload",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON only")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--envoy", metavar="PATH", help="the Envoy binary (default: found)")
    return parser


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - absent on some systems
    except ImportError:
        return None
    return uvloop.new_event_loop
