"""What an operator sees of each request: counted, logged, recorded, passed on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.adapters.access_log import Outcome
    from extproc.adapters.metrics import Metrics
    from extproc.adapters.record import Recorder
    from extproc.core.decision import Decision
    from extproc.core.errors import RequestRefusedError

_LOG = logging.getLogger("extproc")


class Watch:
    """The server's observer: counts, logs, and passes decisions on."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        log: bool,
        on_decision: Callable[[Decision], None] | None,
        recorder: Recorder | None,
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._on_decision = on_decision
        self._recorder = recorder

    def on_stream_open(self) -> None:
        """Count a stream that began."""
        self._metrics.open_stream()

    def on_stream_close(self) -> None:
        """Count a stream that ended."""
        self._metrics.close_stream()

    def on_decision(self, decision: Decision, seconds: float) -> None:
        """Tell a decision."""
        self._metrics.count_decision(decision, seconds)
        if self._log:
            _LOG.info(
                "decision %s endpoint=%s policy=%s reason=%s matched=%d/%d us=%d",
                decision.decision_id,
                decision.destination,
                decision.policy,
                decision.reason,
                decision.matched_tokens,
                decision.prompt_tokens,
                seconds * 1e6,
            )
        if self._recorder:
            self._recorder.routed(decision)
        if self._on_decision:
            self._on_decision(decision)

    def on_refused(self, error: RequestRefusedError) -> None:
        """Tell a refusal."""
        self._metrics.count_refusal(error)
        _LOG.debug("refused: %s", error.code)

    def on_error(self, phase: str, error: Exception) -> None:
        """Tell a fault of ours; the place, not the text, which may quote the prompt."""
        self._metrics.count_error()
        _LOG.warning("undecided at %s: %s%s", phase, type(error).__name__, _place(error))

    def on_finished(self, outcome: Outcome) -> None:
        """Tell what became of a request."""
        self._metrics.count_finish(attempts=outcome.attempts, fell_back=outcome.fell_back)
        if self._recorder and outcome.decision_id is not None:
            self._recorder.finished(
                outcome.decision_id,
                served=outcome.served,
                status=outcome.status,
                attempts=outcome.attempts,
                duration_s=outcome.duration_s,
            )


def _place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
