from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Self

import pytest
from valkey.asyncio import Valkey

from extproc.adapters.decision_log import DecisionLog
from extproc.adapters.log_settings import LogSettings
from extproc.core.decision import RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp, Finished
from extproc.core.router import Router, RouterSettings

sys.path.insert(0, str(Path(__file__).parent))
from valkey_server import BINARY, ValkeyServer, free_port, until

pytestmark = pytest.mark.skipif(BINARY is None, reason="no valkey-server or redis-server here")

ENDPOINTS = tuple(Endpoint(f"10.0.0.{n}:8000") for n in range(1, 5))


class Member:
    """A router with its log, running for the time of a block."""

    def __init__(self, url: str, name: str, **settings) -> None:
        self.router = Router(RouterSettings(slow_start_s=0.0), router_id=name)
        for endpoint in ENDPOINTS:
            self.router.apply(EndpointUp(endpoint=endpoint), time.monotonic())
        self.log = DecisionLog(
            LogSettings(url=url, stream="test", **{"timeout_s": 0.5, **settings}),
            self.router,
            router_id=name,
            clock=time.monotonic,
            is_known=lambda endpoint: endpoint in ENDPOINTS,
        )

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.log.run())
        async with asyncio.timeout(10.0):
            await self.log.until_warm()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def route(self, conversation: int, turns: int = 1):
        chain = tuple(conversation * 1_000 + depth for depth in range(8 * turns))
        request = RoutingRequest(
            chains=(chain,),
            prompt_tokens=len(chain) * 128 + 9,
            tier1=conversation,
            tier1_tokens=1024,
            tier2=conversation,
        )
        return self.log.peers.route(request, time.monotonic())

    def finish(self, decision) -> None:
        event = Finished(decision_id=decision.decision_id, served=decision.destination, status=200)
        self.log.peers.apply(event, time.monotonic())

    @property
    def inflight(self) -> float:
        return sum(view.inflight for view in self.router.snapshot(time.monotonic()))

    @property
    def connected(self) -> bool:
        return self.log.state().connected


@pytest.fixture
async def server(tmp_path):
    server = ValkeyServer(tmp_path)
    await server.start()
    yield server
    await server.kill()


async def test_a_router_knows_what_another_decided(server):
    async with Member(server.url, "a") as first, Member(server.url, "b") as second:
        decisions = {n: first.route(n) for n in range(1, 21)}
        await until(lambda: second.log.peers.applied == 20)

        for n, decision in decisions.items():
            theirs = second.route(n, turns=2)
            assert theirs.destination == decision.destination
            assert theirs.matched_tokens == 1024


async def test_load_is_the_sum_over_routers_and_ends_everywhere(server):
    async with Member(server.url, "a") as first, Member(server.url, "b") as second:
        ours, theirs = first.route(1), second.route(2)
        await until(lambda: first.inflight == second.inflight == 2.0)
        first.finish(ours)
        # Envoy's access log may come to the router that did not decide.
        first.finish(theirs)
        await until(lambda: first.inflight == second.inflight == 0.0)


async def test_own_events_are_not_applied_twice(server):
    async with Member(server.url, "a") as first:
        first.route(1)
        await until(lambda: first.log.state().lag_ms > 0)
        assert (first.inflight, first.log.peers.applied) == (1.0, 0)


async def test_a_restarted_router_is_warm_before_it_is_ready(server):
    async with Member(server.url, "a") as first:
        destination = first.route(7, turns=3).destination
        await first.log.flush()
    async with Member(server.url, "a2") as restarted:
        decision = restarted.route(7, turns=3)
        assert decision.destination == destination
        assert decision.matched_tokens == 3_072


async def test_without_a_server_the_router_goes_on_alone_and_joins_when_it_comes(tmp_path):
    server = ValkeyServer(tmp_path)
    async with Member(server.url, "a") as first:
        assert first.route(1).destination in ENDPOINTS
        assert not first.connected
        assert first.log.state().reason
        try:
            await server.start()
            await until(lambda: first.connected)
            async with Member(server.url, "b") as second:
                # What was decided alone is told afterwards.
                await until(lambda: second.route(1, turns=2).matched_tokens >= 1024)
        finally:
            await server.kill()


async def test_a_wrong_password_is_said_and_requests_go_on(tmp_path):
    server = ValkeyServer(tmp_path, "--requirepass", "right")
    await server.start()
    try:
        async with Member(server.url, "a", read_password=lambda: "wrong") as first:
            assert first.route(1).destination in ENDPOINTS
            reason = first.log.state().reason
            assert "username-password" in reason
            assert "wrong" not in reason
        async with Member(server.url, "b", read_password=lambda: "right") as second:
            await until(lambda: second.connected)
    finally:
        await server.kill()


async def test_routers_find_each_other_again_after_the_server_died(server):
    async with Member(server.url, "a") as first, Member(server.url, "b") as second:
        first.route(1)
        await until(lambda: second.log.peers.applied == 1)
        await server.kill()
        await until(lambda: not first.connected and not second.connected)
        destination = first.route(2).destination
        await server.start()
        await until(lambda: first.connected and second.connected)
        await until(lambda: second.log.peers.applied >= 2)
        assert second.route(2, turns=2).destination == destination


async def test_a_server_that_hangs_is_left_and_nobody_waits(server):
    async with Member(server.url, "a") as first:
        await until(lambda: first.connected)
        server.hang()
        try:
            began_s = time.perf_counter()
            for n in range(100):
                first.route(n)
            assert time.perf_counter() - began_s < 1.0
            await until(lambda: not first.connected)
            assert first.log.state().lag_ms > 0
        finally:
            server.wake()
        await until(lambda: first.connected)


async def test_what_is_no_entry_of_ours_is_counted_and_left_out(server):
    async with Member(server.url, "a") as first:
        client = Valkey.from_url(server.url)
        await client.xadd("test", {b"b": b"\xff nonsense"})
        await client.xadd("test", {b"x": b"other"})
        await client.aclose()
        await until(lambda: first.log.state().unreadable == 2)
        assert first.connected


async def test_the_stream_is_bounded(server):
    async with Member(server.url, "a", max_entries=100) as first:
        for n in range(40):
            for m in range(10):
                first.route(n * 10 + m)
            await first.log.flush()
        client = Valkey.from_url(server.url)
        # Servers trim by whole nodes, of 100 entries unless configured otherwise.
        assert await client.xlen("test") <= 200
        await client.aclose()


async def test_the_log_ends_at_once_whenever_it_is_cancelled(server):
    # The client swallows a cancellation that comes at some of its awaits.
    for steps in range(40):
        member = Member(server.url, "a")
        task = asyncio.create_task(member.log.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(5.0):
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_a_port_that_speaks_something_else_is_a_reason_not_a_fault():
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    port = free_port()
    other = await asyncio.start_server(answer, "127.0.0.1", port)
    async with other, Member(f"valkey://127.0.0.1:{port}", "a") as first:
        assert first.route(1).destination in ENDPOINTS
        assert not first.connected
