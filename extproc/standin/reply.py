"""What every dialect writes: one Reply per call, its usage and its server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.standin.body import Body, Call, CallError
    from extproc.standin.engine import Generation
    from extproc.standin.settings import StandinSettings

JsonObject = dict[str, object]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What a reply says of itself: its bare id, when it was made (Unix seconds), its model."""

    reply_id: str
    created_s: int
    model: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole call."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @classmethod
    def total(cls, generations: Sequence[Generation]) -> Usage:
        """Sum over the sequences of a call."""
        return cls(
            sum(g.prompt_tokens for g in generations),
            sum(g.cached_tokens for g in generations),
            sum(g.done_tokens for g in generations),
        )

    def as_openai(self) -> JsonObject:
        """Return it in the form of chat and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Reply(ABC):
    """One call's answer, whole or as bytes of an event stream; a dialect fills in its parts."""

    def preamble(self) -> bytes:
        """Return what is sent with the headers, before the first token."""
        return b""

    def opening(self, generations: Sequence[Generation]) -> bytes:
        """Return what comes right before the first token."""
        del generations
        return b""

    def delta(self, index: int, tokens: Sequence[str]) -> bytes:
        """Return the events of some tokens of sequence `index`."""
        del index, tokens
        return b""

    def closing(self, index: int, generation: Generation) -> bytes:
        """Return the end of sequence `index`."""
        del index, generation
        return b""

    def end(self, generations: Sequence[Generation]) -> bytes:
        """Return the end of the stream."""
        del generations
        return b""

    @abstractmethod
    def whole(self, generations: Sequence[Generation]) -> JsonObject:
        """Return the answer of a call that does not stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One path of the API: how its bodies are read, answered and refused."""

    read: Callable[[Body, StandinSettings], Call]
    reply: Callable[[ReplyHead, Body, Call], Reply]
    refuse: Callable[[CallError], JsonObject]


def encode_json(value: object) -> bytes:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def sse_data(value: object) -> bytes:
    """Return one unnamed event."""
    return b"data: " + encode_json(value) + b"\n\n"


def sse_event(name: str, value: object) -> bytes:
    """Return one named event."""
    return b"event: " + name.encode() + b"\ndata: " + encode_json(value) + b"\n\n"
