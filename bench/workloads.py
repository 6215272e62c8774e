"""The suite that routing is measured on: generated traffic, and traces where they are.

Loads are chosen so that a fleet with perfect caching is busy for 50 to 75 % of its time
(`offered_load`): a good rule has slack, one that loses the cache has none. Exceptions are
viral, which is lightly loaded; flash, whose peak is just about servable; and agent, whose
open contexts fill two thirds of all memory at half of that load, and above 0.4 thrash it.
"""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import exp, inf
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bench.text import BLOCK_TOKENS
from bench.traffic import Documents, Kind, answer_s, conversations, zipf
from extproc.simulation.engine import EngineSettings
from extproc.simulation.traces import read_trace
from extproc.simulation.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extproc.simulation.workload import Conversation, Turn

_WARMUP_S = 60.0
_DURATION_S = 240.0
# Single turns are cheap, so they come often: less time keeps a run short.
_API_DURATION_S = 130.0
_FLASH_AT_S, _FLASH_RISE_S, _FLASH_S, _FLASH_PEAK = 120.0, 10.0, 40.0, 5.0
_VIRAL_SHARE = 0.5
_CODING_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A workload and the fleet it is meant for; `kv_tokens` is of each endpoint."""

    workload: Workload
    endpoints: int = 8
    kv_tokens: int = 320_000
    prefill_tokens_per_s: float = 12_000.0


@dataclass(frozen=True, slots=True)
class _Flow:
    kind: Callable[[Random], Kind]
    starts_per_s: float


def agent(chance: Random) -> Kind:
    """Coding agents: few hot instructions, many turns, each with the results of a tool."""
    return Kind(
        name="agent",
        prefix_tokens=tuple(chance.randint(12_000, 16_000) for _ in range(3)),
        weights=(1.0, 1.0, 1.0),
        turns=(20, 30),
        user_tokens=(900, 1_500),
        output_tokens=(100, 200),
        # Most tools answer in a second or two, some compile or test for long.
        think_s=lambda draw: min(60.0, exp(draw.gauss(0.4, 0.9))),
        session=True,
    )


def chat(chance: Random) -> Kind:
    """People: forty applications, a few turns, time to read the answer."""
    return Kind(
        name="chat",
        prefix_tokens=tuple(chance.randint(1_000, 4_000) for _ in range(40)),
        weights=zipf(40, 1.1),
        turns=(3, 7),
        user_tokens=(50, 400),
        output_tokens=(150, 350),
        think_s=lambda draw: draw.uniform(5.0, 20.0),
        session=True,
    )


def api(_: Random) -> Kind:
    """Programs: one of many long instructions, one short question, one short answer."""
    return Kind(
        name="api",
        prefix_tokens=(6_000,) * 300,
        weights=zipf(300, 0.9),
        turns=(1, 1),
        user_tokens=(100, 500),
        output_tokens=(30, 70),
        think_s=_never,
    )


def rag(_: Random) -> Kind:
    """Questions about documents, which differ right after the shared instructions."""
    return Kind(
        name="rag",
        prefix_tokens=(1_500,),
        weights=(1.0,),
        turns=(1, 2),
        user_tokens=(50, 200),
        output_tokens=(100, 300),
        think_s=lambda draw: draw.uniform(5.0, 20.0),
        documents=Documents(cumulated=tuple(accumulate(zipf(500, 1.0))), tokens=800, each=(2, 5)),
    )


def viral(chance: Random) -> Kind:
    """Single turns, half of them under one prefix."""
    others = 100
    return Kind(
        name="viral",
        prefix_tokens=(8_000, *[chance.randint(4_000, 8_000) for _ in range(others)]),
        weights=(_VIRAL_SHARE, *[(1.0 - _VIRAL_SHARE) / others] * others),
        turns=(1, 1),
        user_tokens=(100, 500),
        output_tokens=(100, 200),
        think_s=_never,
    )


def traces_path() -> Path:
    """Where traces are looked for: PROMPT_TRACES, else ../shared/traces of the repository."""
    beside = Path(__file__).parents[2] / "shared" / "traces"
    return Path(os.environ.get("PROMPT_TRACES", beside))


def traces_present() -> bool:
    """Tell whether all traces of the suite are there."""
    return all((traces_path() / file).is_file() for file in TRACE_FILES.values())


def runnable() -> list[str]:
    """Name the workloads of the suite that can be made here."""
    return [name for name in SUITE if name not in TRACE_FILES or traces_present()]


def offered_load(spec: WorkloadSpec, *, begin_s: float | None = None, end_s: float = inf) -> float:
    """Give the share of the fleet's time that the work takes at nominal times of answers.

    Prompt tokens that one cache without bounds would not hold cost prefill; output tokens
    cost their part of a step with all slots in use. Counted from the warm-up's end on.
    """
    begin_s = spec.workload.warmup_s if begin_s is None else begin_s
    engine, bt = EngineSettings(), spec.workload.block_tokens
    per_output_s = (engine.step_s + engine.slots * engine.decode_s) / engine.slots
    moments = sorted(_moments(spec.workload), key=lambda moment: moment[0])
    seen: set[int] = set()
    work_s = 0.0
    for at_s, turn in moments:
        if begin_s <= at_s < end_s:
            held = next((i for i, h in enumerate(turn.chain) if h not in seen), len(turn.chain))
            work_s += (turn.prompt_tokens - held * bt) / spec.prefill_tokens_per_s
            work_s += turn.output_tokens * per_output_s
        seen.update(turn.chain, turn.answer_chain)
    return work_s / (min(end_s, moments[-1][0]) - begin_s) / spec.endpoints


def _never(_: Random) -> float:
    return 0.0


def _flash(at_s: float) -> float:
    """Multiply the rate: up within seconds at half time, and down again."""
    since_s = at_s - _FLASH_AT_S
    up = since_s / _FLASH_RISE_S
    down = (_FLASH_RISE_S + _FLASH_S - since_s) / _FLASH_RISE_S + 1.0
    return 1.0 + (_FLASH_PEAK - 1.0) * max(0.0, min(1.0, up, down))


def _generated(
    name: str,
    flows: list[_Flow],
    seed: int,
    *,
    duration_s: float = _DURATION_S,
    sessions: bool = True,
    shape: Callable[[float], float] | None = None,
) -> WorkloadSpec:
    everyone: list[Conversation] = []
    for flow in flows:
        kind = flow.kind(Random(seed))
        everyone += conversations(
            kind if sessions else kind.without_session(),
            starts_per_s=flow.starts_per_s,
            seed=seed,
            duration_s=duration_s,
            shape=shape,
            peak=_FLASH_PEAK if shape else 1.0,
        )
    everyone.sort(key=lambda conversation: conversation.start_s)
    workload = Workload(
        name=name, conversations=everyone, block_tokens=BLOCK_TOKENS, warmup_s=_WARMUP_S
    )
    return WorkloadSpec(workload=workload)


def _trace(name: str, seed: int, *, warmup_s: float, limit: int | None = None) -> WorkloadSpec:
    with gzip.open(traces_path() / TRACE_FILES[name], "rt", encoding="utf-8") as lines:
        workload = read_trace(lines, name=name, seed=seed, limit=limit, warmup_s=warmup_s)
    return WorkloadSpec(workload=workload, kv_tokens=2_000_000, prefill_tokens_per_s=7_500.0)


def _coding_agent(seed: int) -> WorkloadSpec:
    """Take the sessions that begin first, and of them what falls into an hour.

    They have 12,000 requests, but a few of them go on for a working day.
    """
    spec = _trace("coding-agent", seed, warmup_s=300.0, limit=12_000)
    sessions = [replace(c, turns=_Within(c)) for c in spec.workload.conversations]
    return replace(spec, workload=replace(spec.workload, conversations=sessions))


@dataclass(frozen=True, slots=True)
class _Within:
    """The turns of a conversation that are sent within the hour, at nominal times."""

    whole: Conversation

    def __iter__(self) -> Iterator[Turn]:
        return (turn for _, turn in _timed(self.whole, _CODING_S))


def _moments(workload: Workload) -> Iterator[tuple[float, Turn]]:
    for conversation in workload.conversations:
        yield from _timed(conversation)


def _timed(conversation: Conversation, end_s: float = inf) -> Iterator[tuple[float, Turn]]:
    """Give turns before `end_s` with their nominal times."""
    at_s = conversation.start_s
    for turn in conversation.turns:
        at_s += turn.wait_s
        if at_s >= end_s:
            return
        yield at_s, turn
        at_s += answer_s(turn.output_tokens)


_AGENT, _CHAT, _API = _Flow(agent, 0.65), _Flow(chat, 6.9), _Flow(api, 72.0)
_RAG, _VIRAL, _CROWD = _Flow(rag, 16.0), _Flow(viral, 29.0), _Flow(chat, 3.8)
_MIXED = [_Flow(agent, 0.2), _Flow(chat, 3.6), _Flow(api, 12.5)]

TRACE_FILES = {
    "mooncake-conversation": "conversation_trace.jsonl.gz",
    "mooncake-synthetic": "synthetic_trace.jsonl.gz",
    "coding-agent": "cc_v8_739.jsonl.gz",
}

SUITE: dict[str, Callable[[int], WorkloadSpec]] = {
    "agent": partial(_generated, "agent", [_AGENT]),
    "chat": partial(_generated, "chat", [_CHAT]),
    "api": partial(_generated, "api", [_API], duration_s=_API_DURATION_S),
    "rag": partial(_generated, "rag", [_RAG]),
    "viral": partial(_generated, "viral", [_VIRAL]),
    "flash": partial(_generated, "flash", [_CROWD], shape=_flash),
    "mixed": partial(_generated, "mixed", _MIXED),
    "agent-no-session": partial(_generated, "agent-no-session", [_AGENT], sessions=False),
    "chat-no-session": partial(_generated, "chat-no-session", [_CHAT], sessions=False),
    "mooncake-conversation": partial(_trace, "mooncake-conversation", warmup_s=300.0),
    "mooncake-synthetic": partial(_trace, "mooncake-synthetic", warmup_s=120.0),
    "coding-agent": _coding_agent,
}
"""Makers of the workloads by name; each takes a seed."""
