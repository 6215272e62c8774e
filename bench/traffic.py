"""Clients of every kind, drawn by a seed: when they come, what they send, how long they think.

Traffic is under way when a run begins: conversations that began before it bring their past
in their first prompt. A run cuts them at its end, so its load stays what it is to the last.
Both go by nominal times of answers; what a client really waits for is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from bench.text import Text
from extproc.core.blocks import key_hash
from extproc.simulation.workload import Conversation, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extproc.core.decision import KeyHash

# Clients appear one by one in this time, or engines with empty caches would meet them all.
RAMP_S = 40.0
# Hardly any conversation takes longer for a turn, thinking included.
_TURN_S = 25.0

Between = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """What retrieval puts before a question: some of the catalogue, popular ones first.

    `cumulated` has each document's weight added to those before it.
    """

    cumulated: tuple[float, ...]
    tokens: int
    each: Between


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of client. Pairs are bounds of what is drawn evenly.

    A conversation has one of the prefixes, then turns; `think_s` passes before each but the
    first. `same_opening` is the share of a prefix's conversations with one first user turn.
    """

    name: str
    prefix_tokens: tuple[int, ...]
    weights: tuple[float, ...]
    turns: Between
    user_tokens: Between
    output_tokens: Between
    think_s: Callable[[Random], float]
    session: bool = False
    documents: Documents | None = None
    same_opening: float = 0.0

    def without_session(self) -> Kind:
        """The same clients, known by their openings alone, which collide at times."""
        return replace(self, session=False, same_opening=0.15)


def zipf(count: int, exponent: float) -> tuple[float, ...]:
    """Weigh ranks 1 to `count`."""
    return tuple(rank**-exponent for rank in range(1, count + 1))


def answer_s(output_tokens: int) -> float:
    """Take an answer's nominal time on an endpoint that is fairly busy."""
    return 0.1 + 0.02 * output_tokens


def conversations(
    kind: Kind,
    *,
    starts_per_s: float,
    seed: int,
    duration_s: float,
    shape: Callable[[float], float] | None = None,
    peak: float = 1.0,
) -> Iterator[Conversation]:
    """Draw the conversations of a kind that send anything before `duration_s`.

    They start as a Poisson process, whose rate `shape` multiplies by up to `peak`.
    """
    chance = Random(f"{seed}/{kind.name}")
    prefixes = [_prefix(kind, index) for index in range(len(kind.prefix_tokens))]
    start_s, number = -_TURN_S * (kind.turns[1] - 1), 0
    while (start_s := start_s + chance.expovariate(starts_per_s * peak)) < duration_s:
        number += 1
        if shape is not None and chance.random() * peak >= shape(start_s):
            continue
        script = _Script(kind, prefixes, seed, number)
        conversation = script.play(start_s, duration_s)
        if conversation is not None:
            yield conversation


class _Script:
    """All that one client will send, drawn before it is known when."""

    def __init__(self, kind: Kind, prefixes: list[Text], seed: int, number: int) -> None:
        self._kind = kind
        self._chance = Random(f"{seed}/{kind.name}/{number}")
        self._root = key_hash(seed, kind.name.encode(), b"%d" % number)
        index = self._chance.choices(range(len(prefixes)), kind.weights)[0]
        self._text = prefixes[index].copy()
        self._tier1 = key_hash(0, b"instructions", kind.name.encode(), b"%d" % index)
        self._tier1_tokens = kind.prefix_tokens[index]
        # Drawn apart, so that all else is equal with and without sessions.
        chooser = Random(f"{seed}/{kind.name}/{number}/opening")
        self._same_opening = chooser.random() < kind.same_opening

    def play(self, start_s: float, end_s: float) -> Conversation | None:
        """Send what falls between the client's appearance and `end_s`."""
        kind, chance = self._kind, self._chance
        appears_s = chance.uniform(0.0, RAMP_S)
        at_s, wait_s, first_s = start_s, 0.0, 0.0
        turns: list[Turn] = []
        for number in range(chance.randint(*kind.turns)):
            if at_s >= end_s:
                break
            if number:
                self._ask(number)
            else:
                self._open()
            prompt_tokens, chain = self._text.tokens, self._text.chain()
            output_tokens = chance.randint(*kind.output_tokens)
            self._text.add(self._source(b"answer", number), output_tokens)
            if at_s >= appears_s:
                first_s = first_s if turns else at_s
                turn = Turn(
                    chain=chain,
                    prompt_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                    answer_chain=self._text.chain()[len(chain) :],
                    wait_s=wait_s if turns else 0.0,
                )
                turns.append(turn)
            wait_s = kind.think_s(chance)
            at_s += answer_s(output_tokens) + wait_s
        return self._conversation(first_s, turns) if turns else None

    def _conversation(self, start_s: float, turns: list[Turn]) -> Conversation:
        tier2 = key_hash(self._tier1, b"%d" % self._opening())
        if self._kind.session:
            tier2 = key_hash(0, b"session", b"%d" % self._root)
        return Conversation(
            start_s=start_s,
            turns=tuple(turns),
            tier1=self._tier1,
            tier1_tokens=self._tier1_tokens,
            tier2=tier2,
            session=self._kind.session,
        )

    def _open(self) -> None:
        documents = self._kind.documents
        if documents is not None:
            for index in _pick(documents, self._chance):
                self._text.add(key_hash(0, b"document", b"%d" % index), documents.tokens)
        tokens = self._chance.randint(*self._kind.user_tokens)
        if self._same_opening:
            tokens = sum(self._kind.user_tokens) // 2
        self._text.add(self._opening(), tokens)

    def _ask(self, number: int) -> None:
        tokens = self._chance.randint(*self._kind.user_tokens)
        self._text.add(self._source(b"user", number), tokens)

    def _opening(self) -> KeyHash:
        if self._same_opening:
            return key_hash(self._tier1, b"the same opening")
        return self._source(b"user", 0)

    def _source(self, role: bytes, number: int) -> KeyHash:
        return key_hash(self._root, role, b"%d" % number)


def _prefix(kind: Kind, index: int) -> Text:
    text = Text()
    text.add(key_hash(0, b"prefix", kind.name.encode(), b"%d" % index), kind.prefix_tokens[index])
    return text


def _pick(documents: Documents, chance: Random) -> list[int]:
    """Draw different documents, in the order of this query's relevance."""
    count = chance.randint(*documents.each)
    everything = range(len(documents.cumulated))
    picked: dict[int, None] = {}
    while len(picked) < count:
        picked.update(dict.fromkeys(chance.choices(everything, cum_weights=documents.cumulated)))
    return list(picked)
