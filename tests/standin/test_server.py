from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.standin.faults import Fault, FaultKind
from extproc.standin.server import run_standin
from extproc.standin.settings import StandinSettings

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "word " * 200}]}


async def metrics(http, standin):
    async with http.get(f"{standin.url}/metrics") as response:
        text = await response.text()
    return {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def all_released(engine):
    async with asyncio.timeout(5):
        while engine.inflight:
            engine.released.clear()
            await engine.released.wait()
    assert engine.cache.used_blocks == 0


async def one_runs(http, standin):
    async with asyncio.timeout(5):
        while not (await metrics(http, standin))["vllm:num_requests_running"].value:
            pass


async def test_every_answer_names_the_endpoint_and_the_body_it_got(running, http):
    odd = b'{ "messages" :[{"role":"user","content":"\\u00e9"}]}\n'
    async with running() as standin:
        for path, data, status in [
            (CHAT, odd, 200),
            (CHAT, b"not json", 400),
            (CHAT, b"", 400),
            ("/v1/audio/transcriptions", bytes(range(256)), 200),
        ]:
            async with http.post(standin.url + path, data=data) as response:
                assert response.status == status
                assert response.headers["x-standin-endpoint"] == standin.endpoint
                digest = hashlib.sha256(data).hexdigest()
                assert response.headers["x-standin-body-sha256"] == digest
        async with http.get(f"{standin.url}/nowhere") as response:
            assert response.status == 404
            assert response.headers["x-standin-endpoint"] == standin.endpoint


async def test_a_compressed_body_is_hashed_as_it_came(running, http):
    headers = {"content-encoding": "gzip"}
    async with running() as standin:
        url = f"{standin.url}/anything"
        async with http.post(url, data=b"raw", headers=headers) as response:
            assert (await response.json())["sha256"] == hashlib.sha256(b"raw").hexdigest()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"messages": "Hi"}, "messages", id="messages are no list"),
        pytest.param({"messages": [{"content": "Hi"}]}, "role", id="a message without role"),
        pytest.param({"max_tokens": 0}, "at least 1", id="no tokens asked for"),
        pytest.param({"max_tokens": "9"}, "integer", id="tokens as text"),
        pytest.param({"stream": "yes"}, "boolean", id="stream as text"),
        pytest.param({"cache_salt": ""}, "non-empty string", id="empty salt"),
        pytest.param({"n": 2}, "n=1", id="two answers"),
        pytest.param({"model": 7}, "model", id="model as number"),
        pytest.param({"max_tokens": 10**9}, "maximum context length", id="beyond the context"),
    ],
)
async def test_a_bad_body_is_a_400_that_says_why(running, http, change, says):
    async with (
        running() as standin,
        http.post(standin.url + CHAT, json={**BODY, **change}) as response,
    ):
        answer = await response.json()

    assert response.status == 400
    assert answer["error"]["code"] == 400
    assert says in answer["error"]["message"]


async def test_a_body_over_the_limit_is_a_413(running, http):
    async with running(max_body_bytes=1_000) as standin:
        for path in (CHAT, "/anything"):
            async with http.post(standin.url + path, data=b"x" * 1_001) as response:
                assert response.status == 413
                assert response.headers["x-standin-body-sha256"] == "unread"
            async with http.post(standin.url + path, data=b"x" * 1_000) as response:
                assert response.status != 413


async def test_headers_come_before_the_first_token(running, http):
    async with (
        running(first_token_overhead_s=60.0) as standin,
        http.post(standin.url + CHAT, json={**BODY, "stream": True}) as response,
    ):
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert standin.engine.running == 1
        assert standin.engine.counters.generation_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_releases_everything(running, http, stream):
    body = {**BODY, "stream": stream, "max_tokens": 1_000}
    async with running(decode_tokens_per_s=20.0) as standin:
        request = asyncio.create_task(http.post(standin.url + CHAT, json=body))
        await one_runs(http, standin)
        if stream:
            response = await request
            await response.content.readline()
            response.close()
        else:
            request.cancel()
        await all_released(standin.engine)

        assert standin.engine.counters.ended["abort"] == 1


async def test_a_full_engine_answers_503_in_each_dialect(running, http):
    async with (
        running(max_inflight=1, first_token_overhead_s=60.0) as standin,
        http.post(standin.url + CHAT, json={**BODY, "stream": True}),
    ):
        async with http.post(standin.url + CHAT, json=BODY) as response:
            assert response.status == 503
            assert (await response.json())["error"]["type"] == "Service Unavailable"
        async with http.post(f"{standin.url}/v1/messages", json=BODY) as response:
            assert response.status == 503
            assert (await response.json())["error"]["type"] == "overloaded_error"


async def test_metrics_show_load_cache_and_counters_in_vllm_names(running, http):
    async with running(cache_tokens=3_200, first_token_overhead_s=60.0) as standin:
        idle = await metrics(http, standin)
        async with http.post(standin.url + CHAT, json={**BODY, "stream": True}):
            busy = await metrics(http, standin)
        await all_released(standin.engine)
        after = await metrics(http, standin)

    config = idle["vllm:cache_config_info"].labels
    assert (config["num_gpu_blocks"], config["block_size"]) == ("200", "16")
    assert idle["process_start_time_seconds"].value > 0
    for name, values in {
        "vllm:num_requests_running": (0, 1, 0),
        "vllm:num_requests_waiting": (0, 0, 0),
        "vllm:kv_cache_usage_perc": (0, pytest.approx(18 / 200), 0),
        "vllm:prefix_cache_queries_total": (0, 263, 263),
        "vllm:prefix_cache_hits_total": (0, 0, 0),
        "vllm:prompt_tokens_total": (0, 263, 263),
        "vllm:generation_tokens_total": (0, 0, 0),
    }.items():
        assert tuple(page[name].value for page in (idle, busy, after)) == values, name


async def test_a_reset_empties_the_cache(running, http):
    cached = []
    async with running() as standin:
        for path in (CHAT, CHAT, "/reset_prefix_cache", CHAT):
            async with http.post(standin.url + path, json=BODY) as response:
                if path == CHAT:
                    usage = (await response.json())["usage"]
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached == [0, 256, 0]


async def test_a_fault_strikes_the_number_of_requests_asked_for(running, http):
    async with running() as standin:
        fault = {"kind": "status", "status": 502, "count": 1, "health_status": 503}
        async with http.post(f"{standin.url}/standin/fault", json=fault) as response:
            assert response.status == 200
        statuses = []
        for _ in range(2):
            async with http.post(standin.url + CHAT, json=BODY) as response:
                statuses.append(response.status)
        async with http.get(f"{standin.url}/health") as response:
            statuses.append(response.status)
        async with http.post(f"{standin.url}/standin/fault", json={"kind": "odd"}) as response:
            statuses.append(response.status)

    assert statuses == [502, 200, 503, 400]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_answer_breaks_the_connection(running, http, stream):
    async with running() as standin:
        standin.fail(Fault(kind=FaultKind.CUT))
        with pytest.raises(aiohttp.ClientError):
            async with http.post(standin.url + CHAT, json={**BODY, "stream": stream}) as response:
                await response.read()
        await all_released(standin.engine)


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.STALL])
async def test_a_hanging_engine_stays_healthy_and_can_be_stopped(running, http, kind):
    async with running() as standin:
        standin.fail(Fault(kind=kind))
        request = asyncio.create_task(http.post(standin.url + CHAT, json=BODY))
        async with http.get(f"{standin.url}/health") as response:
            assert response.status == 200
        await asyncio.wait([request], timeout=0.05)
        assert not request.done()
    with pytest.raises(aiohttp.ClientError):
        await request


async def test_two_stand_ins_share_a_loop_but_no_cache(running, http):
    async with running() as one, running() as other:
        cached = []
        for standin in (one, one, other):
            async with http.post(standin.url + CHAT, json=BODY) as response:
                usage = (await response.json())["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    assert one.endpoint != other.endpoint
    assert cached == [0, 256, 0]


async def test_a_taken_port_is_an_error_and_leaves_nothing_open(running):
    async with running() as standin:
        with pytest.raises(OSError, match="address already in use"):
            await run_standin(StandinSettings(), port=standin.endpoint.port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly(number):
    script = (
        "import asyncio;from extproc.standin.server import run_standin;"
        "from extproc.standin.settings import StandinSettings;"
        "asyncio.run(run_standin(StandinSettings(),"
        " on_ready=lambda standin: print(standin.url, flush=True)))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=-1, stderr=-1, env=dict(os.environ)
    )
    async with asyncio.timeout(20):
        assert (await process.stdout.readline()).startswith(b"http://127.0.0.1:")
        process.send_signal(number)
        _, errors = await process.communicate()

    assert process.returncode == 0
    assert errors == b""


def test_a_senseless_setting_is_refused_by_name():
    for change in ({"cache_tokens": 1}, {"decode_tokens_per_s": 0}, {"max_inflight": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            StandinSettings(**change)


async def test_a_request_id_names_the_answer(running, http):
    headers = {"x-request-id": 'my-"req'}
    async with (
        running() as standin,
        http.post(standin.url + CHAT, json=BODY, headers=headers) as response,
    ):
        assert json.loads(await response.read())["id"] == 'chatcmpl-my-"req'
