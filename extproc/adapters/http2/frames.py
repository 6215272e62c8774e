"""HTTP/2 frames: bytes to frames and back, and the two ways in which a peer can be wrong."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING

from extproc.core.errors import ExtprocError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
MAX_FRAME_BYTES = 16_384
"""The longest payload we take in: the least that the protocol allows to ask for."""
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535
"""Of the connection, and of streams until settings say otherwise."""
FRAME_LIMIT = 2**24
PRIORITY_BYTES = 5

# Plain numbers, since every frame is told apart by them.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

_HEAD = Struct(">HBBBL")
_SETTING = Struct(">HL")
_LONG = Struct(">L")
_TWO_LONGS = Struct(">LL")


class Code(IntEnum):
    """Error codes of RFC 9113, section 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Setting(IntEnum):
    """Names of settings, section 6.5.2."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class ConnectionFaultError(ExtprocError):
    """The peer broke a rule that the whole connection depends on."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFaultError(ExtprocError):
    """The peer broke a rule within one stream."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


Frame = tuple[int, int, int, bytes]
"""Kind, flags, stream id, payload."""


class FrameReader:
    """Cuts a connection's bytes, in whatever pieces they come, into frames."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Give each frame that is whole; raise ConnectionFaultError in the place of a bad one."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        at = 0
        if not self._begun:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise ConnectionFaultError(Code.PROTOCOL_ERROR, "not HTTP/2")
            if len(data) < len(PREFACE):
                self._rest = data
                return
            self._begun = True
            at = len(PREFACE)
        end = len(data)
        while end - at >= HEAD_BYTES:
            high, low, kind, flags, stream_id = _HEAD.unpack_from(data, at)
            length = high << 8 | low
            if length > MAX_FRAME_BYTES:
                raise ConnectionFaultError(Code.FRAME_SIZE_ERROR, "a frame is too long")
            begin = at + HEAD_BYTES
            if begin + length > end:
                break
            at = begin + length
            yield kind, flags, stream_id & MAX_WINDOW, data[begin:at]
        self._rest = data[at:]


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Write a frame."""
    length = len(payload)
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id) + payload


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """Write our settings."""
    payload = b"".join(_SETTING.pack(name, value) for name, value in settings.items())
    return frame(SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Read a peer's settings in order: numbers and values."""
    if len(payload) % _SETTING.size:
        raise ConnectionFaultError(Code.FRAME_SIZE_ERROR, "settings of a wrong length")
    return list(_SETTING.iter_unpack(payload))


def window_update(stream_id: int, increment: int) -> bytes:
    """Allow the peer so many more bytes."""
    return frame(WINDOW_UPDATE, 0, stream_id, _LONG.pack(increment))


def reset(stream_id: int, code: Code) -> bytes:
    """End a stream at once."""
    return frame(RST_STREAM, 0, stream_id, _LONG.pack(code))


def goaway(last_id: int, code: Code) -> bytes:
    """Announce that streams above `last_id` are not served."""
    return frame(GOAWAY, 0, 0, _TWO_LONGS.pack(last_id, code))


def read_long(payload: bytes) -> int:
    """Read the 31-bit number that some frames are made of."""
    if len(payload) != _LONG.size:
        raise ConnectionFaultError(Code.FRAME_SIZE_ERROR, "a frame of a wrong length")
    return int.from_bytes(payload, "big") & MAX_WINDOW


def content(payload: bytes, flags: int) -> bytes:
    """Take padding and priority off the payload of DATA or HEADERS."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ConnectionFaultError(Code.FRAME_SIZE_ERROR, "padding without its length")
        begin, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        begin += PRIORITY_BYTES
    if begin > end:
        raise ConnectionFaultError(Code.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[begin:end]
