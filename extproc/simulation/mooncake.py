"""Mooncake's traces: requests with arrival times and one id for each block of 512 tokens.

An id stands for its block and all before it. No row tells which conversation it belongs
to, so each is one of a single turn. Format: kvcache-ai/Mooncake, FAST25-release.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from extproc.core.blocks import key_hash
from extproc.core.decision import BlockHash, KeyHash
from extproc.simulation.workload import Conversation, Turn, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.core.decision import Chain
    from extproc.simulation.trace_rows import Row, TraceOptions

_BLOCK_TOKENS = 512
# Times of the conversation trace are rounded to this; taken literally, they are bursts.
_BUCKET_S = 3.0
_OPENING_BLOCKS = 2
_SEED = key_hash(0, b"mooncake")


class _Request(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: list[int]


def read_mooncake(rows: Iterable[Row], options: TraceOptions) -> Workload:
    """Make every row a conversation of one turn; raises TraceError."""
    requests = sorted([_request(row) for row in rows], key=attrgetter("at_s"))
    chains = _Chains()
    return Workload(
        name=options.name,
        conversations=[
            _conversation(at_s, request, chains)
            for at_s, request in _spread(requests[: options.limit])
        ],
        block_tokens=_BLOCK_TOKENS,
        warmup_s=options.warmup_s,
    )


class _Chains:
    """Chains of ids; what two of them share is the same objects."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], BlockHash] = {}

    def chain(self, ids: Iterable[int]) -> Chain:
        link = BlockHash(_SEED)
        links: list[BlockHash] = []
        for block in ids:
            step = (link, block)
            known = self._known.get(step)
            if known is None:
                known = BlockHash(key_hash(link, block.to_bytes(8, "little")))
                self._known[step] = known
            link = known
            links.append(link)
        return tuple(links)


def _request(row: Row) -> _Request:
    prompt_tokens, ids = row.tokens("input_length"), row.ids("hash_ids")
    if len(ids) < prompt_tokens // _BLOCK_TOKENS:
        row.refuse("`hash_ids` has fewer blocks than `input_length` fills")
    at_s = row.amount("timestamp") / 1_000
    return _Request(at_s, prompt_tokens, max(1, row.tokens("output_length")), ids)


def _spread(requests: list[_Request]) -> Iterator[tuple[float, _Request]]:
    """Give requests of equal time even distances, up to the next time or a bucket's end."""
    buckets = [(at_s, list(group)) for at_s, group in groupby(requests, attrgetter("at_s"))]
    ends = [at_s for at_s, _ in buckets[1:]]
    for (at_s, group), end_s in zip(buckets, [*ends, float("inf")], strict=True):
        step_s = min(_BUCKET_S, end_s - at_s) / len(group)
        for position, request in enumerate(group):
            yield at_s + position * step_s, request


def _conversation(at_s: float, request: _Request, chains: _Chains) -> Conversation:
    full = request.prompt_tokens // _BLOCK_TOKENS
    # The last id may stand for a block that isn't full: it names an opening all the same.
    opening = chains.chain(request.ids[:_OPENING_BLOCKS])
    chain = chains.chain(request.ids[:full])
    return Conversation(
        start_s=at_s,
        turns=(
            Turn(
                chain=chain,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
            ),
        ),
        tier1=KeyHash(chain[0] if chain else 0),
        tier1_tokens=_BLOCK_TOKENS if chain else 0,
        tier2=key_hash(_SEED, b"opening", b"".join(h.to_bytes(8, "little") for h in opening)),
    )
