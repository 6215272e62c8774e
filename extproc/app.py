"""Builds every part from a Config and joins them: startup, serve, drain.

Events flow one way: discovery -> health checks -> router, with the scraper beside them.
"""

from __future__ import annotations

import asyncio
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
from extproc.config.sections import split_address
from extproc.core.router import Router
from extproc.settings import (
    discovery_settings,
    intake_settings,
    router_settings,
    stream_settings,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from extproc.adapters.access_log import Outcome
    from extproc.config.sections import Config
    from extproc.core.decision import Decision
    from extproc.core.endpoint import Endpoint
    from extproc.core.errors import RequestRefusedError
    from extproc.core.events import EndpointDown, EndpointReset, EndpointUp, Observed
    from extproc.core.router import EndpointView

_LOG = logging.getLogger(__name__)
# Envoy's health checks of us come every second: so long new streams are still answered.
_NOTICE_S = 2.0
_RESTART_S = 1.0


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
        self.metrics = Metrics(snapshot=self.snapshot, is_ready=self.is_ready)
        self._recorder = self._build_recorder()
        self._watch = _Watch(
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
        """Whether requests are routed: an endpoint is ready and we are not draining."""
        return not self._draining and any(view.ready for view in self.snapshot())

    def snapshot(self) -> Sequence[EndpointView]:
        """Show every endpoint of the pool."""
        return self.router.snapshot(self._clock())

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints that are listed and resolved, ready or not."""
        return self._discovery.known

    async def until_ready(self, count: int = 1) -> None:
        """Wait until so many endpoints are ready, without a limit."""
        while sum(view.ready for view in self.snapshot()) < count:
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

    async def stop(self, *, grace_s: float | None = None) -> None:
        """Drain: report not serving first, then give open streams the rest of the grace."""
        grace_s = self._config.listen.drain_s if grace_s is None else grace_s
        self._draining = True
        await self._server.set_serving(serving=False)
        notice_s = min(_NOTICE_S, grace_s / 2)
        await asyncio.sleep(notice_s)
        await self._server.stop(grace_s - notice_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._admin:
            await self._admin.stop()
        if self._recorder:
            self._recorder.close()

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
        log = AccessLog(self.router.apply, self._clock, self._watch.on_finished)
        return ExtProcServer(
            ServerSettings(
                address=config.listen.address,
                transport=config.listen.transport,
                max_streams=config.listen.max_streams,
            ),
            router=self.router,
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
            render_metrics=self.metrics.render, is_ready=self.is_ready, snapshot=self.snapshot
        )
        return AdminServer(host, port, sources)

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
        self.router.apply(event, self._clock())

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


class _Watch:
    """The server's observer: counts, logs, and passes decisions on."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        log: bool,
        on_decision: Callable[[Decision], None] | None,
        recorder: Recorder | None,
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._on_decision = on_decision
        self._recorder = recorder

    def on_stream_open(self) -> None:
        self._metrics.open_stream()

    def on_stream_close(self) -> None:
        self._metrics.close_stream()

    def on_decision(self, decision: Decision, seconds: float) -> None:
        self._metrics.count_decision(decision, seconds)
        if self._log:
            _LOG.info(
                "decision %s endpoint=%s policy=%s reason=%s matched=%d/%d us=%d",
                decision.decision_id,
                decision.destination,
                decision.policy,
                decision.reason,
                decision.matched_tokens,
                decision.prompt_tokens,
                seconds * 1e6,
            )
        if self._recorder:
            self._recorder.routed(decision)
        if self._on_decision:
            self._on_decision(decision)

    def on_refused(self, error: RequestRefusedError) -> None:
        self._metrics.count_refusal(error)
        _LOG.debug("refused: %s", error.code)

    def on_error(self, phase: str, error: Exception) -> None:
        # The place, not the text: an exception's text may quote the prompt.
        self._metrics.count_error()
        _LOG.warning("undecided at %s: %s%s", phase, type(error).__name__, _place(error))

    def on_finished(self, outcome: Outcome) -> None:
        self._metrics.count_finish(attempts=outcome.attempts, fell_back=outcome.fell_back)
        if self._recorder and outcome.decision_id is not None:
            self._recorder.finished(
                outcome.decision_id,
                served=outcome.served,
                status=outcome.status,
                attempts=outcome.attempts,
                duration_s=outcome.duration_s,
            )


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain; raise OSError or ExtprocError at start."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    app = App(config)
    await app.start()
    _LOG.info("listening on %s", app.address)
    try:
        await stopping.wait()
        _LOG.info("draining for up to %.0f s", config.listen.drain_s)
    finally:
        await app.stop()


async def _keep_running(name: str, run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except Exception:  # noqa: BLE001 - a part that fails must not take the others along
            _LOG.exception("%s failed; starting again", name)
        await asyncio.sleep(_RESTART_S)


def _place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
