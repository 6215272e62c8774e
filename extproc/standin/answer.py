"""One call carried from admission to the last byte; every way out releases its sequences."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web

from extproc.standin.faults import FaultKind
from extproc.standin.reply import ReplyHead, encode_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.standin.body import Body, Call
    from extproc.standin.engine import Engine, Generation
    from extproc.standin.reply import Dialect, JsonObject, Reply

_MAX_ID_CHARACTERS = 128


def send_json(value: JsonObject, status: int = 200) -> web.Response:
    """Return a JSON answer."""
    return web.Response(body=encode_json(value), status=status, content_type="application/json")


async def answer(
    request: web.Request, engine: Engine, dialect: Dialect, body: Body, fault: FaultKind
) -> web.StreamResponse:
    """Serve one parsed body; CallError when it is refused before anything is sent."""
    call = dialect.read(body, engine.settings)
    generations = engine.admit(call)
    try:
        reply = dialect.reply(_head(request, engine, call), body, call)
        if call.stream:
            return await _stream(request, reply, generations, fault)
        for generation in generations:
            await generation.await_first_token()
        if fault is FaultKind.CUT:
            return _cut(request, web.Response())
        if fault is FaultKind.STALL:
            await asyncio.Event().wait()
        for generation in generations:
            await generation.finish()
        return send_json(reply.whole(generations))
    finally:
        for generation in generations:
            generation.close()


def _head(request: web.Request, engine: Engine, call: Call) -> ReplyHead:
    given = request.headers.get("x-request-id", "")[:_MAX_ID_CHARACTERS]
    return ReplyHead(given or f"{next(engine.numbers):016x}", int(time.time()), call.model)


async def _stream(
    request: web.Request, reply: Reply, generations: Sequence[Generation], fault: FaultKind
) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    response.charset = "utf-8"
    # As vLLM does: the headers go out long before the first token.
    await response.prepare(request)
    try:
        return await _write_stream(request, response, reply, generations, fault)
    except ConnectionResetError:
        return response  # the client left; the caller releases


async def _write_stream(
    request: web.Request,
    response: web.StreamResponse,
    reply: Reply,
    generations: Sequence[Generation],
    fault: FaultKind,
) -> web.StreamResponse:
    pending = reply.preamble()
    if pending:
        await response.write(pending)
    for generation in generations:
        await generation.await_first_token()
    pending = reply.opening(generations)
    for index, generation in enumerate(generations):
        async for tokens in generation.decode():
            await response.write(pending + reply.delta(index, tokens))
            pending = b""
            if fault is FaultKind.CUT:
                return _cut(request, response)
            if fault is FaultKind.STALL:
                await asyncio.Event().wait()
        pending += reply.closing(index, generation)
    await response.write_eof(pending + reply.end(generations))
    return response


def _cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Break the connection without a proper end, as a crashed engine does."""
    if request.transport is not None:
        request.transport.abort()
    return response
