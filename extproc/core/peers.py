"""A router among others: tells its events, applies theirs, and drops what dead ones held.

Each router applies the events of all through the same `Router.apply`, so load and
knowledge are sums over routers. Nothing here waits: events to tell are kept in a bounded
queue, which gives up its oldest.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.core.events import EndpointReset, Finished, FirstByte, Routed
from extproc.core.router import routed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.core.decision import Decision, DecisionId, RoutingRequest
    from extproc.core.endpoint import Endpoint
    from extproc.core.events import Event
    from extproc.core.journal import Batch, Shared
    from extproc.core.router import EndpointView, Router

# Ids come from Envoy's access log, where other filters may have written them.
_MAX_ID_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """`silent_s`: a router not heard of for so long is dead, and what it held ends.

    `forward_s`: so long we wait for the router that decided to tell the end of a request
    before we tell it. `reset_s`: resets of one endpoint within it are one reset, which
    each router saw for itself.
    """

    max_waiting: int = 20_000
    silent_s: float = 5.0
    forward_s: float = 0.25
    reset_s: float = 5.0
    max_peers: int = 256
    max_open: int = 20_000
    max_ended: int = 10_000


@dataclass(slots=True)
class _Peer:
    heard_at_s: float
    sequence: int
    open: OrderedDict[DecisionId, None]
    """Requests it routed and whose end nobody told."""


class Peers:
    """Stands in for a router towards streams, access log and scrapes.

    `is_known` says whether an endpoint is ours too: what concerns others is left out.
    `on_waiting` is called when there is something to `take`.
    """

    def __init__(
        self,
        router: Router,
        *,
        router_id: str,
        is_known: Callable[[Endpoint], bool],
        on_waiting: Callable[[], None] = lambda: None,
        settings: PeerSettings | None = None,
    ) -> None:
        self._router = router
        self._router_id = router_id
        self._is_known = is_known
        self._on_waiting = on_waiting
        self._settings = settings or PeerSettings()
        self._waiting: deque[Shared] = deque()
        self._forwards: OrderedDict[DecisionId, tuple[Finished, float]] = OrderedDict()
        self._ended: OrderedDict[DecisionId, Finished] = OrderedDict()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._resets: dict[Endpoint, float] = {}
        self._ends_are_told = False
        self.dropped = 0
        """Events that nobody took in time."""
        self.applied = 0
        """Events of others that were applied."""

    @property
    def waiting(self) -> int:
        """Events to tell."""
        return len(self._waiting)

    @property
    def alive(self) -> int:
        """Other routers heard of."""
        return len(self._peers)

    def route(self, request: RoutingRequest, now_s: float) -> Decision:
        """Route as the router does, errors as there, and tell the decision."""
        decision = self._router.route(request, now_s)
        self._tell(routed(decision))
        return decision

    def apply(self, event: Event, now_s: float) -> None:
        """Apply an event that was seen here, and tell it if it concerns others."""
        match event:
            case FirstByte() if self._is_own(event.decision_id):
                self._tell(event)
            case Finished() if self._is_own(event.decision_id):
                self._ends_are_told = True
                self._tell(event)
            case Finished():
                if self._note_end(event):
                    self._forward(event, now_s)
            case EndpointReset():
                if not self._is_news(event.endpoint, now_s):
                    return
                self._tell(event)
        self._router.apply(event, now_s)

    def snapshot(self, now_s: float) -> tuple[EndpointView, ...]:
        """Show every endpoint of the pool, as the router does."""
        return self._router.snapshot(now_s)

    def take(self, limit: int, now_s: float) -> list[Shared]:
        """Take out at most `limit` events to tell, the oldest first."""
        while self._forwards:
            decision_id, (event, due_s) = next(iter(self._forwards.items()))
            if due_s > now_s:
                break
            del self._forwards[decision_id]
            self._tell(event)
        count = min(limit, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def merge(self, batch: Batch, now_s: float) -> bool:
        """Apply another router's events; False for our own batch and for one seen before."""
        if batch.router_id == self._router_id:
            return False
        peer = self._hear(batch.router_id, now_s)
        if batch.sequence <= peer.sequence:
            return False
        peer.sequence = batch.sequence
        for event in batch.events:
            self._merge(event, peer, now_s)
        return True

    def expire(self, now_s: float) -> Sequence[str]:
        """End what silent routers hold; give their ids."""
        silent = [
            router_id
            for router_id, peer in self._peers.items()
            if now_s - peer.heard_at_s > self._settings.silent_s
        ]
        for router_id in silent:
            self._bury(self._peers.pop(router_id), now_s)
        return silent

    def lose(self, now_s: float) -> None:
        """End what all others hold: a part of what they told is lost."""
        for peer in self._peers.values():
            self._bury(peer, now_s)
            peer.open.clear()

    def _merge(self, event: Shared, peer: _Peer, now_s: float) -> None:
        match event:
            case Routed():
                if not self._is_known(event.endpoint):
                    return
                self._router.apply(event, now_s)
                ended = self._ended.get(event.decision_id)
                if ended is None:
                    peer.open[event.decision_id] = None
                    if len(peer.open) > self._settings.max_open:
                        peer.open.popitem(last=False)
                else:
                    self._router.apply(ended, now_s)
            case Finished():
                self._forwards.pop(event.decision_id, None)
                self._note_end(event)
                self._router.apply(event, now_s)
            case EndpointReset():
                if self._is_news(event.endpoint, now_s):
                    self._router.apply(event, now_s)
            case _:
                self._router.apply(event, now_s)
        self.applied += 1

    def _tell(self, event: Shared) -> None:
        if len(self._waiting) >= self._settings.max_waiting:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(event)
        self._on_waiting()

    def _forward(self, event: Finished, now_s: float) -> None:
        """Tell the end of another's request later, unless that router does so itself."""
        if len(event.decision_id) > _MAX_ID_CHARS:
            return
        self._forwards.setdefault(event.decision_id, (event, now_s + self._settings.forward_s))
        if len(self._forwards) > self._settings.max_ended:
            self._forwards.popitem(last=False)
            self.dropped += 1

    def _note_end(self, event: Finished) -> bool:
        """Note the end of another's request, which may be told before its beginning.

        False when it was noted before.
        """
        self._ends_are_told = True
        peer = self._peers.get(event.decision_id.rpartition("-")[0])
        if peer is not None:
            peer.open.pop(event.decision_id, None)
        if event.decision_id in self._ended:
            return False
        self._ended[event.decision_id] = event
        if len(self._ended) > self._settings.max_ended:
            self._ended.popitem(last=False)
        return True

    def _hear(self, router_id: str, now_s: float) -> _Peer:
        peer = self._peers.get(router_id)
        if peer is None:
            peer = self._peers[router_id] = _Peer(now_s, 0, OrderedDict())
            if len(self._peers) > self._settings.max_peers:
                _, longest_known = self._peers.popitem(last=False)
                self._bury(longest_known, now_s)
        peer.heard_at_s = max(now_s, peer.heard_at_s)
        return peer

    def _bury(self, peer: _Peer, now_s: float) -> None:
        # Where no end is ever told, one told here would make the leases of all count.
        if self._ends_are_told:
            for decision_id in peer.open:
                self._router.apply(Finished(decision_id=decision_id), now_s)

    def _is_own(self, decision_id: DecisionId) -> bool:
        return decision_id.rpartition("-")[0] == self._router_id

    def _is_news(self, endpoint: Endpoint, now_s: float) -> bool:
        """Say whether a reset is another one than the last; each router sees all of them."""
        before_s = self._resets.get(endpoint)
        if before_s is not None and now_s - before_s <= self._settings.reset_s:
            return False
        if len(self._resets) >= self._settings.max_ended:
            self._resets.clear()
        self._resets[endpoint] = now_s
        return True
