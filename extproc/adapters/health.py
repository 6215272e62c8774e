"""Active health checks: an endpoint takes requests once it answers, until it stops answering.

Sits between discovery and the router: it takes the same events and passes an EndpointUp on
only while the endpoint is healthy, so membership and health can't contradict each other.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from extproc.core.events import EndpointDown, EndpointUp

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.endpoint import Endpoint

_LOG = logging.getLogger(__name__)
_OK = range(200, 300)
_MAX_CONCURRENT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """GET `path` every `interval_s`; the thresholds are counts in a row."""

    path: str = "/health"
    interval_s: float = 2.0
    timeout_s: float = 1.0
    unhealthy_threshold: int = 2
    healthy_threshold: int = 1


@dataclass(slots=True)
class _Patient:
    event: EndpointUp
    healthy: bool = False
    successes: int = 0
    failures: int = 0


class HealthChecks:
    """Checks every member of the pool concurrently and tells `apply` of each change."""

    def __init__(
        self, settings: HealthSettings, apply: Callable[[EndpointUp | EndpointDown], None]
    ) -> None:
        self._settings = settings
        self._apply = apply
        self._patients: dict[Endpoint, _Patient] = {}
        self._joined = asyncio.Event()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    def update(self, event: EndpointUp | EndpointDown) -> None:
        """Take in what discovery says; a newcomer is checked at once."""
        if isinstance(event, EndpointDown):
            self._patients.pop(event.endpoint, None)
            self._apply(event)
            return
        known = self._patients.get(event.endpoint)
        if known is None:
            self._patients[event.endpoint] = _Patient(event)
            self._joined.set()
            return
        known.event = event
        if known.healthy:
            self._apply(event)

    async def run(self) -> None:
        """Check until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as session:
            while True:
                self._joined.clear()
                await self.check_all(session)
                try:
                    async with asyncio.timeout(self._settings.interval_s):
                        await self._joined.wait()
                except TimeoutError:
                    continue

    async def check_all(self, session: aiohttp.ClientSession) -> None:
        """Check every member once."""
        await asyncio.gather(*(self._check(session, one) for one in list(self._patients)))

    async def _check(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        async with self._slots:
            passed, why = await self._ask(session, endpoint)
        patient = self._patients.get(endpoint)
        if patient is not None:
            self._judge(patient, passed=passed, why=why)

    async def _ask(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> tuple[bool, str]:
        url = f"http://{endpoint}{self._settings.path}"
        try:
            async with session.get(url, allow_redirects=False) as response:
                return response.status in _OK, f"status {response.status}"
        except TimeoutError:
            return False, "no answer in time"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return False, type(error).__name__

    def _judge(self, patient: _Patient, *, passed: bool, why: str) -> None:
        patient.successes = patient.successes + 1 if passed else 0
        patient.failures = 0 if passed else patient.failures + 1
        endpoint = patient.event.endpoint
        if not patient.healthy and patient.successes >= self._settings.healthy_threshold:
            patient.healthy = True
            _LOG.info("endpoint %s is healthy", endpoint)
            self._apply(patient.event)
        elif patient.failures == self._settings.unhealthy_threshold:
            patient.healthy = False
            _LOG.warning("endpoint %s is unhealthy: %s", endpoint, why)
            self._apply(EndpointDown(endpoint))
