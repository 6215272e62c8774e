"""Reads a request body of any known LLM API into a prompt, whole or cut.

A body is JSON; Envoy may show only its first bytes. Which API it is follows from its
fields, with the path as a hint, since gateways rewrite paths. JSON stops here: what
leaves is segments and texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from extproc.core.partial import parse_object
from extproc.core.segments import (
    CutError,
    Segment,
    content_segments,
    digest_segment,
    is_cut,
    json_segment,
    message_segments,
    speaker_of,
    text_segment,
    token_segment,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

# A body with more prompts is one batch job; the first ones decide where it goes.
MAX_SEQUENCES = 128
# Far above real conversations; bounds the work of one request.
MAX_SEGMENTS = 20_000
_CHAT_PATHS = ("/chat/completions", "/messages", "/responses")
_BATCH_PATHS = ("/embeddings", "/pooling", "/classify")
_MEDIA_FIELDS = ("image_data", "video_data", "audio_data")
# What a response continues; the engine renders it between instructions and input.
_CONTEXT_FIELDS = ("conversation", "previous_response_id")
_CALLS = {"tool_calls", "function_call"}
_GENERATE_PATHS = ("/generate", "/generate_stream")

Sequence = tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a body asks an engine to compute.

    `sequences` has one sequence of segments per prompt of the body. `head` is what keys are
    made of: its first `instructions` segments are tools and system, its first `opening`
    reach to the end of the first user turn (none unless `conversational`). `behind_bytes`
    counts what was read but is in no sequence. Texts are empty when unknown.
    `fields` holds the asked-for body fields that are texts; `person` names who asks, which
    may only narrow a key.
    """

    model: str
    salt: str
    adapter: str
    sequences: tuple[Sequence, ...]
    head: Sequence = ()
    instructions: int = 0
    opening: int = 0
    behind_bytes: int = 0
    conversational: bool = True
    fields: dict[str, str] = field(default_factory=dict)
    person: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The parts of a body that make the prompt, in the order of the chat template."""

    tools: Any = None
    system: Any = None
    context: tuple[tuple[str, Any], ...] = ()
    turns: Any = None
    conversational: bool = True


def extract_prompt(
    path: str, body: bytes, *, complete: bool, fields: Iterable[str] = ()
) -> Prompt | None:
    """Read a body; None when it is no LLM request. Never raises for any bytes.

    `complete` says whether these are all bytes of the body. `fields` are dotted names of
    body fields to keep when they hold a text. A field behind the cut is unknown: tools or
    a model sent after the messages are missing from the prompt then.
    """
    root = parse_object(body, complete=complete)
    reading = None if root is None else _recognise(root, path.partition("?")[0].rstrip("/"))
    if root is None or reading is None:
        return None
    read = _conversation(reading) if reading.conversational else _batch(reading)
    salts = filter(None, (_text_at(root, "cache_salt"), _text_at(root, "extra_key")))
    return Prompt(
        model=_text_at(root, "model"),
        salt="\0".join(salts),
        adapter=_text_at(root, "lora_path"),
        sequences=read.sequences,
        head=read.head,
        instructions=read.instructions,
        opening=read.opening,
        behind_bytes=read.behind_bytes,
        conversational=reading.conversational,
        fields={name: text for name in fields if (text := _text_at(root, name))},
        person=_text_at(root, "user") or _text_at(root, "safety_identifier"),
    )


def _recognise(root: dict[str, Any], place: str) -> _Reading | None:
    """Tell the API by its fields; `place` is the path without query."""
    if isinstance(root.get("messages"), list):
        tools = root.get("tools", root.get("functions"))
        return _Reading(tools=tools, system=root.get("system"), turns=root["messages"])
    given = root.get("input")
    if isinstance(given, str | list) and _is_response(root, place, given):
        return _response_reading(root, given if isinstance(given, list) else [given])
    prompts = _prompts(root, place, given)
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts):
        media = tuple((name, root[name]) for name in _MEDIA_FIELDS if root.get(name) is not None)
        return _Reading(context=media, turns=prompts, conversational=False)
    if is_cut(root) and (place.endswith(_CHAT_PATHS) or "tools" in root):
        # Cut before the turns, as where long tools come first. Tools are certain to lead;
        # a system is certain to follow them only when they are known.
        system = root.get("system", root.get("instructions")) if "tools" in root else None
        return _Reading(tools=root.get("tools"), system=system, turns=[])
    return None


def _is_response(root: dict[str, Any], place: str, given: str | list[Any]) -> bool:
    """Tell the responses API from embeddings, which also call their prompts input."""
    if place.endswith(_BATCH_PATHS):
        return False
    items = isinstance(given, list) and any(isinstance(item, dict) for item in given[:1])
    return items or "/responses" in place or "instructions" in root


def _prompts(root: dict[str, Any], place: str, given: object) -> object:
    """Find the prompts of a body without turns."""
    if place.endswith(_BATCH_PATHS):
        return given
    if isinstance(root.get("prompt"), str | list):
        return root["prompt"]
    ids = root.get("input_ids")
    if ids is not None:
        return ids
    named = place.endswith(_GENERATE_PATHS) or "sampling_params" in root
    return root.get("text") if named else None


def _response_reading(root: dict[str, Any], turns: list[Any]) -> _Reading:
    context = tuple((name, root[name]) for name in _CONTEXT_FIELDS if root.get(name) is not None)
    return _Reading(
        tools=root.get("tools"), system=root.get("instructions"), context=context, turns=turns
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What became of a reading; fields as in Prompt."""

    sequences: tuple[Sequence, ...]
    head: Sequence = ()
    instructions: int = 0
    opening: int = 0
    behind_bytes: int = 0


def _conversation(reading: _Reading) -> _Read:
    segments: list[Segment] = []
    try:
        _add_instructions(reading, segments)
    except CutError:
        # Turns sent before the instructions can't be put behind them, but they are the
        # same whatever the cut left of these, so they make the keys.
        turns, leading, opening = _turns(reading.turns, MAX_SEGMENTS)
        return _Read(
            sequences=(tuple(segments),),
            head=tuple(turns[:opening]),
            instructions=leading,
            opening=opening,
            behind_bytes=sum(len(segment.data) for segment in turns),
        )
    known = len(segments)
    turns, leading, opening = _turns(reading.turns, MAX_SEGMENTS - known)
    segments += turns
    return _Read(
        sequences=(tuple(segments),),
        head=tuple(segments[: known + opening]),
        instructions=known + leading,
        opening=known + opening,
    )


def _turns(messages: list[Any], most: int) -> tuple[list[Segment], int, int]:
    """Give the segments, how many are instructions, and how many open the conversation."""
    segments: list[Segment] = []
    instructions = opening = -1
    try:
        for message in messages:
            if len(segments) >= most:
                break
            role = speaker_of(message)
            if instructions < 0 and role != "system":
                instructions = len(segments)
            content = message.get("content") if type(message) is dict else None
            if type(content) is str and "role" in message and _CALLS.isdisjoint(message):
                # The short way for nearly every message; types are exact, so it is whole.
                segments.append(Segment(role, content.encode("utf-8", "surrogatepass")))
            else:
                segments.extend(islice(message_segments(message), most - len(segments)))
            if opening < 0 and role == "user":
                opening = len(segments)
    except CutError:
        pass
    instructions = len(segments) if instructions < 0 else instructions
    opening = len(segments) if opening < 0 else opening
    return segments, instructions, opening


def _add_instructions(reading: _Reading, segments: list[Segment]) -> None:
    """Add tools, system, context; raises CutError when one is cut, after what is known of it."""
    tools = reading.tools if isinstance(reading.tools, list) else [reading.tools]
    known = (tool for tool in tools[:MAX_SEGMENTS] if tool is not None)
    segments.extend(json_segment(tool, "tools") for tool in known)
    if is_cut(reading.tools):
        raise CutError
    room = MAX_SEGMENTS - len(segments)
    segments.extend(islice(content_segments(reading.system, "system"), room))
    segments.extend(json_segment(value, name) for name, value in reading.context)


def _batch(reading: _Reading) -> _Read:
    prompts = reading.turns
    single = isinstance(prompts, str) or isinstance(prompts[0], int)
    members = [prompts] if single else prompts[:MAX_SEQUENCES]
    try:
        media = tuple(digest_segment(value, name) for name, value in reading.context)
    except CutError:
        return _Read(sequences=())
    sequences = tuple(media + _single(member) for member in members)
    read_bytes = sum(len(segment.data) for sequence in sequences for segment in sequence)
    left_out = 0 if single else len(prompts) - len(members)
    return _Read(sequences=sequences, behind_bytes=read_bytes * left_out // len(members))


def _single(prompt: object) -> Sequence:
    try:
        if isinstance(prompt, str):
            return (text_segment(prompt, "text"),)
        if isinstance(prompt, list):
            return (token_segment(prompt),)
        return (json_segment(prompt, "text"),)
    except CutError:
        return ()


def _text_at(root: dict[str, Any], name: str) -> str:
    """Give the text at a dotted name, empty when there is none or it may be cut."""
    first, dot, rest = name.partition(".")
    value: Any = root.get(first)
    while dot and value is not None:
        first, dot, rest = rest.partition(".")
        value = value.get(first) if isinstance(value, dict) else None
    return value if isinstance(value, str) and not is_cut(value) else ""
