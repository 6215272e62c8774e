"""`python -m bench.routing`: the routing rule against its peers over the workload suite.

Writes bench/results/routing.json, and with `--write` the tables of docs/routing.md. The
parts: suite (one router, every rule), routers (4 and 16), rate (the prefill rate believed
wrongly), elastic (endpoints join and die).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench import elastic
from bench.cases import PRODUCT, Case, Row, run_cases
from bench.figures import describe_machine
from bench.peers import PEERS
from bench.workloads import runnable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RESULTS = Path(__file__).parent / "results" / "routing.json"
DOCUMENT = Path(__file__).parents[1] / "docs" / "routing.md"
SEEDS = (1, 2, 3)
# The bars: the rule's mean TTFT against the best baseline's, and its hit rate.
TTFT_RATIO, TTFT_SLACK_S, HIT_SLACK = 1.05, 0.020, 0.01
ROUTERS_RATIO, ROUTERS_HIT_SLACK = 1.05, 0.01

_BLOCK = "<!-- {0} -->\n{1}<!-- /{0} -->"


def main() -> None:
    options = _parse()
    names = options.workload or runnable()
    parts = [part for part in options.part if part != "elastic"]
    cases = [case for part in parts for case in _PARTS[part][0](names, options.seeds)]
    rows = run_cases(cases, workers=options.workers)
    tables = {part: _PARTS[part][1]([r for r in rows if r.part == part]) for part in parts}
    if "elastic" in options.part:
        tables["elastic"] = elastic.measure(options.seeds, workers=options.workers)
    for part, lines in tables.items():
        sys.stdout.write(f"\n## {part}\n\n" + "\n".join(lines) + "\n")
    if options.write:
        _write(rows, tables)


def medians(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """Give the row of the median mean TTFT of each label and workload; unstable ones last."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.workload, row.label].append(row)
    return {key: _median(group) for key, group in groups.items()}


def judge(rows: Sequence[Row]) -> list[str]:
    """Name each bar of the suite that a workload misses."""
    found = medians(rows)
    misses = []
    for workload in dict.fromkeys(row.workload for row in rows):
        ours = found[workload, PRODUCT]
        peers = [found[workload, name] for name in baselines() if (workload, name) in found]
        steady = [peer for peer in peers if peer.stable]
        if steady and not ours.stable:
            misses.append(f"{workload}: unsteady where {steady[0].label} is steady")
        best_s = min([peer.ttft_mean_s for peer in steady], default=float("inf"))
        if ours.ttft_mean_s > max(best_s * TTFT_RATIO, best_s + TTFT_SLACK_S):
            misses.append(f"{workload}: mean TTFT {ours.ttft_mean_s:.3f} s, best {best_s:.3f} s")
        best_hit = max([peer.hit_rate for peer in steady or peers], default=0.0)
        if ours.hit_rate < best_hit - HIT_SLACK:
            misses.append(f"{workload}: hit rate {ours.hit_rate:.3f}, best {best_hit:.3f}")
    return misses


def baselines() -> list[str]:
    """Name the peers that know no more than the rule does."""
    return [name for name, peer in PEERS.items() if not peer.exact]


def _suite_cases(names: Sequence[str], seeds: Sequence[int]) -> list[Case]:
    return [
        Case(part="suite", workload=name, policy=policy, seed=seed, label=policy)
        for name in names
        for policy in (PRODUCT, *PEERS)
        for seed in seeds
    ]


def _router_cases(names: Sequence[str], seeds: Sequence[int]) -> list[Case]:
    return [
        Case(part="routers", workload=name, routers=routers, seed=seed, label=str(routers))
        for name in names
        for routers in (1, 4, 16)
        for seed in seeds
    ]


def _rate_cases(names: Sequence[str], seeds: Sequence[int]) -> list[Case]:
    return [
        Case(
            part="rate",
            workload=name,
            believed=believed,
            scrape_interval_s=scrape_s,
            seed=seed,
            label=f"{believed:g}{', scraped' if scrape_s else ''}",
        )
        for name in names
        for believed, scrape_s in ((1.0, None), (0.6, None), (1.4, None), (0.6, 1.0), (1.4, 1.0))
        for seed in seeds
    ]


def _suite_table(rows: Sequence[Row]) -> list[str]:
    found = medians(rows)
    policies = [PRODUCT, *PEERS]
    lines = [
        "| workload | " + " | ".join(_title(policy) for policy in policies) + " |",
        "|---|" + "---|" * len(policies),
    ]
    better = total = 0
    for workload in dict.fromkeys(row.workload for row in rows):
        peers = [found[workload, name] for name in baselines()]
        best_s = min(peer.ttft_mean_s if peer.stable else float("inf") for peer in peers)
        cells = [_cell(found[workload, policy], best_s) for policy in policies]
        lines.append(f"| {workload} | " + " | ".join(cells) + " |")
        total += 1
        better += found[workload, PRODUCT].ttft_mean_s < best_s
    misses = judge(rows)
    lines += ["", f"Better than every baseline in mean TTFT on {better} of {total} workloads."]
    lines += ["Bars missed: " + ("; ".join(misses) if misses else "none") + "."]
    return lines


def _variant_table(rows: Sequence[Row]) -> list[str]:
    """Set the labels side by side; the last row compares each with the first."""
    found = medians(rows)
    labels = list(dict.fromkeys(row.label for row in rows))
    lines = ["| workload | " + " | ".join(labels) + " |", "|---|" + "---|" * len(labels)]
    worst, lost = dict.fromkeys(labels, 0.0), dict.fromkeys(labels, 0.0)
    for workload in dict.fromkeys(row.workload for row in rows):
        base = found[workload, labels[0]]
        cells = []
        for label in labels:
            row = found[workload, label]
            cells.append(_cell(row, 0.0))
            worst[label] = max(worst[label], row.ttft_mean_s / base.ttft_mean_s)
            lost[label] = max(lost[label], base.hit_rate - row.hit_rate)
        lines.append(f"| {workload} | " + " | ".join(cells) + " |")
    compared = [f"x {worst[label]:.2f}, -{100 * lost[label]:.1f} points" for label in labels]
    return [*lines, "| *worst against the first* | " + " | ".join(compared) + " |"]


def _cell(row: Row, best_s: float) -> str:
    if not row.stable:
        return f"unsteady ({row.hit_rate:.3f})"
    text = f"{row.ttft_mean_s:.3f} ({row.hit_rate:.3f})"
    return f"**{text}**" if row.ttft_mean_s < best_s else text


def _title(policy: str) -> str:
    return policy + (" †" if policy in PEERS and PEERS[policy].exact else "")


def _median(group: list[Row]) -> Row:
    ordered = sorted(group, key=lambda row: (not row.stable, row.ttft_mean_s))
    return ordered[len(ordered) // 2]


def _write(rows: Sequence[Row], tables: dict[str, list[str]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    parts = {row.part for row in rows}
    kept = [row for row in old if row["part"] not in parts]
    data = {"machine": describe_machine(), "rows": kept + [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    text = DOCUMENT.read_text()
    for part, lines in tables.items():
        block = _BLOCK.format(part, "\n".join(lines) + "\n")
        pattern = _BLOCK.format(part, "(?:.*\n)*?")
        text = re.sub(pattern, lambda _, block=block: block, text)
    DOCUMENT.write_text(text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__)
    parser.add_argument(
        "--part", action="append", choices=(*_PARTS, "elastic"), help="default: all"
    )
    parser.add_argument("--workload", action="append", help="default: all there are")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="write the results and the page")
    options = parser.parse_args()
    options.part = options.part or [*_PARTS, "elastic"]
    return options


_PARTS = {
    "suite": (_suite_cases, _suite_table),
    "routers": (_router_cases, _variant_table),
    "rate": (_rate_cases, _variant_table),
}

if __name__ == "__main__":
    main()
