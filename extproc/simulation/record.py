"""Our own decision record as a workload; docs/record.md has its format.

Turns of one tier-2 key follow each other as they did: the next one waits after the answer
for as long as its client waited. A request sent before the last answer came begins a
conversation of its own with the same key.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from binascii import Error as Base64Error
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from extproc.core.blocks import key_hash
from extproc.core.decision import BlockHash, KeyHash
from extproc.simulation.workload import Conversation, Turn, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.decision import Chain
    from extproc.simulation.trace_rows import Row, TraceOptions

# The record has times, not lengths of answers: this is what one running request decodes.
_DECODED_TOKENS_PER_S = 80.0
# Of a request whose end was not recorded.
_TYPICAL_DURATION_S = 5.0
_HASH_BYTES = 8


@dataclass(slots=True)
class _Request:
    at_s: float
    chain: Chain
    prompt_tokens: int
    tier1: KeyHash
    tier1_tokens: int
    tier2: KeyHash
    session: bool
    duration_s: float = _TYPICAL_DURATION_S


@dataclass(slots=True)
class _Thread:
    start_s: float
    requests: list[_Request] = field(default_factory=list)


def read_record(rows: Iterable[Row], options: TraceOptions) -> Workload:
    """Join decisions with their ends and thread them by tier-2 key; raises TraceError."""
    requests: dict[str, _Request] = {}
    chains: dict[KeyHash, Chain] = {}
    block_tokens = 0
    for row in rows:
        decision_id = str(row.fields.get("id"))
        if row.fields.get("event") == "finished":
            if decision_id in requests:
                requests[decision_id].duration_s = row.amount("duration_s")
        elif options.limit is None or len(requests) < options.limit:
            block_tokens = row.tokens("block_tokens")
            requests[decision_id] = _read_routed(row, block_tokens, chains)
    threads = _thread(sorted(requests.values(), key=lambda request: request.at_s))
    return Workload(
        name=options.name,
        conversations=[_conversation(thread) for thread in threads],
        block_tokens=max(1, block_tokens),
        warmup_s=options.warmup_s,
    )


def _read_routed(row: Row, block_tokens: int, chains: dict[KeyHash, Chain]) -> _Request:
    tier1, tier2 = _key(row, "tier1"), _key(row, "tier2")
    tier1_tokens, keep = row.tokens("tier1_tokens"), row.tokens("keep")
    prompt_tokens = row.tokens("prompt_tokens")
    if block_tokens < 1 or keep * block_tokens > prompt_tokens:
        row.refuse("`keep` has more blocks than the prompt fills")
    head = chains.get(tier2, ())[:keep]
    if len(head) < keep:
        # The record begins after this conversation did: stand-ins for what was not seen.
        shared = tier1_tokens // block_tokens
        head = tuple(
            BlockHash(key_hash(tier1 if n < shared else tier2, n.to_bytes(8, "little")))
            for n in range(keep)
        )
    chains[tier2] = chain = head + _blocks(row)
    return _Request(
        at_s=row.amount("at"),
        chain=chain,
        prompt_tokens=prompt_tokens,
        tier1=tier1,
        tier1_tokens=tier1_tokens,
        tier2=tier2,
        session=row.fields.get("session") is True,
    )


def _blocks(row: Row) -> Chain:
    text = row.fields.get("blocks")
    try:
        data = b64decode(text, validate=True) if isinstance(text, str) else None
    except Base64Error:
        data = None
    if data is None or len(data) % _HASH_BYTES:
        row.refuse("`blocks` must be base64 of 8-byte hashes")
    return tuple(map(BlockHash, struct.unpack(f"<{len(data) // _HASH_BYTES}Q", data)))


def _key(row: Row, name: str) -> KeyHash:
    text = row.fields.get(name)
    try:
        value = int(text, 16) if isinstance(text, str) else -1
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 64:
        row.refuse(f"`{name}` must be a hash in hexadecimal")
    return KeyHash(value)


def _thread(requests: list[_Request]) -> list[_Thread]:
    """Gather requests into conversations; the times are from the first request on."""
    threads: list[_Thread] = []
    latest: dict[KeyHash, _Thread] = {}
    began_s = requests[0].at_s if requests else 0.0
    for request in requests:
        thread = latest.get(request.tier2)
        if thread is None or request.at_s < _end_s(thread.requests[-1]):
            thread = _Thread(request.at_s - began_s)
            threads.append(thread)
        latest[request.tier2] = thread
        thread.requests.append(request)
    return threads


def _conversation(thread: _Thread) -> Conversation:
    first = thread.requests[0]
    before_s = [first.at_s, *map(_end_s, thread.requests[:-1])]
    return Conversation(
        start_s=thread.start_s,
        turns=tuple(
            Turn(
                chain=request.chain,
                prompt_tokens=request.prompt_tokens,
                output_tokens=max(1, round(request.duration_s * _DECODED_TOKENS_PER_S)),
                wait_s=request.at_s - end_s,
            )
            for request, end_s in zip(thread.requests, before_s, strict=True)
        ),
        tier1=first.tier1,
        tier1_tokens=first.tier1_tokens,
        tier2=first.tier2,
        session=first.session,
    )


def _end_s(request: _Request) -> float:
    return request.at_s + request.duration_s
