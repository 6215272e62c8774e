"""The frames that concern a connection as a whole: settings, signs of life, farewell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.adapters.http2 import frames
from extproc.adapters.http2.frames import Code, ConnectionFaultError, Setting, StreamFaultError
from extproc.adapters.http2.headers import MAX_LIST_BYTES
from extproc.adapters.http2.stream import RECEIVE_WINDOW

if TYPE_CHECKING:
    from extproc.adapters.http2.allowance import Allowance
    from extproc.adapters.http2.stream import Outflow, Stream

CONNECTION_WINDOW = 16 * 1024 * 1024
"""Bytes of the whole connection that may be on their way to us."""

# What our pings carry tells their answers apart.
_LEAVING = b"leaving\0"
_ALIVE = b"alive?\0\0"


class Control:
    """Answers those frames, and keeps what they change."""

    def __init__(self, outflow: Outflow, allowance: Allowance) -> None:
        self._out = outflow
        self._allowance = allowance
        self._leaving = self._awaiting_pong = False
        self.settled = False
        """Whether the client has sent its settings."""
        self.served_id = frames.MAX_WINDOW
        """Streams above it are not served."""

    @property
    def may_leave(self) -> bool:
        """Whether the client knows that no more streams are served."""
        return self._leaving and self.served_id < frames.MAX_WINDOW

    def greet(self, max_streams: int) -> None:
        """Send our settings, before anything else."""
        greeting = {
            Setting.MAX_CONCURRENT_STREAMS: max_streams,
            Setting.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW,
            Setting.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
        }
        wider = frames.window_update(0, CONNECTION_WINDOW - frames.FIRST_WINDOW)
        self._out.put(frames.settings_frame(greeting) + wider)

    def leave(self) -> None:
        """Announce that no more streams will be served.

        Streams already on their way are: a first GOAWAY names no limit, the second comes
        when the client has surely read the first.
        """
        if not self._leaving:
            self._leaving = True
            goaway = frames.goaway(frames.MAX_WINDOW, Code.NO_ERROR)
            self._out.put(goaway + frames.frame(frames.PING, 0, 0, _LEAVING))

    def probe(self) -> bool:
        """Ask whether the client lives; False when it has not answered the last time."""
        if self._awaiting_pong:
            return False
        self._awaiting_pong = True
        self._out.put(frames.frame(frames.PING, 0, 0, _ALIVE))
        return True

    def on_settings(
        self, flags: int, stream_id: int, payload: bytes, streams: list[Stream]
    ) -> None:
        """Take in the client's settings, for `streams` as well, or its answer to ours."""
        if stream_id:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "settings of a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFaultError(Code.FRAME_SIZE_ERROR, "settings in an answer")
            return
        self.settled = True
        self._allowance.spend()
        for name, value in frames.read_settings(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise ConnectionFaultError(Code.FLOW_CONTROL_ERROR, "a window is too large")
                self._out.widen_streams(streams, value)
            elif not _in_range(name, value):
                raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a setting out of range")
        self._out.put(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def on_ping(self, flags: int, stream_id: int, payload: bytes, last_id: int) -> None:
        """Answer a ping, or take in the answer to ours; `last_id` is the last stream seen."""
        if stream_id:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a ping of a stream")
        if len(payload) != len(_ALIVE):
            raise ConnectionFaultError(Code.FRAME_SIZE_ERROR, "a ping of a wrong length")
        if not flags & frames.ACK:
            self._allowance.spend()
            self._out.put(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _ALIVE:
            self._awaiting_pong = False
        elif payload == _LEAVING and self._leaving:
            self.served_id = last_id
            self._out.put(frames.goaway(last_id, Code.NO_ERROR))

    def on_goaway(self, _flags: int, stream_id: int, _payload: bytes) -> None:
        """Take note that the client opens no more streams, which it shows by itself."""
        if stream_id:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a farewell of a stream")

    def on_push(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        """Refuse what only a server may do."""
        raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a client must not push")

    def on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Pass over a wish: every message is answered as it comes."""
        self._allowance.spend()
        if not stream_id:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "priority of no stream")
        if len(payload) != frames.PRIORITY_BYTES:
            raise StreamFaultError(Code.FRAME_SIZE_ERROR, "priority of a wrong length")


def _in_range(name: int, value: int) -> bool:
    if name == Setting.ENABLE_PUSH:
        return value <= 1
    if name == Setting.MAX_FRAME_SIZE:
        return frames.MAX_FRAME_BYTES <= value < frames.FRAME_LIMIT
    return True
