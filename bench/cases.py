"""Cases of the routing benchmark: one simulated run each, several side by side.

Every row is one simulated run: a workload, a policy, a number of routers, a seed. All get
the same approximate index and the same believed prefill rate, except the peers whose own
default says otherwise and the `exact` ones, which see the engines as they are.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.peers import PEERS
from bench.workloads import SUITE, WorkloadSpec
from extproc.core.policies import Tuning
from extproc.core.router import RouterSettings
from extproc.simulation.engine import EngineSettings
from extproc.simulation.outcome import summarize
from extproc.simulation.run import Change, Run, RunSettings

if TYPE_CHECKING:
    from extproc.simulation.outcome import Outcome

PRODUCT = "tiered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. `believed` scales the prefill rate the router takes engines to have.

    `label` tells the runs of one part and workload apart; their seeds are repetitions.
    """

    part: str
    workload: str
    label: str
    policy: str = PRODUCT
    routers: int = 1
    seed: int = 1
    tuning: dict[str, float] = field(default_factory=dict)
    believed: float = 1.0
    scrape_interval_s: float | None = None
    log_delay_s: float = 0.02
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one run; see `extproc.simulation.outcome.Summary`."""

    part: str
    workload: str
    label: str
    policy: str
    routers: int
    seed: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p95_s: float
    stable: bool
    ideal_hit_rate: float
    ttft_p50_s: float
    utilization: float
    utilization_max_over_mean: float
    moved: float
    requests: int
    wall_s: float


def settings_of(case: Case, spec: WorkloadSpec) -> RunSettings:
    """Give the fleet of a workload with the routers of a case.

    A peer runs inside our router, with its index, load model and candidates.
    """
    engine = EngineSettings(
        kv_tokens=spec.kv_tokens,
        block_tokens=spec.workload.block_tokens,
        prefill_tokens_per_s=spec.prefill_tokens_per_s,
    )
    peer = PEERS.get(case.policy)
    router = RouterSettings(
        policy=PRODUCT if peer else case.policy,
        tuning=Tuning(**case.tuning),
        block_tokens=spec.workload.block_tokens,
        cache_tokens=(peer and peer.cache_tokens) or spec.kv_tokens,
        max_index_blocks=10_000_000,
        prefill_tokens_per_s=spec.prefill_tokens_per_s * case.believed,
    )
    return RunSettings(
        endpoints=spec.endpoints,
        engine=engine,
        router=router,
        routers=case.routers,
        log_delay_s=case.log_delay_s,
        scrape_interval_s=case.scrape_interval_s,
        changes=case.changes,
        seed=case.seed,
    )


def play(case: Case) -> Outcome:
    """Play one case and give all that it left."""
    spec = SUITE[case.workload](case.seed)
    peer = PEERS.get(case.policy)
    run = Run(spec.workload, settings_of(case, spec), make_policy=peer.make if peer else None)
    return run.execute()


def run_case(case: Case) -> Row:
    """Play one case and sum it up."""
    began_s = time.perf_counter()
    summary = summarize(play(case))
    return Row(
        part=case.part,
        workload=case.workload,
        label=case.label,
        policy=case.policy,
        routers=case.routers,
        seed=case.seed,
        wall_s=round(time.perf_counter() - began_s, 2),
        **{name: getattr(summary, name) for name in _FIGURES},
    )


def run_cases(cases: list[Case], *, workers: int) -> list[Row]:
    """Play cases side by side; rows come in the order of the cases."""
    rows: dict[int, Row] = {}
    with ProcessPoolExecutor(workers) as pool:
        tasks = {pool.submit(run_case, case): number for number, case in enumerate(cases)}
        for done, task in enumerate(as_completed(tasks), 1):
            row = rows[tasks[task]] = task.result()
            print(
                f"[{done}/{len(cases)}] {row.part} {row.workload} {row.label} seed {row.seed}:"
                f" hit {row.hit_rate:.3f} mean {row.ttft_mean_s:.3f} s"
                f" p95 {row.ttft_p95_s:.3f} s{'' if row.stable else ' UNSTABLE'}"
                f" ({row.wall_s:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
    return [rows[number] for number in range(len(cases))]


_FIGURES = (
    "hit_rate",
    "ttft_mean_s",
    "ttft_p95_s",
    "stable",
    "ideal_hit_rate",
    "ttft_p50_s",
    "utilization",
    "utilization_max_over_mean",
    "moved",
    "requests",
)
