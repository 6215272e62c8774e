"""How loaded each endpoint is: outstanding prefill as a fluid queue, and in-flight requests.

Our own decisions are the first signal; what a scrape of the engine shows corrects them
while it is fresh. A missing signal leaves the other standing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.decision import Chain, DecisionId
    from extproc.core.endpoint import Endpoint
    from extproc.core.events import Observed

# Older scrapes say nothing about a queue that turns over several times a second.
_FRESH_S = 5.0
# Uncached tokens expected of a request before any was seen.
_TYPICAL_UNCACHED_TOKENS = 1_000.0
_LEARN_SHARE = 0.2
# Above this share of KV memory in use an engine queues or preempts instead of admitting.
_FULL_KV_USAGE = 0.9
# An engine that refused for want of room has some again when some of its requests end.
_REFUSAL_S = 2.0
# Rates outside are measurement errors: a counter that jumped, an interval near zero.
_MIN_RATE, _MAX_RATE = 10.0, 10_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One request in flight: what it took from its endpoint, until released."""

    endpoint: Endpoint
    chains: tuple[Chain, ...]
    load: _Load
    routed_tokens: float
    at_s: float


@dataclass(slots=True)
class _Load:
    rate_tokens_per_s: float
    at_s: float
    outstanding_tokens: float = 0.0
    routed_tokens: float = 0.0
    inflight: int = 0
    observed: Observed | None = None
    observed_at_s: float = 0.0
    started_since: int = 0
    """Own requests started minus ended since the last scrape."""
    moved_at_s: float = 0.0
    """When it last showed that it works, or got work while it had none."""
    last_routed_s: float = 0.0
    refused_at_s: float = float("-inf")
    refused_inflight: int = 0
    """Requests it had when it refused one."""

    def drain(self, now_s: float) -> None:
        elapsed_s = now_s - self.at_s
        if elapsed_s <= 0.0:
            return
        self.at_s = now_s
        if self.outstanding_tokens:
            left = self.outstanding_tokens - elapsed_s * self.rate_tokens_per_s
            self.outstanding_tokens = max(0.0, left)


class LoadModel:
    """Load of every endpoint, and the leases that hold it up.

    Leases are bounded twice: `max_leases` in number, `lease_ttl_s` in age, so a request
    whose end nobody reports stops counting. An endpoint with work that shows no progress
    for `suspect_s` is suspect; 0: none ever is.
    """

    def __init__(
        self,
        *,
        prefill_tokens_per_s: float,
        max_leases: int,
        lease_ttl_s: float,
        suspect_s: float = 0.0,
    ) -> None:
        self._rate = prefill_tokens_per_s
        self._max_leases = max_leases
        self._lease_ttl_s = lease_ttl_s
        self._loads: dict[Endpoint, _Load] = {}
        self._leases: OrderedDict[DecisionId, Lease] = OrderedDict()
        self._typical_uncached = _TYPICAL_UNCACHED_TOKENS
        self._suspect_s = suspect_s or float("inf")
        self._ends_are_told = False
        self._first_bytes_are_told = False

    def __len__(self) -> int:
        return len(self._leases)

    def acquire(
        self,
        decision_id: DecisionId,
        endpoint: Endpoint,
        *,
        uncached_tokens: int,
        chains: tuple[Chain, ...],
        now_s: float,
    ) -> None:
        """Count a routed request; `release` with the same id undoes it."""
        self._drop(decision_id, now_s)
        load = self._load(endpoint, now_s)
        load.drain(now_s)
        if not load.inflight:
            load.moved_at_s = now_s
        load.last_routed_s = now_s
        load.outstanding_tokens += uncached_tokens
        load.routed_tokens += uncached_tokens
        load.inflight += 1
        load.started_since += 1
        self._typical_uncached += _LEARN_SHARE * (uncached_tokens - self._typical_uncached)
        self._leases[decision_id] = Lease(
            endpoint=endpoint,
            chains=chains,
            load=load,
            routed_tokens=load.routed_tokens,
            at_s=now_s,
        )
        if len(self._leases) > self._max_leases:
            self._drop(next(iter(self._leases)), now_s)

    def begin(self, decision_id: DecisionId, now_s: float) -> None:
        """Note the first byte of an answer, with which its prefill is done."""
        told = self._computed(decision_id, now_s) is not None
        self._first_bytes_are_told = self._first_bytes_are_told or told

    def refuse(self, endpoint: Endpoint, now_s: float) -> None:
        """Note that an endpoint had no room for a request, which has left it."""
        load = self._load(endpoint, now_s)
        load.refused_at_s, load.refused_inflight = now_s, load.inflight

    def release(self, decision_id: DecisionId, now_s: float) -> Lease | None:
        """End a request, however it ended; unknown ids and second releases do nothing."""
        lease = self._drop(decision_id, now_s)
        self._ends_are_told = self._ends_are_told or lease is not None
        return lease

    def expire(self, now_s: float) -> None:
        """Release leases older than the TTL."""
        while self._leases:
            decision_id, lease = next(iter(self._leases.items()))
            if now_s - lease.at_s <= self._lease_ttl_s:
                return
            self._drop(decision_id, now_s)

    def observe(self, seen: Observed, now_s: float) -> None:
        """Take in a scrape: queue depth counts while fresh, and the prefill rate is learned."""
        load = self._load(seen.endpoint, now_s)
        load.drain(now_s)
        seen_at_s = now_s - seen.age_s
        self._learn_rate(load, seen, seen_at_s)
        if load.observed is None or load.observed.progress != seen.progress:
            load.moved_at_s = now_s
        load.observed = seen
        load.observed_at_s = seen_at_s
        load.started_since = 0

    def forget(self, endpoint: Endpoint) -> None:
        """Drop an endpoint's load; leases still held on it end without effect."""
        self._loads.pop(endpoint, None)

    def levels(self, endpoint: Endpoint, now_s: float) -> tuple[float, float, bool]:
        """Give `outstanding_tokens`, `inflight` and `is_held_back`, as every decision asks."""
        load = self._loads.get(endpoint)
        if load is None:
            return 0.0, 0.0, False
        held = load.inflight > 0 and self._is_held_back(load, now_s)
        if load.observed is None:
            load.drain(now_s)
            return load.outstanding_tokens, float(load.inflight), held
        return self.outstanding_tokens(endpoint, now_s), self.inflight(endpoint, now_s), held

    def is_held_back(self, endpoint: Endpoint, now_s: float) -> bool:
        """Whether an endpoint should get no request that others can take.

        It refused one for want of room, or it is suspect: it answers health checks, but
        what it has does not move.
        """
        load = self._loads.get(endpoint)
        return load is not None and load.inflight > 0 and self._is_held_back(load, now_s)

    def outstanding_tokens(self, endpoint: Endpoint, now_s: float) -> float:
        """Estimate uncached tokens sent to the endpoint and not yet computed."""
        load = self._loads.get(endpoint)
        if load is None:
            return 0.0
        load.drain(now_s)
        seen, age_s = load.observed, now_s - load.observed_at_s
        if seen is None or age_s > _FRESH_S:
            return load.outstanding_tokens
        waiting = float(seen.waiting or 0)
        if seen.kv_usage is not None and seen.kv_usage > _FULL_KV_USAGE:
            waiting += (seen.kv_usage - _FULL_KV_USAGE) / (1.0 - _FULL_KV_USAGE)
        queued = waiting * self._typical_uncached - age_s * load.rate_tokens_per_s
        return max(load.outstanding_tokens, queued)

    def inflight(self, endpoint: Endpoint, now_s: float) -> float:
        """Count requests on the endpoint: the scraped number while fresh, else our leases.

        Where ends are told, leases are the floor: an end told after the scrape that had
        left it out already would count twice.
        """
        load = self._loads.get(endpoint)
        if load is None:
            return 0.0
        seen = load.observed
        if seen is None or seen.running is None or now_s - load.observed_at_s > _FRESH_S:
            return float(load.inflight)
        counted = seen.running + (seen.waiting or 0) + load.started_since
        return float(max(counted, load.inflight if self._ends_are_told else 0))

    def rate_tokens_per_s(self, endpoint: Endpoint) -> float:
        """Give the prefill rate believed of an endpoint."""
        load = self._loads.get(endpoint)
        return self._rate if load is None else load.rate_tokens_per_s

    def _is_held_back(self, load: _Load, now_s: float) -> bool:
        if now_s - load.refused_at_s <= _REFUSAL_S and load.inflight >= load.refused_inflight:
            return True
        if now_s - load.moved_at_s <= self._suspect_s:
            return False
        seen = load.observed
        if seen is None or seen.progress is None or now_s - load.observed_at_s > _FRESH_S:
            return self._first_bytes_are_told
        if seen.running or seen.waiting:
            return True
        # It may have no work at all, if ends were lost on the way to us: one request tells.
        return now_s - load.last_routed_s <= self._suspect_s

    def _computed(self, decision_id: DecisionId, now_s: float) -> Lease | None:
        """End the prefill of a request.

        Engines prefill in order of arrival, so at most what was routed after it is left.
        """
        lease = self._leases.get(decision_id)
        if lease is not None:
            lease.load.moved_at_s = now_s
            lease.load.drain(now_s)
            later = lease.load.routed_tokens - lease.routed_tokens
            lease.load.outstanding_tokens = min(lease.load.outstanding_tokens, later)
        return lease

    def _drop(self, decision_id: DecisionId, now_s: float) -> Lease | None:
        lease = self._computed(decision_id, now_s)
        if lease is not None:
            del self._leases[decision_id]
            lease.load.inflight -= 1
            lease.load.started_since -= 1
        return lease

    def _load(self, endpoint: Endpoint, now_s: float) -> _Load:
        load = self._loads.get(endpoint)
        if load is None:
            load = self._loads[endpoint] = _Load(rate_tokens_per_s=self._rate, at_s=now_s)
        return load

    @staticmethod
    def _learn_rate(load: _Load, seen: Observed, now_s: float) -> None:
        before, elapsed_s = load.observed, now_s - load.observed_at_s
        if before is None or elapsed_s <= 0.0:
            return
        if before.computed_tokens is None or seen.computed_tokens is None:
            return
        rate = (seen.computed_tokens - before.computed_tokens) / elapsed_s
        if not _MIN_RATE <= rate <= _MAX_RATE:
            return
        if before.waiting and seen.waiting:
            load.rate_tokens_per_s += _LEARN_SHARE * (rate - load.rate_tokens_per_s)
        else:
            # The engine was idle for an unknown part of the interval: a lower bound.
            load.rate_tokens_per_s = max(load.rate_tokens_per_s, rate)
