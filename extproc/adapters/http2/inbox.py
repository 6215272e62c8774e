"""The messages of one gRPC call, cut out of the DATA that carries them."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from extproc.core.errors import ExtprocError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = Struct(">BL")
"""Before each message: whether it is compressed, and its length."""

OK, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 5, 8, 12, 13, 14
"""gRPC status codes."""


class CallFaultError(ExtprocError):
    """A call that ends with a gRPC status instead of an answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Budget:
    """Bytes that all calls of a server together may keep until they are whole or sent."""

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Keep so many bytes more; raise CallFaultError when that is too much."""
        if self.used_bytes + size > self.limit_bytes:
            raise CallFaultError(RESOURCE_EXHAUSTED, "too many bytes are held")
        self.used_bytes += size

    def give_back(self, size: int) -> None:
        """Keep so many bytes less."""
        self.used_bytes -= size


class Inbox:
    """Joins a call's DATA to messages of at most `max_bytes`."""

    __slots__ = ("_budget", "_head", "_held", "_held_bytes", "_length", "_max_bytes")

    def __init__(self, max_bytes: int, budget: Budget) -> None:
        self._max_bytes = max_bytes
        self._budget = budget
        self._head = b""
        self._length = -1
        self._held: list[bytes] = []
        self._held_bytes = 0

    @property
    def empty(self) -> bool:
        """Whether no message is begun."""
        return self._length < 0 and not self._head

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Give each message that is whole; raise CallFaultError for one not to be taken."""
        at = 0
        while at < len(data) or self._length == self._held_bytes:
            if self._length < 0:
                at = self._begin(data, at)
                continue
            part = data[at : at + self._length - self._held_bytes]
            at += len(part)
            if self._held_bytes + len(part) < self._length:
                self._budget.take(len(part))
                self._held.append(part)
                self._held_bytes += len(part)
                return
            message = b"".join((*self._held, part)) if self._held else part
            self.clear()
            yield message

    def clear(self) -> None:
        """Drop what is held."""
        self._budget.give_back(self._held_bytes)
        self._held.clear()
        self._held_bytes = 0
        self._length = -1
        self._head = b""

    def _begin(self, data: bytes, at: int) -> int:
        """Read the prefix of a message, or a part of it; give where to go on."""
        if self._head or len(data) - at < PREFIX.size:
            taken = data[at : at + PREFIX.size - len(self._head)]
            self._head += taken
            at += len(taken)
            if len(self._head) < PREFIX.size:
                return at
            compressed, length = PREFIX.unpack(self._head)
        else:
            compressed, length = PREFIX.unpack_from(data, at)
            at += PREFIX.size
        if compressed:
            raise CallFaultError(UNIMPLEMENTED, "compression is not supported")
        if length > self._max_bytes:
            raise CallFaultError(RESOURCE_EXHAUSTED, "the message is too long")
        self._length = length
        return at
