"""OpenAI chat, completions and embeddings as vLLM answers them."""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import TYPE_CHECKING

from extproc.standin.body import CallError, read_call
from extproc.standin.render import render_chat, render_prompts
from extproc.standin.reply import DONE, Dialect, Reply, Usage, sse_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.standin.body import Body, Call
    from extproc.standin.engine import Generation
    from extproc.standin.reply import JsonObject, ReplyHead
    from extproc.standin.settings import StandinSettings

_DEFAULT_DIMENSIONS = 16
_MAX_DIMENSIONS = 4_096


class ChatReply(Reply):
    """The answer to /v1/chat/completions."""

    def __init__(self, head: ReplyHead, body: Body, call: Call) -> None:
        del body
        self._include_usage = call.include_usage
        self._head: JsonObject = {
            "id": f"chatcmpl-{head.reply_id}",
            "object": "chat.completion.chunk" if call.stream else "chat.completion",
            "created": head.created_s,
            "model": head.model,
        }
        # Words are plain ASCII without quotes, so an event is its frame around the word.
        frame = sse_data(self._chunk({"content": "\0"}, None))
        self._before, self._after = frame.split(b"\\u0000")

    def opening(self, generations: Sequence[Generation]) -> bytes:
        """Open the answer."""
        del generations
        return sse_data(self._chunk({"role": "assistant", "content": ""}, None))

    def delta(self, index: int, tokens: Sequence[str]) -> bytes:
        """Write one event per token."""
        del index
        return b"".join(self._before + token.encode() + self._after for token in tokens)

    def closing(self, index: int, generation: Generation) -> bytes:
        """Say why the sequence ended."""
        del index
        return sse_data(self._chunk({}, generation.finish_reason))

    def end(self, generations: Sequence[Generation]) -> bytes:
        """End the stream."""
        return _usage_chunk(self._head, generations, include=self._include_usage) + DONE

    def whole(self, generations: Sequence[Generation]) -> JsonObject:
        """Return all at once."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": generation.text},
                "logprobs": None,
                "finish_reason": generation.finish_reason,
            }
            for index, generation in enumerate(generations)
        ]
        return {**self._head, "choices": choices, "usage": Usage.total(generations).as_openai()}

    def _chunk(self, delta: JsonObject, finish: str | None) -> JsonObject:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head, "choices": [choice]}


class CompletionReply(Reply):
    """The answer to /v1/completions, one choice per prompt."""

    def __init__(self, head: ReplyHead, body: Body, call: Call) -> None:
        del body
        self._include_usage = call.include_usage
        self._head: JsonObject = {
            "id": f"cmpl-{head.reply_id}",
            "object": "text_completion",
            "created": head.created_s,
            "model": head.model,
        }

    def delta(self, index: int, tokens: Sequence[str]) -> bytes:
        """Write one event per token."""
        return b"".join(
            sse_data({**self._head, "choices": [_choice(index, token, None)]}) for token in tokens
        )

    def closing(self, index: int, generation: Generation) -> bytes:
        """Say why the sequence ended."""
        return sse_data({**self._head, "choices": [_choice(index, "", generation.finish_reason)]})

    def end(self, generations: Sequence[Generation]) -> bytes:
        """End the stream."""
        return _usage_chunk(self._head, generations, include=self._include_usage) + DONE

    def whole(self, generations: Sequence[Generation]) -> JsonObject:
        """Return all at once."""
        choices = [_choice(i, g.text, g.finish_reason) for i, g in enumerate(generations)]
        return {**self._head, "choices": choices, "usage": Usage.total(generations).as_openai()}


class EmbeddingReply(Reply):
    """The answer to /v1/embeddings: one vector per input, the same for the same input."""

    def __init__(self, head: ReplyHead, body: Body, call: Call) -> None:
        self._head = head
        self._prompts = call.prompts
        self._as_base64 = body.get("encoding_format") == "base64"
        size = body.get("dimensions")
        self._size = size if isinstance(size, int) else _DEFAULT_DIMENSIONS

    def whole(self, generations: Sequence[Generation]) -> JsonObject:
        """Return all at once."""
        usage = Usage.total(generations)
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(prompt)}
            for index, prompt in enumerate(self._prompts)
        ]
        return {
            "id": f"embd-{self._head.reply_id}",
            "object": "list",
            "created": self._head.created_s,
            "model": self._head.model,
            "data": data,
            "usage": {**usage.as_openai(), "completion_tokens": 0},
        }

    def _vector(self, prompt: bytes) -> list[float] | str:
        seed = _digest(prompt)
        numbers = [((seed >> (i % 57)) % 255) / 127.0 - 1.0 for i in range(self._size)]
        if self._as_base64:
            return base64.b64encode(struct.pack(f"<{self._size}f", *numbers)).decode()
        return numbers


def read_chat(body: Body, settings: StandinSettings) -> Call:
    """Read a chat body; CallError when it is none."""
    limits = ("max_completion_tokens", "max_tokens")
    return read_call(body, render_chat(body), settings, limits=limits)


def read_completion(body: Body, settings: StandinSettings) -> Call:
    """Read a completions body; CallError when it is none."""
    prompts = render_prompts(body.get("prompt"))
    return read_call(body, prompts, settings, limits=("max_tokens",))


def read_embedding(body: Body, settings: StandinSettings) -> Call:
    """Read an embeddings body; CallError when it is none."""
    size = body.get("dimensions", _DEFAULT_DIMENSIONS)
    if size is not None and (not isinstance(size, int) or not 1 <= size <= _MAX_DIMENSIONS):
        message = f"dimensions must be 1 to {_MAX_DIMENSIONS}."
        raise CallError(message)
    prompts = render_prompts(body.get("input"))
    return read_call(body, prompts, settings, limits=(), answers=False)


def refuse(error: CallError) -> JsonObject:
    """Return an error as vLLM writes it on its OpenAI paths."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": error.param,
            "code": error.status,
        }
    }


CHAT = Dialect(read=read_chat, reply=ChatReply, refuse=refuse)
COMPLETIONS = Dialect(read=read_completion, reply=CompletionReply, refuse=refuse)
EMBEDDINGS = Dialect(read=read_embedding, reply=EmbeddingReply, refuse=refuse)


def _choice(index: int, text: str, finish: str | None) -> JsonObject:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _usage_chunk(head: JsonObject, generations: Sequence[Generation], *, include: bool) -> bytes:
    if not include:
        return b""
    return sse_data({**head, "choices": [], "usage": Usage.total(generations).as_openai()})


def _digest(prompt: bytes) -> int:
    return int.from_bytes(hashlib.sha256(prompt).digest()[:8], "little")
