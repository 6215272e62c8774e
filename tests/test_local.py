import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from extproc.adapters.envoy_process import EnvoyError
from extproc.config.sections import Config
from extproc.engine_urls import EngineUrlError, parse_endpoint_url
from extproc.local import StackSettings, example_curl, run_stack
from extproc.standin.server import start_standin
from extproc.standin.settings import StandinSettings

LIMIT_S = 30
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello " * 500}]}
QUICK = Config.model_validate({"health": {"interval_s": 0.1}})


def settings(**changes):
    return StackSettings(**{"port": 0, "config": QUICK, "envoy_concurrency": 1, **changes})


async def post(session, url, **headers):
    target = f"{url}/v1/chat/completions"
    async with session.post(target, json=BODY, headers=headers) as response:
        await response.read()
        return response.status, response.headers["x-standin-endpoint"]


def is_open(address):
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
def folder(monkeypatch):
    """Give the folder of temporary files, here and in child processes, empty and our own."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


async def test_a_conversation_stays_at_its_endpoint_through_a_real_envoy():
    decisions = asyncio.Queue()
    async with (
        asyncio.timeout(LIMIT_S),
        run_stack(settings(standins=2, on_decision=decisions.put_nowait)) as stack,
        aiohttp.ClientSession() as session,
    ):
        answers = [await post(session, stack.url) for _ in range(3)]
        first = await decisions.get()

        assert {status for status, _ in answers} == {200}
        assert {endpoint for _, endpoint in answers} == {first.destination}
        assert set(stack.endpoints) == {standin.endpoint for standin in stack.standins}


async def test_the_access_log_tells_the_router_that_requests_ended():
    async with (
        asyncio.timeout(LIMIT_S),
        run_stack(settings(standins=1)) as stack,
        aiohttp.ClientSession() as session,
    ):
        await post(session, stack.url)
        while b"extproc_finished_total 1.0" not in stack.app.metrics.render():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_nothing_is_left_when_the_stack_ends(folder):
    async with asyncio.timeout(LIMIT_S), run_stack(settings(standins=1)) as stack:
        open_ones = [stack.url.removeprefix("http://"), *stack.endpoints]
        open_ones.append(stack.admin_url.removeprefix("http://"))
        assert all(is_open(address) for address in open_ones)

    assert not any(is_open(address) for address in open_ones)
    assert stack.envoy.process.returncode is not None
    assert list(folder.iterdir()) == []


async def test_a_given_endpoint_is_used_and_its_name_resolved():
    engine = await start_standin(StandinSettings())
    url = f"http://localhost:{engine.endpoint.port}"
    async with (
        asyncio.timeout(LIMIT_S),
        run_stack(settings(endpoints=(url,), policy="round-robin")) as stack,
        aiohttp.ClientSession() as session,
    ):
        assert await post(session, stack.url) == (200, engine.endpoint)
        assert stack.standins == ()
        assert stack.app.policy == "round-robin"
    await engine.stop()


async def test_a_busy_port_is_named_and_nothing_is_left(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvoyError, match=f"127.0.0.1:{port} is in use"):
            async with run_stack(settings(standins=1, port=port)):
                pass

    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://engine:8000/", "engine:8000"),
        ("engine:8000", "engine:8000"),
        ("http://engine", "engine:80"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_an_endpoint_url_is_read(url, expected):
    assert parse_endpoint_url(url) == expected


@pytest.mark.parametrize(
    "url",
    ["", "https://a:1", "http://", "http://a:x", "http://a:1/v1", "http://u@a:1", "http://[a"],
)
def test_what_is_no_endpoint_url_is_refused(url):
    with pytest.raises(EngineUrlError, match="should be http://host:port"):
        parse_endpoint_url(url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_the_command_it_prints_and_ends_at_a_signal(folder, number):
    command = [sys.executable, "-m", "extproc", "up", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(5)]
    url = lines[0].split()[1]
    curl = lines[3].removeprefix("try").strip()
    assert curl == example_curl(url)
    request = urllib.request.Request(  # noqa: S310 - our own URL
        f"{url}/v1/chat/completions",
        json.dumps(BODY).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:  # noqa: S310
        assert response.status == 200
    decision = process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)

    assert decision.split()[1:2] == ["cold"]
    assert "tokens matched" in decision
    assert (process.returncode, out.strip(), err) == (0, "stopped", "")
    assert not is_open(url.removeprefix("http://"))
    assert list(folder.iterdir()) == []


def test_up_stops_at_once_while_it_still_waits_for_an_engine(folder):
    command = [sys.executable, "-m", "extproc", "up", "--port", "0"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen([*command, "--endpoint", url], stderr=subprocess.PIPE)
        silent.settimeout(LIMIT_S)
        asked, _ = silent.accept()
        process.terminate()
        _, err = process.communicate(timeout=LIMIT_S)
        asked.close()

    assert (process.returncode, err) == (0, b"")
    assert list(folder.iterdir()) == []


async def test_a_temporary_folder_too_deep_for_a_socket_does_not_matter(folder, monkeypatch):
    deep = folder / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    async with (
        asyncio.timeout(LIMIT_S),
        run_stack(settings(standins=1)) as stack,
        aiohttp.ClientSession() as session,
    ):
        await post(session, stack.url)

        assert b"extproc_decision_seconds_count 1.0" in stack.app.metrics.render()
