"""`extproc demo`: one seeded chat workload under two policies, through a real Envoy.

Each policy gets a fresh stack with empty caches and the same conversations. Hit rates are
the engines' own, from the usage of each answer; times are the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.core.errors import ExtprocError
from extproc.local import StackSettings, run_stack
from extproc.standin.settings import StandinSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

POLICIES = ("round-robin", "tiered")
_INTERRUPTED = 130
_REQUEST_LIMIT_S = 30.0
_POLICY_LIMIT_S = 120.0
_ENDPOINT_HEADER = "x-standin-endpoint"
# Four bytes each, which engines and router alike count as one token.
_WORDS = (
    *("arc ", "bay ", "cup ", "day ", "elm ", "fog ", "gum ", "hat "),
    *("ivy ", "jet ", "kit ", "log ", "mud ", "net ", "orb ", "pen "),
)
_ENGINE = StandinSettings(
    cache_tokens=32_000, prefill_tokens_per_s=8_000.0, decode_tokens_per_s=100.0
)


class DemoError(ExtprocError):
    """A request of the workload was not answered as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations that share instructions, and the engines they meet.

    The sizes are those of small agents: instructions of 4,000 to 6,000 tokens, turns of
    300, answers of 32. In the end there are about 40,000 tokens of instructions and 66,000
    of conversations, so one cache of 32,000 tokens holds less than a third of them and the
    four together hold all of them once: where a request goes decides what is found. Were
    each cache large enough for everything, any policy would find it there in the end and
    the gap would close. A prefill of 8,000 tokens/s is that of a large model on one GPU:
    0.6 s for the instructions, 0.04 s for a turn.

    As people pause between turns, the next to speak is drawn from all conversations that
    are waiting; with `clients` of them in flight at once, and no other pause.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one policy made of the workload; `hit_rate` is of prompt tokens, 0 to 1."""

    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    wall_s: float
    requests: Mapping[str, int]


def main(arguments: Sequence[str], workload: Workload | None = None) -> int:
    """Run the command and print its table; 130 when interrupted, ExtprocError as raised."""
    options = _parser().parse_args(arguments)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            results = runner.run(_run(workload or Workload(), options.seed, options.envoy))
    except asyncio.CancelledError:
        return _INTERRUPTED
    if options.json:
        figures = {policy: asdict(result) for policy, result in results.items()}
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        Console(highlight=False).print(draw_table(results))
    return 0


async def compare(
    workload: Workload,
    *,
    seed: int = 1,
    envoy: str | None = None,
    on_answer: Callable[[str], None] = lambda _: None,
) -> dict[str, Result]:
    """Run the workload under each policy; `on_answer` is told the policy of each answer.

    Raises DemoError, StackError or EnvoyError when a part does not work.
    """
    scripts = write_scripts(workload, seed)
    results = {}
    for policy in POLICIES:
        settings = StackSettings(
            policy=policy,
            port=0,
            standins=workload.engines,
            standin=workload.engine,
            envoy=envoy,
            envoy_concurrency=1,
        )
        async with run_stack(settings) as stack:
            began_s = time.perf_counter()
            answers = await _converse(
                stack.url, workload, scripts, random.Random(seed), lambda: on_answer(policy)
            )
            wall_s = time.perf_counter() - began_s
            results[policy] = summarize(answers, stack.endpoints, wall_s)
    return results


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


def summarize(answers: Sequence[Answer], endpoints: Iterable[str], wall_s: float) -> Result:
    """Sum up at least one answer; an endpoint that gave none counts 0."""
    counts = Counter(answer.endpoint for answer in answers)
    times = [answer.ttft_s for answer in answers]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return Result(
        hit_rate=sum(answer.cached_tokens for answer in answers) / max(1, prompt_tokens),
        ttft_p50_s=percentile(times, 0.50),
        ttft_p99_s=percentile(times, 0.99),
        wall_s=wall_s,
        requests={str(endpoint): 0 for endpoint in endpoints} | counts,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Give the least value that `share` of all do not exceed; ValueError without values."""
    if not values:
        message = "no values have no percentile"
        raise ValueError(message)
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def draw_table(results: Mapping[str, Result]) -> Table:
    """Set the policies side by side; the endpoints of each in the order they joined."""
    table = Table(title="The same conversations through Envoy")
    table.add_column("")
    for policy in results:
        table.add_column(policy, justify="right")
    rows: dict[str, Callable[[Result], str]] = {
        "hit rate (engines)": lambda one: f"{one.hit_rate:.1%}",
        "TTFT p50": lambda one: f"{one.ttft_p50_s:.3f} s",
        "TTFT p99": lambda one: f"{one.ttft_p99_s:.3f} s",
        "requests per endpoint": lambda one: " ".join(map(str, one.requests.values())),
        "wall time": lambda one: f"{one.wall_s:.1f} s",
    }
    for name, show in rows.items():
        table.add_row(name, *map(show, results.values()))
    return table


async def _run(workload: Workload, seed: int, envoy: str | None) -> dict[str, Result]:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - for the type checker; a coroutine runs in a task
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        ) as progress:
            total = workload.conversations * workload.turns
            bars = {policy: progress.add_task(policy, total=total) for policy in POLICIES}
            return await compare(
                workload,
                seed=seed,
                envoy=envoy,
                on_answer=lambda policy: progress.advance(bars[policy]),
            )
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _converse(
    url: str,
    workload: Workload,
    scripts: Sequence[Script],
    chance: random.Random,
    on_answer: Callable[[], None],
) -> list[Answer]:
    """Hold all conversations; the first request that fails ends them all."""
    answers: list[Answer] = []
    waiting = [(script, _open(script)) for script in scripts]

    async def speak(session: aiohttp.ClientSession) -> None:
        while waiting:
            script, messages = waiting.pop(chance.randrange(len(waiting)))
            said = len(messages) // 2
            messages.append({"role": "user", "content": script.turns[said]})
            answer = await _ask(session, messages, workload.answer_tokens)
            messages.append({"role": "assistant", "content": answer.text})
            answers.append(answer)
            on_answer()
            if said + 1 < len(script.turns):
                waiting.append((script, messages))

    timeout = aiohttp.ClientTimeout(total=_REQUEST_LIMIT_S)
    try:
        async with (
            asyncio.timeout(_POLICY_LIMIT_S),
            aiohttp.ClientSession(url, timeout=timeout) as session,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(workload.clients):
                clients.create_task(speak(session))
    except* ExtprocError as failures:
        raise failures.exceptions[0] from None
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
                raise DemoError(message)
            return await _read_answer(response, began_s)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        message = f"a chat request failed: {type(error).__name__}"
        raise DemoError(message) from error


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
    )


def _open(script: Script) -> list[dict[str, str]]:
    return [{"role": "system", "content": script.instructions}]


def _write(chance: random.Random, tokens: int) -> str:
    return "".join(chance.choices(_WORDS, k=tokens))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="extproc demo",
        description="compare round-robin with tiered on a seeded workload",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON only")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--envoy", metavar="PATH", help="the Envoy binary (default: found)")
    return parser


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - absent on some systems
    except ImportError:
        return None
    return uvloop.new_event_loop
