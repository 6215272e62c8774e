"""Routing events in compact bytes, for a log that several routers share.

A batch names its writer and a sequence number. The chain of a conversation is written as
what is new beyond what the log is known to have said of that conversation, by whoever
wrote it. A block's hash covers all blocks before it, so the hash of the last block kept
proves that reader and writer mean the same blocks; where it does not, the event is read
without that chain, and whole chains, written again every `whole_s`, mend it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from struct import Struct, pack, unpack
from typing import TYPE_CHECKING, assert_never

from extproc.core.decision import BlockHash, Chain, DecisionId, KeyHash
from extproc.core.endpoint import Endpoint
from extproc.core.errors import EndpointError
from extproc.core.events import EndpointReset, Finished, FirstByte, Routed
from extproc.core.packing import JournalError, Reader, put_number, put_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VERSION = 1
MAX_EVENTS = 1_024
"""Events of one batch."""

Shared = Routed | FirstByte | Finished | EndpointReset
"""The events that routers tell one another; the others each one sees for itself."""

_ROUTED, _FIRST_BYTE, _FINISHED, _RESET = range(1, 5)
_HASH_BYTES = 8
_KEYS = Struct("<QQ")
# Longer chains, and more prompts of one body, are written as their heads.
_MAX_BLOCKS = 1 << 16
_MAX_CHAINS = 4_096
# Numbers of fewer digits fit in 64 bits.
# Those of many fleets; read again and again, in every batch.
_MAX_ENDPOINTS = 4_096
_MAX_DIGITS = 19
# A chain of 200 blocks has 1.6 KB: 4 MB for some 2,500 such conversations.
_MAX_KNOWN_BLOCKS = 500_000
# At the default bound, short conversations are limited by number, not by blocks.
_MAX_CONVERSATIONS = 50_000
# Well within the log's age, so that a reader who starts anywhere in it soon knows all.
_WHOLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one router did, in its order; without events it says that the router lives.

    `sequence` counts the writer's batches from 1; `unknown` is how many chains were left
    out because what they continue is not known here.
    """

    router_id: str
    sequence: int
    events: tuple[Shared, ...] = ()
    unknown: int = 0


@dataclass(slots=True)
class _Known:
    blocks: bytes
    whole_at_s: float


class Journal:
    """Encodes and decodes batches; what it knows of conversations is bounded."""

    def __init__(
        self, *, max_known_blocks: int = _MAX_KNOWN_BLOCKS, whole_s: float = _WHOLE_S
    ) -> None:
        self._max_known_bytes = max_known_blocks * _HASH_BYTES
        self._whole_s = whole_s
        self._known: OrderedDict[KeyHash, _Known] = OrderedDict()
        self._known_bytes = 0
        self._endpoints: dict[str, Endpoint] = {}

    @property
    def known_blocks(self) -> int:
        """Blocks remembered to write and read continuations."""
        return self._known_bytes // _HASH_BYTES

    def restart(self) -> None:
        """Write every chain whole once: what the log said before may be lost."""
        for known in self._known.values():
            known.whole_at_s = float("-inf")

    def encode(
        self, router_id: str, sequence: int, events: Sequence[Shared], now_s: float
    ) -> bytes:
        """Write a batch of at most MAX_EVENTS events; it has to reach the log in this order."""
        endpoints = {endpoint: n for n, endpoint in enumerate(_endpoints_of(events))}
        out = bytearray((VERSION,))
        put_text(out, router_id)
        put_number(out, sequence)
        put_number(out, len(endpoints))
        for endpoint in endpoints:
            put_text(out, endpoint)
        put_number(out, len(events))
        prefix = f"{router_id}-"
        for event in events:
            match event:
                case Routed():
                    out.append(_ROUTED)
                    _put_id(out, event.decision_id, prefix)
                    self._put_routed(out, event, endpoints[event.endpoint], now_s)
                case FirstByte():
                    out.append(_FIRST_BYTE)
                    _put_id(out, event.decision_id, prefix)
                case Finished():
                    out.append(_FINISHED)
                    _put_id(out, event.decision_id, prefix)
                    put_number(out, 0 if event.served is None else 1 + endpoints[event.served])
                    put_number(out, event.status)
                case EndpointReset():
                    out.append(_RESET)
                    put_number(out, endpoints[event.endpoint])
                case _:
                    assert_never(event)
        return bytes(out)

    def decode(self, data: bytes, now_s: float) -> Batch:
        """Read a batch; raise JournalError for bytes that are none."""
        try:
            return self._read(Reader(data), now_s)
        except (IndexError, EndpointError) as error:
            message = f"an endpoint that is none: {error}"
            raise JournalError(message) from None

    def _read(self, reader: Reader, now_s: float) -> Batch:
        version = reader.byte()
        if version != VERSION:
            message = f"version {version} of the log's encoding, not {VERSION}"
            raise JournalError(message)
        router_id, sequence = reader.text(), reader.number()
        endpoints = [self._parse(reader.text()) for _ in range(reader.count(2 * MAX_EVENTS))]
        prefix = f"{router_id}-"
        count, unknown = reader.count(MAX_EVENTS), 0
        events: list[Shared] = []
        for _ in range(count):
            kind = reader.byte()
            if kind == _RESET:
                events.append(EndpointReset(endpoints[reader.number()]))
                continue
            decision_id = _read_id(reader, prefix)
            if kind == _ROUTED:
                event, missing = self._read_routed(reader, decision_id, endpoints, now_s)
                events.append(event)
                unknown += missing
            elif kind == _FIRST_BYTE:
                events.append(FirstByte(decision_id))
            elif kind == _FINISHED:
                served, status = reader.number(), reader.number()
                at = endpoints[served - 1] if served else None
                events.append(Finished(decision_id=decision_id, served=at, status=status))
            else:
                message = f"no event is of kind {kind}"
                raise JournalError(message)
        reader.end()
        return Batch(router_id=router_id, sequence=sequence, events=tuple(events), unknown=unknown)

    def _parse(self, text: str) -> Endpoint:
        endpoint = self._endpoints.get(text)
        if endpoint is None:
            endpoint = Endpoint.parse(text)
            if len(self._endpoints) >= _MAX_ENDPOINTS:
                self._endpoints.clear()
            self._endpoints[text] = endpoint
        return endpoint

    def _put_routed(self, out: bytearray, event: Routed, endpoint: int, now_s: float) -> None:
        put_number(out, endpoint)
        put_number(out, event.prompt_tokens)
        put_number(out, event.matched_tokens)
        out += _KEYS.pack(event.tier1, event.tier2)
        chains = event.chains[:_MAX_CHAINS]
        put_number(out, len(chains))
        for n, chain in enumerate(chains):
            head = chain[:_MAX_BLOCKS]
            blocks = pack(f"<{len(head)}Q", *head)
            keep = 0 if n else self._kept_bytes(event.tier2, blocks, now_s)
            put_number(out, keep // _HASH_BYTES)
            if keep:
                out += blocks[keep - _HASH_BYTES : keep]
            put_number(out, (len(blocks) - keep) // _HASH_BYTES)
            out += blocks[keep:]
            if not n:
                self._learn(event.tier2, blocks, None if keep else now_s)

    def _read_routed(
        self, reader: Reader, decision_id: DecisionId, endpoints: list[Endpoint], now_s: float
    ) -> tuple[Routed, int]:
        endpoint = endpoints[reader.number()]
        prompt_tokens, matched_tokens = reader.number(), reader.number()
        tier1, tier2 = (KeyHash(key) for key in _KEYS.unpack(reader.take(_KEYS.size)))
        chains: list[Chain] = []
        unknown = 0
        for n in range(reader.count(_MAX_CHAINS)):
            blocks = self._read_chain(reader, tier2, now_s, first=n == 0)
            if blocks is None:
                unknown += 1
            else:
                chains.append(_unpack(blocks))
        event = Routed(
            decision_id=decision_id,
            endpoint=endpoint,
            chains=tuple(chains),
            prompt_tokens=prompt_tokens,
            matched_tokens=matched_tokens,
            tier1=tier1,
            tier2=tier2,
        )
        return event, unknown

    def _read_chain(
        self, reader: Reader, tier2: KeyHash, now_s: float, *, first: bool
    ) -> bytes | None:
        keep = reader.number() * _HASH_BYTES
        last_kept = reader.take(_HASH_BYTES) if keep else b""
        fresh = reader.take(reader.number() * _HASH_BYTES)
        known = self._known.get(tier2)
        before = known.blocks if known is not None else b""
        if before[:keep][-_HASH_BYTES:] != last_kept or len(before) < keep:
            return None
        blocks = before[:keep] + fresh
        if len(blocks) > _MAX_BLOCKS * _HASH_BYTES:
            message = f"a chain of more than {_MAX_BLOCKS} blocks"
            raise JournalError(message)
        if first:
            self._learn(tier2, blocks, None if keep else now_s)
        return blocks

    def _kept_bytes(self, tier2: KeyHash, blocks: bytes, now_s: float) -> int:
        """Give how many leading bytes of `blocks` the log holds; 0 when it is time to repeat."""
        known = self._known.get(tier2)
        if known is None or now_s - known.whole_at_s > self._whole_s:
            return 0
        before = known.blocks
        if blocks.startswith(before):
            return len(before)
        low, high = 0, min(len(before), len(blocks)) // _HASH_BYTES
        while low < high:  # equal blocks have equal blocks before them
            middle = (low + high + 1) // 2
            end = middle * _HASH_BYTES
            if before[end - _HASH_BYTES : end] == blocks[end - _HASH_BYTES : end]:
                low = middle
            else:
                high = middle - 1
        return low * _HASH_BYTES

    def _learn(self, tier2: KeyHash, blocks: bytes, whole_at_s: float | None) -> None:
        """Note the last chain of a conversation; `whole_at_s` is None for a continuation."""
        known = self._known.pop(tier2, None)
        if known is not None:
            self._known_bytes -= len(known.blocks)
            if whole_at_s is None:
                whole_at_s = known.whole_at_s
        if not tier2 or not blocks or whole_at_s is None:
            return
        self._known[tier2] = _Known(blocks, whole_at_s)
        self._known_bytes += len(blocks)
        while self._known_bytes > self._max_known_bytes or len(self._known) > _MAX_CONVERSATIONS:
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= len(oldest.blocks)


def _endpoints_of(events: Iterable[Shared]) -> dict[Endpoint, None]:
    named: dict[Endpoint, None] = {}
    for event in events:
        if isinstance(event, Routed | EndpointReset):
            named[event.endpoint] = None
        elif isinstance(event, Finished) and event.served is not None:
            named[event.served] = None
    return named


def _put_id(out: bytearray, decision_id: DecisionId, prefix: str) -> None:
    """Write an id of the writer's as its number, another router's in full after a 0."""
    digits = decision_id.removeprefix(prefix)
    short = len(digits) < min(len(decision_id), _MAX_DIGITS)
    if short and digits.isascii() and digits.isdigit() and digits[0] != "0":
        put_number(out, int(digits))
        return
    out.append(0)
    put_text(out, decision_id)


def _read_id(reader: Reader, prefix: str) -> DecisionId:
    number = reader.number()
    return DecisionId(f"{prefix}{number}" if number else reader.text())


def _unpack(blocks: bytes) -> Chain:
    return tuple(map(BlockHash, unpack(f"<{len(blocks) // _HASH_BYTES}Q", blocks)))
