"""The samples of a metrics page in the Prometheus text format that a dialect asks for.

The library's parser reads single lines only: whole pages of 60 to 100 KB take it 27 to
50 ms, the dozen lines that are wanted take 2 ms with the search for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

# A page may repeat a name for every engine and adapter; beyond this it is no metrics page.
_MAX_SAMPLES = 10_000
_MAX_LINE_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class Sample:
    """One finite value with its labels."""

    value: float
    labels: Mapping[str, str]


class Samples:
    """The samples of the wanted names; `ranks` are labels of engines that repeat one another."""

    def __init__(self, page: str, names: Collection[str], *, ranks: frozenset[str]) -> None:
        self._ranks = ranks
        self._page = page
        self._found: dict[str, list[Sample]] = {}
        for name, sample in _read(page, names):
            self._found.setdefault(name, []).append(sample)

    def __bool__(self) -> bool:
        return bool(self._found)

    def of(self, name: str) -> list[Sample]:
        """List the samples of one name, none when the page has none."""
        return self._found.get(name, [])

    def total(self, *names: str, **labels: str) -> float | None:
        """Sum the first of the names that the page has, over samples with these labels.

        Ranks of one engine tell the same, so of those the largest counts. None when the
        page has none of the names.
        """
        wanted = labels.items()
        for name in names:
            found = [one for one in self.of(name) if wanted <= one.labels.items()]
            if found:
                return sum(self._by_engine(found).values())
        return None

    def mean(self, *names: str) -> float | None:
        """Average over engines, as `total` sums over them."""
        for name in names:
            if found := self.of(name):
                values = self._by_engine(found).values()
                return sum(values) / len(values)
        return None

    def describes(self, name: str, word: str) -> bool:
        """Say whether the help text of a metric has a word."""
        begin = self._page.find(f"# HELP {name} ")
        return begin >= 0 and word in self._page[begin:].split("\n", 1)[0]

    def _by_engine(self, samples: list[Sample]) -> dict[frozenset[tuple[str, str]], float]:
        largest: dict[frozenset[tuple[str, str]], float] = {}
        for one in samples:
            key = frozenset(item for item in one.labels.items() if item[0] not in self._ranks)
            largest[key] = max(one.value, largest.get(key, -math.inf))
        return largest


def _read(page: str, names: Collection[str]) -> Iterator[tuple[str, Sample]]:
    count = 0
    for line in page.split("\n"):
        name = line.partition("{")[0].partition(" ")[0]
        if name not in names or len(line) > _MAX_LINE_CHARS:
            continue
        try:
            for family in text_string_to_metric_families(line):
                for sample in family.samples:
                    if math.isfinite(sample.value):
                        yield name, Sample(sample.value, sample.labels)
        except ValueError:
            continue
        count += 1
        if count >= _MAX_SAMPLES:
            return
