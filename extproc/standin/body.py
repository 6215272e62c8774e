"""A request body read into a Call: what any of the dialects asks the engine to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from extproc.standin.tokens import namespace_seed

if TYPE_CHECKING:
    from extproc.standin.settings import StandinSettings
    from extproc.standin.tokens import StoredHash

Body = Mapping[str, object]

MAX_PROMPTS = 2_048
"""Prompts in one body, as many as OpenAI takes for embeddings."""


class CallError(Exception):
    """The request is answered with an error; `kind` is vLLM's name for it."""

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "BadRequestError"
    param: str | None = None


class UnknownModelError(CallError):
    """The body names a model that is not served here."""

    status = 404
    kind = "NotFoundError"
    param = "model"


class BusyError(CallError):
    """The engine takes no more requests."""

    status = 503
    kind = "Service Unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One body's work: `prompts` are rendered bytes, each computed by itself.

    `max_tokens` is the exact length of each answer (0: no answer, as in embeddings) unless
    a stop string comes first; `ends_itself` is true when the client set no limit.
    """

    prompts: tuple[bytes, ...]
    seed: StoredHash
    model: str
    max_tokens: int
    ends_itself: bool
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]


def parse_body(data: bytes) -> Body:
    """Read a JSON object; CallError for anything else."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        message = "The request body is not valid JSON."
        raise CallError(message) from error
    if not isinstance(body, dict):
        message = "The request body must be a JSON object."
        raise CallError(message)
    return body


def read_call(
    body: Body,
    prompts: tuple[bytes, ...],
    settings: StandinSettings,
    *,
    limits: tuple[str, ...],
    answers: bool = True,
) -> Call:
    """Join rendered prompts with what all dialects share.

    `limits` are the fields that bound the answer, the first one sent counts; `answers` is
    False where nothing is generated.
    """
    model = _served_model(body, settings)
    if not 0 < len(prompts) <= MAX_PROMPTS:
        message = f"There must be 1 to {MAX_PROMPTS} prompts in one request."
        raise CallError(message)
    if body.get("n") not in {None, 1}:
        message = "Only n=1 is served."
        raise CallError(message)
    limit = next((body[name] for name in limits if body.get(name) is not None), None)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        message = "The limit of output tokens must be an integer of at least 1."
        raise CallError(message)
    answer_tokens = settings.default_max_tokens if limit is None else limit
    options = body.get("stream_options")
    stream = _flag(body, "stream") and answers
    return Call(
        prompts=prompts,
        seed=_seed(body, model),
        model=model,
        max_tokens=answer_tokens if answers else 0,
        ends_itself=limit is None,
        stream=stream,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        stop=_stops(body),
    )


def _served_model(body: Body, settings: StandinSettings) -> str:
    model = body.get("model")
    if model is None or model == "":
        return settings.model
    if not isinstance(model, str):
        message = "model must be a string."
        raise CallError(message)
    if settings.strict_models and model not in {settings.model, *settings.adapters}:
        message = f"The model `{model[:200]}` does not exist."
        raise UnknownModelError(message)
    return model


def _seed(body: Body, model: str) -> StoredHash:
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        message = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise CallError(message)
    adapter = body.get("lora_path")
    return namespace_seed(model, adapter if isinstance(adapter, str) else "", salt or "")


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        message = f"{name} must be a boolean."
        raise CallError(message)
    return value is True


def _stops(body: Body) -> tuple[str, ...]:
    value = body.get("stop", body.get("stop_sequences"))
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(mark for mark in value if isinstance(mark, str))
    return ()
