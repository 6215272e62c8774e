"""OpenAI Responses: the same text in one output message; nothing is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.standin.body import read_call
from extproc.standin.openai import refuse
from extproc.standin.render import render_responses
from extproc.standin.reply import Dialect, Reply, Usage, sse_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.standin.body import Body, Call
    from extproc.standin.engine import Generation
    from extproc.standin.reply import JsonObject, ReplyHead
    from extproc.standin.settings import StandinSettings


class ResponsesReply(Reply):
    """The answer to /v1/responses; its events are numbered in order."""

    def __init__(self, head: ReplyHead, body: Body, call: Call) -> None:
        del call
        self._item_id = f"msg_{head.reply_id}"
        self._next_number = 0
        self._head: JsonObject = {
            "id": f"resp_{head.reply_id}",
            "object": "response",
            "created_at": head.created_s,
            "model": head.model,
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "instructions": body.get("instructions"),
            "previous_response_id": body.get("previous_response_id"),
            "metadata": body.get("metadata"),
        }

    def preamble(self) -> bytes:
        """Announce the response."""
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=response) + (
            self._event("response.in_progress", response=response)
        )

    def opening(self, generations: Sequence[Generation]) -> bytes:
        """Open the answer."""
        del generations
        item = {**self._item("", "in_progress"), "content": []}
        return self._event("response.output_item.added", output_index=0, item=item) + (
            self._content_event("response.content_part.added", part=_part(""))
        )

    def delta(self, index: int, tokens: Sequence[str]) -> bytes:
        """Write one event per token."""
        del index
        name = "response.output_text.delta"
        return b"".join(self._content_event(name, delta=token, logprobs=[]) for token in tokens)

    def closing(self, index: int, generation: Generation) -> bytes:
        """Say why the sequence ended."""
        del index
        text = generation.text
        item = self._item(text, _status(generation))
        return b"".join(
            (
                self._content_event("response.output_text.done", text=text, logprobs=[]),
                self._content_event("response.content_part.done", part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
            )
        )

    def end(self, generations: Sequence[Generation]) -> bytes:
        """End the stream."""
        name = f"response.{_status(generations[0])}"
        return self._event(name, response=self.whole(generations))

    def whole(self, generations: Sequence[Generation]) -> JsonObject:
        """Return all at once."""
        generation, usage = generations[0], Usage.total(generations)
        status = _status(generation)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "incomplete_details": details,
            "error": None,
            "output": [self._item(generation.text, status)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _item(self, text: str, status: str) -> JsonObject:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _content_event(self, name: str, **fields: object) -> bytes:
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(name, **at, **fields)

    def _event(self, name: str, **fields: object) -> bytes:
        number = self._next_number
        self._next_number += 1
        return sse_event(name, {"type": name, "sequence_number": number, **fields})


def read_responses(body: Body, settings: StandinSettings) -> Call:
    """Read a responses body; CallError when it is none."""
    return read_call(body, render_responses(body), settings, limits=("max_output_tokens",))


RESPONSES = Dialect(read=read_responses, reply=ResponsesReply, refuse=refuse)


def _part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(generation: Generation) -> str:
    return "incomplete" if generation.finish_reason == "length" else "completed"
