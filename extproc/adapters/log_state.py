"""What is to be known of the decision log: for health, people and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

# The bar is 20 ms; a log that lags by seconds is slower than a scrape of the engines.
_DELAY_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


@dataclass(slots=True, kw_only=True)
class LogCounts:
    """What the log's client counts, from its start."""

    connected: set[str] = field(default_factory=set)
    """Which of reading and writing goes on."""
    reason: str = ""
    """Why one of them does not; of the last time when both do."""
    batches: int = 0
    written: int = 0
    unreadable: int = 0
    unknown_chains: int = 0
    gaps: int = 0
    replayed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The log at one moment. `lag_ms`: from an event to its return through the log."""

    connected: bool
    reason: str
    lag_ms: float
    peers: int
    waiting: int
    written: int
    applied: int
    dropped: int
    replayed: int
    unreadable: int
    unknown_chains: int
    gaps: int


@dataclass(frozen=True, slots=True)
class LogMetrics:
    """The log's metrics in a registry; `state` is read when the page is rendered."""

    registry: CollectorRegistry
    state: Callable[[], LogState]
    delay_s: Histogram = field(init=False)

    def __post_init__(self) -> None:
        delay_s = Histogram(
            "extproc_log_delay_seconds",
            "Time from an event here to its return through the decision log.",
            buckets=_DELAY_BUCKETS_S,
            registry=self.registry,
        )
        object.__setattr__(self, "delay_s", delay_s)
        self.registry.register(_LogCollector(self.state))


class _LogCollector(Collector):
    def __init__(self, state: Callable[[], LogState]) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Skip the collection that registering would otherwise do."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for name, text, read in _GAUGES:
            yield GaugeMetricFamily(f"extproc_log_{name}", text, value=read(state))
        for name, text, count in _COUNTERS:
            yield CounterMetricFamily(f"extproc_log_{name}", text, value=count(state))


_GAUGES: tuple[tuple[str, str, Callable[[LogState], float]], ...] = (
    ("connected", "1 while the decision log is read and written.", lambda s: float(s.connected)),
    ("lag_seconds", "How far the decision log is behind.", lambda s: s.lag_ms / 1e3),
    ("waiting", "Events that wait to be written.", lambda s: float(s.waiting)),
    ("peers", "Other routers heard of through the log.", lambda s: float(s.peers)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[LogState], float]], ...] = (
    ("written_events", "Own events written to the log.", lambda s: float(s.written)),
    ("applied_events", "Events of other routers applied.", lambda s: float(s.applied)),
    ("dropped_events", "Own events that no log took in time.", lambda s: float(s.dropped)),
    ("unreadable", "Entries of the log that are none of ours.", lambda s: float(s.unreadable)),
    (
        "unknown_chains",
        "Chains left out as what they continue is unknown.",
        lambda s: float(s.unknown_chains),
    ),
    ("gaps", "Times a part of the log was lost unread.", lambda s: float(s.gaps)),
)
