"""Peers' routing rules as baselines for the simulator; they are no policies of the product.

Each is our own port of what the named project's code or paper describes, with its defaults.
Peers know neither weights nor drains, so both are ignored here. Where a peer leaves a tie to
chance, the Random given in decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.peers_affinity import BoundedRing, LongestMatchGuard, session_rendezvous
from bench.peers_costs import ExpectedTtft, LMetric, WeightedScorers
from bench.peers_sight import Exact, believed
from extproc.core.policies import least_request, round_robin

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from extproc.core.policies import Policy
    from extproc.simulation.view import FleetView


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A rule to compare with; `make` gives each router an instance of its own.

    `exact` rules see the engines as they are, which no router can: a reference only.
    `cache_tokens` is the peer's own capacity of its approximate index for one endpoint;
    None where it follows the engine's, or is too large to be fair.
    """

    name: str
    make: Callable[[FleetView, Random], Policy]
    exact: bool = False
    cache_tokens: int | None = None


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="round-robin", make=lambda _fleet, _chance: round_robin),
        Peer(name="least-request", make=lambda _fleet, _chance: least_request),
        Peer(name="session-rendezvous", make=lambda _fleet, _chance: session_rendezvous),
        Peer(name="longest-match-guard", make=lambda _fleet, _chance: LongestMatchGuard()),
        Peer(
            name="weighted-3-2-2",
            make=lambda _fleet, chance: WeightedScorers(chance),
            cache_tokens=31_250 * 64,
        ),
        Peer(name="chwbl-256", make=lambda _fleet, _chance: BoundedRing()),
        Peer(name="expected-ttft", make=lambda _fleet, chance: ExpectedTtft(believed, chance)),
        Peer(
            name="expected-ttft-exact",
            make=lambda fleet, chance: ExpectedTtft(Exact(fleet), chance),
            exact=True,
        ),
        Peer(name="lmetric", make=lambda _fleet, chance: LMetric(believed, chance)),
        Peer(
            name="lmetric-exact",
            make=lambda fleet, chance: LMetric(Exact(fleet), chance),
            exact=True,
        ),
    )
}
