"""Every way a request can be refused, one class each with its HTTP status."""

from __future__ import annotations

from typing import ClassVar


class ExtprocError(Exception):
    """Base of all errors that outside input can cause."""


class RequestRefusedError(ExtprocError):
    """The request is answered at once instead of being routed.

    `status` is the HTTP status of the answer, `code` the machine-readable name in its
    JSON body; the message is shown to the client, so it never holds input of others.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    retry_after_s: ClassVar[int | None] = None


class NoEndpointError(RequestRefusedError):
    """No ready endpoint is a candidate for this request."""

    status = 503
    code = "no_ready_endpoint"


class SheddingError(RequestRefusedError):
    """Every candidate is at its limit of in-flight requests."""

    status = 429
    code = "overloaded"
    retry_after_s = 1


class BodyTooLargeError(RequestRefusedError):
    """The body exceeds the configured limit."""

    status = 413
    code = "body_too_large"


class UnreadableBodyError(RequestRefusedError):
    """The body is no prompt and the config asks to refuse such bodies."""

    status = 400
    code = "unreadable_body"


class EndpointError(ExtprocError, ValueError):
    """A text does not name an endpoint."""
