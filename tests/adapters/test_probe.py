import asyncio

import grpc.aio
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from extproc.adapters.probe import probe


async def ask(address, **options):
    return await asyncio.to_thread(probe, address, **options)


@pytest.fixture
async def health():
    server, servicer = grpc.aio.server(), HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", servicer
    await server.stop(None)


async def test_a_serving_router_is_up(health):
    address, servicer = health
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    assert await ask(address) is None


async def test_a_draining_router_is_not_up(health):
    address, servicer = health
    await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    assert await ask(address) == "NOT_SERVING"


async def test_an_unknown_service_is_not_up(health):
    assert await ask(health[0], service="other") == "no answer: NOT_FOUND"


async def test_nobody_there_is_not_up(tmp_path):
    assert "UNAVAILABLE" in await ask(f"unix:{tmp_path}/none", timeout_s=5.0)


@pytest.mark.parametrize(("status", "problem"), [(200, None), (503, "status 503")])
async def test_a_page_is_up_by_its_status(status, problem):
    async def page(_):
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/readyz", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]

    assert await ask(f"http://127.0.0.1:{port}/readyz") == problem
    await runner.cleanup()


async def test_a_page_of_nobody_is_not_up():
    assert (await ask("http://127.0.0.1:1/readyz")).startswith("no answer")
