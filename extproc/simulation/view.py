"""What the engines truly hold and have to do, for rules that are given exact knowledge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from extproc.core.decision import Chain
    from extproc.core.endpoint import Endpoint


class FleetView(Protocol):
    """The state of the modelled engines at this instant; no real router can have it."""

    def held_blocks(self, endpoint: Endpoint, chain: Chain) -> int:
        """Count the leading blocks of `chain` in the endpoint's cache."""
        ...

    def waiting_tokens(self, endpoint: Endpoint) -> float:
        """Count the prompt tokens sent to the endpoint that it has yet to compute."""
        ...

    def requests(self, endpoint: Endpoint) -> int:
        """Count the requests that wait or run on the endpoint."""
        ...
