"""Envoy's gRPC access log: what became of each request, told within its flush interval."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from extproc.adapters import wire
from extproc.adapters.exchange import Sink
from extproc.adapters.proto import access_log_pb2 as pb
from extproc.core.decision import DecisionId
from extproc.core.endpoint import Endpoint
from extproc.core.errors import EndpointError
from extproc.core.events import Finished
from extproc.core.phases import DESTINATION_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.protobuf.duration_pb2 import Duration

ACCESS_LOG_SERVICE = "envoy.service.accesslog.v3.AccessLogService"

_ENDS = (pb.NotSet, pb.DownstreamEnd)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one request as Envoy saw it.

    `decision_id` is None for a request we did not decide; `served` None when no endpoint
    took it; `attempts` counts the first one; `first_byte_s` is None when no byte came.
    """

    decision_id: DecisionId | None
    destination: Endpoint | None
    served: Endpoint | None
    status: int
    attempts: int
    duration_s: float
    first_byte_s: float | None

    @property
    def fell_back(self) -> bool:
        """Whether another endpoint than the destination served the request."""
        return self.served is not None and self.served != self.destination


class AccessLog:
    """The access log service: releases what requests held, and passes on every outcome."""

    def __init__(
        self,
        apply: Callable[[Finished, float], None],
        clock: Callable[[], float],
        on_finished: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._apply = apply
        self._clock = clock
        self._on_finished = on_finished

    def sink(self) -> Sink:
        """Give the service for a server."""
        path = f"/{ACCESS_LOG_SERVICE}/StreamAccessLogs"
        answer = pb.StreamAccessLogsResponse().SerializeToString()
        return Sink(path=path, record=self._take, answer=answer)

    def record(self, data: bytes) -> None:
        """Take in one StreamAccessLogsMessage; bytes that are none change nothing."""
        for outcome in read_outcomes(data):
            if outcome.decision_id is not None:
                finished = Finished(
                    decision_id=outcome.decision_id, served=outcome.served, status=outcome.status
                )
                self._apply(finished, self._clock())
            if self._on_finished:
                self._on_finished(outcome)

    def _take(self, data: bytes) -> None:
        try:
            self.record(data)
        except Exception:  # noqa: BLE001 - one bad entry must not end the whole log
            _LOG.exception("an access log message could not be taken in")


def read_outcomes(data: bytes) -> Iterator[Outcome]:
    """Read the ends of requests in one message; entries of running requests are left out."""
    try:
        message = pb.StreamAccessLogsMessage.FromString(data)
    except DecodeError:
        _LOG.warning("not a StreamAccessLogsMessage: %d bytes", len(data))
        return
    for entry in message.http_logs.log_entry:
        if entry.common_properties.access_log_type in _ENDS:
            yield _read_outcome(entry)


def _read_outcome(entry: pb.HttpAccessLogEntry) -> Outcome:
    common = entry.common_properties
    decision_id, destination = _read_decision(common.metadata)
    upstream = common.upstream_remote_address.socket_address
    came = common.HasField("time_to_first_upstream_rx_byte")
    return Outcome(
        decision_id=DecisionId(decision_id) if decision_id else None,
        destination=_parse(destination.partition(",")[0]),
        served=_parse(_join(upstream.address, upstream.port_value)),
        status=entry.response.response_code.value,
        attempts=common.upstream_request_attempt_count,
        duration_s=_seconds(common.duration),
        first_byte_s=_seconds(common.time_to_first_upstream_rx_byte) if came else None,
    )


def _read_decision(metadata: pb.Metadata) -> tuple[str, str]:
    if wire.DECISION_NAMESPACE not in metadata.filter_metadata:
        return "", ""
    fields = metadata.filter_metadata[wire.DECISION_NAMESPACE].fields
    decision_id, destination = (
        fields[key].string_value if key in fields else ""
        for key in (wire.DECISION_ID_KEY, DESTINATION_HEADER)
    )
    return decision_id, destination


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse(text: str) -> Endpoint | None:
    try:
        return Endpoint.parse(text)
    except EndpointError:
        return None


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
