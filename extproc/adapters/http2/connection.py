"""One client's HTTP/2 connection as a sans-IO object: bytes in, calls made, bytes out.

Nothing here waits. A peer that breaks the protocol gets GOAWAY with the code that says
how, and the connection is over; one that breaks it within a stream loses that stream.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.adapters.http2 import frames
from extproc.adapters.http2.allowance import Allowance
from extproc.adapters.http2.control import CONNECTION_WINDOW, Control
from extproc.adapters.http2.ended import EndedStreams
from extproc.adapters.http2.frames import (
    Code,
    ConnectionFaultError,
    FrameReader,
    StreamFaultError,
)
from extproc.adapters.http2.headers import (
    HeaderBlock,
    HeaderReader,
    check_trailers,
)
from extproc.adapters.http2.inbox import UNIMPLEMENTED, Budget
from extproc.adapters.http2.stream import Call, Outflow, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may ask for."""

    max_streams: int = 1_000
    max_message_bytes: int = 4 * 1024 * 1024


class Connection:
    """Serves `methods`, by path; `write` and `disconnect` are the way out.

    `disconnect` is called once, after the last write.
    """

    def __init__(
        self,
        methods: Mapping[str, Callable[[Stream], Call]],
        limits: Limits,
        *,
        budget: Budget,
        clock: Callable[[], float],
        write: Callable[[bytes], None],
        disconnect: Callable[[], None],
    ) -> None:
        self._methods = methods
        self._limits = limits
        self._disconnect = disconnect
        self._out = Outflow(write, budget)
        self._reader = FrameReader()
        self._headers = HeaderReader()
        self._allowance = Allowance(clock)
        self._streams: dict[int, Stream] = {}
        self._ended = EndedStreams()
        self._last_id = 0
        self._receive_window = CONNECTION_WINDOW
        self._block: HeaderBlock | None = None
        self._control = Control(self._out, self._allowance)
        self.closed = False
        """Whether nothing more is written."""
        self._actions = {
            frames.DATA: self._on_data,
            frames.HEADERS: self._on_headers,
            frames.PRIORITY: self._control.on_priority,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._control.on_push,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._control.on_goaway,
            frames.WINDOW_UPDATE: self._on_window_update,
            frames.CONTINUATION: self._on_continuation,
        }
        self._control.greet(limits.max_streams)

    @property
    def streams(self) -> int:
        """Streams now open."""
        return len(self._streams)

    @property
    def settled(self) -> bool:
        """Whether the client has sent its preface and settings."""
        return self._control.settled

    def receive(self, data: bytes) -> None:
        """Take in bytes, make the calls they complete, and write what is to be answered."""
        if not self.closed:
            self._receive(data)

    def drain(self) -> None:
        """Take no new streams, end when the open ones have."""
        if not self.closed:
            self._control.leave()

    def probe(self) -> None:
        """Close when the last probe was not answered, else ask whether the client lives."""
        if not self.closed and not self._control.probe():
            self._shut(Code.NO_ERROR)

    def abort(self, code: Code = Code.NO_ERROR) -> None:
        """End every stream and close."""
        for stream in list(self._streams.values()):
            stream.end(None if self.closed else Code.CANCEL)
        self._shut(code)

    def lose(self) -> None:
        """Take note that the client is gone."""
        self.closed = True
        for stream in list(self._streams.values()):
            stream.end(None)

    def _receive(self, data: bytes) -> None:
        self._out.corked = True
        try:
            for kind, flags, stream_id, payload in self._reader.feed(data):
                self._take(kind, flags, stream_id, payload)
                if self.closed:
                    break
        except ConnectionFaultError as fault:
            _LOG.info("a client's connection is closed: %s", fault)
            self._shut(fault.code)
        except Exception:  # noqa: BLE001 - costs one connection, never the process
            _LOG.exception("a client's connection is closed")
            self._shut(Code.INTERNAL_ERROR)
        self._out.corked = False
        self._out.flush()
        self._leave_when_done()

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a header block was interrupted")
        if not self._control.settled and kind != frames.SETTINGS:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "settings must come first")
        action = self._actions.get(kind)
        if action is None:
            self._allowance.spend()
            return
        try:
            action(flags, stream_id, payload)
        except StreamFaultError as fault:
            self._end_stream(stream_id, fault.code)

    def _end_stream(self, stream_id: int, code: Code) -> None:
        stream = self._streams.get(stream_id)
        self._allowance.spend()
        if stream is not None:
            stream.end(code)
        else:
            self._out.put(frames.reset(stream_id, code))

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFaultError(Code.FLOW_CONTROL_ERROR, "more than the window")
        if self._receive_window < CONNECTION_WINDOW // 2:
            self._out.put(frames.window_update(0, CONNECTION_WINDOW - self._receive_window))
            self._receive_window = CONNECTION_WINDOW
        ends = bool(flags & frames.END_STREAM)
        data = frames.content(payload, flags & frames.PADDED) if flags & frames.PADDED else payload
        if not data and not ends:
            self._allowance.spend()
        stream = self._streams.get(stream_id)
        if stream is None or not stream.remote_open:
            self._expect_late(stream_id, ends=ends)
            return
        stream.receive(data, size, ends=ends)

    def _expect_late(self, stream_id: int, *, ends: bool) -> None:
        """Pass over what was sent before the client knew of the stream's end."""
        if stream_id > self._last_id or not stream_id % 2:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a stream that was never opened")
        if not self._ended.expects(stream_id) and stream_id <= self._control.served_id:
            raise ConnectionFaultError(Code.STREAM_CLOSED, "a stream that is closed")
        if ends:
            self._ended.forget(stream_id)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id % 2:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a stream id not of a client")
        optional = flags & (frames.PADDED | frames.WITH_PRIORITY)
        data = frames.content(payload, optional) if optional else payload
        ends = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, data, ends=ends)
        else:
            self._block = HeaderBlock(stream_id, data, ends=ends)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None or block.stream_id != stream_id:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a continuation of nothing")
        block.add(payload)
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(stream_id, block.whole(), ends=block.ends)

    def _on_block(self, stream_id: int, block: bytes, *, ends: bool) -> None:
        # Read whatever becomes of it: the table must follow.
        head = self._headers.read(block)
        stream = self._streams.get(stream_id)
        if stream is not None and stream.remote_open:
            check_trailers(head, ends=ends)
            stream.half_close()
            return
        if stream is not None or stream_id <= self._last_id:
            self._expect_late(stream_id, ends=ends)
            return
        self._last_id = stream_id
        if stream_id > self._control.served_id or len(self._streams) >= self._limits.max_streams:
            self._ended.add(stream_id, remote_open=not ends)
            raise StreamFaultError(Code.REFUSED_STREAM, "too many streams")
        if head.fault:
            self._ended.add(stream_id, remote_open=not ends)
            raise StreamFaultError(Code.PROTOCOL_ERROR, head.fault)
        self._open(stream_id, head.path, head.refusal, ends=ends)

    def _open(self, stream_id: int, path: str, refusal: int, *, ends: bool) -> None:
        stream = Stream(stream_id, self._out, self._limits.max_message_bytes, self._forget)
        stream.remote_open = not ends
        self._streams[stream_id] = stream
        method = self._methods.get(path)
        if refusal:
            stream.refuse(refusal)
        elif method is None:
            stream.finish(UNIMPLEMENTED, "no such method")
        else:
            stream.call = method(stream)
            if ends:
                stream.half_close()

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.id]
        self._ended.add(stream.id, remote_open=stream.remote_open)
        if not self._out.corked:
            self._leave_when_done()

    def _on_reset(self, _flags: int, stream_id: int, payload: bytes) -> None:
        frames.read_long(payload)
        if not stream_id or stream_id > self._last_id:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a reset of no stream")
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._allowance.spend()
            stream.remote_open = False
            stream.end(None)
        self._ended.forget(stream_id)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._control.on_settings(flags, stream_id, payload, list(self._streams.values()))

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._control.on_ping(flags, stream_id, payload, self._last_id)

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        increment = frames.read_long(payload)
        if not stream_id:
            if not increment:
                raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a window of no more")
            self._out.widen(increment)
            return
        if stream_id > self._last_id:
            raise ConnectionFaultError(Code.PROTOCOL_ERROR, "a window of no stream")
        stream = self._streams.get(stream_id)
        if stream is not None:
            if not increment:
                raise StreamFaultError(Code.PROTOCOL_ERROR, "a window of no more")
            stream.widen(increment)

    def _leave_when_done(self) -> None:
        if self._control.may_leave and not self._streams:
            self._shut(Code.NO_ERROR)

    def _shut(self, code: Code) -> None:
        """Say goodbye, close, and end what is open."""
        if self.closed:
            return
        self._out.put(frames.goaway(self._last_id, code))
        self._out.corked = False
        self._out.flush()
        self.closed = True
        self._disconnect()
        for stream in list(self._streams.values()):
            stream.end(None)
