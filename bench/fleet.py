"""A whole fleet as processes: stand-in engines, routers with or without a log, a real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import uvloop
import yaml

from bench.processes import START_S, free_port, module
from extproc.adapters.envoy_config import bootstrap, to_yaml
from extproc.adapters.envoy_process import find_envoy, start_envoy
from extproc.adapters.probe import probe
from extproc.config import load_config
from extproc.conversations import Workload
from extproc.settings import gateway_settings
from extproc.standin.server import start_standin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

_FLUSH_NOTHING = ("--save", "", "--appendonly", "no")


class Child:
    """A process that can be killed and started again; ended with its fleet."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process's id, while it runs."""
        assert self._process is not None  # noqa: S101 - started before it is asked
        return self._process.pid

    async def start(self) -> None:
        """Start it; its output goes to the log."""
        with self._log.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=sink, stderr=sink
            )

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal and wait for the end, killing what does not end."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            async with asyncio.timeout(START_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A running fleet; clients talk to `url`."""

    url: str
    admin_urls: tuple[str, ...]
    routers: list[Child]
    """One supervisor with all workers if they share a log, else one process each."""
    valkey: Child | None = None
    addresses: tuple[str, ...] = field(default=())

    async def until_routing(self) -> None:
        """Wait until every router says that it routes."""
        async with asyncio.timeout(START_S):
            for address in self.addresses:
                while await asyncio.to_thread(probe, address) is not None:  # noqa: ASYNC110 - a process
                    await asyncio.sleep(0.05)

    async def read(self, page: str) -> list[str]:
        """Read a page of every router; those that do not answer give an empty text."""
        limit = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=limit) as session:
            return [await _read(session, url + page) for url in self.admin_urls]


def find_valkey() -> str | None:
    """Find the server's program."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


@contextlib.asynccontextmanager
async def run_valkey(folder: Path) -> AsyncIterator[tuple[Child, str]]:
    """Run a Valkey or Redis server on a free port; give it and its URL."""
    program = find_valkey()
    if program is None:
        message = "needs valkey-server or redis-server (apt install redis-server)"
        raise SystemExit(message)
    port = free_port()
    where = ("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder))
    valkey = Child((program, *where, *_FLUSH_NOTHING), folder / "valkey.log")
    await valkey.start()
    try:
        yield valkey, f"valkey://127.0.0.1:{port}"
    finally:
        await valkey.end()


@contextlib.asynccontextmanager
async def run_fleet(folder: Path, *, routers: int, log: bool) -> AsyncIterator[Fleet]:
    """Run engines, routers and Envoy; end them with the block."""
    async with contextlib.AsyncExitStack() as cleanup:
        engines = Child(module("bench.fleet"), folder / "engines.log")
        endpoints = await _start_engines(engines, folder)
        cleanup.push_async_callback(engines.end)
        valkey, url = None, None
        if log:
            valkey, url = await cleanup.enter_async_context(run_valkey(folder))
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(_config(folder, endpoints, routers, url)), encoding="utf-8")
        config = load_config(path)
        children = []
        for number, command in enumerate(_commands(folder, path, routers, log=log)):
            router = Child(command, folder / f"router-{number}.log")
            await router.start()
            cleanup.push_async_callback(router.end)
            children.append(router)
        envoy = await start_envoy(
            find_envoy(),
            to_yaml(bootstrap(gateway_settings(config, endpoints))),
            log_path=folder / "envoy.log",
            concurrency=1,
        )
        cleanup.push_async_callback(envoy.stop)
        host, port = envoy.listen
        first = int((config.metrics.address or "").rpartition(":")[2])
        fleet = Fleet(
            url=f"http://{host}:{port}",
            admin_urls=tuple(f"http://127.0.0.1:{first + n}" for n in range(routers)),
            routers=children,
            valkey=valkey,
            addresses=config.gateway.routers,
        )
        await fleet.until_routing()
        yield fleet


def _config(
    folder: Path, endpoints: Sequence[str], routers: int, url: str | None
) -> dict[str, Any]:
    sockets = [f"unix:{folder}/r.sock", *(f"unix:{folder}/r.sock.{n}" for n in range(1, routers))]
    return {
        "listen": {"address": sockets[0], "workers": routers if url else 1, "drain_s": 1.0},
        "endpoints": {"static": [{"address": endpoint} for endpoint in endpoints]},
        "metrics": {"address": f"127.0.0.1:{_free_ports(routers)}"},
        "routing": {"cache_tokens": Workload().engine.cache_tokens},
        "gateway": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "routers": sockets},
        **({"decision_log": url} if url else {}),
    }


def _commands(folder: Path, path: Path, routers: int, *, log: bool) -> list[tuple[str, ...]]:
    """Give one command for all if they share a log, else one for each with a file of its own."""
    if log:
        return [module("extproc", "serve", "--config", str(path))]
    commands = []
    whole = yaml.safe_load(path.read_text(encoding="utf-8"))
    port = int(whole["metrics"]["address"].rpartition(":")[2])
    for number in range(routers):
        own = folder / f"config-{number}.yaml"
        whole["listen"]["address"] = whole["gateway"]["routers"][number]
        whole["listen"]["router_id"] = f"router-{number}"
        whole["metrics"]["address"] = f"127.0.0.1:{port + number}"
        own.write_text(yaml.safe_dump(whole), encoding="utf-8")
        commands.append(module("extproc", "serve", "--config", str(own)))
    return commands


async def _start_engines(engines: Child, folder: Path) -> list[str]:
    await engines.start()
    log = folder / "engines.log"
    async with asyncio.timeout(START_S):
        while not log.read_text(encoding="utf-8").endswith("\n"):  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.05)
    return list(json.loads(log.read_text(encoding="utf-8")))


async def _run_engines() -> None:
    """Run the workload's engines until killed; print their endpoints as one JSON line."""
    workload = Workload()
    engines = [await start_standin(workload.engine) for _ in range(workload.engines)]
    print(json.dumps([engine.endpoint for engine in engines]), flush=True)
    await asyncio.Event().wait()


async def _read(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as answer:
            return await answer.text()
    except (aiohttp.ClientError, TimeoutError):
        return ""


def _free_ports(count: int) -> int:
    """Find a port that is free with those after it."""
    for _ in range(100):
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for number in range(count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", first + number))
            return first
    message = "no free ports"
    raise OSError(message)


if __name__ == "__main__":
    uvloop.run(_run_engines())
