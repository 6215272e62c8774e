"""What fails around a request: engines, the router, clients, bodies too large. Nothing is lost."""

import asyncio
import gzip
import hashlib
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from extproc.core.endpoint import Endpoint
from extproc.standin.settings import StandinSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
LIMIT_S = 20.0
LIMIT_BYTES = 1_048_576
MESSAGE_TIMEOUT_S = 0.5
DEAD = Endpoint("127.0.0.1:1")
SLOW = StandinSettings(decode_tokens_per_s=200.0, prefill_tokens_per_s=1e6)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(start_gateway):
    limits = {"stream": {"max_body_bytes": LIMIT_BYTES}}
    async with start_gateway(standins=3, standin=SLOW, sections=limits) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared, eventually):
    """Give the shared gateway, whatever became of its router before; and leave it at rest."""
    if shared.service.process.returncode is not None:
        await shared.service.start()
    await eventually(lambda: _all_ready(shared))
    await eventually(lambda: _decides(shared))
    await shared.until_idle()
    yield shared
    if shared.service.process.returncode is None:
        await shared.until_idle()


async def _all_ready(gateway):
    return await gateway.service.ready_count() == len(gateway.endpoints)


async def _decides(gateway):
    """Whether Envoy asks the router again."""
    count = len(gateway.service.decisions())
    async with gateway.session.get("/v1/models") as response:
        assert response.status == 200
    return len(gateway.service.decisions()) > count


def _resident_kb(pid):
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _numbered(size):
    """Make bytes of which no part looks like another."""
    return b"".join(b"%09d " % number for number in range(size // 10 + 1))[:size]


async def _in_parts(body, part_bytes=65_536):
    for at in range(0, len(body), part_bytes):
        yield body[at : at + part_bytes]


@pytest.mark.parametrize("length", ["declared", "chunked"])
async def test_a_body_one_byte_over_the_limit_is_413_and_reaches_no_engine(gateway, length):
    body = _numbered(LIMIT_BYTES)
    fits = body if length == "declared" else _in_parts(body)
    assert (await gateway.ask("/upload", fits)).headers["x-standin-body-sha256"] == hashlib.sha256(
        body
    ).hexdigest()
    before = await gateway.envoy_counter("cluster.llm.upstream_rq_total")
    pids = (gateway.service.pid, gateway.envoy.pid)
    sizes_kb = [_resident_kb(pid) for pid in pids]
    for _ in range(30):
        large = body + b"1"
        data = large if length == "declared" else _in_parts(large)
        assert (await gateway.ask(CHAT, data)).status == 413
    grown_kb = [_resident_kb(pid) - size for pid, size in zip(pids, sizes_kb, strict=True)]

    assert await gateway.envoy_counter("cluster.llm.upstream_rq_total") == before
    # 30 bodies are 30 MB: were they kept, it would show.
    assert max(grown_kb) < 15_000


async def test_an_endless_body_is_ended_at_the_limit(gateway):
    before = await gateway.envoy_counter("cluster.llm.upstream_rq_total")
    size_kb = _resident_kb(gateway.envoy.pid)
    reader, writer = await asyncio.open_connection(*gateway.host_and_port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    part = b"%x\r\n%b\r\n" % (65_536, b"x" * 65_536)
    answer = asyncio.create_task(reader.readline())
    sent = 0
    try:
        async with asyncio.timeout(LIMIT_S):
            while not answer.done() and sent < 200 * LIMIT_BYTES:
                writer.write(part)
                sent += len(part)
                await writer.drain()
                await asyncio.sleep(0)
    except ConnectionError:
        pass
    line = await asyncio.wait_for(answer, LIMIT_S)
    writer.transport.abort()

    assert b"413" in line
    assert await gateway.envoy_counter("cluster.llm.upstream_rq_total") == before
    assert _resident_kb(gateway.envoy.pid) - size_kb < 30_000


async def test_another_endpoint_of_the_list_answers_for_a_dead_one(start_gateway):
    unseen = {"health": {"enabled": False}, "scrape": {"enabled": False}}
    async with start_gateway(standins=2, endpoints=(DEAD,), sections=unseen) as gateway:
        fell_back = 0
        for number in range(24):
            response = await gateway.ask("/generate", {"text": f"{number} " * 400})
            seen = dict((await response.json())["headers"])
            listed = seen["x-gateway-destination-endpoint"].split(",")
            expected = listed[1] if listed[0] == DEAD else listed[0]
            fell_back += listed[0] == DEAD

            assert response.status == 200
            assert response.headers["x-standin-endpoint"] == expected
        await gateway.until_idle()

        assert fell_back > 0
        assert await gateway.service.metric("extproc_fallbacks_total") == fell_back
        assert await gateway.service.metric("extproc_retries_total") == fell_back
        assert await gateway.service.metric("extproc_finished_total") == 24


async def test_an_endpoint_that_dies_is_left_and_comes_back(start_gateway, chat, eventually):
    async with start_gateway(standins=2) as gateway:
        gone, stays = gateway.standins
        await gone.stop()
        during = [await gateway.ask(CHAT, chat(f"a {n}").body()) for n in range(12)]
        await eventually(lambda: _ready_is(gateway, 1))
        after = [await gateway.ask(CHAT, chat(f"b {n}").body()) for n in range(12)]
        decisions = (await gateway.decided(24))[-12:]

    assert {one.status for one in during + after} == {200}
    assert {one.headers["x-standin-endpoint"] for one in after} == {stays.endpoint}
    assert {one["endpoint"] for one in decisions} == {stays.endpoint}


async def _ready_is(gateway, count):
    return await gateway.service.ready_count() == count


async def test_requests_are_answered_while_the_router_is_dead(gateway, eventually):
    await gateway.service.kill()
    for size in (0, 10, 300_000, LIMIT_BYTES):
        body = _numbered(size)
        for data in (body, _in_parts(body)):
            response = await gateway.ask("/upload", data)

            assert response.status == 200
            assert response.headers["x-standin-body-sha256"] == hashlib.sha256(body).hexdigest()
    await gateway.service.start()
    await eventually(lambda: _all_ready(gateway))

    assert await eventually(lambda: _decides(gateway))


@pytest.mark.parametrize("length", ["declared", "chunked"])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_router_lost_in_mid_body_costs_neither_request_nor_bytes(gateway, death, length):
    body = _numbered(400_000)
    reader, writer = await asyncio.open_connection(*gateway.host_and_port)
    framing = (
        f"content-length: {len(body)}" if length == "declared" else "transfer-encoding: chunked"
    )
    writer.write(f"POST /upload HTTP/1.1\r\nhost: t\r\n{framing}\r\n\r\n".encode())
    parts = [part async for part in _in_parts(body)]
    for number, part in enumerate(parts):
        if number == len(parts) // 2:
            await _lose(gateway, death)
        framed = part if length == "declared" else b"%x\r\n%b\r\n" % (len(part), part)
        writer.write(framed)
        await writer.drain()
    writer.write(b"0\r\n\r\n" if length == "chunked" else b"")
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
    writer.close()
    await writer.wait_closed()
    gateway.service.process.send_signal(signal.SIGCONT) if death == signal.SIGSTOP else None

    assert answer.startswith(b"HTTP/1.1 200")
    assert f"x-standin-body-sha256: {hashlib.sha256(body).hexdigest()}".encode() in answer


async def _lose(gateway, death):
    if death == signal.SIGKILL:
        await gateway.service.kill()
    else:
        gateway.service.signal(death)


async def test_a_router_killed_in_mid_answer_does_not_cut_it(gateway, chat):
    body = chat("killed in mid-answer").body(stream=True, max_tokens=60)
    async with gateway.post(CHAT, body) as response:
        await response.content.readuntil(b"\n\n")
        await gateway.service.kill()
        rest = await response.read()

    assert response.status == 200
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_hung_router_holds_a_request_no_longer_than_the_message_timeout(gateway, chat):
    gateway.service.signal(signal.SIGSTOP)
    try:
        took_s = []
        for number in range(4):
            began_s = time.monotonic()
            response = await gateway.ask(CHAT, chat(f"hung {number}").body())
            took_s.append(time.monotonic() - began_s)

            assert response.status == 200
    finally:
        gateway.service.signal(signal.SIGCONT)

    # What is above the time-out is the engine's own time, and the machine's.
    assert max(took_s) < MESSAGE_TIMEOUT_S + 0.4


async def test_clients_that_leave_in_mid_stream_leave_nothing_in_flight(gateway, chat, eventually):
    before = await gateway.service.metric("extproc_finished_total")
    count, at_once = 1_000, asyncio.Semaphore(50)

    async def leave(number):
        async with at_once:
            body = chat(f"leaving {number}").body(stream=True, max_tokens=4_000)
            async with gateway.post(CHAT, body) as response:
                await response.content.readuntil(b"\n\n")
                response.close()

    await asyncio.gather(*(leave(number) for number in range(count)))
    await eventually(lambda: _finished(gateway, before + count))
    await gateway.until_idle()
    views = await gateway.service.views()

    assert [view["inflight"] for view in views] == [0, 0, 0]
    assert [standin.engine.inflight for standin in gateway.standins] == [0, 0, 0]


async def _finished(gateway, count):
    return await gateway.service.metric("extproc_finished_total") >= count


EVENTS = [b'data: {"n": %d, "text": "n\xc3\xa9"}\n\n' % number for number in range(3)]
GZIPPED = gzip.compress(b'{"answer": "' + b"words " * 500 + b'"}')


class Fixed:
    """An engine whose answers are fixed to the byte; a stream waits for the client to read on."""

    def __init__(self):
        self.read_on = asyncio.Event()

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_get("/health", _well)
        app.router.add_post("/error", _error)
        app.router.add_post("/gzip", _gzip)
        app.router.add_post("/sse", self._sse)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield Endpoint("{}:{}".format(*runner.addresses[0]))
        finally:
            await runner.cleanup()

    async def _sse(self, request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in EVENTS:
            await response.write(event)
            await self.read_on.wait()
            self.read_on.clear()
        return response


async def _well(_request):
    return web.Response()


async def _error(_request):
    headers = {"x-engine": "kept", "content-type": "application/problem+json"}
    return web.Response(status=500, body=b'{"broken":  true}', headers=headers)


async def _gzip(_request):
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    return web.Response(body=GZIPPED, headers=headers)


async def test_answers_pass_unchanged(start_gateway):
    engine = Fixed()
    quiet = {"scrape": {"enabled": False}}
    async with (
        engine.serving() as endpoint,
        start_gateway(standins=0, endpoints=(endpoint,), sections=quiet) as gateway,
    ):
        gateway.session._auto_decompress = False
        async with gateway.post("/error", {}) as error:
            error_body = await error.read()
        async with gateway.post("/gzip", {}, headers={"accept-encoding": "gzip"}) as zipped:
            zipped_body = await zipped.read()
        async with gateway.post("/sse", {}) as stream:
            events = []
            for _ in EVENTS:
                # Each event arrives before the engine writes the next one.
                events.append(await stream.content.readuntil(b"\n\n"))
                engine.read_on.set()
            rest = await stream.read()

        assert (error.status, error_body) == (500, b'{"broken":  true}')
        assert error.headers["x-engine"] == "kept"
        assert error.headers["content-type"] == "application/problem+json"
        assert zipped_body == GZIPPED
        assert zipped.headers["content-encoding"] == "gzip"
        assert stream.headers["content-type"] == "text/event-stream"
        assert (events, rest) == (EVENTS, b"")
        await gateway.until_idle()
