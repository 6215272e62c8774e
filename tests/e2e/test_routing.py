"""Where requests go through a real Envoy: conversations, shared prompts, bodies of any kind."""

import asyncio
import contextlib
import hashlib
import json

import aiohttp
import pytest
import pytest_asyncio

from extproc.standin.server import start_standin
from extproc.standin.settings import StandinSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
NAME = "x-gateway-destination-endpoint"
LIMIT_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(start_gateway):
    async with start_gateway(standins=3) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared):
    """Give the shared gateway at rest, and see that each test leaves it at rest."""
    yield shared
    await shared.until_idle()


async def test_a_conversation_returns_to_the_endpoint_of_its_first_turn(gateway, chat):
    for number in range(4):
        conversation = chat(f"topic {number}", system=f"Task {number}. " * 100)
        count = len(gateway.service.decisions())
        first = await gateway.ask(CHAT, conversation.body())
        second = await gateway.ask(CHAT, conversation.body())
        decisions = (await gateway.decided(count + 2))[count:]

        assert first.status == second.status == 200
        assert first.headers["x-standin-endpoint"] == second.headers["x-standin-endpoint"]
        assert {one["endpoint"] for one in decisions} == {first.headers["x-standin-endpoint"]}
        assert int(decisions[1]["matched"]) > 0


async def test_a_later_turn_finds_its_prompt_in_the_engines_cache(gateway, chat):
    conversation = chat("cached tokens", system="The cache is warm. " * 100)
    first = await (await gateway.ask(CHAT, conversation.body())).json()
    second = await (await gateway.ask(CHAT, conversation.body())).json()

    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * first["usage"]["prompt_tokens"]


async def test_thirty_conversations_on_one_system_prompt_use_every_endpoint(start_gateway, chat):
    slow = StandinSettings(prefill_tokens_per_s=200_000.0, decode_tokens_per_s=5.0)
    async with start_gateway(standins=3, standin=slow) as gateway:
        bodies = [chat(f"user {n}").body(stream=True, max_tokens=400) for n in range(30)]
        async with contextlib.AsyncExitStack() as stack:
            answers = [gateway.post(CHAT, body) for body in bodies]
            opened = await asyncio.gather(*map(stack.enter_async_context, answers))
            served = [one.headers["x-standin-endpoint"] for one in opened]
            counts = [served.count(endpoint) for endpoint in gateway.endpoints]
            for one in opened:
                one.close()
        await gateway.until_idle()
        decisions = await gateway.decided(30)

    assert all(one.status == 200 for one in opened)
    assert min(counts) > 0
    assert max(counts) <= 20
    assert sorted(served) == sorted(one["endpoint"] for one in decisions)


async def test_headers_alone_are_routed_without_waiting_for_a_body(gateway):
    for _ in range(3):
        count = len(gateway.service.decisions())
        async with gateway.session.get("/v1/models") as response:
            models = await response.json()
        decision = await gateway.last_decision_after(count)

        assert response.status == 200
        assert models["data"][0]["id"] == "standin"
        assert response.headers["x-standin-endpoint"] == decision["endpoint"]
        assert decision["reason"] == "fallback"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x00\xff not json {", id="not JSON"),
        pytest.param(b'{"query": "select 1", "rows": [1, 2]}', id="JSON of another kind"),
        pytest.param(b'["a", 1]', id="a JSON list"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"model": "m", "messages": [{"role": ', id="JSON that breaks off"),
    ],
)
async def test_a_body_that_is_no_prompt_reaches_an_engine_as_it_was_sent(gateway, body):
    count = len(gateway.service.decisions())
    response = await gateway.ask(CHAT, body)
    decision = await gateway.last_decision_after(count)

    assert response.headers["x-standin-body-sha256"] == hashlib.sha256(body).hexdigest()
    assert response.headers["x-standin-endpoint"] == decision["endpoint"]
    assert response.status == 400  # the engine's own answer


async def test_bodies_that_are_no_prompt_go_where_the_load_is_least(gateway, chat, eventually):
    async with gateway.post(CHAT, chat("long").body(stream=True, max_tokens=40_000)) as long:
        await long.content.readuntil(b"\n\n")
        busy = long.headers["x-standin-endpoint"]

        async def only_the_long_one_is_left():
            views = await gateway.service.views()
            return [view["endpoint"] for view in views if view["inflight"]] == [busy]

        served = set()
        for _ in range(6):
            await eventually(only_the_long_one_is_left)
            answer = await gateway.ask(CHAT, b"no prompt")
            served.add(answer.headers["x-standin-endpoint"])
        long.close()

    assert served == set(gateway.endpoints) - {busy}


async def test_a_multipart_upload_is_routed_and_untouched(gateway):
    sound = bytes(range(256)) * 800
    head = (
        b'--edge\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"content-type: audio/wav\r\n\r\n"
    )
    body = head + sound + b"\r\n--edge--\r\n"
    kind = "multipart/form-data; boundary=edge"
    count = len(gateway.service.decisions())
    response = await gateway.ask("/v1/audio/transcriptions", body, headers={"content-type": kind})
    decision = await gateway.last_decision_after(count)
    seen = await response.json()

    assert seen["sha256"] == hashlib.sha256(body).hexdigest()
    assert dict(seen["headers"])["content-type"] == kind
    assert response.headers["x-standin-endpoint"] == decision["endpoint"]


async def test_a_destination_named_by_the_client_is_overwritten(gateway):
    outside = await start_standin(StandinSettings())
    try:
        for number in range(8):
            headers = {"X-Gateway-Destination-Endpoint": str(outside.endpoint)}
            response = await gateway.ask("/generate", {"text": f"{number} " * 400}, headers=headers)
            seen = [value for name, value in (await response.json())["headers"] if name == NAME]
            served = response.headers["x-standin-endpoint"]

            assert served in gateway.endpoints
            assert len(seen) == 1
            assert seen[0].split(",")[0] == served
            assert set(seen[0].split(",")) <= set(gateway.endpoints)
    finally:
        await outside.stop()


@pytest.mark.parametrize("length", ["declared", "chunked"])
async def test_the_cutting_of_a_body_changes_neither_destination_nor_bytes(gateway, length):
    for body in (_short_prompt(), _long_prompt()):
        whole = await gateway.ask(CHAT, body)
        digest, home = hashlib.sha256(body).hexdigest(), whole.headers["x-standin-endpoint"]
        for parts in _cuts(body):
            count = len(gateway.service.decisions())
            headers = await _send_raw(gateway, parts, length)
            decision = await gateway.last_decision_after(count)

            assert headers["x-standin-body-sha256"] == digest
            assert headers["x-standin-endpoint"] == home
            # All full blocks: what was read of the parts is what was read of the whole.
            assert int(decision["matched"]) == int(decision["tokens"]) // 128 * 128


def _short_prompt():
    text = 'né \\u00e9 "quoted" 漢字 🙂\n' * 40
    return _prompt(text)


def _long_prompt():
    """Give a prompt with a three-byte character on every border of 16 KiB, near escapes."""
    return _prompt("漢\n" * 40_000)


def _prompt(text):
    body = {"model": "standin", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    return json.dumps(body, ensure_ascii=False).encode()


def _cuts(body):
    """Cut into single bytes, into 16 KiB, inside a character and inside an escape."""
    if len(body) < 16_384:
        yield [body[at : at + 1] for at in range(len(body))]
    else:
        yield [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    character = body.index("漢".encode()) + 1
    yield [body[:character], body[character : character + 1], body[character + 1 :]]
    escape = body.index(b"\\n") + 1
    yield [body[:escape], body[escape:]]
    assert all(body[at] >= 0x80 for at in (character, character + 1))


async def _send_raw(gateway, parts, length):
    """Write the parts one by one, each its own segment; give the headers of the answer."""
    reader, writer = await asyncio.open_connection(*gateway.host_and_port)
    try:
        size = sum(map(len, parts))
        framing = (
            f"content-length: {size}" if length == "declared" else "transfer-encoding: chunked"
        )
        head = f"POST {CHAT} HTTP/1.1\r\nhost: test\r\n{framing}\r\n\r\n"
        writer.write(head.encode())
        for part in parts:
            await writer.drain()
            await asyncio.sleep(0)
            framed = part if length == "declared" else b"%x\r\n%b\r\n" % (len(part), part)
            writer.write(framed)
        if length == "chunked":
            writer.write(b"0\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
        lines = answer.decode().split("\r\n")
        assert lines[0].split()[1] == "200"
        return dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_request_that_breaks_off_in_its_body_leaves_nothing_behind(gateway):
    body = _short_prompt()
    for cut in (1, len(body) // 2, len(body) - 1):
        _, writer = await asyncio.open_connection(*gateway.host_and_port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:cut])
        await writer.drain()
        writer.transport.abort()
    await gateway.until_idle()

    assert (await gateway.ask(CHAT, body)).status == 200


@pytest.mark.parametrize("spelling", ["{0}", " {0} ", "{0} , {1}", "{1},{0}"])
async def test_a_subset_hint_of_envoy_is_obeyed(start_gateway, chat, spelling):
    async with start_gateway(standins=3, edit=_hint_from_header) as gateway:
        allowed = gateway.endpoints[2], gateway.endpoints[0]
        named = allowed if "{1}" in spelling else allowed[:1]
        headers = {"x-subset": spelling.format(*allowed)}
        served = set()
        for number in range(8):
            body = chat(f"subset {number}", system=f"{number} " * 300).body()
            response = await gateway.ask(CHAT, body, headers=headers)
            served.add(response.headers["x-standin-endpoint"])
        nobody = await gateway.ask(CHAT, chat("x").body(), headers={"x-subset": "10.255.255.1:9"})
        text = await nobody.json()

    assert served <= set(named)
    assert nobody.status == 503
    assert text["error"]["code"] == "no_ready_endpoint"


def _hint_from_header(config):
    """Let a header of the client stand for what a gateway's own filters would allow."""
    rule = {
        "header": "x-subset",
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
        "remove": True,
    }
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    filters = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    filters[0]["typed_config"]["http_filters"].insert(
        0,
        {
            "name": "envoy.filters.http.header_to_metadata",
            "typed_config": {"@type": kind, "request_rules": [rule]},
        },
    )


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_without_endpoints_the_answer_is_503_with_a_json_error(start_gateway, chat, method):
    async with start_gateway(standins=0) as gateway:
        path, body = ("/v1/models", None) if method == "GET" else (CHAT, chat("x").body())
        async with gateway.session.request(method, path, json=body) as response:
            status, answer = response.status, await response.json()

    assert status == 503
    assert answer["error"]["code"] == "no_ready_endpoint"


async def test_no_prompt_is_in_the_log(gateway, chat):
    await gateway.ask(CHAT, chat("unmistakable-words").body())
    await gateway.ask(CHAT, b"unmistakable-words")

    assert "unmistakable-words" not in gateway.service.log()


async def test_every_request_was_served_by_its_destination(gateway, chat):
    before = await gateway.service.metric("extproc_finished_total")
    count = len(gateway.service.decisions())
    bodies = [chat(f"many {n}", system=f"Many {n % 5}. " * 90).body() for n in range(40)]
    answers = await asyncio.gather(*(gateway.ask(CHAT, body) for body in bodies))
    decisions = (await gateway.decided(count + 40))[count:]
    await gateway.until_idle()

    served = sorted(one.headers["x-standin-endpoint"] for one in answers)
    assert served == sorted(one["endpoint"] for one in decisions)
    assert await gateway.service.metric("extproc_finished_total") == before + 40
    assert await gateway.service.metric("extproc_fallbacks_total") == 0


async def test_a_router_told_to_end_ends_well(start_gateway, chat):
    async with start_gateway(standins=2) as gateway:
        assert (await gateway.ask(CHAT, chat("x").body())).status == 200
        code = await gateway.service.end()
        with pytest.raises(aiohttp.ClientConnectionError):
            await gateway.service.page("/healthz")

        assert (await gateway.ask(CHAT, chat("y").body())).status == 200

    assert code == 0
    assert "Traceback" not in gateway.service.log()
