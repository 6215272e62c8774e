"""What clients send: conversations of turns, each known by its chain alone.

A workload may be run many times, once per policy, so its parts can be iterated anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.core.decision import Chain, KeyHash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NO_KEY = KeyHash(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: `chain` has the full blocks of its prompt of `prompt_tokens` tokens.

    `answer_chain` holds the blocks that the answer completes after the prompt's, where the
    next turn repeats them; `wait_s` passes between the previous turn's end and this one.
    """

    chain: Chain
    prompt_tokens: int
    output_tokens: int
    answer_chain: Chain = ()
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns sent one after the other, the first at `start_s`: a client waits for its answer.

    `session`: the client names it; otherwise `tier2` is the fingerprint of its opening.
    `turns` may be lazy, but must give the same turns each time it is iterated.
    """

    start_s: float
    turns: Iterable[Turn]
    tier1: KeyHash = _NO_KEY
    tier1_tokens: int = 0
    tier2: KeyHash = _NO_KEY
    session: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations in order of `start_s`; turns sent before `warmup_s` are not measured."""

    name: str
    conversations: Sequence[Conversation]
    block_tokens: int = 128
    warmup_s: float = 0.0
