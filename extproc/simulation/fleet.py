"""The engines of one simulated fleet, by endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.endpoint import Endpoint
from extproc.simulation.engine import Engine, EngineSettings, Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.core.decision import Chain


class Fleet:
    """Engines alike, numbered in the order they joined; a FleetView."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._engines: dict[Endpoint, Engine] = {}
        self._joined = 0

    def __iter__(self) -> Iterator[tuple[Endpoint, Engine]]:
        return iter(self._engines.items())

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, endpoint: Endpoint) -> Engine:
        return self._engines[endpoint]

    def __contains__(self, endpoint: object) -> bool:
        return endpoint in self._engines

    def add(self) -> Endpoint:
        """Start an engine with an empty cache."""
        self._joined += 1
        high, low = divmod(self._joined, 256)
        endpoint = Endpoint(f"10.0.{high}.{low}:8000")
        self._engines[endpoint] = Engine(self._settings)
        return endpoint

    def kill(self, endpoint: Endpoint) -> list[Job]:
        """Remove an engine with its cache; give the requests it took with it."""
        return self._engines.pop(endpoint).jobs()

    def held_blocks(self, endpoint: Endpoint, chain: Chain) -> int:
        """Count the leading blocks of `chain` in the endpoint's cache."""
        return self._engines[endpoint].cache.held_blocks(chain)

    def waiting_tokens(self, endpoint: Endpoint) -> float:
        """Count the prompt tokens sent to the endpoint that it has yet to compute."""
        return float(self._engines[endpoint].waiting_tokens)

    def requests(self, endpoint: Endpoint) -> int:
        """Count the requests that wait or run on the endpoint."""
        engine = self._engines[endpoint]
        return engine.running + engine.waiting
