"""Seeded chat conversations of many turns, and the client that holds them and times answers."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp

from extproc.core.errors import ExtprocError
from extproc.standin.settings import StandinSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REQUEST_LIMIT_S = 30.0
_TOTAL_LIMIT_S = 120.0
_ENDPOINT_HEADER = "x-standin-endpoint"
# Four bytes each, which engines and router alike count as one token.
_WORDS = (
    *("arc ", "bay ", "cup ", "day ", "elm ", "fog ", "gum ", "hat "),
    *("ivy ", "jet ", "kit ", "log ", "mud ", "net ", "orb ", "pen "),
)
_ENGINE = StandinSettings(
    cache_tokens=24_000, prefill_tokens_per_s=8_000.0, decode_tokens_per_s=100.0
)


class ConversationError(ExtprocError):
    """A request of the workload was not answered as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations that share instructions, and the engines they meet.

    Instructions of 4,000 to 6,000 tokens, turns of 300, answers of 32: all that is said
    comes to about 40,000 tokens of instructions and 66,000 of conversations. A cache of
    24,000 holds a quarter of that, the four together nearly all, so that where a request
    goes decides what it finds. The gap depends on this size, which was chosen to show it.
    The engines' hit rate in one run each with seed 1: `tiered` 0.91 throughout,
    `round-robin` 0.39 with 24,000 tokens, 0.51 with 32,000, 0.72 with 60,000. With room
    for everything on every engine, any policy finds it in the end.

    A prefill of 8,000 tokens/s, an assumption, takes 0.6 s for the instructions and 0.04 s
    for a turn. `clients` requests are always in flight, so the time to the first token is
    mostly that of waiting for the prefill of others. As people pause between turns, the
    next to speak is drawn from all conversations that wait.
    """

    prefixes: int = 8
    conversations: int = 40
    turns: int = 5
    clients: int = 16
    instruction_tokens: tuple[int, int] = (4_000, 6_000)
    turn_tokens: int = 300
    answer_tokens: int = 32
    engines: int = 4
    engine: StandinSettings = field(default_factory=lambda: _ENGINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One conversation as the user will have it."""

    instructions: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer: its text, its cost as the engine counts, its time to the first content."""

    text: str
    endpoint: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    ended_s: float
    """By the monotonic clock."""


def write_scripts(workload: Workload, seed: int) -> list[Script]:
    """Write every conversation; the same seed writes the same ones."""
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    lengths = [chance.randint(*workload.instruction_tokens) for _ in range(workload.prefixes)]
    prefixes = [_write(chance, tokens) for tokens in lengths]
    return [
        Script(
            instructions=prefixes[number % workload.prefixes],
            turns=tuple(_write(chance, workload.turn_tokens) for _ in range(workload.turns)),
        )
        for number in range(workload.conversations)
    ]


async def converse(
    url: str,
    workload: Workload,
    scripts: Sequence[Script],
    *,
    seed: int,
    limit_s: float = _TOTAL_LIMIT_S,
    on_answer: Callable[[], None] = lambda: None,
    on_failure: Callable[[ConversationError], None] | None = None,
) -> list[Answer]:
    """Hold all conversations at `url`, a base URL; ConversationError for the first that fails.

    With `on_failure` that is told the error, the failed conversation ends and the others go on.
    """
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    answers: list[Answer] = []
    waiting = [(script, _open(script)) for script in scripts]

    async def speak(session: aiohttp.ClientSession) -> None:
        while waiting:
            script, messages = waiting.pop(chance.randrange(len(waiting)))
            said = len(messages) // 2
            messages.append({"role": "user", "content": script.turns[said]})
            try:
                answer = await _ask(session, messages, workload.answer_tokens)
            except ConversationError as error:
                if on_failure is None:
                    raise
                on_failure(error)
                continue
            messages.append({"role": "assistant", "content": answer.text})
            answers.append(answer)
            on_answer()
            if said + 1 < len(script.turns):
                waiting.append((script, messages))

    timeout = aiohttp.ClientTimeout(total=_REQUEST_LIMIT_S)
    try:
        async with (
            asyncio.timeout(limit_s),
            aiohttp.ClientSession(url, timeout=timeout) as session,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(workload.clients):
                clients.create_task(speak(session))
    except* ConversationError as failures:
        raise failures.exceptions[0] from None
    except* TimeoutError:
        message = f"the conversations took more than {limit_s:.0f} s"
        raise ConversationError(message) from None
    return answers


async def _ask(
    session: aiohttp.ClientSession, messages: list[dict[str, str]], answer_tokens: int
) -> Answer:
    body = {
        "model": "standin",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": answer_tokens,
    }
    try:
        began_s = time.perf_counter()
        async with session.post("/v1/chat/completions", json=body) as response:
            if response.status != HTTPStatus.OK:
                message = f"a chat request was answered with status {response.status}"
                raise ConversationError(message)
            return await _read_answer(response, began_s)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        message = f"a chat request failed: {type(error).__name__}"
        raise ConversationError(message) from error


async def _read_answer(response: aiohttp.ClientResponse, began_s: float) -> Answer:
    """Read an event stream; LookupError or ValueError when it is not that of a chat."""
    ttft_s = math.inf
    words: list[str] = []
    usage: dict[str, Any] = {}
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if word := choice["delta"].get("content"):
                ttft_s = min(ttft_s, time.perf_counter() - began_s)
                words.append(word)
    return Answer(
        text="".join(words),
        endpoint=response.headers[_ENDPOINT_HEADER],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        ttft_s=ttft_s,
        ended_s=time.monotonic(),
    )


def _open(script: Script) -> list[dict[str, str]]:
    return [{"role": "system", "content": script.instructions}]


def _write(chance: random.Random, tokens: int) -> str:
    return "".join(chance.choices(_WORDS, k=tokens))
