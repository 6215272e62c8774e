"""A real Envoy as a child: found or not with a remedy, refused, ready, ended in every way."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys

import aiohttp
import pytest

from extproc.adapters.envoy_config import bootstrap, to_yaml
from extproc.adapters.envoy_process import EnvoyError, find_envoy, start_envoy, validate
from extproc.adapters.envoy_settings import GatewaySettings

LIMIT_S = 20
WHEEL = find_envoy()
PARENT = """
import asyncio, sys
from pathlib import Path
from extproc.adapters.envoy_process import start_envoy

async def main():
    text = Path(sys.argv[2]).read_text()
    envoy = await start_envoy(Path(sys.argv[1]), text, log_path=Path(sys.argv[3]), concurrency=1)
    print(envoy.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def gateway(**settings):
    free = {"listen_port": 0, "admin_port": 0, "health_path": None}
    return to_yaml(bootstrap(GatewaySettings(**(free | settings))))


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def log_path(tmp_path):
    return tmp_path / "envoy.log"


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_named_binary_that_does_not_exist_is_an_error_with_a_remedy():
    with pytest.raises(EnvoyError, match=r"no Envoy binary at '/nowhere/envoy'.*extproc\[envoy\]"):
        find_envoy("/nowhere/envoy")


def test_a_named_binary_is_taken_before_all_others(tmp_path):
    named = program(tmp_path / "other", "#!/bin/sh\n")

    assert find_envoy(str(named)) == named


def test_the_binary_on_path_is_taken_before_the_package(tmp_path, monkeypatch):
    binary = program(tmp_path / "envoy", "\x7fELF")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_envoy() == binary


def test_a_script_on_path_is_passed_over(tmp_path, monkeypatch):
    program(tmp_path / "envoy", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_envoy().parent.name == "_bin"


def test_no_binary_anywhere_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "envoy", None)

    with pytest.raises(EnvoyError, match=r"no Envoy binary found: install .*extproc\[envoy\]"):
        find_envoy()


async def test_a_configuration_envoy_refuses_is_an_error_that_says_why(own_temporary_files):
    with pytest.raises(EnvoyError, match="no_such_field"):
        await validate(WHEEL, gateway() + "no_such_field: 1\n")

    assert not list(own_temporary_files.iterdir())


async def test_a_started_envoy_serves_at_the_addresses_it_names(log_path, own_temporary_files):
    envoy = await start_envoy(WHEEL, gateway(), log_path=log_path, concurrency=1)
    try:
        async with aiohttp.ClientSession() as session:
            host, port = envoy.admin
            async with session.get(f"http://{host}:{port}/server_info") as response:
                info = await response.json()
            host, port = envoy.listen
            async with session.get(f"http://{host}:{port}/") as response:
                status = response.status
    finally:
        await envoy.stop()

    assert info["command_line_options"]["concurrency"] == 1
    assert status == 503
    assert not list(own_temporary_files.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(envoy.pid, 0)


async def test_two_run_side_by_side(log_path):
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            envoy = await start_envoy(WHEEL, gateway(), log_path=log_path, concurrency=1)
            stack.push_async_callback(envoy.stop)


async def test_stopping_twice_is_no_error(log_path):
    envoy = await start_envoy(WHEEL, gateway(), log_path=log_path, concurrency=1)
    await envoy.stop()
    await envoy.stop()

    assert await envoy.wait() == 0


async def test_an_envoy_that_ignores_the_signal_is_killed(log_path, monkeypatch):
    monkeypatch.setattr("extproc.adapters.envoy_process._STOP_S", 0.2)
    envoy = await start_envoy(WHEEL, gateway(), log_path=log_path, concurrency=1)
    os.kill(envoy.pid, signal.SIGSTOP)
    await envoy.stop()

    assert await envoy.wait() == -signal.SIGKILL


@pytest.mark.parametrize("which", ["listen_port", "admin_port"])
async def test_an_address_in_use_is_named(which, log_path):
    with listening() as port, pytest.raises(EnvoyError, match=f"127.0.0.1:{port} is in use"):
        await start_envoy(WHEEL, gateway(**{which: port}), log_path=log_path)


async def test_an_address_of_another_host_is_named(log_path):
    with pytest.raises(EnvoyError, match=r"192\.0\.2\.1:\d+ is no use"):
        await start_envoy(WHEEL, gateway(listen_host="192.0.2.1"), log_path=log_path)


async def test_without_admin_address_nothing_is_started(log_path):
    with pytest.raises(EnvoyError, match="no admin address"):
        await start_envoy(WHEEL, gateway(admin_port=None), log_path=log_path)

    assert not log_path.exists()


async def test_an_early_end_shows_the_end_of_the_log(log_path, own_temporary_files):
    with pytest.raises(EnvoyError, match=r"(?s)ended with code 1.*no_such_field"):
        await start_envoy(WHEEL, gateway() + "no_such_field: 1\n", log_path=log_path)

    assert not list(own_temporary_files.iterdir())


async def test_an_envoy_that_is_never_ready_is_ended(tmp_path, log_path, own_temporary_files):
    idle = program(tmp_path / "idle", "#!/bin/sh\necho waiting\nexec sleep 60\n")
    with pytest.raises(EnvoyError, match=r"(?s)not ready after 0\.5 s.*waiting"):
        await start_envoy(idle, gateway(), log_path=log_path, ready_s=0.5)

    assert not list(own_temporary_files.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
async def test_envoy_dies_with_its_parent(tmp_path, log_path, own_temporary_files):
    config = tmp_path / "gateway.yaml"
    config.write_text(gateway())
    arguments = (str(WHEEL), str(config), str(log_path))
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, *arguments),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(own_temporary_files)},
    )
    try:
        pid = int(await asyncio.wait_for(parent.stdout.readline(), LIMIT_S))
        descriptor = os.pidfd_open(pid)
    finally:
        parent.kill()
        await parent.wait()
    files = list(own_temporary_files.iterdir())
    ended, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], LIMIT_S)
    os.close(descriptor)

    assert ended
    assert not files
