import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, ClientTimeout, web

from extproc.adapters.health import HealthChecks, HealthSettings
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointDown, EndpointUp


class Engine:
    """Answers /health with `status`, after `wait` when that is set."""

    def __init__(self):
        self.status = 200
        self.wait = None
        self.endpoint = None

    async def answer(self, _request):
        if self.wait is not None:
            await self.wait.wait()
        return web.Response(status=self.status)


@asynccontextmanager
async def running_engine():
    engine, app = Engine(), web.Application()
    app.router.add_get("/health", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.endpoint = Endpoint.parse(f"127.0.0.1:{runner.addresses[0][1]}")
    yield engine
    await runner.cleanup()


async def verdicts(engine, statuses, **thresholds):
    events = []
    checks = HealthChecks(HealthSettings(**thresholds), events.append)
    checks.update(EndpointUp(endpoint=engine.endpoint))
    async with ClientSession() as session:
        for engine.status in statuses:
            await checks.check_all(session)
    return ["up" if isinstance(event, EndpointUp) else "down" for event in events]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        pytest.param([200, 200], ["up"], id="the first success brings it up, once"),
        pytest.param([503, 503, 503], ["down"], id="one that never answered well is never up"),
        pytest.param([200, 500, 200, 500], ["up"], id="single failures change nothing"),
        pytest.param([200, 500, 500, 500], ["up", "down"], id="two failures in a row, told once"),
        pytest.param([200, 500, 500, 200], ["up", "down", "up"], id="it comes back"),
        pytest.param([200, 302, 302], ["up", "down"], id="a redirect is no success"),
    ],
)
async def test_thresholds_decide(statuses, expected):
    async with running_engine() as engine:
        assert await verdicts(engine, statuses) == expected


async def test_a_higher_healthy_threshold_waits():
    async with running_engine() as engine:
        assert await verdicts(engine, [200, 200], healthy_threshold=3) == []
        assert await verdicts(engine, [200, 200, 200], healthy_threshold=3) == ["up"]


async def test_a_hung_endpoint_fails_in_time():
    events = asyncio.Queue()
    settings = HealthSettings(timeout_s=0.05, interval_s=0.01)
    async with running_engine() as engine, asyncio.timeout(5):
        checks = HealthChecks(settings, events.put_nowait)
        running = asyncio.create_task(checks.run())
        checks.update(EndpointUp(endpoint=engine.endpoint))
        assert await events.get() == EndpointUp(endpoint=engine.endpoint)
        engine.wait = asyncio.Event()
        assert await events.get() == EndpointDown(engine.endpoint)
        engine.wait.set()
        assert await events.get() == EndpointUp(endpoint=engine.endpoint)
        running.cancel()


async def test_a_refused_connection_is_a_failure():
    async with running_engine() as engine:
        endpoint = engine.endpoint
    events = []
    checks = HealthChecks(HealthSettings(unhealthy_threshold=1), events.append)
    checks.update(EndpointUp(endpoint=endpoint))
    async with ClientSession(timeout=ClientTimeout(1)) as session:
        await checks.check_all(session)

    assert events == [EndpointDown(endpoint)]


async def test_an_endpoint_that_left_is_told_at_once_and_not_checked():
    events = []
    checks = HealthChecks(HealthSettings(), events.append)
    async with running_engine() as engine, ClientSession() as session:
        checks.update(EndpointUp(endpoint=engine.endpoint))
        checks.update(EndpointDown(engine.endpoint, gone=True))
        await checks.check_all(session)

        assert events == [EndpointDown(engine.endpoint, gone=True)]


async def test_a_changed_weight_passes_only_while_healthy():
    events = []
    checks = HealthChecks(HealthSettings(), events.append)
    async with running_engine() as engine, ClientSession() as session:
        heavy = EndpointUp(endpoint=engine.endpoint, weight=2.0)
        heavier = EndpointUp(endpoint=engine.endpoint, weight=3.0)
        checks.update(EndpointUp(endpoint=engine.endpoint))
        checks.update(heavy)
        await checks.check_all(session)
        checks.update(heavier)

        assert events == [heavy, heavier]
