"""One call's stream: messages in, and answers out within the windows the client grants."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

from extproc.adapters.http2 import headers
from extproc.adapters.http2.frames import (
    DATA,
    FIRST_WINDOW,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    Code,
    ConnectionFaultError,
    StreamFaultError,
    frame,
    reset,
    window_update,
)
from extproc.adapters.http2.inbox import INTERNAL, PREFIX, Budget, CallFaultError, Inbox

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = logging.getLogger(__name__)

RECEIVE_WINDOW = 1024 * 1024
"""Bytes of one stream that may be on their way to us."""

# Who does not take our answers may send no more: the answers kept stay few.
_MAX_BACKLOG_BYTES = 256 * 1024


class Call(Protocol):
    """What a stream's messages go to. Any method may send and finish at once."""

    def receive(self, data: bytes) -> None:
        """Take in one message."""
        ...

    def half_close(self) -> None:
        """Take note that no more messages come."""
        ...

    def close(self, sent: int) -> None:
        """End, once, however it ends; so many of the messages sent went out whole."""
        ...


class Outflow:
    """What leaves a connection: frames gathered for one write, and the connection's window."""

    def __init__(self, write: Callable[[bytes], None], budget: Budget) -> None:
        self._write = write
        self._frames: list[bytes] = []
        self.budget = budget
        self.corked = False
        """While set, frames wait for `flush`."""
        self.window = FIRST_WINDOW
        self.first_window = FIRST_WINDOW
        """The window that a stream begins with."""
        self.blocked: dict[int, Stream] = {}
        """Streams with more to send than a window allows."""

    def put(self, data: bytes) -> None:
        """Send a frame, or several."""
        self._frames.append(data)
        if not self.corked:
            self.flush()

    def flush(self) -> None:
        """Write what was put."""
        if self._frames:
            frames, self._frames = self._frames, []
            self._write(b"".join(frames))

    def widen(self, increment: int) -> None:
        """Take in more window of the connection, and use it."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise ConnectionFaultError(Code.FLOW_CONTROL_ERROR, "the window is too large")
        for stream in list(self.blocked.values()):
            stream.pump()

    def widen_streams(self, streams: list[Stream], first_window: int) -> None:
        """Take in the client's new size of a stream's first window, for those open as well."""
        change, self.first_window = first_window - self.first_window, first_window
        for stream in streams:
            stream.window += change
            if stream.window > MAX_WINDOW:
                raise ConnectionFaultError(Code.FLOW_CONTROL_ERROR, "a window is too large")
            stream.pump()


class Stream:
    """The state of one stream; `on_end` is called once, when it is over."""

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_begun",
        "_closing",
        "_inbox",
        "_on_end",
        "_out",
        "_receive_window",
        "_sent",
        "call",
        "id",
        "over",
        "remote_open",
        "window",
    )

    def __init__(
        self,
        stream_id: int,
        outflow: Outflow,
        max_message_bytes: int,
        on_end: Callable[[Stream], None],
    ) -> None:
        self.id = stream_id
        self.call: Call | None = None
        self.window = outflow.first_window
        self.remote_open = True
        """Whether the client may send more."""
        self.over = False
        self._out = outflow
        self._on_end = on_end
        self._inbox = Inbox(max_message_bytes, outflow.budget)
        self._receive_window = RECEIVE_WINDOW
        self._backlog: deque[bytes] | None = None
        self._backlog_bytes = 0
        self._begun = False
        self._closing: tuple[int, str] | None = None
        self._sent = 0

    def receive(self, data: bytes, frame_bytes: int, *, ends: bool) -> None:
        """Take in a DATA frame of `frame_bytes` with padding."""
        self._receive_window -= frame_bytes
        if self._receive_window < 0:
            raise StreamFaultError(Code.FLOW_CONTROL_ERROR, "more than the stream's window")
        if ends:
            self.remote_open = False
        try:
            for message in self._inbox.feed(data):
                if self._closing is not None or self.call is None:
                    break
                self.call.receive(message)
            if ends:
                self.half_close()
        except CallFaultError as fault:
            self.finish(fault.status, str(fault))
        except Exception:  # noqa: BLE001 - one call must not end the others
            _LOG.exception("a call failed")
            self.finish(INTERNAL)
        self._credit()

    def half_close(self) -> None:
        """Take note that the client sends no more."""
        self.remote_open = False
        if self._closing is not None or self.call is None:
            return
        if self._inbox.empty:
            self.call.half_close()
        else:
            self.end(Code.PROTOCOL_ERROR)

    def send(self, data: bytes) -> None:
        """Send one message, at once or as the windows allow."""
        if self._closing is not None:
            return
        out = self._out
        if not self._begun:
            self._begun = True
            out.put(headers.opening(self.id))
        size = PREFIX.size + len(data)
        if self._backlog or size > MAX_FRAME_BYTES or size > self.window or size > out.window:
            self._queue(data)
            return
        self.window -= size
        out.window -= size
        out.put(frame(DATA, 0, self.id, PREFIX.pack(0, len(data)) + data))
        self._sent += 1

    def finish(self, status: int, text: str = "") -> None:
        """End the call with a gRPC status, behind what was sent."""
        if self._closing is None:
            self._closing = (status, text)
            if not self._backlog:
                self._close()

    def refuse(self, refusal: int) -> None:
        """Answer a request that is no call with an HTTP status."""
        self._closing = (0, "")
        self._out.put(headers.refusing(self.id, refusal))
        self._stop_client()
        self.end(None)

    def end(self, code: Code | None) -> None:
        """Be over at once; tell the client by a reset, unless `code` is None."""
        if self.over:
            return
        self.over = True
        self._closing = self._closing or (0, "")
        self._inbox.clear()
        self._out.budget.give_back(self._backlog_bytes)
        self._backlog, self._backlog_bytes = None, 0
        self._out.blocked.pop(self.id, None)
        if code is not None:
            self._out.put(reset(self.id, code))
        self._on_end(self)
        if self.call is not None:
            self.call.close(self._sent)

    def widen(self, increment: int) -> None:
        """Take in more window, and use it."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise StreamFaultError(Code.FLOW_CONTROL_ERROR, "the window is too large")
        self.pump()

    def pump(self) -> None:
        """Send of what waits as much as the windows allow."""
        out, backlog = self._out, self._backlog
        while backlog:
            room = min(self.window, out.window, MAX_FRAME_BYTES)
            if room <= 0:
                out.blocked[self.id] = self
                return
            part = backlog[0][:room]
            if len(part) < len(backlog[0]):
                backlog[0] = backlog[0][room:]
            else:
                backlog.popleft()
                self._sent += 1
            self._spend(len(part))
            out.put(frame(DATA, 0, self.id, part))
        out.blocked.pop(self.id, None)
        if self._closing is not None and not self.over:
            self._close()
        else:
            self._credit()

    def _spend(self, size: int) -> None:
        self.window -= size
        self._out.window -= size
        self._backlog_bytes -= size
        self._out.budget.give_back(size)

    def _queue(self, data: bytes) -> None:
        whole = PREFIX.pack(0, len(data)) + data
        try:
            self._out.budget.take(len(whole))
        except CallFaultError:
            self.end(Code.ENHANCE_YOUR_CALM)
            return
        if self._backlog is None:
            self._backlog = deque()
        self._backlog.append(whole)
        self._backlog_bytes += len(whole)
        self.pump()

    def _close(self) -> None:
        status, text = self._closing or (0, "")
        self._out.put(headers.closing(self.id, status, text, begun=self._begun))
        self._stop_client()
        self.end(None)

    def _stop_client(self) -> None:
        """Tell a client that may still be sending that the answer is whole: section 8.1."""
        if self.remote_open:
            self._out.put(reset(self.id, Code.NO_ERROR))

    def _credit(self) -> None:
        """Let the client send more, unless it does not take what we answer."""
        used = RECEIVE_WINDOW - self._receive_window
        if used < RECEIVE_WINDOW // 2 or self._backlog_bytes > _MAX_BACKLOG_BYTES or self.over:
            return
        if self.remote_open:
            self._receive_window = RECEIVE_WINDOW
            self._out.put(window_update(self.id, used))
