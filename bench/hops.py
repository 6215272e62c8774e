"""The hops that are compared: plain Envoy, Envoy with us, and Rust routers as full proxies.

All stand before the same engines: listeners of one Envoy that read a body whole and answer
at once with their name.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from bench.gateway import decisions, without_us
from bench.processes import START_S, child, free_port, module
from extproc.adapters.envoy_config import bootstrap, to_yaml
from extproc.adapters.envoy_process import find_envoy, start_envoy
from extproc.config import load_config
from extproc.core.endpoint import Endpoint
from extproc.settings import gateway_settings

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

ENGINES = 4
ENGINE_HEADER = "x-engine"
PEERS = ("sglang-router", "vllm-router")

_MAX_BODY_BYTES = 64 * 1024 * 1024
_INSTALL_S = 180.0
_PATH = "/v1/chat/completions"
_ANSWER = {"object": "list", "status": "ok", "data": [{"id": "bench", "object": "model"}]}
_TYPE = "type.googleapis.com/envoy.extensions.filters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A running hop: its processes are all that it adds, ours the last where there is one."""

    name: str
    url: str
    pids: tuple[int, ...]


async def start_engines(cleanup: contextlib.AsyncExitStack, folder: Path) -> list[str]:
    """Start the engines; give `host:port` of each."""
    ports = [free_port() for _ in range(ENGINES)]
    config = {
        "admin": {"address": {"pipe": {"path": f"@extproc-bench-{os.getpid()}"}}},
        "static_resources": {"listeners": [_engine(port) for port in ports]},
    }
    path = folder / "engines.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    options = ("--use-dynamic-base-id", "--concurrency", "1", "-l", "warning")
    command = (str(find_envoy()), "-c", str(path), *options)
    await cleanup.enter_async_context(child(*command, log=folder / "engines.log"))
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    for endpoint in endpoints:
        await _until_answered(f"http://{endpoint}{_PATH}")
    return endpoints


async def start_envoys(
    cleanup: contextlib.AsyncExitStack, folder: Path, endpoints: Sequence[str], mode: str
) -> list[Hop]:
    """Start Envoy alone and Envoy with us over either transport; with us alone for other modes."""
    names = ["plain", "h2", "grpc"] if mode == "buffered-partial" else ["h2"]
    hops = []
    for name in names:
        place = folder / f"{name}-{mode}"
        place.mkdir()
        hops.append(await _start_envoy(cleanup, place, endpoints, name, mode))
    return hops


async def start_peer(
    cleanup: contextlib.AsyncExitStack, folder: Path, endpoints: Sequence[str], name: str
) -> Hop | None:
    """Start a Rust router with its cache-aware policy; None where it can't be had."""
    program = _install(name)
    if program is None:
        return None
    port = free_port()
    command = [
        *(str(program), *(["launch"] if name == "sglang-router" else [])),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
        *("--prometheus-port", str(free_port()), "--log-level", "error"),
        *("--worker-urls", *(f"http://{endpoint}" for endpoint in endpoints)),
    ]
    process = await cleanup.enter_async_context(child(*command, log=folder / f"{name}.log"))
    url = f"http://127.0.0.1:{port}{_PATH}"
    try:
        await _until_answered(url)
    except TimeoutError:
        return None
    return Hop(name=name, url=url, pids=(process.pid,))


async def _start_envoy(
    cleanup: contextlib.AsyncExitStack,
    folder: Path,
    endpoints: Sequence[str],
    name: str,
    mode: str,
) -> Hop:
    admin_port = free_port()
    path = folder / "config.yaml"
    path.write_text(
        yaml.safe_dump(_config(folder, endpoints, admin_port, name, mode)), encoding="utf-8"
    )
    settings = gateway_settings(load_config(path), [Endpoint.parse(one) for one in endpoints])
    text = to_yaml(bootstrap(settings))
    pids: list[int] = []
    if name == "plain":
        text = without_us(text)
    else:
        serve = module("extproc", "serve", "--config", str(path))
        router = await cleanup.enter_async_context(child(*serve, log=folder / "router.log"))
        pids.append(router.pid)
    envoy = await start_envoy(find_envoy(), text, log_path=folder / "envoy.log", concurrency=1)
    cleanup.push_async_callback(envoy.stop)
    host, port = envoy.listen
    url = f"http://{host}:{port}{_PATH}"
    await _until_answered(url)
    if pids:
        await _until_routed(url, f"http://127.0.0.1:{admin_port}")
    label = {"plain": "Envoy", "h2": "Envoy + extproc", "grpc": "Envoy + extproc, grpc"}[name]
    label += "" if mode == "buffered-partial" else f", {mode}"
    return Hop(name=label, url=url, pids=(envoy.pid, *pids))


def _config(
    folder: Path, endpoints: Sequence[str], admin_port: int, name: str, mode: str
) -> dict[str, Any]:
    transport = {"transport": name} if name in {"h2", "grpc"} else {}
    return {
        "listen": {"address": f"unix:{folder}/router.sock", **transport},
        "endpoints": {"static": [{"address": endpoint} for endpoint in endpoints]},
        "stream": {"body_mode": mode},
        "metrics": {"address": f"127.0.0.1:{admin_port}"},
        "scrape": {"enabled": False},
        "logging": {"level": "warning"},
        "gateway": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
    }


def _engine(port: int) -> dict[str, Any]:
    answer = {
        "match": {"prefix": "/"},
        "direct_response": {"status": 200, "body": {"inline_string": json.dumps(_ANSWER)}},
        "response_headers_to_add": [{"header": {"key": ENGINE_HEADER, "value": str(port)}}],
    }
    whole = {"@type": f"{_TYPE}.http.buffer.v3.Buffer", "max_request_bytes": _MAX_BODY_BYTES}
    manager = {
        "@type": f"{_TYPE}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "engine",
        "http_filters": [
            {"name": "envoy.filters.http.buffer", "typed_config": whole},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}.http.router.v3.Router"},
            },
        ],
        "route_config": {
            "virtual_hosts": [{"name": "engine", "domains": ["*"], "routes": [answer]}]
        },
    }
    named = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {
        "name": f"engine-{port}",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [named]}],
    }


def _install(name: str) -> Path | None:
    """Find a peer, or install it in an environment of its own outside of the repository."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    place = Path(os.environ.get("EXTPROC_BENCH_PEERS", cache / "extproc-bench"))
    program = place / "bin" / name
    if program.exists():
        return program
    try:
        subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=_INSTALL_S)
        install = [place / "bin" / "python", "-m", "pip", "install", "--quiet", name]
        subprocess.run(install, check=True, timeout=_INSTALL_S)
    except (subprocess.SubprocessError, OSError):
        shutil.rmtree(place, ignore_errors=True)
        return None
    return program if program.exists() else None


async def _until_answered(url: str) -> None:
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        answered = await _is_answered(session, url)
        while not answered:
            await asyncio.sleep(0.1)
            answered = await _is_answered(session, url)


async def _is_answered(session: aiohttp.ClientSession, url: str) -> bool:
    body = {"model": "bench", "messages": [{"role": "user", "content": "hello"}]}
    try:
        async with session.post(url, json=body) as answer:
            await answer.read()
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def _until_routed(url: str, admin_url: str) -> None:
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while not await decisions(session, admin_url):
            await _is_answered(session, url)
            await asyncio.sleep(0.1)
