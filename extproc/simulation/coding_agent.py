"""Traces of coding agents: sessions of a main agent and helpers, with ids of 64-token blocks.

A header row opens a trace, then come rows of helpers and of requests. Ids are runs, and
mean nothing outside their trace. When sessions began is not recorded, so it is drawn.
Format: callanjfox/kv-cache-tester, re-encoded: one header a trace, ids as runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from struct import pack
from typing import TYPE_CHECKING, NamedTuple, cast

from xxhash import xxh3_64_intdigest

from extproc.core.blocks import key_hash
from extproc.core.decision import KeyHash
from extproc.simulation.workload import Conversation, Turn, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.core.decision import Chain
    from extproc.simulation.trace_rows import Row, TraceOptions

_BLOCK_TOKENS = 128
# A pause of hours says that somebody went home; a simulation need not wait.
_LONGEST_WAIT_S = 300.0

_Runs = tuple[tuple[int, int], ...]


class _Request(NamedTuple):
    at_s: float
    wait_s: float
    answer_s: float
    prompt_tokens: int
    output_tokens: int
    runs: _Runs


@dataclass(slots=True, kw_only=True)
class _Agent:
    """One conversation: `at_s` is when it begins, in its session's recorded time."""

    trace: KeyHash
    session: int
    number: int
    at_s: float
    instruction_tokens: int
    ids_per_block: int
    requests: list[_Request] = field(default_factory=list)


class _Trace(NamedTuple):
    key: KeyHash
    ids_per_block: int
    instruction_tokens: int
    helpers: dict[int, tuple[float, int]]


def read_coding_agents(rows: Iterable[Row], options: TraceOptions) -> Workload:
    """Make each agent of each session a closed-loop conversation; raises TraceError.

    With a limit, those that begin first are taken whole until it is reached.
    """
    conversations = _start(_gather(rows), options)
    if options.limit is not None:
        conversations = list(_until(conversations, options.limit))
    return Workload(
        name=options.name,
        conversations=[conversation for conversation, _ in conversations],
        block_tokens=_BLOCK_TOKENS,
        warmup_s=options.warmup_s,
    )


@dataclass(frozen=True, slots=True)
class _Turns:
    """Turns made as they are iterated: whole, the chains of long sessions fill gigabytes."""

    agent: _Agent

    def __iter__(self) -> Iterator[Turn]:
        agent = self.agent
        chain = _chain(agent, (), (), agent.requests[0].runs)
        for position, request in enumerate(agent.requests):
            answer: Chain = ()
            upcoming: Chain = ()
            if position + 1 < len(agent.requests):
                upcoming = _chain(agent, chain, request.runs, agent.requests[position + 1].runs)
                written = (request.prompt_tokens + request.output_tokens) // _BLOCK_TOKENS
                if upcoming[: len(chain)] == chain:
                    answer = upcoming[len(chain) : written]
            yield Turn(
                chain=chain,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                answer_chain=answer,
                wait_s=request.wait_s,
            )
            chain = upcoming


def _gather(rows: Iterable[Row]) -> list[_Agent]:
    agents: dict[tuple[KeyHash, int, int], _Agent] = {}
    trace: _Trace | None = None
    for row in rows:
        if "trace" in row.fields:
            trace = _header(row)
        elif trace is None:
            row.refuse("a request before any header row")
        elif "sub" in row.fields:
            instruction_tokens = row.tokens("tool") + row.tokens("sys")
            trace.helpers[row.number("sub")] = (row.amount("t"), instruction_tokens)
        else:
            _add_request(row, trace, agents)
    return list(agents.values())


def _header(row: Row) -> _Trace:
    block_tokens = row.tokens("block")
    if not block_tokens or _BLOCK_TOKENS % block_tokens:
        row.refuse(f"`block` must divide {_BLOCK_TOKENS}")
    return _Trace(
        key=key_hash(0, b"coding-agent", pack("<Q", row.number("trace"))),
        ids_per_block=_BLOCK_TOKENS // block_tokens,
        instruction_tokens=row.tokens("tool") + row.tokens("sys"),
        helpers={},
    )


def _add_request(row: Row, trace: _Trace, agents: dict[tuple[KeyHash, int, int], _Agent]) -> None:
    session, number = row.number("s"), row.number("a")
    agent = agents.get((trace.key, session, number))
    if agent is None:
        at_s, instruction_tokens = trace.helpers.get(number, (0.0, trace.instruction_tokens))
        agent = agents[trace.key, session, number] = _Agent(
            trace=trace.key,
            session=session,
            number=number,
            at_s=at_s,
            instruction_tokens=instruction_tokens,
            ids_per_block=trace.ids_per_block,
        )
    before = agent.requests[-1] if agent.requests else None
    request = _request(row, before)
    ids = sum([count for _, count in request.runs])
    if ids != request.prompt_tokens * trace.ids_per_block // _BLOCK_TOKENS:
        row.refuse("`h` has not as many blocks as `in` fills")
    agent.requests.append(request)


def _request(row: Row, before: _Request | None) -> _Request:
    at_s = row.amount("t")
    if before is not None and at_s < before.at_s:
        row.refuse("`t` goes back")
    answer_s = 0.0 if row.fields.get("api") is None else row.amount("api")
    if before is None:
        wait_s = 0.0
    elif row.fields.get("think") is None:
        wait_s = max(0.0, at_s - before.at_s - before.answer_s)
    else:
        wait_s = row.amount("think")
    return _Request(
        at_s=at_s,
        wait_s=min(_LONGEST_WAIT_S, wait_s),
        answer_s=answer_s,
        prompt_tokens=row.tokens("in"),
        output_tokens=max(1, row.tokens("out")),
        runs=row.runs("h"),
    )


def _start(agents: list[_Agent], options: TraceOptions) -> list[tuple[Conversation, int]]:
    """Draw when sessions begin; give conversations in that order with their requests."""
    chance = Random(options.seed)
    mains = {(a.trace, a.session): a for a in agents if a.number == 0}
    starts: dict[tuple[KeyHash, int], float] = {}
    conversations = []
    for agent in agents:
        session = (agent.trace, agent.session)
        if session not in starts:
            starts[session] = chance.uniform(0.0, options.spread_s)
        main = mains.get(session)
        at_s = agent.at_s + agent.requests[0].at_s
        past = [] if main is None or main is agent else [r.at_s for r in main.requests]
        start_s = starts[session] + _shortened(at_s, past)
        conversations.append((_conversation(agent, start_s), len(agent.requests)))
    return sorted(conversations, key=lambda pair: pair[0].start_s)


def _shortened(at_s: float, past: list[float]) -> float:
    """Take the long pauses of the session before `at_s` out of it."""
    moments = [0.0, *[past_s for past_s in past if past_s < at_s], at_s]
    return sum([min(_LONGEST_WAIT_S, b - a) for a, b in pairwise(moments)])


def _until(
    conversations: list[tuple[Conversation, int]], limit: int
) -> Iterator[tuple[Conversation, int]]:
    for pair in conversations:
        if limit <= 0:
            return
        limit -= pair[1]
        yield pair


def _conversation(agent: _Agent, start_s: float) -> Conversation:
    first = _chain(agent, (), (), agent.requests[0].runs)
    shared = min(len(first), agent.instruction_tokens // _BLOCK_TOKENS)
    names = pack("<QQ", agent.session, agent.number)
    return Conversation(
        start_s=start_s,
        turns=_Turns(agent),
        tier1=KeyHash(first[shared - 1] if shared else agent.trace),
        tier1_tokens=min(agent.instruction_tokens, agent.requests[0].prompt_tokens),
        tier2=key_hash(agent.trace, b"session", names),
        session=True,
    )


def _chain(agent: _Agent, before: Chain, runs_before: _Runs, runs: _Runs) -> Chain:
    """Hash the full blocks of `runs`, keeping what `before`, hashed from its runs, shares."""
    size = agent.ids_per_block
    kept = _common_ids(runs_before, runs) // size
    links: list[int] = [*before[:kept]]
    link = links[-1] if links else agent.trace
    ids = list(_ids_from(runs, kept * size))
    for start in range(0, len(ids) - size + 1, size):
        link = xxh3_64_intdigest(pack(f"<{size}Q", *ids[start : start + size]), link)
        links.append(link)
    return cast("Chain", tuple(links))


def _common_ids(runs: _Runs, others: _Runs) -> int:
    """Count leading ids in common, or fewer where equal ids are cut into other runs."""
    common = 0
    for (first, count), (other_first, other_count) in zip(runs, others, strict=False):
        if first != other_first:
            break
        common += min(count, other_count)
        if count != other_count:
            break
    return common


def _ids_from(runs: _Runs, skip: int) -> Iterator[int]:
    for first, count in runs:
        if skip < count:
            yield from range(first + skip, first + count)
        skip = max(0, skip - count)
