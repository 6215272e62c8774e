"""Rows of a trace file: one JSON object a line, each field checked where it is read."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, NoReturn

import jiter

from extproc.core.errors import ExtprocError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Beyond any model's context, and few enough that a wrong row can't exhaust memory.
_MOST_TOKENS = 10_000_000
_MOST_ID = (1 << 63) - 1


class TraceError(ExtprocError, ValueError):
    """A row of a trace can't be used; `line` counts from 1."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How a trace becomes a workload.

    `limit` cuts it after that many requests, counted from its beginning; `spread_s` is the
    time over which conversations begin where the trace doesn't tell.
    """

    name: str
    seed: int = 0
    limit: int | None = None
    spread_s: float = 7_200.0
    warmup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One row; reading a field that is missing or of another kind raises TraceError."""

    line: int
    fields: dict[str, object]

    def tokens(self, name: str) -> int:
        """Read a number of tokens."""
        return self._whole(name, _MOST_TOKENS)

    def number(self, name: str) -> int:
        """Read a number that identifies something."""
        return self._whole(name, _MOST_ID)

    def amount(self, name: str) -> float:
        """Read a number that is not negative, such as a time."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"`{name}` must be a number")
        if not 0 <= value <= _MOST_ID or not isfinite(value):
            self.refuse(f"`{name}` is out of range")
        return float(value)

    def ids(self, name: str) -> list[int]:
        """Read a list of ids."""
        values = self.fields.get(name)
        if not isinstance(values, list):
            self.refuse(f"`{name}` must be a list")
        if not all(_is_whole(value, _MOST_ID) for value in values):
            self.refuse(f"`{name}` must hold whole numbers, none negative")
        return values

    def runs(self, name: str) -> tuple[tuple[int, int], ...]:
        """Read a list of runs: the first id, and how many ids follow each other."""
        values = self.fields.get(name)
        if not isinstance(values, list) or not all(_is_run(value) for value in values):
            self.refuse(f"`{name}` must be a list of [first id, count]")
        return tuple((first, count) for first, count in values)

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error that names this row."""
        raise TraceError(self.line, reason)

    def _whole(self, name: str, most: int) -> int:
        value = self.fields.get(name)
        if not isinstance(value, int) or not _is_whole(value, most):
            self.refuse(f"`{name}` must be a whole number of 0 to {most:,}")
        return value


def read_rows(lines: Iterable[str]) -> Iterator[Row]:
    """Read JSON objects, one a line; empty lines are left out. Raises TraceError."""
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        yield _row(line, text)


def _row(line: int, text: str) -> Row:
    fields: object = None
    try:
        fields = jiter.from_json(text.encode("utf-8", "surrogatepass"), allow_inf_nan=False)
    except ValueError as error:
        Row(line, {}).refuse(f"no JSON: {error}")
    if not isinstance(fields, dict):
        Row(line, {}).refuse("no JSON object")
    return Row(line, fields)


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_run(value: object) -> bool:
    if not isinstance(value, list) or len(value) != len(("first", "count")):
        return False
    return _is_whole(value[0], _MOST_ID // 2) and _is_whole(value[1], _MOST_TOKENS)
