"""The pages for people and probes: /metrics, /healthz, /readyz, /debug/endpoints, /debug/log.

Served apart from Envoy's port and on loopback by default: nothing here is for clients.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extproc.core.router import EndpointView

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHUTDOWN_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminSources:
    """Where the pages take their content from, at each request."""

    render_metrics: Callable[[], bytes]
    is_ready: Callable[[], bool]
    snapshot: Callable[[], Sequence[EndpointView]]
    log: Callable[[], Mapping[str, object]] | None = None
    """What is known of the decision log, `connected` and `reason` at least."""


class AdminServer:
    """An HTTP server on `host:port`; port 0 takes a free one, told by `port` once started."""

    def __init__(self, host: str, port: int, sources: AdminSources) -> None:
        self._host = host
        self.port = port
        self._sources = sources
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Bind and serve; raise OSError when the port is taken."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._alive)
        app.router.add_get("/readyz", self._readiness)
        app.router.add_get("/debug/endpoints", self._endpoints)
        app.router.add_get("/debug/log", self._log)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        self._runner = runner
        try:
            await web.TCPSite(runner, self._host, self.port).start()
        except OSError:
            await self.stop()
            raise
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        body = self._sources.render_metrics()
        return web.Response(body=body, headers={"content-type": _METRICS_TYPE})

    async def _alive(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text="ok\n")

    async def _readiness(self, request: web.Request) -> web.Response:
        del request
        if self._sources.is_ready():
            log = self._sources.log() if self._sources.log else {"connected": True}
            if log["connected"]:
                return web.Response(text="ready\n")
            return web.Response(text=f"ready, degraded: decision log: {log['reason']}\n")
        return web.Response(status=503, text="not ready: no endpoint is known, or draining\n")

    async def _endpoints(self, request: web.Request) -> web.Response:
        del request
        views = [dataclasses.asdict(view) for view in self._sources.snapshot()]
        return web.json_response({"endpoints": views})

    async def _log(self, request: web.Request) -> web.Response:
        del request
        if self._sources.log is None:
            return web.Response(status=404, text="no decision log is configured\n")
        return web.json_response(dict(self._sources.log()))
