"""The pool: the endpoints that serve the model, their weights, and which are ready."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.core.endpoint import Endpoint
    from extproc.core.events import EndpointUp

# A newcomer starts with this share of its weight, so that it is tried at once.
_RAMP_START = 0.1
# It takes over its share of the tier-1 keys one after the other in this time, since each
# has to be computed there once, and may claim those not seen yet for as long again, x 6.
_CLAIM_RAMP_S = 40.0
_CLAIM_S = 7 * _CLAIM_RAMP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One endpoint of the pool. `up_since_s` starts its slow-start ramp."""

    endpoint: Endpoint
    weight: float
    max_inflight: int | None
    draining: bool
    ready: bool
    up_since_s: float


class Pool:
    """The members, in the order they joined."""

    def __init__(self, *, slow_start_s: float = 0.0) -> None:
        self._slow_start_s = slow_start_s
        self._members: dict[Endpoint, Member] = {}
        self._ramping_until_s = 0.0
        self._claiming_until_s = 0.0

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, endpoint: object) -> bool:
        return endpoint in self._members

    def up(self, event: EndpointUp, now_s: float) -> None:
        """Add an endpoint, or make a known one ready; only a change restarts its ramp."""
        known = self._members.get(event.endpoint)
        ramping = known is None or not known.ready
        if ramping:
            self._begin_ramp(now_s)
        self._members[event.endpoint] = Member(
            endpoint=event.endpoint,
            weight=event.weight,
            max_inflight=event.max_inflight,
            draining=event.draining,
            ready=True,
            up_since_s=now_s if known is None or ramping else known.up_since_s,
        )

    def down(self, endpoint: Endpoint, *, gone: bool) -> None:
        """Take an endpoint out of use; `gone` removes it from the pool."""
        if gone:
            self._members.pop(endpoint, None)
        elif endpoint in self._members:
            self._members[endpoint] = replace(self._members[endpoint], ready=False)

    def restart_ramp(self, endpoint: Endpoint, now_s: float) -> None:
        """Begin the slow start of a member again: its cache is empty."""
        if endpoint in self._members:
            self._members[endpoint] = replace(self._members[endpoint], up_since_s=now_s)
            self._begin_ramp(now_s)

    def ready(self, subset: frozenset[str] | None = None) -> list[Member]:
        """List the ready members, of `subset` only when one is given."""
        return [
            member
            for member in self._members.values()
            if member.ready and (subset is None or member.endpoint in subset)
        ]

    def ramps(self, members: list[Member], now_s: float) -> list[float]:
        """Give each member's slow-start share in (0, 1], relative to the furthest one.

        Relative, since a fleet that starts as a whole has nobody to hold back for.
        """
        if not self._slow_start_s or now_s >= self._ramping_until_s:
            return [1.0] * len(members)
        shares = [
            min(1.0, _RAMP_START + max(0.0, now_s - member.up_since_s) / self._slow_start_s)
            for member in members
        ]
        furthest = max(shares, default=1.0)
        return [share / furthest for share in shares]

    def newcomers(self, members: list[Member], now_s: float) -> dict[Endpoint, float]:
        """Give those that joined lately, with the share 0..1 of their keys they may claim.

        Lately is relative to the others: a fleet that starts as a whole has no newcomers.
        """
        if now_s >= self._claiming_until_s or not members:
            return {}
        settled_s = min(member.up_since_s for member in members) + self._slow_start_s
        return {
            member.endpoint: min(1.0, (now_s - member.up_since_s) / _CLAIM_RAMP_S)
            for member in members
            if member.up_since_s > settled_s and now_s - member.up_since_s < _CLAIM_S
        }

    def _begin_ramp(self, now_s: float) -> None:
        self._ramping_until_s = now_s + self._slow_start_s
        self._claiming_until_s = now_s + _CLAIM_S
