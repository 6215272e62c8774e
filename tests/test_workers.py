from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from extproc.adapters.probe import probe
from extproc.config import ConfigError
from extproc.config.sections import Config
from extproc.config.workers import with_workers, worker_addresses, worker_configs

sys.path.insert(0, str(Path(__file__).parent / "adapters"))
from valkey_server import BINARY, ValkeyServer, free_port

LIMIT_S = 30.0
LOG = "valkey://127.0.0.1:6379"


def config(**given) -> Config:
    return Config.model_validate({"decision_log": {"url": LOG}, **given})


def test_workers_listen_at_the_next_ports_under_names_of_their_own():
    listen = {"address": "127.0.0.1:9002", "workers": 3, "router_id": "a"}
    record = {"file": "log/decisions.jsonl"}
    configs = worker_configs(config(listen=listen, record=record))

    assert [one.listen.address for one in configs] == [f"127.0.0.1:{9002 + n}" for n in range(3)]
    assert [one.metrics.address for one in configs] == [f"127.0.0.1:{9090 + n}" for n in range(3)]
    assert [one.listen.router_id for one in configs] == ["a-0", "a-1", "a-2"]
    assert [one.record.file for one in configs] == [
        "log/decisions.jsonl",
        "log/decisions-1.jsonl",
        "log/decisions-2.jsonl",
    ]
    assert {one.listen.workers for one in configs} == {1}


@pytest.mark.parametrize(
    ("address", "addresses"),
    [
        ("unix:/run/x.sock", ("unix:/run/x.sock", "unix:/run/x.sock.1")),
        ("[::1]:9002", ("[::1]:9002", "[::1]:9003")),
        ("127.0.0.1:0", ("127.0.0.1:0", "127.0.0.1:0")),
    ],
)
def test_addresses_are_counted_up(address, addresses):
    assert worker_addresses(config(listen={"address": address, "workers": 2})) == addresses


def test_one_worker_changes_nothing():
    alone = Config()

    assert worker_configs(with_workers(alone, 1)) == (alone,)


def test_addresses_that_can_not_be_counted_up_are_named():
    beyond = config(listen={"address": "127.0.0.1:65535", "workers": 2})

    with pytest.raises(ConfigError, match=r"listen\.address of worker 1"):
        worker_configs(beyond)


def test_several_workers_without_a_log_are_refused():
    with pytest.raises(ValueError, match="several workers need decision_log"):
        Config.model_validate({"listen": {"workers": 2}})
    with pytest.raises(ConfigError, match="--workers 2: several workers need decision_log"):
        with_workers(Config(), 2)


class Serving:
    """`extproc serve` of two workers; what it writes is read as it comes."""

    def __init__(self, folder: Path, log: str) -> None:
        self.sockets = [f"unix:{folder}/x.sock", f"unix:{folder}/x.sock.1"]
        self._log = log
        self._folder = folder
        self.lines: list[str] = []
        self.pids: dict[int, int] = {}
        self._changed = asyncio.Event()

    async def start(self, *, metrics: int, address: str = "") -> None:
        path = self._folder / "config.yaml"
        path.write_text(
            f"listen: {{address: '{address or self.sockets[0]}', drain_s: 1}}\n"
            f"metrics: {{address: '127.0.0.1:{metrics}'}}\n"
            f"decision_log: {self._log}\n"
            "health: {enabled: false}\nendpoints: ['127.0.0.1:1']\n"
        )
        command = (sys.executable, "-m", "extproc", "serve", "--workers", "2", "--config", path)
        self.process = await asyncio.create_subprocess_exec(*command, stderr=-1)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr
        async for raw in self.process.stderr:
            line = raw.decode()
            self.lines.append(line)
            if found := re.search(r"worker (\d) serves as process (\d+)", line):
                self.pids[int(found[1])] = int(found[2])
            self._changed.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            await self._reader
            return await self.process.wait()


@pytest.fixture
async def server(tmp_path):
    if BINARY is None:
        pytest.skip("no valkey-server or redis-server here")
    server = ValkeyServer(tmp_path)
    await server.start()
    yield server
    await server.kill()


@pytest.fixture
async def serving(tmp_path, server):
    serving = Serving(tmp_path, server.url)
    await serving.start(metrics=free_port())
    try:
        await serving.until(lambda: len(serving.pids) == 2)
        yield serving
    finally:
        if serving.process.returncode is None:
            serving.process.kill()
        await serving.end()


async def until_healthy(address: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await asyncio.to_thread(probe, address) is not None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        # Killed, but not yet collected by whoever became its parent.
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


async def test_each_worker_serves_and_all_end_on_sigterm(serving):
    for socket in serving.sockets:
        await until_healthy(socket)

    serving.process.send_signal(signal.SIGTERM)
    assert await serving.end() == 0
    assert not any(alive(pid) for pid in serving.pids.values())


async def test_a_dead_worker_is_started_again(serving):
    killed = serving.pids[1]
    os.kill(killed, signal.SIGKILL)
    await serving.until(lambda: serving.pids[1] != killed)

    await until_healthy(serving.sockets[1])
    assert any("worker 1 ended with -9" in line for line in serving.lines)


async def test_workers_end_with_their_supervisor(serving):
    serving.process.kill()
    # Its workers hold its stderr, which ends with the last of them.
    await serving.end()
    assert not any(alive(pid) for pid in serving.pids.values())


async def test_a_worker_that_can_not_listen_ends_them_all_with_its_reason(tmp_path, server):
    port = free_port()
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", port + 1)
    async with taken:
        serving = Serving(tmp_path, server.url)
        await serving.start(metrics=free_port(), address=f"127.0.0.1:{port}")
        assert await serving.end() == 2

    assert any("extproc: worker-1: " in line and str(port + 1) in line for line in serving.lines)
    assert serving.lines[-1] == "extproc: worker 1 of 2 ended at its start\n"


async def test_each_worker_has_metrics_and_shows_its_log(tmp_path, server):
    serving = Serving(tmp_path, server.url)
    metrics = free_port()
    await serving.start(metrics=metrics)
    try:
        await serving.until(lambda: len(serving.pids) == 2)
        async with aiohttp.ClientSession() as session:
            for port in (metrics, metrics + 1):
                async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    assert "extproc_log_connected" in await answer.text()
                async with session.get(f"http://127.0.0.1:{port}/debug/log") as answer:
                    assert "lag_ms" in await answer.json()
    finally:
        serving.process.terminate()
        await serving.end()
