"""The HTTP paths of a stand-in, over one engine."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING

from aiohttp import web

from extproc.standin import anthropic, openai, responses
from extproc.standin.answer import answer, send_json
from extproc.standin.body import CallError, parse_body
from extproc.standin.dialects import ENGINE_DIALECTS
from extproc.standin.faults import FaultKind, read_fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from extproc.core.endpoint import Endpoint
    from extproc.standin.engine import Engine
    from extproc.standin.faults import Faults
    from extproc.standin.reply import Dialect, JsonObject

    Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": openai.CHAT,
    "/v1/completions": openai.COMPLETIONS,
    "/v1/embeddings": openai.EMBEDDINGS,
    "/v1/responses": responses.RESPONSES,
    "/v1/messages": anthropic.MESSAGES,
}

_DRAINING_PATH = "/metrics"
_BODY_HASH = web.RequestKey("body_hash", str)
_EMPTY_HASH = hashlib.sha256(b"").hexdigest()


class _BodyTooLongError(CallError):
    """The body is longer than `max_body_bytes`."""

    status = 413
    kind = "PayloadTooLarge"


class Paths:
    """Routes and answers of one stand-in."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self.faults = faults
        self._engine = engine
        self._passes_for = ENGINE_DIALECTS[engine.settings.engine]
        self._render = self._passes_for.make_page(engine)
        self.drained = 0
        """How often somebody took away the statistics of TensorRT-LLM's /metrics."""
        self._created_s = int(time.time())
        self._endpoint: Endpoint | None = None
        self._runner: web.AppRunner | None = None

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=self._engine.settings.max_body_bytes)
        app.on_response_prepare.append(self._sign)
        routes = app.router
        for path, dialect in DIALECTS.items():
            routes.add_post(path, self._responder(dialect))
        routes.add_get("/health", self._health)
        routes.add_get(self._passes_for.metrics_path, self._render_metrics)
        if self._passes_for.metrics_path != _DRAINING_PATH:
            routes.add_get(_DRAINING_PATH, self._drain)
        routes.add_get("/v1/models", self._list_models)
        routes.add_post("/standin/fault", self._set_fault)
        routes.add_post("/reset_prefix_cache", self._reset_cache)
        routes.add_post("/{path:.*}", self._echo)
        routes.add_route("*", "/{path:.*}", self._refuse_path)
        return app

    def open(self, endpoint: Endpoint, runner: web.AppRunner) -> None:
        """Take on the address that the answers name, and what `stop` ends."""
        self._endpoint = endpoint
        self._runner = runner

    async def stop(self) -> None:
        """End the server; may be called twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-standin-endpoint"] = str(self._endpoint)
        unread = "unread" if request.body_exists else _EMPTY_HASH
        response.headers["x-standin-body-sha256"] = request.get(_BODY_HASH, unread)

    async def _read(self, request: web.Request) -> bytes:
        try:
            data = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            limit = self._engine.settings.max_body_bytes
            message = f"The request body is longer than {limit} bytes."
            raise _BodyTooLongError(message) from error
        request[_BODY_HASH] = hashlib.sha256(data).hexdigest()
        return data

    def _responder(self, dialect: Dialect) -> Respond:
        async def respond(request: web.Request) -> web.StreamResponse:
            try:
                data = await self._read(request)
                fault = self.faults.strike()
                if fault.kind is FaultKind.HANG:
                    await asyncio.Event().wait()
                if fault.kind is FaultKind.STATUS:
                    return send_json(_broken(dialect, fault.status), fault.status)
                body = parse_body(data)
                return await answer(request, self._engine, dialect, body, fault.kind)
            except CallError as error:
                return send_json(dialect.refuse(error), error.status)

        return respond

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=self.faults.fault.health_status)

    async def _render_metrics(self, request: web.Request) -> web.Response:
        del request
        headers = {"content-type": self._passes_for.content_type}
        return web.Response(body=self._render(), headers=headers)

    async def _drain(self, request: web.Request) -> web.Response:
        del request
        self.drained += 1
        return web.json_response([])

    async def _list_models(self, request: web.Request) -> web.Response:
        del request
        settings = self._engine.settings
        parents = {settings.model: None, **dict.fromkeys(settings.adapters, settings.model)}
        models: list[JsonObject] = [
            {
                "id": name,
                "object": "model",
                "created": self._created_s,
                "owned_by": self._passes_for.owner,
                "root": name,
                "parent": parent,
                "max_model_len": settings.max_model_tokens,
            }
            for name, parent in parents.items()
        ]
        return send_json({"object": "list", "data": models})

    async def _set_fault(self, request: web.Request) -> web.Response:
        try:
            self.faults.set(read_fault(parse_body(await self._read(request))))
        except CallError as error:
            return send_json(openai.refuse(error), error.status)
        return send_json({"kind": self.faults.fault.kind})

    async def _reset_cache(self, request: web.Request) -> web.Response:
        del request
        self._engine.cache.clear()
        return web.Response()

    async def _refuse_path(self, request: web.Request) -> web.Response:
        del request
        return send_json({"detail": "Not Found"}, 404)

    async def _echo(self, request: web.Request) -> web.Response:
        """Answer any other POST with what came: path, headers, byte count and SHA-256."""
        try:
            data = await self._read(request)
        except CallError as error:
            return send_json(openai.refuse(error), error.status)
        response = send_json(
            {
                "path": request.path_qs,
                "bytes": len(data),
                "sha256": request[_BODY_HASH],
                "headers": [[name.lower(), value] for name, value in request.headers.items()],
            }
        )
        if "gzip" in request.headers.get("accept-encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response


def _broken(dialect: Dialect, status: int) -> JsonObject:
    error = CallError("The engine was told to fail.")
    error.status = status  # type: ignore[misc]  # one error stands for any status
    return dialect.refuse(error)
