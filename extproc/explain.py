"""`extproc explain`: what the router sees in one request, and what it would decide.

The decision is that of an idle router that has seen nothing yet. Content is never shown,
only kinds, lengths and hashes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from extproc.core.endpoint import Endpoint
from extproc.core.errors import ExtprocError
from extproc.core.events import EndpointUp
from extproc.core.intake import Identity, identify, read_request
from extproc.core.router import Router
from extproc.settings import intake_settings, router_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from rich.console import Console

    from extproc.config.sections import Config
    from extproc.core.decision import Decision, RoutingRequest

_PATH_BY_KEY = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
    "text": "/generate",
    "input_ids": "/generate",
}
# Documentation addresses (RFC 5737), for a config that names no endpoints.
EXAMPLE_FLEET = tuple(Endpoint.parse(f"192.0.2.{number}:8000") for number in range(1, 5))
_TERMS = ("queued", "recompute", "slowdown", "crowding")
# Longer conversations are shown by their head and their tail.
_SHOWN_SEGMENTS = 40
_SHOWN_CANDIDATES = 20


class RequestFileError(ExtprocError):
    """The request file can't be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A request as a client would send it; header names in lower case."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known of a request; `identity` is None for no prompt."""

    sample: Sample
    identity: Identity | None
    request: RoutingRequest
    decision: Decision


def read_sample(file: Path, path: str | None = None) -> Sample:
    """Read a body as a client sends it, or a JSON object of `path`, `headers` and `body`.

    `path` overrides; else it is guessed from the body's keys. Raises RequestFileError.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        message = f"{file}: {(error.strerror or 'not readable').lower()}"
        raise RequestFileError(message) from None
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return Sample(path=path or "/", body=raw)
    if not isinstance(data, dict):
        return Sample(path=path or "/", body=raw)
    if "body" not in data or not data.keys() <= {"path", "headers", "body"}:
        return Sample(path=path or _guess_path(data), body=raw)
    return _read_wrapped(file, data, path)


def explain(sample: Sample, config: Config, endpoints: Iterable[Endpoint]) -> Explanation:
    """Identify a request and decide it over idle endpoints, EXAMPLE_FLEET when there are none.

    Raises RequestRefusedError as routing does.
    """
    settings = intake_settings(config.intake)
    identity = identify(sample.path, sample.headers, sample.body, complete=True, settings=settings)
    request = read_request(
        sample.path, sample.headers, sample.body, complete=True, subset=None, settings=settings
    )
    router = Router(router_settings(config), router_id="explain")
    for endpoint in tuple(endpoints) or EXAMPLE_FLEET:
        router.apply(EndpointUp(endpoint=endpoint), 0.0)
    decision = router.decide(request, 0.0)
    return Explanation(sample=sample, identity=identity, request=request, decision=decision)


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print segments, keys and decision as tables."""
    if explanation.identity is None:
        console.print(f"{explanation.sample.path}: no prompt was found; routed by load alone")
    else:
        console.print(_segment_table(explanation.identity))
    console.print(_key_table(explanation))
    if explanation.decision.destination in EXAMPLE_FLEET:
        console.print("no endpoints are configured: decided over an example fleet")
    console.print(_decision_table(explanation.decision))


def _read_wrapped(file: Path, data: dict[str, object], path: str | None) -> Sample:
    body, headers, named = data["body"], data.get("headers", {}), data.get("path")
    if not isinstance(headers, dict) or not all(isinstance(v, str) for v in headers.values()):
        message = f"{file}: headers: should map names to texts"
        raise RequestFileError(message)
    if named is not None and not isinstance(named, str):
        message = f"{file}: path: should be a text"
        raise RequestFileError(message)
    raw = body.encode("utf-8", "replace") if isinstance(body, str) else json.dumps(body).encode()
    return Sample(
        path=path or named or _guess_path(body if isinstance(body, dict) else {}),
        headers={name.lower(): value for name, value in headers.items()},
        body=raw,
    )


def _guess_path(body: dict[str, object]) -> str:
    return next((path for key, path in _PATH_BY_KEY.items() if key in body), "/")


def _segment_table(identity: Identity) -> Table:
    table = Table(
        "prompt", "#", "kind", "bytes", title="segments", title_justify="left", box=box.SIMPLE
    )
    rows = [
        (str(prompt), str(number), segment.kind, f"{len(segment.data):,}")
        for prompt, sequence in enumerate(identity.prompt.sequences, 1)
        for number, segment in enumerate(sequence, 1)
    ]
    half = _SHOWN_SEGMENTS // 2
    left_out = len(rows) - _SHOWN_SEGMENTS
    shown = (
        rows if left_out <= 0 else [*rows[:half], ("", "", f"{left_out} more", ""), *rows[-half:]]
    )
    for row in shown:
        table.add_row(*row)
    return table


def _key_table(explanation: Explanation) -> Table:
    request, identity = explanation.request, explanation.identity
    table = Table(title="keys", title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_row("path", explanation.sample.path)
    if identity is not None:
        table.add_row("model", identity.model or "(unknown)")
        source = identity.session.source if identity.session else "opening of the conversation"
        table.add_row("session from", source)
    table.add_row("namespace", _hex(request.namespace))
    table.add_row("tier-1 key", _hex(request.tier1))
    table.add_row("tier-2 key", _hex(request.tier2))
    blocks = " + ".join(str(len(chain)) for chain in request.chains) or "0"
    table.add_row("chain", f"{blocks} blocks of {request.block_tokens} tokens")
    ends = ", ".join(_hex(chain[-1]) for chain in request.chains[:4] if chain)
    table.add_row("last block", ends or "-")
    table.add_row("prompt tokens", f"about {request.prompt_tokens:,}")
    return table


def _decision_table(decision: Decision) -> Table:
    title = f"{decision.policy}: {decision.destination} ({decision.reason})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("endpoint", no_wrap=True)
    table.add_column("matched", justify="right")
    with_terms = any(candidate.terms for candidate in decision.candidates)
    for name in (*_TERMS, "cost") if with_terms else ():
        table.add_column(name, justify="right")
    for candidate in decision.candidates[:_SHOWN_CANDIDATES]:
        costs = (*candidate.terms, candidate.cost) if with_terms else ()
        numbers = (f"{value:,.0f}" for value in costs)
        table.add_row(candidate.endpoint, f"{candidate.matched_tokens:,}", *numbers)
    return table


def _hex(value: int) -> str:
    return f"{value:016x}"
