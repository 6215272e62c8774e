"""The values of one ext_proc stream: events from Envoy, and the actions that answer them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.decision import Decision
    from extproc.core.errors import RequestRefusedError

DESTINATION_HEADER = "x-gateway-destination-endpoint"
"""The request header, and the key in dynamic metadata, by which Envoy chooses the host."""

MAX_ECHO_BYTES = 62_000
"""Below 64 KiB with room for the frame; what other ext_proc servers send at most."""

# 20 digits hold every 64-bit length; longer texts are no lengths.
_MAX_LENGTH_DIGITS = 20


class Phase(StrEnum):
    """The six messages of an HTTP exchange, as Envoy names them."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


class BodyMode(StrEnum):
    """How Envoy sends a body, and so what it expects for an answer."""

    NONE = "none"
    BUFFERED = "buffered"
    BUFFERED_PARTIAL = "buffered-partial"
    STREAMED = "streamed"
    FULL_DUPLEX_STREAMED = "full-duplex-streamed"


class Observe(StrEnum):
    """How we learn that a request ended."""

    ACCESS_LOG = "access-log"
    STREAM = "stream"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How to answer Envoy.

    `body_mode` counts where Envoy does not say its mode. `gather_bytes` bounds the body
    held back before deciding, where the mode lets us choose; `hold_s` the time for which
    the reply to headers is held back in STREAMED mode, less than Envoy's message_timeout.
    """

    body_mode: BodyMode = BodyMode.BUFFERED_PARTIAL
    max_body_bytes: int = 64 * 1024 * 1024
    gather_bytes: int = 1024 * 1024
    hold_s: float = 0.1
    observe: Observe = Observe.ACCESS_LOG


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a message carries beside its phase; Envoy sends the modes with the first one only.

    `early_body`: body messages come without waiting for the reply to the headers.
    `headers` are those sent as attributes, for filters that skip the header phase.
    """

    request_mode: BodyMode | None = None
    response_mode: BodyMode | None = None
    early_body: bool = False
    subset: frozenset[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeaders:
    """The client's headers, pseudo-headers included, names in lower case."""

    headers: Mapping[str, str]
    end_of_stream: bool = False
    opening: Opening | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """The client's body, or a part of it."""

    body: bytes
    end_of_stream: bool = False
    opening: Opening | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrailers:
    """The client's trailers: the body before them is whole."""

    opening: Opening | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHeaders:
    """The engine's headers; `status` is 0 when Envoy did not show it."""

    status: int
    end_of_stream: bool = False
    opening: Opening | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBody:
    """The engine's body, or a part of it."""

    body: bytes
    end_of_stream: bool = False
    opening: Opening | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTrailers:
    """The engine's trailers."""

    opening: Opening | None = None


StreamEvent = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Let a message pass unchanged, with the decision when this reply carries it.

    `strip`: remove a destination header of the client's, since this reply sets none.
    """

    phase: Phase
    decision: Decision | None = None
    strip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoBody:
    """Give a part of a body back to Envoy, which forwards only what is given back."""

    phase: Phase
    body: bytes = b""
    end_of_stream: bool = False
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the client in place of an engine."""

    error: RequestRefusedError


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the operator of a fault of ours; the request goes on without a decision."""

    phase: Phase
    error: Exception


@dataclass(frozen=True, slots=True)
class Finish:
    """End the stream: nothing more is to be said, Envoy goes on alone."""


Action = Continue | EchoBody | Refuse | Report | Finish


def reply(phase: Phase, decision: Decision | None) -> Continue:
    """Answer the message that settles the headers: with a decision, or stripped of the client's."""
    return Continue(phase=phase, decision=decision, strip=decision is None)


def echo_body(phase: Phase, body: bytes, *, end_of_stream: bool) -> list[EchoBody]:
    """Give back a body in parts of at most MAX_ECHO_BYTES; an empty one only to end it."""
    parts = [body[at : at + MAX_ECHO_BYTES] for at in range(0, len(body), MAX_ECHO_BYTES)]
    if end_of_stream and not parts:
        parts = [b""]
    last = len(parts) - 1
    return [
        EchoBody(phase=phase, body=part, end_of_stream=end_of_stream and number == last)
        for number, part in enumerate(parts)
    ]


def declared_bytes(headers: Mapping[str, str]) -> int | None:
    """Read content-length; None when it is absent or no length."""
    text = headers.get("content-length", "").strip()
    plain = text.isascii() and text.isdigit() and len(text) <= _MAX_LENGTH_DIGITS
    return int(text) if plain else None
