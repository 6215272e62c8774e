"""Header blocks: a client's read into what a gRPC call is, and ours written.

Envoy's blocks for one method are the same bytes time after time. A block that was read
without changing the compression table means the same as long as the table is the same, so
what it says is kept until the table changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from extproc.adapters.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Code,
    ConnectionFaultError,
    StreamFaultError,
    frame,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_LIST_BYTES = 64 * 1024

_MAX_BLOCK_BYTES = 32 * 1024
# More fragments than this are no header block that any client needs.
_MAX_FRAGMENTS = 32
# A connection has a few methods; more blocks than this are no repetition.
_MAX_KNOWN = 64
# A change of the table's size stands at the start of a block, in this form.
_RESIZE_MASK, _RESIZE = 0xE0, 0x20
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED = frozenset({b":method", b":scheme", b":path"})
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]|^[ \t]|[ \t]$")
_GRPC = re.compile(rb"application/grpc(?:[+;].*)?", re.DOTALL)

# Literals that no table keeps, so the client's table needs no thought. 0x88 is `:status: 200`,
# 0x0f 0x10 the name `content-type`.
_CONTENT_TYPE = b"\x0f\x10\x10application/grpc"
_OPENING = b"\x88" + _CONTENT_TYPE
_NOT_A_CALL = {404: b"\x8d", 405: b"\x08\x03405", 415: b"\x08\x03415"}


@dataclass(frozen=True, slots=True)
class Head:
    """What a client's header block says: the method's path, or why it is no call.

    `refusal` is an HTTP status, 0 for a call; `fault` tells how the block is malformed.
    `trailing`: it has no pseudo-headers, as trailers must not.
    """

    path: str = ""
    refusal: int = 0
    fault: str = ""
    trailing: bool = False


class HeaderBlock:
    """A header block in the making, in as many fragments as its client likes, almost."""

    def __init__(self, stream_id: int, fragment: bytes, *, ends: bool) -> None:
        self.stream_id = stream_id
        self.ends = ends
        """Whether the client sends nothing behind it."""
        self._fragments = [fragment]
        self._size = len(fragment)

    def add(self, fragment: bytes) -> None:
        """Add a fragment; raise ConnectionFaultError when there are too many."""
        self._fragments.append(fragment)
        self._size += len(fragment)
        if self._size > _MAX_BLOCK_BYTES or len(self._fragments) > _MAX_FRAGMENTS:
            raise ConnectionFaultError(Code.ENHANCE_YOUR_CALM, "a header block without end")

    def whole(self) -> bytes:
        """Join the fragments."""
        return b"".join(self._fragments)


class HeaderReader:
    """Reads the header blocks of one connection, each whole and in order."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_LIST_BYTES)
        self._table = _CountingTable()
        self._decoder.header_table = self._table
        self._known: dict[bytes, Head] = {}

    def read(self, block: bytes) -> Head:
        """Read a block; raise ConnectionFaultError when the table is lost with it."""
        head = self._known.get(block)
        if head is not None:
            return head
        added = self._table.added
        try:
            fields = [(field[0], field[1]) for field in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError as error:
            raise ConnectionFaultError(Code.ENHANCE_YOUR_CALM, "headers too long") from error
        except HPACKError as error:
            raise ConnectionFaultError(Code.COMPRESSION_ERROR, "not HPACK") from error
        head = _examine(fields)
        resized = bool(block) and block[0] & _RESIZE_MASK == _RESIZE
        if resized or self._table.added != added or len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        else:
            self._known[block] = head
        return head


class _CountingTable(HeaderTable):
    """A compression table that counts what was put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.added = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.added += 1
        super().add(name, value)


def _examine(fields: Sequence[tuple[bytes, bytes]]) -> Head:
    """Check a list of headers by section 8.2 and 8.3, and for what gRPC asks of a call."""
    pseudo: dict[bytes, bytes] = {}
    content_type, plain = b"", False
    for name, value in fields:
        if name.startswith(b":"):
            if plain or name in pseudo or name not in _PSEUDO:
                return Head(fault="a pseudo-header out of place")
            pseudo[name] = value
        else:
            plain = True
            if name == b"content-type":
                content_type = value
        if not _NAME.fullmatch(name) or _BAD_VALUE.search(value):
            return Head(fault="a header that is none")
        if name in _HOP_BY_HOP or (name == b"te" and value != b"trailers"):
            return Head(fault="a header of one connection")
    if not pseudo:
        return Head(trailing=True, fault="headers without pseudo-headers")
    if not pseudo.keys() >= _NEEDED or not pseudo[b":path"]:
        return Head(fault="headers without a path")
    return Head(pseudo[b":path"].decode("latin-1"), _refusal(pseudo[b":method"], content_type))


def _refusal(method: bytes, content_type: bytes) -> int:
    if method != b"POST":
        return 405
    return 0 if _GRPC.fullmatch(content_type) else 415


def check_trailers(head: Head, *, ends: bool) -> None:
    """Raise StreamFaultError for headers that can't end a call's messages."""
    if not head.trailing or not ends:
        raise StreamFaultError(Code.PROTOCOL_ERROR, "headers in mid-stream")


def opening(stream_id: int) -> bytes:
    """Write the frame that comes before a call's answers."""
    return frame(HEADERS, END_HEADERS, stream_id, _OPENING)


def closing(stream_id: int, status: int, text: str, *, begun: bool) -> bytes:
    """Write the frame that ends a call: trailers, or headers that are also trailers."""
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, _closing_block(status, text, begun))


def refusing(stream_id: int, refusal: int) -> bytes:
    """Write the frame that answers a request that is no gRPC call with an HTTP status."""
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, _NOT_A_CALL[refusal])


@lru_cache(maxsize=64)
def _closing_block(status: int, text: str, begun: bool) -> bytes:
    fields = _literal(b"grpc-status", str(status).encode())
    if text:
        fields += _literal(b"grpc-message", quote(text).encode()[:127])
    return fields if begun else _OPENING + fields


def _literal(name: bytes, value: bytes) -> bytes:
    """Write a header shorter than 128 bytes that no table keeps."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
