"""The gRPC server, called as Envoy calls it, with envoy-data-plane's messages."""

import asyncio
import json
import random
import socket
import time
from contextlib import asynccontextmanager, suppress
from functools import partial

import grpc
import grpc.aio
import pytest
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as Mode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.adapters.access_log import ACCESS_LOG_SERVICE, AccessLog
from extproc.adapters.exchange import LIVENESS, READINESS, ListenError, TooManyStreamsError
from extproc.adapters.server import ExtProcServer, ServerSettings
from extproc.adapters.wire import PROCESSOR_SERVICE, WireError
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp
from extproc.core.intake import IntakeSettings
from extproc.core.phases import Observe, StreamSettings
from extproc.core.router import Router, RouterSettings

A, B = Endpoint.parse("10.0.0.1:8000"), Endpoint.parse("10.0.0.2:8000")
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "hello " * 500}]}
).encode()
LIMIT_S = 10


class Log:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.opened = self.closed = 0
        self.decisions, self.refusals, self.errors = [], [], []
        self.begun, self.idle = asyncio.Event(), asyncio.Event()

    def on_stream_open(self):
        self.opened += 1
        self.begun.set()
        self.idle.clear()

    def on_stream_close(self):
        self.closed += 1
        if self.closed == self.opened:
            self.idle.set()

    def on_decision(self, decision, seconds):
        self.decisions.append((decision, seconds))

    def on_refused(self, error):
        self.refusals.append(error)

    def on_error(self, phase, error):
        self.errors.append((phase, error))


class Running:
    """A server, its channel, and what stands behind it."""

    def __init__(self, server, router, log, channel):
        self.server, self.router, self.log, self.channel = server, router, log, channel
        self.process = channel.stream_stream(f"/{PROCESSOR_SERVICE}/Process")

    async def exchange(self, *requests):
        """Send messages and collect the answers until the server ends the stream."""
        call = self.process()
        async with asyncio.timeout(LIMIT_S):
            for request in requests:
                await call.write(bytes(request))
            answers = [ProcessingResponse.parse(answer) async for answer in call]
        assert await call.code() is grpc.StatusCode.OK
        await asyncio.wait_for(self.log.idle.wait(), LIMIT_S)
        return answers

    def inflight(self):
        return sum(view.inflight for view in self.router.snapshot(time.monotonic()))


@pytest.fixture(params=["h2", "grpc"])
def serving(request):
    return partial(start_serving, request.param)


@asynccontextmanager
async def start_serving(
    transport, *, endpoints=(A, B), address="127.0.0.1:0", max_streams=100, **stream
):
    router = Router(RouterSettings(), router_id="r")
    for endpoint in endpoints:
        router.apply(EndpointUp(endpoint=endpoint), 0.0)
    log = Log()
    server = ExtProcServer(
        ServerSettings(address=address, transport=transport, max_streams=max_streams),
        router=router,
        intake=IntakeSettings(),
        stream=StreamSettings(**stream),
        clock=time.monotonic,
        observer=log,
        sinks=(AccessLog(router.apply, time.monotonic).sink(),),
    )
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        try:
            yield Running(server, router, log, channel)
        finally:
            await server.stop(0.0)


def headers(*, end=False, mode=None, early=False, **more):
    names = {":path": "/v1/chat/completions", ":method": "POST"} | more
    config = ProtocolConfiguration(
        request_body_mode=mode or Mode.NONE, send_body_without_waiting_for_header_response=early
    )
    return ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(
                headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in names.items()]
            ),
            end_of_stream=end,
        ),
        protocol_config=None if mode is None else config,
    )


def body(data, *, end=True):
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=end))


async def test_the_default_flow_decides_in_the_body_reply_and_returns(serving):
    async with serving() as run:
        first, second = await run.exchange(headers(), body(BODY))

        assert first.request_headers is not None
        assert first.dynamic_metadata is None
        assert second.request_body.response.header_mutation.set_headers
        ((decision, seconds),) = run.log.decisions
        assert second.dynamic_metadata.to_dict()["envoy.lb"]["x-extproc-decision-id"] == (
            decision.decision_id
        )
        assert 0 <= seconds < LIMIT_S
        assert run.inflight() == 1


async def test_headers_alone_are_decided_at_once(serving):
    async with serving() as run:
        (answer,) = await run.exchange(headers(end=True))

        assert answer.dynamic_metadata is not None


async def test_a_unix_socket_serves_too(serving, tmp_path):
    async with serving(address=f"unix:{tmp_path}/s") as run:
        assert len(await run.exchange(headers(), body(BODY))) == 2
        assert run.server.address == f"unix:{tmp_path}/s"


async def test_a_body_above_grpcs_default_limit_arrives(serving):
    async with serving() as run:
        *_, answer = await run.exchange(headers(), body(BODY + b" " * 6_000_000))

        assert answer.dynamic_metadata is not None


async def test_refusals_reach_client_and_observer(serving):
    async with serving(endpoints=()) as run:
        _, answer = await run.exchange(headers(), body(BODY))

        assert int(answer.immediate_response.status.code) == 503
        assert [error.code for error in run.log.refusals] == ["no_ready_endpoint"]


async def test_a_body_over_the_limit_is_413_even_above_the_receive_limit_of_the_setting(serving):
    async with serving(max_body_bytes=1000) as run:
        _, answer = await run.exchange(headers(), body(BODY))

        assert int(answer.immediate_response.status.code) == 413


async def test_full_duplex_bodies_come_back_whole(serving):
    async with serving() as run:
        data = BODY * 100
        parts = [data[at : at + 50_000] for at in range(0, len(data), 50_000)]
        first, *echoes = await run.exchange(
            headers(mode=Mode.FULL_DUPLEX_STREAMED),
            *(body(part, end=False) for part in parts),
            body(b""),
        )
        streamed = [e.request_body.response.body_mutation.streamed_response for e in echoes]

        assert first.dynamic_metadata is not None
        assert b"".join(s.body for s in streamed) == data
        assert [s.end_of_stream for s in streamed] == [False] * (len(streamed) - 1) + [True]


async def test_an_early_streamed_body_that_stalls_is_answered_when_the_hold_ends(serving):
    async with serving(hold_s=0.05) as run:
        call = run.process()
        async with asyncio.timeout(LIMIT_S):
            await call.write(bytes(headers(mode=Mode.STREAMED, early=True)))
            await call.write(bytes(body(BODY[:1000], end=False)))
            first = ProcessingResponse.parse(await call.read())
            second = ProcessingResponse.parse(await call.read())
            await call.write(bytes(body(BODY[1000:])))
            third = ProcessingResponse.parse(await call.read())
            end = await call.read()

        assert first.dynamic_metadata is not None
        assert second.request_body is not None
        assert third.request_body is not None
        assert end is grpc.aio.EOF


async def test_a_client_that_leaves_while_a_reply_is_held_ends_the_stream(serving):
    async with serving(hold_s=60.0) as run:
        call = run.process()
        await call.write(bytes(headers(mode=Mode.STREAMED, early=True)))
        await asyncio.wait_for(run.log.begun.wait(), LIMIT_S)
        call.cancel()
        await asyncio.wait_for(run.log.idle.wait(), LIMIT_S)

        assert run.server.streams == 0
        assert run.log.errors == []


async def test_streams_above_the_limit_pass_undecided(serving):
    async with serving(max_streams=1) as run:
        holder = run.process()
        await holder.write(bytes(headers()))
        await asyncio.wait_for(holder.read(), LIMIT_S)
        call = run.process()
        await call.write(bytes(headers()))
        await call.write(bytes(body(BODY)))
        async with asyncio.timeout(LIMIT_S):
            answers = [ProcessingResponse.parse(answer) async for answer in call]

        assert [a.dynamic_metadata for a in answers] == [None, None]
        ((phase, error),) = run.log.errors
        assert phase == "limit"
        assert isinstance(error, TooManyStreamsError)
        holder.cancel()


@pytest.mark.parametrize("garbage", [b"", b"\xff\xff", b"\x92\x01\x00"])
async def test_bytes_that_are_no_message_end_the_stream_quietly(serving, garbage):
    async with serving() as run:
        call = run.process()
        await call.write(garbage)
        async with asyncio.timeout(LIMIT_S):
            answers = [answer async for answer in call]

        assert answers == []
        assert await call.code() is grpc.StatusCode.OK
        assert isinstance(run.log.errors[0][1], WireError)


async def test_a_fault_fails_loudly_where_bytes_would_be_lost(serving):
    async with serving() as run:
        call = run.process()
        await call.write(bytes(headers(mode=Mode.FULL_DUPLEX_STREAMED)))
        await call.write(b"\xff\xff")

        assert await asyncio.wait_for(call.code(), LIMIT_S) is grpc.StatusCode.INTERNAL
        assert await call.details() == "the router failed"


async def test_observed_streams_release_their_request_however_they_end(serving):
    async with serving(observe=Observe.STREAM) as run:
        for _ in range(20):
            call = run.process()
            await call.write(bytes(headers(end=True)))
            await asyncio.wait_for(call.read(), LIMIT_S)
            assert run.inflight() >= 1
            call.cancel()
        await asyncio.wait_for(run.log.idle.wait(), LIMIT_S)

        assert run.inflight() == 0


async def test_clients_that_leave_at_any_moment_leave_no_stream_behind(serving):
    async with serving() as run:
        for turn in range(100):
            call = run.process()
            await call.write(bytes(headers()))
            if turn % 2:
                await call.write(bytes(body(BODY)))
            call.cancel()
        await run.exchange(headers(), body(BODY))

        assert run.server.streams == 0
        assert run.log.errors == []


async def test_thousands_of_streams_cancelled_at_random_leave_nothing_behind(serving):
    chance = random.Random(7)
    async with serving(max_streams=10_000) as run:

        async def visit():
            call = run.process()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await call.write(bytes(headers()))
                if chance.random() < 0.5:
                    await asyncio.wait_for(call.read(), LIMIT_S)
                if chance.random() < 0.7:
                    await call.write(bytes(body(BODY)))
                    if chance.random() < 0.5:
                        await asyncio.wait_for(call.read(), LIMIT_S)
            call.cancel()

        for _ in range(20):
            await asyncio.gather(*(visit() for _ in range(100)))
        await run.exchange(headers(), body(BODY))

        assert run.log.opened == run.log.closed > 1_500
        assert run.server.streams == 0
        assert run.log.errors == []


async def test_the_access_log_is_served_beside(serving):
    async with serving() as run:
        await run.exchange(headers(), body(BODY))
        log = run.channel.stream_unary(f"/{ACCESS_LOG_SERVICE}/StreamAccessLogs")
        call = log()
        decision_id = run.log.decisions[0][0].decision_id.encode()
        await call.write(b"\xff\xff")
        await call.write(_finished_entry(decision_id))
        await call.done_writing()

        assert await asyncio.wait_for(call, LIMIT_S) == b""
        assert run.inflight() == 0


def _finished_entry(decision_id):
    def field(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    def entry(key, value):
        return field(1, field(1, key) + field(2, value))

    struct = entry(b"x-extproc-decision-id", field(3, decision_id))
    metadata = entry(b"envoy.lb", struct)
    common = b"\x8a\x01" + bytes([len(metadata)]) + metadata
    return field(2, field(1, field(1, common)))


async def test_health_follows_readiness_and_liveness_does_not(serving):
    async with serving() as run:
        stub = health_pb2_grpc.HealthStub(run.channel)
        answer = health_pb2.HealthCheckResponse

        async def status(service):
            request = health_pb2.HealthCheckRequest(service=service)
            return (await stub.Check(request, timeout=LIMIT_S)).status

        for service in ("", READINESS, PROCESSOR_SERVICE):
            assert await status(service) == answer.NOT_SERVING
        await run.server.set_serving(serving=True)
        for service in ("", READINESS, PROCESSOR_SERVICE, LIVENESS):
            assert await status(service) == answer.SERVING
        await run.server.set_serving(serving=False)
        assert await status("") == answer.NOT_SERVING
        assert await status(LIVENESS) == answer.SERVING


async def test_a_watch_of_health_is_told_of_every_change(serving):
    async with serving() as run:
        answer = health_pb2.HealthCheckResponse
        watch = health_pb2_grpc.HealthStub(run.channel).Watch
        call = watch(health_pb2.HealthCheckRequest(service=READINESS))
        unknown = watch(health_pb2.HealthCheckRequest(service="nobody"))
        async with asyncio.timeout(LIMIT_S):
            seen = [(await call.read()).status]
            for serving_now in (True, False):
                await run.server.set_serving(serving=serving_now)
                seen.append((await call.read()).status)
            assert (await unknown.read()).status == answer.SERVICE_UNKNOWN

        assert seen == [answer.NOT_SERVING, answer.SERVING, answer.NOT_SERVING]
        call.cancel()
        unknown.cancel()


async def test_health_of_a_name_nobody_knows_and_unknown_methods_are_errors(serving):
    async with serving() as run:
        check = health_pb2_grpc.HealthStub(run.channel).Check
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check(health_pb2.HealthCheckRequest(service="nobody"), timeout=LIMIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await run.channel.unary_unary("/no.Such/Method")(b"", timeout=LIMIT_S)

        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_stopping_lets_a_running_stream_end(serving):
    async with serving() as run:
        call = run.process()
        await call.write(bytes(headers()))
        await asyncio.wait_for(call.read(), LIMIT_S)
        stopping = asyncio.create_task(run.server.stop(LIMIT_S))
        await call.write(bytes(body(BODY)))
        answer = ProcessingResponse.parse(await asyncio.wait_for(call.read(), LIMIT_S))
        await asyncio.wait_for(stopping, LIMIT_S)

        assert answer.dynamic_metadata is not None
        await run.server.stop(0.0)


async def test_an_address_in_use_is_a_listen_error(serving):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match="cannot listen on"):
            async with serving(address=address):
                pytest.fail("it started")
