"""The decision record: what was routed and how it ended, as JSON lines without prompt text.

One `routed` row for each decision and one `finished` row for each end, joined by `id`.
Chains are keyed hashes; a row holds only the blocks beyond those it shares with the
conversation's row before. `extproc simulate` reads it; docs/record.md has the format.
"""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from collections import OrderedDict
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from queue import Full, Queue
from struct import pack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from extproc.core.decision import Chain, Decision, DecisionId, KeyHash
    from extproc.core.endpoint import Endpoint

# Rows waiting for the disk; beyond it rows are dropped, never a request delayed.
_MAX_WAITING_ROWS = 10_000
# Conversations whose last chain is kept, to write only what is new of the next one.
_MAX_CONVERSATIONS = 10_000


class Recorder:
    """Writes rows from a thread of its own; at `max_bytes` the file becomes `FILE.1`.

    Times are seconds of `clock`, wall time. Raises OSError when the file can't be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        clock: Callable[[], float],
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        file = RotatingFileHandler(
            path, maxBytes=max(1, max_bytes // 2), backupCount=1, encoding="utf-8"
        )
        self._queue = _DroppingQueue(Queue(_MAX_WAITING_ROWS), on_drop)
        self._listener = QueueListener(self._queue.queue, file)
        self._file = file
        self._chains: OrderedDict[KeyHash, Chain] = OrderedDict()
        self._listener.start()

    def routed(self, decision: Decision) -> None:
        """Record a decision."""
        request = decision.request
        row: dict[str, object] = {
            "event": "routed",
            "at": round(self._clock(), 6),
            "id": decision.decision_id,
            "endpoint": decision.destination,
            "policy": decision.policy,
            "reason": decision.reason.value,
            "matched": decision.matched_tokens,
            "prompt_tokens": request.prompt_tokens,
            "block_tokens": request.block_tokens,
            "namespace": f"{request.namespace:016x}",
            "tier1": f"{request.tier1:016x}",
            "tier1_tokens": request.tier1_tokens,
            "tier2": f"{request.tier2:016x}",
            "session": request.session,
        }
        self._write(row | self._delta(request.tier2, request.chains))

    def finished(
        self,
        decision_id: DecisionId,
        *,
        served: Endpoint | None,
        status: int,
        attempts: int,
        duration_s: float,
    ) -> None:
        """Record the end of a request, as the access log told it."""
        self._write(
            {
                "event": "finished",
                "at": round(self._clock(), 6),
                "id": decision_id,
                "served": served,
                "status": status,
                "attempts": attempts,
                "duration_s": round(duration_s, 6),
            }
        )

    def close(self) -> None:
        """Write what waits and close the file."""
        self._listener.stop()
        self._file.close()

    def _delta(self, tier2: KeyHash, chains: tuple[Chain, ...]) -> dict[str, object]:
        """Give `keep`, the blocks shared with the conversation's row before, and the rest.

        A body of several prompts is written as its first one: they are routed as a whole.
        """
        chain = chains[0] if chains else ()
        before = self._chains.pop(tier2, ())
        keep = next(
            (n for n, (old, new) in enumerate(zip(before, chain, strict=False)) if old != new),
            min(len(before), len(chain)),
        )
        self._chains[tier2] = chain
        if len(self._chains) > _MAX_CONVERSATIONS:
            self._chains.popitem(last=False)
        fresh = chain[keep:]
        return {"keep": keep, "blocks": b64encode(pack(f"<{len(fresh)}Q", *fresh)).decode()}

    def _write(self, row: Mapping[str, object]) -> None:
        text = json.dumps(row, separators=(",", ":"))
        self._queue.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


class _DroppingQueue(QueueHandler):
    queue: Queue[logging.LogRecord]

    def __init__(self, queue: Queue[logging.LogRecord], on_drop: Callable[[], None]) -> None:
        super().__init__(queue)
        self._on_drop = on_drop

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self._on_drop()
