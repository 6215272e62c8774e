"""Traces of real traffic as workloads; which format a file has, its first row tells."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Protocol

from extproc.simulation.coding_agent import read_coding_agents
from extproc.simulation.mooncake import read_mooncake
from extproc.simulation.record import read_record
from extproc.simulation.trace_rows import Row, TraceOptions, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.simulation.workload import Workload


class TraceReader(Protocol):
    """Make a workload of all rows of a trace; raises TraceError."""

    def __call__(self, rows: Iterable[Row], options: TraceOptions, /) -> Workload:
        """Read the rows, the first of which was recognised."""
        ...


# A format is known by fields that its first row has. New formats are added here.
FORMATS: dict[frozenset[str], TraceReader] = {
    frozenset({"timestamp", "input_length", "output_length", "hash_ids"}): read_mooncake,
    frozenset({"trace", "block", "tool", "sys"}): read_coding_agents,
    frozenset({"event", "at", "id"}): read_record,
}


def read_trace(
    lines: Iterable[str],
    *,
    name: str,
    seed: int = 0,
    limit: int | None = None,
    spread_s: float = 7_200.0,
    warmup_s: float = 0.0,
) -> Workload:
    """Read the lines of a trace as a workload; `limit` counts requests.

    `seed` draws what the trace leaves open: the beginnings of conversations, over
    `spread_s`. Raises TraceError with the number of the line that can't be used.
    """
    rows = read_rows(lines)
    first = next(rows, None)
    if first is None:
        Row(1, {}).refuse("the trace is empty")
    options = TraceOptions(name=name, seed=seed, limit=limit, spread_s=spread_s, warmup_s=warmup_s)
    read = next((r for fields, r in FORMATS.items() if fields <= first.fields.keys()), None)
    if read is None:
        known = "; ".join(", ".join(sorted(fields)) for fields in FORMATS)
        first.refuse(f"no known format: a first row has the fields of one of: {known}")
    return read(chain([first], rows), options)
