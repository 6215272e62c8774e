"""Numbers and texts in bytes: seven bits a byte, low ones first; texts after their length."""

from __future__ import annotations

from extproc.core.errors import ExtprocError

_MORE = 0x80
_MAX_BITS = 64


class JournalError(ExtprocError):
    """Bytes that are no batch of this version."""


class Reader:
    """A position in bytes; whatever is not as expected raises JournalError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        """Read one byte."""
        if self._at >= len(self._data):
            message = "cut short"
            raise JournalError(message)
        value = self._data[self._at]
        self._at += 1
        return value

    def number(self) -> int:
        """Read a number from 0."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < _MORE:
                return value
            shift += 7
            if shift >= _MAX_BITS:
                message = "a number of more than 64 bits"
                raise JournalError(message)

    def count(self, limit: int) -> int:
        """Read a number of things that follow, at most `limit`."""
        count = self.number()
        if count > limit:
            message = f"a count above {limit}"
            raise JournalError(message)
        return count

    def take(self, count: int) -> bytes:
        """Read so many bytes."""
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            message = "cut short"
            raise JournalError(message)
        self._at += count
        return taken

    def text(self) -> str:
        """Read a text."""
        try:
            return self.take(self.number()).decode()
        except UnicodeDecodeError:
            message = "a text that is not UTF-8"
            raise JournalError(message) from None

    def end(self) -> None:
        """Check that nothing follows."""
        if self._at != len(self._data):
            message = "bytes after the last event"
            raise JournalError(message)


def put_number(out: bytearray, value: int) -> None:
    """Write a number from 0 to 2^64 - 1."""
    while value >= _MORE:
        out.append(value & 0x7F | _MORE)
        value >>= 7
    out.append(value)


def put_text(out: bytearray, text: str) -> None:
    """Write a text."""
    data = text.encode()
    put_number(out, len(data))
    out += data
