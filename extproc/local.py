"""The whole gateway on one machine: engines or stand-ins, the router, a real Envoy.

`run_stack` starts it and ends all of it, ports and temporary files included, however its
block is left; `up` is the command around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.adapters.envoy_config import bootstrap, to_yaml
from extproc.adapters.envoy_process import RunningEnvoy, find_envoy, start_envoy
from extproc.app import App
from extproc.config.addresses import MAX_UNIX_PATH_BYTES
from extproc.config.sections import Config, Endpoints, Gateway, Listen, Member, MetricsSection
from extproc.core.errors import ExtprocError
from extproc.engine_urls import parse_endpoint_url
from extproc.settings import gateway_settings
from extproc.standin.server import RunningStandin, start_standin
from extproc.standin.settings import StandinSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from extproc.core.decision import Decision
    from extproc.core.endpoint import Endpoint

_READY_S = 30.0
# Endpoint and reason columns of the lines `up` prints.
_ENDPOINT_COLUMNS, _REASON_COLUMNS = 22, 15


class StackError(ExtprocError):
    """The stack can't be started, or a part of it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What to run. Without `endpoints` (`http://host:port`), so many stand-ins are started.

    Port 0 asks for a free one. `config` gives everything else; its listen address,
    endpoints, gateway addresses and metrics address are replaced.
    """

    endpoints: tuple[str, ...] = ()
    policy: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    standins: int = 4
    standin: StandinSettings = field(default_factory=StandinSettings)
    config: Config = field(default_factory=Config)
    envoy: str | None = None
    envoy_concurrency: int | None = None
    on_decision: Callable[[Decision], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running gateway: clients talk to `url`."""

    url: str
    app: App
    endpoints: tuple[Endpoint, ...]
    standins: tuple[RunningStandin, ...]
    envoy: RunningEnvoy

    @property
    def admin_url(self) -> str:
        """Where the router's own pages are."""
        return f"http://127.0.0.1:{self.app.admin_port}"


@contextlib.asynccontextmanager
async def run_stack(settings: StackSettings) -> AsyncIterator[Stack]:
    """Start everything, wait until it is ready, end it all at the end of the block.

    Raises ExtprocError or OSError when a part does not start, naming it.
    """
    binary = find_envoy(settings.envoy)
    listed = [parse_endpoint_url(url) for url in settings.endpoints]
    async with contextlib.AsyncExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="extproc-"))
        standins = [] if listed else await _start_standins(settings, cleanup)
        members = listed or [standin.endpoint for standin in standins]
        config = _stack_config(settings, members, Path(folder))
        app = App(config, on_decision=settings.on_decision)
        await app.start()
        cleanup.push_async_callback(app.stop, grace_s=0.0)
        await _until_ready(app, len(standins) or 1)
        gateway = replace(gateway_settings(config, app.endpoints), routers=(app.address,))
        envoy = await start_envoy(
            binary,
            to_yaml(bootstrap(gateway)),
            log_path=Path(folder) / "envoy.log",
            concurrency=settings.envoy_concurrency,
        )
        cleanup.push_async_callback(envoy.stop)
        host, port = envoy.listen
        shown = f"[{host}]" if ":" in host else host
        yield Stack(
            url=f"http://{shown}:{port}",
            app=app,
            endpoints=app.endpoints,
            standins=tuple(standins),
            envoy=envoy,
        )


async def up(settings: StackSettings, show: Callable[[str], None]) -> None:
    """Run a stack until SIGINT or SIGTERM; raise StackError when Envoy ends by itself."""
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(_run_until_envoy_ends(settings, show))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        show("stopped")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def describe_decision(decision: Decision) -> str:
    """Give the line that tells where a request went, and why."""
    endpoint = f"{decision.destination:<{_ENDPOINT_COLUMNS}}"
    reason = f"{decision.reason:<{_REASON_COLUMNS}}"
    return f"{endpoint} {reason} {decision.matched_tokens}/{decision.prompt_tokens} tokens matched"


def example_curl(url: str) -> str:
    """Give a command that sends a first request."""
    body = '{"model": "standin", "messages": [{"role": "user", "content": "Hello"}]}'
    target = f"{url}/v1/chat/completions"
    return f"curl {target} -H 'content-type: application/json' -d {shlex.quote(body)}"


async def _run_until_envoy_ends(settings: StackSettings, show: Callable[[str], None]) -> None:
    async with run_stack(settings) as stack:
        show(f"gateway  {stack.url}  policy {stack.app.policy}")
        show(f"engines  {' '.join(stack.endpoints)}{'  (stand-ins)' if stack.standins else ''}")
        show(f"metrics  {stack.admin_url}/metrics")
        show(f"try      {example_curl(stack.url)}")
        show("One line per decision follows; Ctrl-C stops everything.")
        code = await stack.envoy.wait()
    message = f"Envoy ended with code {code}"
    raise StackError(message)


async def _start_standins(
    settings: StackSettings, cleanup: contextlib.AsyncExitStack
) -> list[RunningStandin]:
    standins = []
    for _ in range(settings.standins):
        standin = await start_standin(settings.standin, settings.host)
        cleanup.push_async_callback(standin.stop)
        standins.append(standin)
    return standins


def _stack_config(settings: StackSettings, members: list[str], folder: Path) -> Config:
    given = settings.config
    routing = given.routing
    if settings.policy:
        routing = type(routing).model_validate({**routing.model_dump(), "policy": settings.policy})
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    gateway = Gateway.model_validate(
        {
            **given.gateway.model_dump(),
            "listen": f"{host}:{settings.port}",
            "admin": "127.0.0.1:0",
            "routers": (),
        }
    )
    return given.model_copy(
        update={
            "listen": Listen(address=_router_address(folder)),
            "endpoints": Endpoints(static=tuple(Member(address=member) for member in members)),
            "routing": routing,
            "metrics": MetricsSection(address="127.0.0.1:0"),
            "gateway": gateway,
        }
    )


def _router_address(folder: Path) -> str:
    """Prefer a unix socket, a tenth to a quarter cheaper, where its path is short enough."""
    path = folder / "router.sock"
    return f"unix:{path}" if len(bytes(path)) <= MAX_UNIX_PATH_BYTES else "127.0.0.1:0"


async def _until_ready(app: App, count: int) -> None:
    try:
        async with asyncio.timeout(_READY_S):
            await app.until_ready(count)
    except TimeoutError:
        names = ", ".join(app.endpoints) or "none is known"
        message = f"no endpoint passed its health check within {_READY_S:.0f} s: {names}"
        raise StackError(message) from None
