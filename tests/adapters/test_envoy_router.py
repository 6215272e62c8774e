"""The gateway with real routers: decisions are followed, and every router hears the outcome."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from extproc.adapters.access_log import AccessLog
from extproc.adapters.envoy_config import bootstrap, to_yaml
from extproc.adapters.envoy_process import find_envoy, start_envoy
from extproc.adapters.envoy_settings import GatewaySettings
from extproc.adapters.server import ExtProcServer, ServerSettings
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp
from extproc.core.intake import IntakeSettings
from extproc.core.phases import BodyMode, StreamSettings
from extproc.core.router import Router, RouterSettings

LIMIT_S = 20
DEAD = Endpoint("127.0.0.1:1")
REQUESTS = 24
MODES = [mode for mode in BodyMode if mode is not BodyMode.NONE]


def prompt(number):
    message = {"role": "user", "content": f"{number} " * 300}
    return json.dumps({"model": "m", "messages": [message]}).encode()


@asynccontextmanager
async def engine():
    async def echo(request):
        return web.Response(body=await request.read())

    app = web.Application(client_max_size=0)
    app.router.add_route("*", "/{path:.*}", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0]
        yield Endpoint(f"{host}:{port}")
    finally:
        await runner.cleanup()


@asynccontextmanager
async def router(name, address, endpoints, mode):
    core = Router(RouterSettings(slow_start_s=0.0), router_id=name)
    for one in endpoints:
        core.apply(EndpointUp(endpoint=one), time.monotonic())
    outcomes = asyncio.Queue()
    log = AccessLog(core.apply, time.monotonic, outcomes.put_nowait)
    server = ExtProcServer(
        ServerSettings(address=address),
        router=core,
        intake=IntakeSettings(),
        stream=StreamSettings(body_mode=mode),
        clock=time.monotonic,
        sinks=(log.sink(),),
    )
    await server.start()
    await server.set_serving(serving=True)
    try:
        yield server.address, core, outcomes
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def gateway(folder, mode, endpoints):
    """Two routers, one on TCP and one on a unix socket, behind one Envoy."""
    async with AsyncExitStack() as stack:
        places = {"tcp": "127.0.0.1:0", "unix": f"unix:{folder}/r"}
        routers = [
            await stack.enter_async_context(router(name, place, endpoints, mode))
            for name, place in places.items()
        ]
        settings = GatewaySettings(
            listen_port=0,
            admin_port=0,
            routers=tuple(address for address, _, _ in routers),
            endpoints=tuple(endpoints),
            body_mode=mode,
            message_timeout_s=5.0,
            health_path=None,
        )
        text = to_yaml(bootstrap(settings))
        envoy = await start_envoy(find_envoy(), text, log_path=folder / "log", concurrency=1)
        stack.push_async_callback(envoy.stop)
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        url = f"http://127.0.0.1:{envoy.listen[1]}"
        session = await stack.enter_async_context(aiohttp.ClientSession(url, timeout=timeout))
        yield session, routers


async def told(outcomes):
    return [await asyncio.wait_for(outcomes.get(), LIMIT_S) for _ in range(REQUESTS)]


@pytest.mark.parametrize("mode", MODES)
async def test_every_router_hears_which_endpoint_served_each_request(tmp_path, mode):
    retried = mode is not BodyMode.FULL_DUPLEX_STREAMED
    async with engine() as alive, engine() as other:
        endpoints = [alive, DEAD if retried else other]
        async with gateway(tmp_path, mode, endpoints) as (session, routers):
            for number in range(REQUESTS):
                async with session.post("/v1/chat/completions", data=prompt(number)) as response:
                    assert response.status == 200
                    assert await response.read() == prompt(number)
            logs = [await told(outcomes) for _, _, outcomes in routers]
            inflight = [
                view.inflight for _, core, _ in routers for view in core.snapshot(time.monotonic())
            ]

    first, second = ({outcome.decision_id: outcome for outcome in log} for log in logs)
    assert first == second
    assert None not in first
    assert len(first) == REQUESTS
    for outcome in first.values():
        assert outcome.served == (alive if outcome.destination == DEAD else outcome.destination)
        assert outcome.attempts == (2 if outcome.destination == DEAD else 1)
    assert {outcome.destination for outcome in first.values()} == set(endpoints)
    assert not any(inflight)
