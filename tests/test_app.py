import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.adapters.envoy_settings import GatewaySettings
from extproc.adapters.exchange import ListenError
from extproc.adapters.proto import ext_proc_pb2 as pb
from extproc.adapters.wire import PROCESSOR_SERVICE
from extproc.app import App
from extproc.config.sections import Config
from extproc.core.policies import Tuning
from extproc.core.router import RouterSettings
from extproc.settings import (
    discovery_settings,
    gateway_settings,
    intake_settings,
    router_settings,
    stream_settings,
)
from extproc.standin.server import start_standin
from extproc.standin.settings import StandinSettings

SERVING = health_pb2.HealthCheckResponse.SERVING
LIMIT_S = 10
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi " * 999}]}).encode()


def config_of(*endpoints, **sections):
    return Config.model_validate(
        {
            "listen": {"address": "127.0.0.1:0"},
            "metrics": {"address": "127.0.0.1:0"},
            "endpoints": [str(endpoint) for endpoint in endpoints],
            "health": {"interval_s": 0.02, "timeout_s": 0.5},
            "scrape": {"interval_s": 0.02},
            **sections,
        },
    )


@asynccontextmanager
async def running(config):
    decisions = asyncio.Queue()
    app = App(config, on_decision=decisions.put_nowait)
    await app.start()
    async with grpc.aio.insecure_channel(app.address) as channel, asyncio.timeout(LIMIT_S):
        yield SimpleNamespace(app=app, channel=channel, decisions=decisions)
    await app.stop(grace_s=0)


@asynccontextmanager
async def engines(count):
    standins = [await start_standin(StandinSettings()) for _ in range(count)]
    yield standins
    for standin in standins:
        await standin.stop()


def watch(channel):
    request = health_pb2.HealthCheckRequest(service="readiness")
    return health_pb2_grpc.HealthStub(channel).Watch(request)


async def until_serving(channel):
    async for answer in watch(channel):
        if answer.status == SERVING:
            return


async def ask(channel, body=BODY):
    """Play Envoy's part for one request in the default flow."""
    call = channel.stream_stream(f"/{PROCESSOR_SERVICE}/Process")()
    headers = [
        pb.HeaderValue(key=":path", raw_value=b"/v1/chat/completions"),
        pb.HeaderValue(key=":method", raw_value=b"POST"),
    ]
    first = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=headers))
    )
    second = pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))
    answers = []
    for message in (first, second):
        await call.write(message.SerializeToString())
        answers.append(pb.ProcessingResponse.FromString(await call.read()))
    await call.done_writing()
    return answers[-1]


async def page(app, path):
    url = f"http://127.0.0.1:{app.admin_port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_a_request_is_routed_to_a_healthy_endpoint():
    async with (
        engines(2) as standins,
        running(config_of(*(s.endpoint for s in standins))) as router,
    ):
        await until_serving(router.channel)
        answer = await ask(router.channel)
        decision = await router.decisions.get()

        assert decision.destination in {s.endpoint for s in standins}
        assert decision.destination in str(answer.dynamic_metadata)
        _, metrics = await page(router.app, "/metrics")
        assert f'extproc_decisions_total{{endpoint="{decision.destination}"' in metrics
        assert await page(router.app, "/readyz") == (200, "ready\n")


async def test_a_router_without_endpoints_is_alive_but_not_serving():
    async with running(config_of()) as router:
        async for answer in watch(router.channel):
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            break
        refusal = await ask(router.channel)

        assert refusal.immediate_response.status.code == 503
        assert (await page(router.app, "/readyz"))[0] == 503
        assert (await page(router.app, "/healthz"))[0] == 200
        assert (
            'extproc_refused_total{code="no_ready_endpoint"} 1.0'
            in (await page(router.app, "/metrics"))[1]
        )


async def test_serving_ends_when_the_last_endpoint_does():
    async with engines(1) as (engine,), running(config_of(engine.endpoint)) as router:
        seen = []
        async for answer in watch(router.channel):
            seen.append(answer.status == SERVING)
            if seen[-1]:
                await engine.stop()
            elif True in seen:
                break

        assert seen[-2:] == [True, False]


async def test_without_health_checks_a_listed_endpoint_is_ready():
    config = config_of("127.0.0.1:9", health={"enabled": False}, scrape={"enabled": False})
    async with running(config) as router:
        await until_serving(router.channel)
        await ask(router.channel)

        assert (await router.decisions.get()).destination == "127.0.0.1:9"


async def test_draining_clears_health_first():
    async with engines(1) as (engine,), running(config_of(engine.endpoint)) as router:
        await until_serving(router.channel)
        stopping = asyncio.create_task(router.app.stop(grace_s=0.2))
        async for answer in watch(router.channel):
            if answer.status != SERVING:
                break
        answered = await ask(router.channel)
        await stopping

        assert answered.HasField("dynamic_metadata")
        assert not router.app.is_ready()


async def test_a_taken_address_is_an_error_and_leaves_nothing_open():
    async with running(config_of()) as first:
        taken = config_of(listen={"address": first.app.address})
        second = App(taken)
        with pytest.raises(ListenError):
            await second.start()
        with pytest.raises(aiohttp.ClientError):
            await page(second, "/healthz")


async def test_a_decision_is_one_line_without_the_prompt(caplog):
    caplog.set_level("INFO")
    config = config_of("127.0.0.1:9", health={"enabled": False}, scrape={"enabled": False})
    async with running(config) as router:
        await until_serving(router.channel)
        await ask(router.channel, BODY.replace(b"hi ", b"secret "))
        await router.decisions.get()

    lines = [record.message for record in caplog.records if "decision " in record.message]
    assert len(lines) == 1
    assert "endpoint=127.0.0.1:9 policy=tiered reason=cold matched=0/" in lines[0]
    assert "secret" not in caplog.text


def test_the_default_config_gives_the_cores_defaults():
    config = Config()

    assert router_settings(config) == RouterSettings(tuning=Tuning())
    assert stream_settings(config).max_body_bytes == config.stream.max_body_bytes
    assert discovery_settings(config).listed == ()


def test_the_default_config_describes_the_gateways_defaults():
    assert gateway_settings(Config(), ()) == GatewaySettings()


def test_the_gateway_forwards_the_headers_the_config_names():
    intake = {"session_headers": ("x-mine",), "tier1_header": "x-task"}
    config = Config.model_validate({"intake": intake})

    assert gateway_settings(config, ()).forward_headers == ("x-mine", "x-task")


def test_another_secret_is_another_seed():
    plain, keyed = Config(), Config.model_validate({"intake": {"secret": "s3cret"}})

    assert intake_settings(plain.intake) == intake_settings(Config().intake)
    assert intake_settings(plain.intake) != intake_settings(keyed.intake)
