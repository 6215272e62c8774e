"""The listener's sockets: clients that are silent, that talk nonsense, that do not listen."""

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import pytest

from extproc.adapters.exchange import Exchanges, SilentObserver, Sink
from extproc.adapters.http2 import frames, server
from extproc.adapters.http2.server import Http2Server
from extproc.core.intake import IntakeSettings
from extproc.core.phases import StreamSettings
from extproc.core.router import Router, RouterSettings

LIMIT_S = 10
GREETING = frames.PREFACE + frames.settings_frame({})


@asynccontextmanager
async def listening():
    exchanges = Exchanges(
        router=Router(RouterSettings(), router_id="r"),
        intake=IntakeSettings(),
        stream=StreamSettings(),
        clock=time.monotonic,
        observer=SilentObserver(),
        max_streams=10,
    )
    sink = Sink(path="/a.B/C", record=lambda _data: None)
    running = Http2Server("127.0.0.1:0", exchanges, [sink], max_streams=10)
    await running.start()
    host, port = running.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield running, reader, writer
    finally:
        writer.transport.abort()
        await asyncio.wait_for(running.stop(0.0), LIMIT_S)


async def test_a_client_that_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(server, "_GREETING_S", 0.05)
    async with listening() as (_, reader, _):
        assert await asyncio.wait_for(reader.read(), LIMIT_S)


async def test_a_client_that_is_silent_is_probed_and_given_up(monkeypatch):
    monkeypatch.setattr(server, "_GREETING_S", 0.05)
    monkeypatch.setattr(server, "_PROBE_S", 0.05)
    async with listening() as (_, reader, writer):
        writer.write(GREETING)
        answered = await asyncio.wait_for(reader.read(), LIMIT_S)

        assert b"alive?\0\0" in answered


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100])
async def test_nonsense_is_answered_with_a_farewell_and_no_more(first, caplog):
    async with listening() as (running, reader, writer):
        writer.write(first)
        farewell = await asyncio.wait_for(reader.read(), LIMIT_S)

        assert farewell[-17:-8] == frames.goaway(0, frames.Code.PROTOCOL_ERROR)[:9]
        assert not running._peers
        assert not [record for record in caplog.records if record.exc_info]


async def test_a_client_that_takes_no_answers_is_not_read_and_in_the_end_cut(monkeypatch):
    monkeypatch.setattr(server, "_STALL_S", 0.1)
    ping = frames.frame(frames.PING, 0, 0, b"8 bytes.")
    async with listening() as (running, reader, writer):
        writer.write(GREETING + ping)
        await asyncio.wait_for(reader.readuntil(b"8 bytes."), LIMIT_S)
        (peer,) = running._peers
        peer.pause_writing()
        writer.write(ping)
        peer.resume_writing()
        await asyncio.wait_for(reader.readuntil(b"8 bytes."), LIMIT_S)
        peer.pause_writing()
        writer.write(ping)

        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""


async def test_stopping_sends_idle_clients_away_without_waiting():
    async with listening() as (running, reader, writer):
        writer.write(GREETING)
        await asyncio.wait_for(reader.readexactly(9), LIMIT_S)
        stopping = asyncio.create_task(running.stop(LIMIT_S))
        seen = b""
        async with asyncio.timeout(LIMIT_S):
            while b"leaving\0" not in seen:
                seen += await reader.read(1_000)
            writer.write(frames.frame(frames.PING, frames.ACK, 0, b"leaving\0"))
            await stopping

        assert not running._peers
