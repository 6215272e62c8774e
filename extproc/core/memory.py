"""What is remembered of conversations: where each one lives, and what such ones still bring."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.decision import KeyHash
    from extproc.core.endpoint import Endpoint

# A tier-1 key nobody has used for this long weighs half: traffic changes with the hour.
_HALF_LIFE_S = 600.0
# A new tier-1 key is expected to behave like this many conversations of all traffic.
_PRIOR_CONVERSATIONS = 2.0


@dataclass(frozen=True, slots=True)
class Home:
    """The endpoint a conversation was last sent to, and how many tokens it had."""

    endpoint: Endpoint
    prompt_tokens: int
    at_s: float


class Sessions:
    """Tier-2 key to home: least recently used out at `capacity`, forgotten after `ttl_s`."""

    def __init__(self, *, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._homes: OrderedDict[KeyHash, Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, key: KeyHash, now_s: float) -> Home | None:
        """Give the home of a conversation unless it has been idle longer than the TTL."""
        home = self._homes.get(key)
        if home is None or now_s - home.at_s > self._ttl_s:
            return None
        return home

    def bind(self, key: KeyHash, home: Home) -> None:
        """Remember where a conversation lives."""
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def expire(self, now_s: float) -> None:
        """Drop homes idle longer than the TTL; the oldest are in front."""
        while self._homes:
            key, home = next(iter(self._homes.items()))
            if now_s - home.at_s <= self._ttl_s:
                return
            del self._homes[key]


@dataclass(slots=True)
class _Tally:
    conversations: float = 0.0
    later_requests: float = 0.0
    later_uncached: float = 0.0
    at_s: float = 0.0

    def decay(self, now_s: float) -> None:
        share = 0.5 ** (max(0.0, now_s - self.at_s) / _HALF_LIFE_S)
        self.conversations *= share
        self.later_requests *= share
        self.later_uncached *= share
        self.at_s = now_s


class Demand:
    """Per tier-1 key, decayed: how much prefill a conversation brings after its first turn."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._tallies: OrderedDict[KeyHash, _Tally] = OrderedDict()
        self._all = _Tally()

    def __len__(self) -> int:
        return len(self._tallies)

    def count(self, key: KeyHash, *, new: bool, uncached_tokens: int, now_s: float) -> None:
        """Note one request of a tier-1 key: a new conversation, or a later turn of one."""
        tally = self._tallies.setdefault(key, _Tally(at_s=now_s))
        self._tallies.move_to_end(key)
        if len(self._tallies) > self._capacity:
            self._tallies.popitem(last=False)
        for counted in (tally, self._all):
            counted.decay(now_s)
            if new:
                counted.conversations += 1.0
            else:
                counted.later_requests += 1.0
                counted.later_uncached += uncached_tokens

    def future_tokens(self, key: KeyHash) -> float:
        """Expect the uncached tokens of all later turns of one new conversation.

        That is (requests per conversation - 1) x (uncached tokens of a later turn), which
        is the later turns' uncached tokens by conversation.
        """
        tally = self._tallies.get(key) or _Tally()
        prior = self._all.later_uncached / max(1.0, self._all.conversations)
        conversations = tally.conversations + _PRIOR_CONVERSATIONS
        return (tally.later_uncached + _PRIOR_CONVERSATIONS * prior) / conversations
