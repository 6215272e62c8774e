"""How many frames a client may send that cost us work and bring its calls no further."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.adapters.http2.frames import Code, ConnectionFaultError

if TYPE_CHECKING:
    from collections.abc import Callable

# Envoy resets one stream for each client that leaves, and all of them when we are late.
_MOST = 20_000.0
_PER_S = 5_000.0


class Allowance:
    """Pings, settings, priorities, empty DATA and streams reset before they were answered."""

    __slots__ = ("_clock", "_left", "_since_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = _MOST
        self._since_s = clock()

    def spend(self) -> None:
        """Count one; raise ConnectionFaultError when they come too fast."""
        self._left -= 1.0
        if self._left < 0.0:
            now_s = self._clock()
            self._left = min(_MOST, self._left + (now_s - self._since_s) * _PER_S)
            self._since_s = now_s
            if self._left < 0.0:
                raise ConnectionFaultError(Code.ENHANCE_YOUR_CALM, "a flood of frames")
