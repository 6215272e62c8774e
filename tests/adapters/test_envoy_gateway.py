"""The gateway without a router, or with a bad one: a real Envoy keeps every promise alone."""

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest

from extproc.adapters.envoy_config import bootstrap, to_yaml
from extproc.adapters.envoy_process import find_envoy, start_envoy
from extproc.adapters.envoy_settings import GatewaySettings
from extproc.core.endpoint import Endpoint
from extproc.core.phases import DESTINATION_HEADER, BodyMode, Observe

LIMIT_S = 20
NOBODY = "127.0.0.1:1"
LIMIT_BYTES = 300_000
PART_BYTES = 20_000
HEAD = re.compile(rb"(\S+) (\S+) HTTP/1.1\r\n(.*?)\r\n\r\n", re.DOTALL)


class Engine:
    """Records every byte that Envoy sends, request by request, and answers 200.

    Raw, since what matters is which bytes arrive, also behind the end of a request.
    """

    def __init__(self, health=200):
        self.health = health
        self.checked = asyncio.Event()
        self.requests = []
        self.stray = []

    @asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server:
            yield Endpoint(f"{host}:{port}")

    async def _serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                status = await self._take(reader, head)
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode())
        except asyncio.IncompleteReadError as end:
            if end.partial:
                self.stray.append(end.partial[:100])
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _take(self, reader, head):
        parts = HEAD.fullmatch(head)
        if parts is None:
            self.stray.append(head[:100])
            return 400
        method, path, lines = (part.decode() for part in parts.groups())
        if path == "/health" and method == "GET":
            self.checked.set()
            return self.health
        headers = dict(line.lower().split(": ", 1) for line in lines.split("\r\n"))
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append((path, headers, body))
        return 200


@asynccontextmanager
async def gateway(log_path, engines, **settings):
    plain = {
        "listen_port": 0,
        "admin_port": 0,
        "routers": (NOBODY,),
        "observe": Observe.NONE,
        "endpoints": tuple(engines),
        "max_body_bytes": LIMIT_BYTES,
        "buffer_bytes": 65_536,
    }
    text = to_yaml(bootstrap(GatewaySettings(**(plain | settings))))
    envoy = await start_envoy(find_envoy(), text, log_path=log_path, concurrency=1)
    try:
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{envoy.listen[1]}", timeout=timeout
        ) as session:
            yield session
    finally:
        await envoy.stop()


@asynccontextmanager
async def mute():
    """A router that accepts connections and never says a word."""
    ends = asyncio.Event()

    async def hold(_reader, writer):
        await ends.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        ends.set()
        server.close()


async def in_parts(body, pause_s=0):
    for at in range(0, len(body), PART_BYTES):
        yield body[at : at + PART_BYTES]
        await asyncio.sleep(pause_s)


def numbered(size):
    """Make bytes of which no part looks like another."""
    return b"".join(b"%09d " % number for number in range(size // 10 + 1))[:size]


@pytest.fixture
def log_path(tmp_path):
    return tmp_path / "envoy.log"


@pytest.fixture
async def engine():
    return Engine()


@pytest.mark.parametrize("size", [0, 10, 200_000])
@pytest.mark.parametrize("mode", [BodyMode.BUFFERED_PARTIAL, BodyMode.STREAMED])
async def test_without_a_router_requests_still_reach_an_engine(log_path, engine, size, mode):
    body = numbered(size)
    async with (
        engine.serving() as endpoint,
        gateway(log_path, [endpoint], body_mode=mode) as session,
        session.post("/v1/chat/completions", data=body) as response,
    ):
        status = response.status

    assert status == 200
    assert [body for _, _, body in engine.requests] == [body]


async def test_a_mute_router_holds_a_request_for_the_message_timeout_only(log_path, engine):
    async with (
        engine.serving() as endpoint,
        mute() as router,
        gateway(log_path, [endpoint], routers=(router,), message_timeout_s=0.2) as session,
    ):
        began = time.monotonic()
        async with session.post("/v1/chat/completions", data=b"body") as response:
            status = response.status
        took_s = time.monotonic() - began

    assert status == 200
    assert 0.1 < took_s < 2
    assert engine.requests[0][2] == b"body"


async def test_a_strict_gateway_answers_503_without_a_router(log_path, engine):
    async with (
        engine.serving() as endpoint,
        gateway(log_path, [endpoint], failure_mode_allow=False) as session,
        session.post("/v1/chat/completions", data=b"body") as response,
    ):
        status = response.status

    assert status == 503
    assert not engine.requests


async def test_a_client_can_neither_choose_an_address_nor_speak_as_the_router(log_path, engine):
    outside = Engine()
    async with (
        engine.serving() as endpoint,
        outside.serving() as elsewhere,
        gateway(log_path, [endpoint]) as session,
    ):
        headers = {
            "X-Gateway-Destination-Endpoint": elsewhere,
            "X-ExtProc-Decision-Id": "forged",
            "x-extproc-anything": "forged",
            "x-session-id": "kept",
        }
        for _ in range(5):
            async with session.post("/v1/chat/completions", data=b"1", headers=headers):
                pass

    assert not outside.requests
    assert len(engine.requests) == 5
    for _, seen, _ in engine.requests:
        assert seen["x-session-id"] == "kept"
        assert not [name for name in seen if name.startswith("x-extproc-")]
        assert DESTINATION_HEADER not in seen


async def test_a_client_cannot_choose_even_a_member_of_the_pool(log_path, engine):
    other = Engine()
    async with (
        engine.serving() as endpoint,
        other.serving() as named,
        gateway(log_path, [endpoint, named]) as session,
    ):
        for _ in range(12):
            async with session.post("/", data=b"1", headers={DESTINATION_HEADER: named}):
                pass

    assert engine.requests


async def test_an_endpoint_that_fails_its_health_checks_gets_no_fallback_traffic(log_path, engine):
    sick = Engine(health=500)
    async with (
        engine.serving() as endpoint,
        sick.serving() as unhealthy,
        gateway(log_path, [endpoint, unhealthy]) as session,
    ):
        await asyncio.wait_for(sick.checked.wait(), LIMIT_S)
        for _ in range(12):
            async with session.post("/", data=b"1") as response:
                assert response.status == 200

    assert len(engine.requests) == 12
    assert not sick.requests


async def test_an_endpoint_that_refuses_connections_is_passed_over(log_path, engine):
    async with (
        engine.serving() as endpoint,
        gateway(log_path, [endpoint, Endpoint(NOBODY)], health_path=None) as session,
    ):
        for _ in range(12):
            async with session.post("/", data=b"1") as response:
                assert response.status == 200

    assert len(engine.requests) == 12


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED_PARTIAL, BodyMode.STREAMED])
@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_a_body_of_the_limit_passes_and_one_byte_more_never_reaches_an_engine(
    log_path, engine, declared, mode
):
    async with (
        engine.serving() as endpoint,
        gateway(log_path, [endpoint], body_mode=mode) as session,
    ):
        body = numbered(LIMIT_BYTES)
        data = body if declared else in_parts(body)
        async with session.post("/v1/chat/completions", data=data) as response:
            assert response.status == 200
        data = body + b"1" if declared else in_parts(body + b"1")
        async with session.post("/v1/chat/completions", data=data) as response:
            status, answer = response.status, await response.text()

    assert status == 413
    assert not declared or json.loads(answer)["error"]["code"] == "body_too_large"
    assert [body for _, _, body in engine.requests] == [body]


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED_PARTIAL, BodyMode.STREAMED])
async def test_no_byte_is_repeated_behind_a_slow_body_when_the_router_is_down(
    log_path, engine, mode
):
    body = numbered(LIMIT_BYTES)
    headers = {"content-length": str(len(body))}
    async with (
        engine.serving() as endpoint,
        gateway(log_path, [endpoint], body_mode=mode) as session,
    ):
        for _ in range(5):
            async with session.post("/", data=in_parts(body, 0.002), headers=headers) as response:
                assert response.status == 200

    assert {body for _, _, body in engine.requests} == {body}
    assert len(engine.requests) == 5
    assert not engine.stray
