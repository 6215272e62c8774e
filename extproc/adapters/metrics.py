"""What the router counts, as Prometheus metrics in a registry of its own.

Labels come from closed sets: policies, reasons, error codes, and endpoints of the pool.
Series of an endpoint end with it, so churn of addresses does not grow the registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from extproc.core.events import EndpointDown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client import Metric

    from extproc.core.decision import Decision
    from extproc.core.endpoint import Endpoint
    from extproc.core.errors import RequestRefusedError
    from extproc.core.events import EndpointUp
    from extproc.core.router import EndpointView

# From a tenth of the decision budget (300 us at 16 KB) to a time-out's length.
_DECISION_BUCKETS_S = (
    0.00003, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2,
)  # fmt: skip


class Metrics:
    """Counters of one router; `snapshot` and `is_ready` are read when the page is rendered."""

    def __init__(
        self, *, snapshot: Callable[[], Sequence[EndpointView]], is_ready: Callable[[], bool]
    ) -> None:
        self.registry = CollectorRegistry()
        self._label_sets: dict[str, set[tuple[str, str, str]]] = {}
        self._decisions = self._counter(
            "decisions", "Requests routed, by destination.", ("policy", "reason", "endpoint")
        )
        self._decision_s = Histogram(
            "extproc_decision_seconds",
            "Time from the last body byte we wait for to the decision.",
            buckets=_DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens routed (estimated).")
        self._matched_tokens = self._counter(
            "matched_tokens", "Prompt tokens believed to be cached at the destination."
        )
        self._refused = self._counter("refused", "Requests answered at once.", ("code",))
        self._errors = self._counter("errors", "Streams that ended in a fault of the router.")
        self._finished = self._counter("finished", "Ends of requests told by the access log.")
        self._retries = self._counter("retries", "Attempts beyond the first, told by Envoy.")
        self._fallbacks = self._counter(
            "fallbacks", "Requests served by another endpoint than their destination."
        )
        self._dropped_rows = self._counter(
            "record_dropped", "Rows of the decision record lost to a slow disk."
        )
        self._streams = Gauge(
            "extproc_streams_open", "Streams of Envoy now open.", registry=self.registry
        )
        self.registry.register(_PoolCollector(snapshot, is_ready))

    def count_decision(self, decision: Decision, took_s: float) -> None:
        """Count a routed request and the time its decision took."""
        labels = (decision.policy, decision.reason.value, str(decision.destination))
        self._label_sets.setdefault(decision.destination, set()).add(labels)
        self._decisions.labels(*labels).inc()
        self._decision_s.observe(took_s)
        self._prompt_tokens.inc(decision.prompt_tokens)
        self._matched_tokens.inc(decision.matched_tokens)

    def count_refusal(self, error: RequestRefusedError) -> None:
        """Count a request answered at once, by the code of its error."""
        self._refused.labels(error.code).inc()

    def count_error(self) -> None:
        """Count a stream that ended in a fault of our own."""
        self._errors.inc()

    def count_finish(self, *, attempts: int, fell_back: bool) -> None:
        """Count the end of a request: `attempts` includes the first one."""
        self._finished.inc()
        self._retries.inc(max(0, attempts - 1))
        if fell_back:
            self._fallbacks.inc()

    def count_dropped_row(self) -> None:
        """Count a row of the decision record that could not be written."""
        self._dropped_rows.inc()

    def open_stream(self) -> None:
        """Count a stream of Envoy that began."""
        self._streams.inc()

    def close_stream(self) -> None:
        """Count a stream of Envoy that ended."""
        self._streams.dec()

    def update(self, event: EndpointUp | EndpointDown) -> None:
        """End the series of an endpoint that left the pool."""
        if isinstance(event, EndpointDown) and event.gone:
            self.forget(event.endpoint)

    def forget(self, endpoint: Endpoint) -> None:
        """Drop every series labelled with an endpoint."""
        for labels in self._label_sets.pop(endpoint, ()):
            self._decisions.remove(*labels)

    def render(self) -> bytes:
        """Give the page in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"extproc_{name}", text, labels, registry=self.registry)


class _PoolCollector(Collector):
    """Gauges of the pool, read from the router when asked, so they can't go stale."""

    def __init__(
        self, snapshot: Callable[[], Sequence[EndpointView]], is_ready: Callable[[], bool]
    ) -> None:
        self._snapshot = snapshot
        self._is_ready = is_ready

    def describe(self) -> list[Metric]:
        """Skip the collection that registering would otherwise do."""
        return []

    def collect(self) -> Iterator[Metric]:
        views = self._snapshot()
        yield GaugeMetricFamily(
            "extproc_ready", "1 while requests are routed.", value=float(self._is_ready())
        )
        for name, text, read in _POOL_GAUGES:
            family = GaugeMetricFamily(f"extproc_{name}", text, labels=("endpoint",))
            for view in views:
                family.add_metric((view.endpoint,), read(view))
            yield family
        for name, text, count in _POOL_COUNTERS:
            counter = CounterMetricFamily(f"extproc_{name}", text, labels=("endpoint",))
            for view in views:
                counter.add_metric((view.endpoint,), count(view))
            yield counter


_POOL_GAUGES: tuple[tuple[str, str, Callable[[EndpointView], float]], ...] = (
    ("inflight", "Requests on the endpoint.", lambda view: view.inflight),
    (
        "outstanding_tokens",
        "Uncached prompt tokens routed to the endpoint and not yet computed.",
        lambda view: view.outstanding_tokens,
    ),
    (
        "index_blocks",
        "Prefix blocks the endpoint is believed to hold.",
        lambda view: float(view.blocks),
    ),
    (
        "endpoint_held_back",
        "1 while others are preferred: it refused a request, or what it has does not move.",
        lambda view: float(view.held_back),
    ),
    ("endpoint_ready", "1 while the endpoint takes requests.", lambda view: float(view.ready)),
)
_POOL_COUNTERS: tuple[tuple[str, str, Callable[[EndpointView], float]], ...] = (
    (
        "predicted_cached_tokens",
        "Prompt tokens believed to be cached where they were routed (estimated).",
        lambda view: view.cached.predicted,
    ),
    (
        "predicted_prompt_tokens",
        "Prompt tokens routed to the endpoint (estimated).",
        lambda view: view.cached.routed,
    ),
    (
        "actual_cached_tokens",
        "Prompt tokens found in the prefix cache, as the engine tells.",
        lambda view: view.cached.hits,
    ),
    (
        "actual_prompt_tokens",
        "Prompt tokens looked up in the prefix cache, as the engine tells.",
        lambda view: view.cached.queries,
    ),
    (
        "index_healed",
        "Times the index forgot the endpoint, as far less was cached than predicted.",
        lambda view: float(view.healed),
    ),
)
