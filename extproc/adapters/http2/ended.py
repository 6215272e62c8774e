"""Streams that we ended while their client could still send: frames of them may yet come."""

from __future__ import annotations

# A client that never learns of so many ends is not owed patience for the oldest.
_MAX_ENDED = 20_000


class EndedStreams:
    """Their ids, in the order of their end."""

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}

    def add(self, stream_id: int, *, remote_open: bool) -> None:
        """Take note of an end; of one that the client has made too nothing more can come."""
        if remote_open:
            self._ids[stream_id] = None
            if len(self._ids) > _MAX_ENDED:
                del self._ids[next(iter(self._ids))]

    def expects(self, stream_id: int) -> bool:
        """Whether frames of the stream may come."""
        return stream_id in self._ids

    def forget(self, stream_id: int) -> None:
        """Take note that the client ended it too."""
        self._ids.pop(stream_id, None)
