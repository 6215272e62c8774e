"""Reads by hand the messages that nearly every stream consists of: plain headers, and a body.

Anything else in a message gives None, and the message is left to the protobuf library. Why
this is worth its lines: docs/decisions/0003-decoding.md.
"""

from __future__ import annotations

# Tags: field number and wire type 2 (length-delimited) or 0 (varint).
_REQUEST_HEADERS, _REQUEST_BODY = b"\x12", b"\x22"
_CONTENT = b"\x0a"
_HEADERS_END, _BODY_END = b"\x18\x01", b"\x10\x01"
_HEADER, _KEY, _RAW_VALUE = 0x0A, 0x0A, 0x1A
_MORE = 0x80

Headers = dict[str, str]


def cut_headers(data: bytes) -> tuple[Headers, bool, bytes] | None:
    """Give the headers, whether they end the request, and the rest of the message."""
    found = _cut(data, _REQUEST_HEADERS, _HEADERS_END)
    if found is None:
        return None
    content, ends, rest = found
    headers = _cut_map(content)
    return None if headers is None else (headers, ends, rest)


def cut_body(data: bytes) -> tuple[bytes, bool, bytes] | None:
    """Give the body, whether it ends the request, and the rest of the message."""
    return _cut(data, _REQUEST_BODY, _BODY_END)


def _cut(data: bytes, phase: bytes, end_mark: bytes) -> tuple[bytes, bool, bytes] | None:
    """Read a message of a phase whose first field is all but an end of stream."""
    if data[:1] != phase:
        return None
    at, end = _length(data, 1)
    if end > len(data) or data[at : at + 1] != _CONTENT:
        return None
    at, stop = _length(data, at + 1)
    tail = data[stop:end]
    if stop > end or tail not in {b"", end_mark}:
        return None
    return data[at:stop], bool(tail), data[end:]


def _cut_map(data: bytes) -> Headers | None:
    """Read a header map of ASCII texts, each header shorter than 128 bytes."""
    if not data.isascii():
        return None
    text = data.decode("ascii")
    headers: Headers = {}
    at, end = 0, len(data)
    try:
        while at < end:
            stop = at + 2 + data[at + 1]
            name_end = at + 4 + data[at + 3]
            value = name_end + 2
            if data[at] != _HEADER or data[at + 2] != _KEY or stop > end:
                return None
            if data[name_end] != _RAW_VALUE or value + data[name_end + 1] != stop:
                return None
            name = text[at + 4 : name_end].lower()
            if name in headers:
                return None
            headers[name] = text[value:stop]
            at = stop
    except IndexError:
        return None
    return headers


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Read a varint length; give where its bytes begin and end, out of reach if malformed."""
    size = shift = 0
    for byte in data[at : at + 5]:
        at += 1
        size |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return at, at + size
        shift += 7
    return len(data), len(data) + 1
