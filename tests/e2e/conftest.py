"""The whole gateway for tests: stand-in engines, the router as its own process, a real Envoy.

Requests go through Envoy's port; what the router decided is read from its log, what it
counts from its pages, and what an engine got from the engine's answer.
"""

import asyncio
import contextlib
import io
import json
import re
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import yaml

from extproc.adapters.envoy_config import bootstrap, to_yaml
from extproc.adapters.envoy_process import find_envoy, start_envoy
from extproc.config import load_config
from extproc.core.endpoint import Endpoint
from extproc.settings import gateway_settings
from extproc.standin.server import start_standin
from extproc.standin.settings import StandinSettings

LIMIT_S = 20.0
POLL_S = 0.02
HTTP_OK = 200
DECISION = re.compile(
    r"decision (?P<decision_id>\S+) endpoint=(?P<endpoint>\S+) policy=(?P<policy>\S+) "
    r"reason=(?P<reason>\S+) matched=(?P<matched>\d+)/(?P<tokens>\d+)"
)
FAST = StandinSettings(
    prefill_tokens_per_s=200_000.0, decode_tokens_per_s=2_000.0, first_token_overhead_s=0.001
)


async def eventually(check, limit_s=LIMIT_S):
    """Ask again until the answer is true; give that answer, or fail at the limit."""
    async with asyncio.timeout(limit_s):
        while True:
            answer = check()
            answer = await answer if asyncio.iscoroutine(answer) else answer
            if answer:
                return answer
            await asyncio.sleep(POLL_S)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass
class Service:
    """The router as `extproc serve` runs it; it may be killed, stopped for a while, restarted."""

    config_path: Path
    log_path: Path
    admin_url: str
    process: asyncio.subprocess.Process | None = None

    async def start(self):
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "extproc", "serve", "--config", str(self.config_path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self):
        return self.process.pid

    def signal(self, number):
        self.process.send_signal(number)

    async def kill(self):
        self.process.kill()
        await asyncio.wait_for(self.process.wait(), LIMIT_S)

    async def end(self):
        """End it as an operator does, by force where that takes too long; give its exit code."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), 5.0)
            except TimeoutError:
                await self.kill()
        return self.process.returncode

    def log(self):
        return self.log_path.read_text(encoding="utf-8")

    def decisions(self):
        return [match.groupdict() for match in DECISION.finditer(self.log())]

    async def page(self, path):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session,
            session.get(self.admin_url + path) as response,
        ):
            return response.status, await response.text()

    async def is_alive(self):
        try:
            status, _ = await self.page("/healthz")
        except aiohttp.ClientConnectionError:
            return False
        return status == HTTP_OK

    async def views(self):
        try:
            _, text = await self.page("/debug/endpoints")
        except aiohttp.ClientConnectionError:
            return []
        return json.loads(text)["endpoints"]

    async def ready_count(self):
        return sum(view["ready"] for view in await self.views())

    async def metric(self, name):
        _, text = await self.page("/metrics")
        lines = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, lines))

    async def is_idle(self):
        views = await self.views()
        open_streams = await self.metric("extproc_streams_open")
        return views and not open_streams and not any(view["inflight"] for view in views)


@dataclass
class Gateway:
    """A running gateway; `session` speaks to Envoy."""

    url: str
    session: aiohttp.ClientSession
    service: Service
    envoy: object
    standins: list = field(default_factory=list)
    endpoints: tuple = ()

    @property
    def host_and_port(self):
        return self.envoy.listen

    def post(self, path, body, **more):
        headers = {"content-type": "application/json"} | more.pop("headers", {})
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        data = io.BytesIO(data) if isinstance(data, bytes) else data
        return self.session.post(path, data=data, headers=headers, **more)

    async def ask(self, path, body, **more):
        """Post and read the whole answer; the body is released, the response stays readable."""
        async with self.post(path, body, **more) as response:
            await response.read()
            return response

    async def decided(self, count):
        """Wait until so many decisions are in the log, give them all."""
        await eventually(lambda: len(self.service.decisions()) >= count)
        return self.service.decisions()

    async def last_decision_after(self, count):
        return (await self.decided(count + 1))[-1]

    async def until_idle(self):
        await eventually(self.service.is_idle)

    async def envoy_counter(self, name):
        host, port = self.envoy.admin
        async with self.session.get(f"http://{host}:{port}/stats?filter=^{name}$") as response:
            lines = (await response.text()).split()
        return int(lines[-1]) if lines else 0


async def _run_standins(stack, count, settings):
    standins = []
    for _ in range(count):
        standin = await start_standin(settings)
        stack.push_async_callback(standin.stop)
        standins.append(standin)
    return standins


def _write_config(folder, members, sections):
    config = {
        "listen": {"address": f"unix:{folder}/r", "drain_s": 0.2},
        "endpoints": [str(member) for member in members],
        "health": {"interval_s": 0.2},
        "metrics": {"address": f"127.0.0.1:{free_port()}"},
        "gateway": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@asynccontextmanager
async def run_gateway(
    folder, *, standins=3, standin=FAST, endpoints=(), ready=None, edit=None, sections=None
):
    """Run it until the end of the block.

    `endpoints` join the stand-ins in the list; `ready` of them all are waited for; `edit`
    may change Envoy's configuration, a dict, before it starts.
    """
    async with contextlib.AsyncExitStack() as stack:
        running = await _run_standins(stack, standins, standin)
        members = [*endpoints, *(one.endpoint for one in running)]
        path = _write_config(folder, members, sections or {})
        config = load_config(path)
        service = Service(path, folder / "router.log", f"http://{config.metrics.address}")
        await service.start()
        stack.push_async_callback(service.end)
        expected = len(members) if ready is None else ready

        async def is_up():
            return await service.is_alive() and await service.ready_count() >= expected

        await eventually(is_up)
        text = to_yaml(bootstrap(gateway_settings(config, [Endpoint(one) for one in members])))
        if edit:
            described = yaml.safe_load(text)
            edit(described)
            text = yaml.safe_dump(described)
        envoy = await start_envoy(find_envoy(), text, log_path=folder / "envoy.log", concurrency=2)
        stack.push_async_callback(envoy.stop)
        url = "http://{}:{}".format(*envoy.listen)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                url,
                timeout=aiohttp.ClientTimeout(total=LIMIT_S),
                connector=aiohttp.TCPConnector(limit=0),
            )
        )
        yield Gateway(url, session, service, envoy, running, tuple(members))


@pytest.fixture(scope="session", params=["h2", "grpc"])
def start_gateway(request, tmp_path_factory):
    """Start a gateway: `async with start_gateway(standins=3, …) as gateway`."""

    def start(*, sections=None, **options):
        sections = sections or {}
        listen = {"transport": request.param, **sections.get("listen", {})}
        sections = {**sections, "listen": listen}
        return run_gateway(tmp_path_factory.mktemp("gw"), sections=sections, **options)

    return start


@pytest.fixture(name="eventually", scope="session")
def give_eventually():
    return eventually


class Chat:
    """A conversation that grows: `body` gives the request of its next turn."""

    def __init__(self, topic, system="You are helpful. " * 80, model="standin"):
        self._model = model
        self._system = system
        self._topic = topic
        self._turns = 0

    def body(self, **more):
        self._turns += 1
        messages = [{"role": "system", "content": self._system}]
        for number in range(self._turns):
            if number:
                messages.append({"role": "assistant", "content": f"Answer {number}. " * 40})
            messages.append({"role": "user", "content": f"{self._topic} question {number}. " * 60})
        return {"model": self._model, "max_tokens": 2, "messages": messages, **more}


@pytest.fixture(scope="session")
def chat():
    return Chat
