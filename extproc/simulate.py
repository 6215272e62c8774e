"""`extproc simulate`: replay a trace under several policies in virtual time, side by side.

The routers are the product's own; the engines are modelled. What it prints orders
policies; it does not promise seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.core.errors import ExtprocError
from extproc.core.policies import POLICIES, Tuning
from extproc.core.router import RouterSettings
from extproc.simulation.engine import EngineSettings
from extproc.simulation.outcome import summarize
from extproc.simulation.run import Change, Run, RunSettings
from extproc.simulation.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extproc.simulation.outcome import Outcome, Summary
    from extproc.simulation.workload import Workload

_COMPARED = "round-robin,session,prefix,tiered"
_GZIP_MAGIC = b"\x1f\x8b"
_AT = re.compile(r"(\d{1,6})@(\d+(?:\.\d+)?)s?")


class SimulateError(ExtprocError):
    """A trace that can't be read, or options that don't go together."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and print its table; raise ExtprocError for what it can't do."""
    options = _parser().parse_args(arguments)
    plot = _plotter(options.plot) if options.plot else None
    workload = _load(options.trace, options)
    settings = _settings(options, workload)
    outcomes = _run_all(workload, settings, options.policy)
    summaries = {policy: summarize(outcome) for policy, outcome in outcomes.items()}
    if options.json:
        figures = {policy: asdict(summary) for policy, summary in summaries.items()}
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        title = f"{workload.name}: {settings.endpoints} endpoints, {settings.routers} router(s)"
        Console(highlight=False).print(draw_table(title, summaries))
    if plot:
        plot(outcomes)
    return 0


def draw_table(title: str, summaries: Mapping[str, Summary]) -> Table:
    """Set the policies side by side, one column for each."""
    table = Table(title=title)
    table.add_column("")
    for policy in summaries:
        table.add_column(policy, justify="right")
    for name, show in _ROWS.items():
        table.add_row(name, *map(show, summaries.values()))
    return table


def _run_all(
    workload: Workload, settings: RunSettings, policies: Sequence[str]
) -> dict[str, Outcome]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn())
    outcomes = {}
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        for policy in policies:
            bar = progress.add_task(policy, total=len(workload.conversations))

            def advance(begun: int, bar: object = bar) -> None:
                progress.update(bar, completed=begun)  # type: ignore[arg-type]

            router = replace(settings.router, policy=policy)
            run = Run(workload, replace(settings, router=router), on_progress=advance)
            outcomes[policy] = run.execute()
    return outcomes


def _load(path: Path, options: argparse.Namespace) -> Workload:
    """Read a trace, plain or gzip, whole: it is replayed once per policy."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data).decode()
    except (OSError, EOFError, zlib.error) as error:
        message = f"{path}: {getattr(error, 'strerror', None) or 'not a gzip file'}"
        raise SimulateError(message) from None
    except UnicodeDecodeError:
        message = f"{path}: not a text file"
        raise SimulateError(message) from None
    name = path.name.partition(".")[0]
    workload = read_trace(text.splitlines(), name=name, seed=options.seed, limit=options.limit)
    if not workload.conversations:
        message = f"{path}: no requests"
        raise SimulateError(message)
    return replace(workload, warmup_s=options.warmup)


def _settings(options: argparse.Namespace, workload: Workload) -> RunSettings:
    engine = EngineSettings(
        kv_tokens=options.kv_tokens,
        block_tokens=workload.block_tokens,
        prefill_tokens_per_s=options.prefill_rate,
    )
    router = RouterSettings(
        tuning=Tuning(gamma=options.gamma, gamma_new=options.gamma_new, phi=options.phi),
        block_tokens=workload.block_tokens,
        cache_tokens=options.kv_tokens,
        max_index_blocks=max(1_000_000, options.endpoints * options.kv_tokens),
        prefill_tokens_per_s=options.believed_rate or options.prefill_rate,
    )
    return RunSettings(
        endpoints=options.endpoints,
        engine=engine,
        router=router,
        routers=options.routers,
        log_delay_s=options.log_delay if options.log_delay >= 0 else None,
        scrape_interval_s=options.scrape,
        changes=tuple(options.add + options.kill),
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    engine, router, tuning = EngineSettings(), RouterSettings(), Tuning()
    parser = argparse.ArgumentParser(
        prog="extproc simulate", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help=_TRACE_HELP)
    add("--policy", type=_policies, default=_policies(_COMPARED), metavar="A,B,…", help=_COMPARED)
    add("--endpoints", type=_count, default=8, metavar="N", help="default: 8")
    add("--routers", type=_count, default=1, metavar="R", help="default: 1")
    add("--log-delay", type=float, default=0.02, metavar="S", help=_LOG_DELAY_HELP)
    add("--kv-tokens", type=_count, default=router.cache_tokens, metavar="N", help=_KV_HELP)
    add("--prefill-rate", type=_rate, default=engine.prefill_tokens_per_s, metavar="N",
        help="prompt tokens an engine computes per second (default: 12000)")  # fmt: skip
    add("--believed-rate", type=_rate, metavar="N", help="what the router takes it for")
    add("--scrape", type=_rate, metavar="S", help="read the engines' metrics so often")
    add("--add", type=_addition, action="append", default=[], metavar="N@S", help=_ADD_HELP)
    add("--kill", type=_death, action="append", default=[], metavar="I@S", help=_KILL_HELP)
    add("--gamma", type=_weight, default=tuning.gamma, help="weight of recomputing")
    add("--gamma-new", type=_weight, default=tuning.gamma_new, help="for new conversations")
    add("--phi", type=_weight, default=tuning.phi, help="weight of a new conversation's future")
    add("--limit", type=_count, metavar="N", help="read so many requests of the trace only")
    add("--warmup", type=_weight, default=0.0, metavar="S", help="leave out what is sent before")
    add("--seed", type=int, default=1, metavar="N", help="default: 1")
    add("--json", action="store_true", help="print the figures as JSON only")
    add("--plot", type=Path, metavar="PNG", help="draw TTFT and hit rate over time")
    return parser


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        message = f"policies are {', '.join(POLICIES)}"
        raise argparse.ArgumentTypeError(message)
    return list(dict.fromkeys(names))


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= _MAX_COUNT:
        message = f"a whole number from 1 to {_MAX_COUNT}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= _MAX_COUNT:
        message = f"a number from 0 to {_MAX_COUNT}"
        raise argparse.ArgumentTypeError(message)
    return value


def _rate(text: str) -> float:
    value = _weight(text)
    if not value:
        message = "a number above 0"
        raise argparse.ArgumentTypeError(message)
    return value


def _addition(text: str) -> Change:
    number, at_s = _number_at(text)
    return Change(at_s=at_s, add=number)


def _death(text: str) -> Change:
    number, at_s = _number_at(text)
    if not number:
        message = "endpoints are numbered from 1"
        raise argparse.ArgumentTypeError(message)
    return Change(at_s=at_s, kill=number - 1)


def _number_at(text: str) -> tuple[int, float]:
    match = _AT.fullmatch(text)
    if not match:
        message = "a number and a time, such as 2@120s"
        raise argparse.ArgumentTypeError(message)
    return int(match[1]), float(match[2])


def _plotter(path: Path) -> Callable[[Mapping[str, Outcome]], None]:
    """Find the plotting library before the runs, not after them."""
    try:
        from extproc.plots import plot_outcomes  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        message = f"--plot needs the extra 'plot' ({error.name} is not installed)"
        raise SimulateError(message) from None
    return lambda outcomes: plot_outcomes(outcomes, path)


_MAX_COUNT = 100_000_000
_ROWS: dict[str, Callable[[Summary], str]] = {
    "requests": lambda s: f"{s.requests:,}",
    "hit rate (tokens)": lambda s: f"{s.hit_rate:.1%}",
    "  of an ideal cache": lambda s: f"{s.ideal_hit_rate:.1%}",
    "prefill saved": lambda s: f"{s.prefill_saved:.1%}",
    "TTFT mean": lambda s: f"{s.ttft_mean_s:.3f} s",
    "TTFT p50": lambda s: f"{s.ttft_p50_s:.3f} s",
    "TTFT p90": lambda s: f"{s.ttft_p90_s:.3f} s",
    "TTFT p99": lambda s: f"{s.ttft_p99_s:.3f} s",
    "prefill utilization": lambda s: f"{s.utilization:.1%}",
    "  max / mean": lambda s: f"{s.utilization_max_over_mean:.2f}",
    "conversations moved": lambda s: f"{s.moved:.1%}",
    "preemptions": lambda s: f"{s.preemptions:,}",
    "refused": lambda s: f"{s.refused:,}",
    "steady": lambda s: "yes" if s.stable else "no",
}
_TRACE_HELP = "Mooncake JSONL, a coding-agent trace, or our own record; plain or gzip"
_LOG_DELAY_HELP = "until routers know each other's decisions; -1: never (default: 0.02)"
_KV_HELP = "tokens of KV cache per endpoint (default: 2000000)"
_ADD_HELP = "N endpoints join at S seconds: 2@120s; may be repeated"
_KILL_HELP = "the I-th endpoint dies at S seconds: 1@200s; may be repeated"
