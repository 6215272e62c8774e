"""One measured figure, the machine it holds for, and the table of all of them."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One result; `budget` is in the same unit, None where none is promised."""

    part: str
    case: str
    value: float
    unit: str
    budget: float | None = None

    @property
    def within(self) -> bool | None:
        """Whether the budget is kept; None without one."""
        return None if self.budget is None else self.value <= self.budget


def describe_machine() -> dict[str, str]:
    """Name what the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if _is_linux() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def as_json(figures: list[Figure]) -> list[dict[str, object]]:
    """Give the figures as plain values."""
    return [asdict(figure) | {"within": figure.within} for figure in figures]


def print_table(figures: list[Figure], machine: dict[str, str]) -> None:
    """Print one table, a rule between the parts."""
    table = Table(title=", ".join(f"{name} {value}" for name, value in machine.items()))
    for name in ("part", "case"):
        table.add_column(name)
    for name in ("measured", "budget", ""):
        table.add_column(name, justify="right")
    for index, figure in enumerate(figures):
        budget = "" if figure.budget is None else f"{figure.budget:,g} {figure.unit}"
        verdict = {None: "", True: "kept", False: "MISSED"}[figure.within]
        table.add_row(
            figure.part,
            figure.case,
            f"{_short(figure.value)} {figure.unit}",
            budget,
            verdict,
            end_section=index + 1 < len(figures) and figures[index + 1].part != figure.part,
        )
    Console(width=100).print(table)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _is_linux() -> bool:
    return platform.system() == "Linux"
