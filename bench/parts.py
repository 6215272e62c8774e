"""Where one request's time goes in our process: each part of the way, measured by itself.

The request is a chat body in Envoy's default flow: headers, body, two answers, and the
entry of the access log. The carrier's part is what a whole request costs over a connection
(our own listener, without a socket) less what the exchange costs.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import jiter
from hpack import Encoder

from bench.bodies import chat_body
from bench.decision import medians_us
from bench.figures import Figure
from extproc.adapters import wire
from extproc.adapters.access_log import AccessLog
from extproc.adapters.exchange import PROCESS_METHOD, Exchanges, SilentObserver
from extproc.adapters.http2 import frames
from extproc.adapters.http2.calls import process_method
from extproc.adapters.http2.connection import Connection, Limits
from extproc.adapters.http2.inbox import PREFIX, Budget
from extproc.adapters.metrics import Metrics
from extproc.adapters.proto import access_log_pb2, ext_proc_pb2
from extproc.core.blocks import canonical, hash_chain
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointUp, Finished
from extproc.core.intake import IntakeSettings, read_request
from extproc.core.phases import Phase, StreamSettings, reply
from extproc.core.prompt import extract_prompt
from extproc.core.router import Router, RouterSettings, routed

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.decision import Decision, RoutingRequest

_PATH = "/v1/chat/completions"
_SIZES = {"1 KB": 1_024, "16 KB": 16_384, "128 KB": 131_072, "1 MB": 1_048_576}
_ENDPOINTS = 16
# What the shipped configuration lets Envoy send.
_HEADERS = {
    ":path": _PATH,
    ":method": "POST",
    "content-length": "0",
    "content-type": "application/json",
    "x-session-id": "6c4b5c6e-5b7e-4a6f-9a74-1f6a5e2f5a11",
}


def measure(*, quick: bool) -> list[Figure]:
    """Measure every part at every size."""
    sizes = list(_SIZES.items())[: 1 if quick else None]
    cases = {(label, name): call for label, size in sizes for name, call in _cases(size).items()}
    times = medians_us(cases, rounds=3 if quick else 11)
    return [
        Figure(part=f"parts, {label}", case=name, value=value, unit="µs")
        for (label, name), value in times.items()
    ]


def _cases(size: int) -> dict[str, Callable[[], object]]:
    body = chat_body(size, 1, shared_bytes=size // 2)
    bench = _Bench(body)
    headers, whole = bench.messages
    prompt = extract_prompt(_PATH, body, complete=True)
    if prompt is None:
        raise AssertionError(body)
    text = canonical(prompt.sequences[0])
    request = bench.read()
    decision = bench.router.decide(request, 0.0)
    answer = reply(Phase.REQUEST_BODY, decision)
    metrics = Metrics(snapshot=tuple, is_ready=lambda: True)
    entry = _log_entry(decision)
    log = AccessLog(lambda _event, _now_s: None, time.monotonic)
    return {
        "whole request over a connection": bench.serve,
        "· exchange": bench.exchange,
        "·· decode headers": lambda: wire.decode(headers),
        "·· decode body": lambda: wire.decode(whole),
        "·· read_request": bench.read,
        "··· JSON alone": lambda: jiter.from_json(body),
        "··· prompt": lambda: extract_prompt(_PATH, body, complete=True),
        "··· canonical text": lambda: canonical(prompt.sequences[0]),
        "··· hashing": lambda: hash_chain(text, block_bytes=512, max_blocks=1_024, seed=1),
        "·· choose": lambda: bench.router.decide(request, 0.0),
        "·· record and release": lambda: bench.record(decision),
        "·· encode": lambda: wire.encode(answer),
        "count": lambda: metrics.count_decision(decision, 0.0001),
        "access log entry": lambda: log.record(entry),
    }


class _Bench:
    """One router, and a connection to it whose client repeats one request."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.messages = _messages(body)
        self.router = Router(RouterSettings(), router_id="bench")
        for number in range(_ENDPOINTS):
            endpoint = Endpoint(f"10.0.0.{number + 1}:8000")
            self.router.apply(EndpointUp(endpoint=endpoint), 0.0)
        self._exchanges = Exchanges(
            router=self.router,
            intake=IntakeSettings(),
            stream=StreamSettings(),
            clock=time.monotonic,
            observer=_Releasing(self.router),
            max_streams=100,
        )
        self._ids = itertools.count(1, 2)
        self._answers: list[bytes] = []
        self._connection = Connection(
            {PROCESS_METHOD: process_method(self._exchanges, _never)},
            Limits(max_message_bytes=2 * len(body) + 65_536),
            budget=Budget(4 * len(body) + 65_536),
            clock=time.monotonic,
            write=self._answers.append,
            disconnect=lambda: None,
        )
        encoder = Encoder()
        self._connection.receive(frames.PREFACE + frames.settings_frame({}))
        self._connection.receive(frames.window_update(0, 2**30))
        self._block = encoder.encode(_CALL)
        self.serve()
        # What the table learned is sent as indices from here on, as Envoy does.
        self._block = encoder.encode(_CALL)

    def serve(self) -> None:
        """Serve one request as it comes from Envoy, in two pieces."""
        stream_id = next(self._ids)
        headers, body = (PREFIX.pack(0, len(data)) + data for data in self.messages)
        opening = frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, self._block)
        self._connection.receive(opening + frames.frame(frames.DATA, 0, stream_id, headers))
        limit = frames.MAX_FRAME_BYTES
        self._connection.receive(
            b"".join(
                frames.frame(frames.DATA, 0, stream_id, body[at : at + limit])
                for at in range(0, len(body), limit)
            )
        )
        self._connection.receive(frames.reset(stream_id, frames.Code.NO_ERROR))
        self._answers.clear()

    def exchange(self) -> None:
        """Serve one request without a connection."""
        exchange = self._exchanges.begin()
        for message in self.messages:
            exchange.receive(message)
        exchange.close()

    def read(self) -> RoutingRequest:
        """Read the body as the stream does."""
        return read_request(
            _PATH, _HEADERS, self._body, complete=True, subset=None, settings=IntakeSettings()
        )

    def record(self, decision: Decision) -> None:
        """Record a choice and its end."""
        self.router.apply(routed(decision), 0.0)
        self.router.apply(Finished(decision_id=decision.decision_id), 0.0)


class _Releasing(SilentObserver):
    """Ends each request at once, so that nothing piles up."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def on_decision(self, decision: Decision, seconds: float) -> None:
        del seconds
        self._router.apply(Finished(decision_id=decision.decision_id), 0.0)


_CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PROCESS_METHOD),
    (":authority", "extproc"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("x-envoy-internal", "true"),
    ("x-forwarded-for", "127.0.0.1"),
]


def _never(_delay_s: float, _call: Callable[[], None]) -> _NoTimer:
    return _NoTimer()


class _NoTimer:
    def cancel(self) -> None:
        """Nothing was to happen."""


def _messages(body: bytes) -> tuple[bytes, bytes]:
    opening, whole = ext_proc_pb2.ProcessingRequest(), ext_proc_pb2.ProcessingRequest()
    for name, value in (_HEADERS | {"content-length": str(len(body))}).items():
        header = opening.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    # Envoy sends it with every message, empty.
    opening.metadata_context.SetInParent()
    whole.metadata_context.SetInParent()
    opening.protocol_config.request_body_mode = ext_proc_pb2.BUFFERED_PARTIAL
    whole.request_body.body = body
    whole.request_body.end_of_stream = True
    return opening.SerializeToString(), whole.SerializeToString()


def _log_entry(decision: Decision) -> bytes:
    message = access_log_pb2.StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add()
    common = entry.common_properties
    fields = common.metadata.filter_metadata[wire.DECISION_NAMESPACE].fields
    fields["x-gateway-destination-endpoint"].string_value = decision.header_value
    fields[wire.DECISION_ID_KEY].string_value = decision.decision_id
    fields["x-extproc-reason"].string_value = decision.reason.value
    fields["x-extproc-policy"].string_value = decision.policy
    fields["x-extproc-matched-tokens"].number_value = decision.matched_tokens
    fields["x-extproc-prompt-tokens"].number_value = decision.prompt_tokens
    common.upstream_remote_address.socket_address.address = "10.0.0.1"
    common.upstream_remote_address.socket_address.port_value = 8000
    common.duration.nanos = common.time_to_first_upstream_rx_byte.nanos = 1_000_000
    entry.response.response_code.value = 200
    data: bytes = message.SerializeToString()
    return data
