"""Anthropic messages, counted as Anthropic does: `input_tokens` leaves out cached ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.standin.body import read_call
from extproc.standin.render import render_chat
from extproc.standin.reply import Dialect, Reply, Usage, sse_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.standin.body import Body, Call, CallError
    from extproc.standin.engine import Generation
    from extproc.standin.reply import JsonObject, ReplyHead
    from extproc.standin.settings import StandinSettings

_ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class MessageReply(Reply):
    """The answer to /v1/messages."""

    def __init__(self, head: ReplyHead, body: Body, call: Call) -> None:
        del body
        self._stops = bool(call.stop)
        self._head: JsonObject = {
            "id": f"msg_{head.reply_id}",
            "type": "message",
            "role": "assistant",
            "model": head.model,
        }
        delta = {"type": "text_delta", "text": "\0"}
        event = {"type": "content_block_delta", "index": 0, "delta": delta}
        # Words are plain ASCII without quotes, so an event is its frame around the word.
        self._before, self._after = sse_event("content_block_delta", event).split(b"\\u0000")

    def opening(self, generations: Sequence[Generation]) -> bytes:
        """Open the answer."""
        message = self._message([], None, Usage.total(generations))
        block = {"type": "text", "text": ""}
        start = {"type": "content_block_start", "index": 0, "content_block": block}
        return sse_event("message_start", {"type": "message_start", "message": message}) + (
            sse_event("content_block_start", start)
        )

    def delta(self, index: int, tokens: Sequence[str]) -> bytes:
        """Write one event per token."""
        del index
        return b"".join(self._before + token.encode() + self._after for token in tokens)

    def closing(self, index: int, generation: Generation) -> bytes:
        """Say why the sequence ended."""
        stop = {"type": "content_block_stop", "index": index}
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": self._reason(generation), "stop_sequence": None},
            "usage": _usage(Usage.total([generation])),
        }
        return sse_event("content_block_stop", stop) + sse_event("message_delta", end)

    def end(self, generations: Sequence[Generation]) -> bytes:
        """End the stream."""
        del generations
        return sse_event("message_stop", {"type": "message_stop"})

    def whole(self, generations: Sequence[Generation]) -> JsonObject:
        """Return all at once."""
        generation = generations[0]
        content: list[JsonObject] = [{"type": "text", "text": generation.text}]
        return self._message(content, self._reason(generation), Usage.total(generations))

    def _message(self, content: list[JsonObject], reason: str | None, usage: Usage) -> JsonObject:
        return {
            **self._head,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _reason(self, generation: Generation) -> str:
        if generation.finish_reason == "length":
            return "max_tokens"
        return "stop_sequence" if self._stops else "end_turn"


def read_message(body: Body, settings: StandinSettings) -> Call:
    """Read a messages body; CallError when it is none. `max_tokens` may be missing."""
    return read_call(body, render_chat(body), settings, limits=("max_tokens",))


def refuse(error: CallError) -> JsonObject:
    """Return an error as Anthropic writes it."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


MESSAGES = Dialect(read=read_message, reply=MessageReply, refuse=refuse)


def _usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
