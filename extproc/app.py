"""Builds every part from a Config and joins them: startup, serve, drain.

Events flow one way: discovery -> health checks -> router, with the scraper beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.adapters.access_log import AccessLog
from extproc.adapters.admin import AdminServer, AdminSources
from extproc.adapters.discovery import Discovery
from extproc.adapters.health import HealthChecks, HealthSettings
from extproc.adapters.metrics import Metrics
from extproc.adapters.record import Recorder
from extproc.adapters.scrape import Scraper, ScrapeSettings
from extproc.adapters.server import ExtProcServer, ServerSettings
from extproc.config.addresses import split_address
from extproc.core.errors import ExtprocError
from extproc.core.router import Router
from extproc.settings import (
    discovery_settings,
    intake_settings,
    log_settings,
    router_settings,
    stream_settings,
)
from extproc.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from multiprocessing.connection import Connection

    from extproc.adapters.decision_log import DecisionLog
    from extproc.config.sections import Config
    from extproc.core.decision import Decision
    from extproc.core.endpoint import Endpoint
    from extproc.core.events import EndpointDown, EndpointReset, EndpointUp, Observed
    from extproc.core.peers import Peers
    from extproc.core.router import EndpointView

_LOG = logging.getLogger(__name__)
# Envoy's health checks of us come every second: so long new streams are still answered.
_NOTICE_S = 2.0
_RESTART_S = 1.0
# A log that takes longer to replay is read on while requests are routed.
_REPLAY_S = 10.0
_FLUSH_S = 1.0


class App:
    """One router process: `start`, then `stop`. `on_decision` sees each decision."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        # Ids of an earlier life must not release what this one holds.
        router_id = f"{config.listen.router_id}-{time.time_ns() // 1_000_000:x}"
        self.router = Router(router_settings(config), router_id=router_id)
        self._routing: Router | Peers = self.router
        self.metrics = Metrics(snapshot=self.snapshot, is_ready=self.is_ready)
        self._recorder = self._build_recorder()
        self._log = self._join_peers(router_id)
        self._watch = Watch(
            self.metrics,
            log=config.logging.decisions,
            on_decision=on_decision,
            recorder=self._recorder,
        )
        self._server = self._build_server()
        self._health = self._build_health()
        self._scraper = self._build_scraper()
        self._discovery = Discovery(discovery_settings(config), self._on_membership)
        self._admin = self._build_admin()
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._serving = False
        self._draining = False
        self._warm = self._log is None

    @property
    def address(self) -> str:
        """Where Envoy reaches us, with the real port once started."""
        return self._server.address

    @property
    def policy(self) -> str:
        """The policy in force."""
        return self._config.routing.policy

    @property
    def admin_port(self) -> int | None:
        """The port of the admin pages; None when they are off."""
        return self._admin.port if self._admin else None

    def is_ready(self) -> bool:
        """Whether requests are routed: an endpoint is ready, and the log was replayed."""
        serving = self._warm and not self._draining
        return serving and any(view.ready for view in self.snapshot())

    def snapshot(self) -> Sequence[EndpointView]:
        """Show every endpoint of the pool."""
        return self.router.snapshot(self._clock())

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints that are listed and resolved, ready or not."""
        return self._discovery.known

    async def until_ready(self, count: int = 1) -> None:
        """Wait until so many endpoints are ready and the log was replayed, without a limit."""
        while not self._warm or sum(view.ready for view in self.snapshot()) < count:
            await self._changed.wait()

    async def start(self) -> None:
        """Listen, find the endpoints and begin to check them; raise OSError or ExtprocError."""
        try:
            if self._admin:
                await self._admin.start()
            await self._server.start()
            await self._discovery.start()
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        self._spawn("discovery", self._discovery.run)
        self._spawn("readiness", self._follow_readiness)
        if self._health:
            self._spawn("health checks", self._health.run)
        if self._scraper:
            self._spawn("scrape", self._scraper.run)
        if self._log:
            self._spawn("decision log", self._log.run)
            self._tasks.append(asyncio.create_task(self._warm_up(self._log)))

    async def stop(self, *, grace_s: float | None = None) -> None:
        """Drain: report not serving first, then give open streams the rest of the grace."""
        grace_s = self._config.listen.drain_s if grace_s is None else grace_s
        self._draining = True
        await self._server.set_serving(serving=False)
        notice_s = min(_NOTICE_S, grace_s / 2)
        await asyncio.sleep(notice_s)
        await self._server.stop(grace_s - notice_s)
        if self._log and self._log.state().connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._log.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._admin:
            await self._admin.stop()
        if self._recorder:
            self._recorder.close()

    def _join_peers(self, router_id: str) -> DecisionLog | None:
        section = self._config.decision_log
        if section is None:
            return None
        try:
            from extproc.adapters.decision_log import DecisionLog  # noqa: PLC0415
        except ModuleNotFoundError as error:
            message = f"decision_log needs the module {error.name}: pip install extproc[log]"
            raise ExtprocError(message) from None
        log = DecisionLog(
            log_settings(section, self._config.intake),
            self.router,
            router_id=router_id,
            clock=self._clock,
            is_known=lambda endpoint: endpoint in self._discovery,
            registry=self.metrics.registry,
        )
        self._routing = log.peers
        return log

    async def _warm_up(self, log: DecisionLog) -> None:
        """Let a restarted router know what the log says before it serves, but not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPLAY_S):
                await log.until_warm()
        self._warm = True
        self._changed.set()
        self._changed = asyncio.Event()

    def _build_recorder(self) -> Recorder | None:
        record = self._config.record
        if record.file is None:
            return None
        return Recorder(
            Path(record.file),
            max_bytes=record.max_bytes,
            clock=time.time,
            on_drop=self.metrics.count_dropped_row,
        )

    def _build_server(self) -> ExtProcServer:
        config = self._config
        log = AccessLog(self._routing.apply, self._clock, self._watch.on_finished)
        return ExtProcServer(
            ServerSettings(
                address=config.listen.address,
                transport=config.listen.transport,
                max_streams=config.listen.max_streams,
            ),
            router=self._routing,
            intake=intake_settings(config.intake),
            stream=stream_settings(config),
            clock=self._clock,
            observer=self._watch,
            sinks=(log.sink(),),
        )

    def _build_health(self) -> HealthChecks | None:
        health = self._config.health
        if not health.enabled:
            return None
        settings = HealthSettings(**health.model_dump(exclude={"enabled"}))
        return HealthChecks(settings, self._apply_membership)

    def _build_scraper(self) -> Scraper | None:
        scrape = self._config.scrape
        if not scrape.enabled:
            return None
        return Scraper(ScrapeSettings(**scrape.model_dump(exclude={"enabled"})), self._apply_scrape)

    def _build_admin(self) -> AdminServer | None:
        if self._config.metrics.address is None:
            return None
        host, port = split_address(self._config.metrics.address, ephemeral=True)
        sources = AdminSources(
            render_metrics=self.metrics.render,
            is_ready=self.is_ready,
            snapshot=self.snapshot,
            log=self._describe_log if self._log else None,
        )
        return AdminServer(host, port, sources)

    def _describe_log(self) -> dict[str, object]:
        return dataclasses.asdict(self._log.state()) if self._log else {}

    def _on_membership(self, event: EndpointUp | EndpointDown) -> None:
        if self._scraper:
            self._scraper.update(event)
        if self._health:
            self._health.update(event)
        else:
            self._apply_membership(event)

    def _apply_membership(self, event: EndpointUp | EndpointDown) -> None:
        self.router.apply(event, self._clock())
        self.metrics.update(event)
        self._changed.set()
        self._changed = asyncio.Event()

    def _apply_scrape(self, event: Observed | EndpointReset) -> None:
        self._routing.apply(event, self._clock())

    async def _follow_readiness(self) -> None:
        while True:
            changed, ready = self._changed, self.is_ready()
            if ready != self._serving:
                self._serving = ready
                await self._server.set_serving(serving=ready)
                _LOG.info("%s", "serving" if ready else "not serving: no endpoint is ready")
            await changed.wait()

    def _spawn(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(_keep_running(name, run), name=name))


async def serve(config: Config, *, supervisor: Connection | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; raise OSError or ExtprocError at start.

    A `supervisor` is told when we listen; that it is gone is as good as SIGTERM.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    app = App(config)
    await app.start()
    _LOG.info("listening on %s", app.address)
    if supervisor:
        loop.add_reader(supervisor.fileno(), stopping.set)
        supervisor.send_bytes(b"serving")
    try:
        await stopping.wait()
        _LOG.info("draining for up to %.0f s", config.listen.drain_s)
    finally:
        if supervisor:
            loop.remove_reader(supervisor.fileno())
        await app.stop()


async def _keep_running(name: str, run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except Exception:  # noqa: BLE001 - a part that fails must not take the others along
            _LOG.exception("%s failed; starting again", name)
        await asyncio.sleep(_RESTART_S)
