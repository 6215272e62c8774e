"""Every change of routing state as a value; `Router.apply` is the one place that applies them.

Because state changes only through these, a router can be fed by itself, by another router,
by a log or by the simulator, and its state can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.decision import Chain, DecisionId, KeyHash
    from extproc.core.endpoint import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A request was sent to an endpoint."""

    decision_id: DecisionId
    endpoint: Endpoint
    chains: tuple[Chain, ...]
    prompt_tokens: int
    matched_tokens: int
    tier1: KeyHash
    tier2: KeyHash


@dataclass(frozen=True, slots=True)
class FirstByte:
    """The engine produced the first token of a request: its prefill is computed."""

    decision_id: DecisionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request ended, however it ended; `served` differs from the destination after retries."""

    decision_id: DecisionId
    served: Endpoint | None = None
    status: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointUp:
    """An endpoint joined or became ready."""

    endpoint: Endpoint
    weight: float = 1.0
    max_inflight: int | None = None
    draining: bool = False


@dataclass(frozen=True, slots=True)
class EndpointDown:
    """An endpoint is not to be used; `gone` also forgets what it holds."""

    endpoint: Endpoint
    gone: bool = False


@dataclass(frozen=True, slots=True)
class EndpointReset:
    """An endpoint lost its cache (restart, cleared)."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a scrape of the engine's metrics showed; None where the engine does not say.

    `kv_usage` is a share 0..1; `cache_tokens` the capacity of its prefix cache and
    `block_tokens` the size of its blocks; `computed_tokens`, `prefix_queries` and
    `prefix_hits` count prompt tokens since the engine's start (`start_time_s`, Unix time);
    `progress` is a counter that stands still only while the engine computes nothing.
    `age_s`: so long ago, at most, all of this was so.
    """

    endpoint: Endpoint
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    cache_tokens: int | None = None
    computed_tokens: float | None = None
    block_tokens: int | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    progress: float | None = None
    start_time_s: float | None = None
    age_s: float = 0.0


Event = Routed | FirstByte | Finished | EndpointUp | EndpointDown | EndpointReset | Observed
