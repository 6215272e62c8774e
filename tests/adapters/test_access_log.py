"""Envoy's access log entries, written with envoy-data-plane, become ends of requests."""

from datetime import timedelta

import pytest
from envoy_data_plane.envoy.config.core.v3 import Address, Metadata, Pipe, SocketAddress
from envoy_data_plane.envoy.data.accesslog.v3 import (
    AccessLogCommon,
    AccessLogType,
    HttpAccessLogEntry,
    HttpResponseProperties,
)
from envoy_data_plane.envoy.service.accesslog.v3 import (
    StreamAccessLogsMessage,
    StreamAccessLogsMessageHttpAccessLogEntries,
)
from envoy_data_plane.google.protobuf import Struct, Value
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.access_log import AccessLog, Outcome, read_outcomes
from extproc.core.endpoint import Endpoint
from extproc.core.events import Finished

A, B = Endpoint.parse("10.0.0.1:8000"), Endpoint.parse("10.0.0.2:8000")


def served_by(host, port=8000):
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def entry(*, decision_id="r-7", destination=f"{A},{B}", status=200, served=None, **common):
    fields = {"x-extproc-decision-id": decision_id, "x-gateway-destination-endpoint": destination}
    struct = Struct(fields={k: Value(string_value=v) for k, v in fields.items() if v})
    return HttpAccessLogEntry(
        common_properties=AccessLogCommon(
            metadata=Metadata(filter_metadata={"envoy.lb": struct}),
            upstream_remote_address=served,
            **common,
        ),
        response=HttpResponseProperties(response_code=status),
    )


def message(*entries):
    logs = StreamAccessLogsMessageHttpAccessLogEntries(log_entry=list(entries))
    return bytes(StreamAccessLogsMessage(http_logs=logs))


def test_an_entry_tells_who_served_after_how_many_attempts_and_when():
    (outcome,) = read_outcomes(
        message(
            entry(
                served=served_by("10.0.0.2"),
                upstream_request_attempt_count=2,
                duration=timedelta(seconds=3.5),
                time_to_first_upstream_rx_byte=timedelta(milliseconds=250),
            )
        )
    )

    assert outcome == Outcome(
        decision_id="r-7",
        destination=A,
        served=B,
        status=200,
        attempts=2,
        duration_s=3.5,
        first_byte_s=0.25,
    )
    assert outcome.fell_back


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (served_by("10.0.0.1"), A),
        (served_by("::1"), Endpoint.parse("[::1]:8000")),
        (Address(pipe=Pipe(path="/run/x.sock")), None),
        (None, None),
    ],
    ids=["ipv4", "ipv6", "a socket file", "nobody"],
)
def test_the_served_endpoint_is_read_in_canonical_form(address, expected):
    (outcome,) = read_outcomes(message(entry(served=address)))

    assert outcome.served == expected
    assert outcome.first_byte_s is None


@pytest.mark.parametrize("kind", list(AccessLogType))
def test_only_the_end_of_a_request_counts(kind):
    ends = kind in {AccessLogType.NotSet, AccessLogType.DownstreamEnd}

    assert len(list(read_outcomes(message(entry(access_log_type=kind))))) == ends


def test_a_request_we_did_not_decide_has_no_decision():
    bare = HttpAccessLogEntry()
    outcomes = list(read_outcomes(message(entry(decision_id="", destination=""), bare)))

    assert [o.decision_id for o in outcomes] == [None, None]
    assert [o.destination for o in outcomes] == [None, None]


@given(st.binary(max_size=80))
def test_any_bytes_are_read_without_an_error(data):
    list(read_outcomes(data))


def test_every_end_is_applied_and_passed_on():
    applied, outcomes = [], []
    log = AccessLog(lambda e, now_s: applied.append((e, now_s)), lambda: 42.0, outcomes.append)
    log.record(message(entry(served=served_by("10.0.0.2"), status=503), entry(decision_id="")))

    assert applied == [(Finished(decision_id="r-7", served=B, status=503), 42.0)]
    assert [o.status for o in outcomes] == [503, 200]


def test_an_outcome_needs_no_listener():
    applied = []
    AccessLog(lambda e, _: applied.append(e), lambda: 0.0).record(message(entry()))

    assert len(applied) == 1
