"""Ways to make a stand-in fail on purpose, for tests of what stands before it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from extproc.standin.body import CallError

if TYPE_CHECKING:
    from extproc.standin.body import Body

_STATUSES = range(400, 600)


class FaultKind(StrEnum):
    """What goes wrong with a model request; /health and /metrics stay well, as in vLLM."""

    NONE = "none"
    STATUS = "status"
    """It is answered with an error status at once."""
    HANG = "hang"
    """It is read and never answered, not even with headers."""
    CUT = "cut"
    """The connection breaks: after the first tokens of a stream, else before the answer."""
    STALL = "stall"
    """The answer stops after the first tokens, and the connection stays open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and how many requests it strikes (None: all until another is set).

    `health_status` is what /health answers meanwhile.
    """

    kind: FaultKind = FaultKind.NONE
    status: int = 500
    count: int | None = None
    health_status: int = 200


class Faults:
    """The fault in force; each model request draws from it."""

    def __init__(self) -> None:
        self.fault = Fault()
        self._left: int | None = None

    def set(self, fault: Fault) -> None:
        """Put a fault in force instead of the present one."""
        self.fault = fault
        self._left = fault.count

    def strike(self) -> Fault:
        """Return what happens to the next request."""
        if self._left == 0:
            return Fault()
        if self._left is not None:
            self._left -= 1
        return self.fault


def read_fault(body: Body) -> Fault:
    """Read `{"kind": …, "status": …, "count": …, "health_status": …}`; CallError if wrong."""
    status, health = body.get("status", 500), body.get("health_status", 200)
    count = body.get("count")
    kind = body.get("kind", "none")
    if (
        kind not in set(FaultKind)
        or not isinstance(status, int)
        or status not in _STATUSES
        or not isinstance(health, int)
        or health not in {200, *_STATUSES}
        or not (count is None or (isinstance(count, int) and count >= 1))
    ):
        message = f"kind must be one of {', '.join(FaultKind)}; status an error status."
        raise CallError(message)
    return Fault(kind=FaultKind(str(kind)), status=status, count=count, health_status=health)
