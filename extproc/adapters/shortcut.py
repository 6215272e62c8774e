"""Reads by hand the messages that nearly every stream consists of: plain headers, and a body.

Anything else in a message gives None, and the message is left to the protobuf library. Why
this is worth its lines: docs/decisions/0003-decoding.md.
"""

from __future__ import annotations

# Tags: field number and wire type 2 (length-delimited) or 0 (varint).
_REQUEST_HEADERS, _REQUEST_BODY = 0x12, 0x22
_CONTENT = 0x0A
_HEADERS_END, _BODY_END = b"\x18\x01", b"\x10\x01"
_HEADER, _KEY, _RAW_VALUE = 0x0A, 0x0A, 0x1A
_MORE = 0x80
_MAX_SHIFT = 28

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


def _cut(data: bytes, phase: int, end_mark: bytes) -> tuple[bytes, bool, bytes] | None:
    """Read a message of a phase whose first field is all but an end of stream."""
    try:
        if data[0] != phase:
            return None
        size, at = _varint(data, 1)
        end = at + size
        if data[at] != _CONTENT:
            return None
        size, at = _varint(data, at + 1)
    except IndexError:
        return None
    stop = at + size
    ends = stop != end
    if end > len(data) or (ends and data[stop:end] != end_mark):
        return None
    return data[at:stop], ends, data[end:]


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


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a length; give where it ends. Raise IndexError where there is none."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return value, at
        shift += 7
        if shift > _MAX_SHIFT:
            raise IndexError
