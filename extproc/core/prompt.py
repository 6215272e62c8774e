"""Reads a request body of any known LLM API into a prompt, whole or cut.

A body is JSON; Envoy may show only its first bytes. Which API it is follows from its
fields, with the path as a hint, since gateways rewrite paths. JSON stops here: what
leaves is segments and texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import jiter

from extproc.core.segments import (
    CutError,
    CutList,
    CutObject,
    CutText,
    Segment,
    content_segments,
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
_BATCH_PATHS = ("/embeddings", "/pooling", "/classify")
_CALLS = {"tool_calls", "function_call"}
_GENERATE_PATHS = ("/generate", "/generate_stream")

Sequence = tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a body asks an engine to compute.

    `sequences` has one sequence of segments per prompt of the body. Of the first one,
    `instructions` segments are tools and system, `opening` segments reach to the end of
    the first user turn (both 0 unless `conversational`). Texts are empty when unknown.
    `fields` holds the asked-for body fields that are texts; `person` names who asks, which
    may only narrow a key.
    """

    model: str
    salt: str
    adapter: str
    sequences: tuple[Sequence, ...]
    instructions: int = 0
    opening: int = 0
    conversational: bool = True
    fields: dict[str, str] = field(default_factory=dict)
    person: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The parts of a body that make the prompt, in the order of the chat template."""

    tools: Any = None
    system: Any = None
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
    root = _parse(body, complete=complete)
    reading = None if root is None else _recognise(root, path.partition("?")[0].rstrip("/"))
    if root is None or reading is None:
        return None
    instructions = opening = 0
    if reading.conversational:
        segments, instructions, opening = _conversation(reading)
        sequences: tuple[Sequence, ...] = (segments,)
    else:
        sequences = _batch(reading.turns)
    return Prompt(
        model=_text_at(root, "model"),
        salt=_text_at(root, "cache_salt"),
        adapter=_text_at(root, "lora_path"),
        sequences=sequences,
        instructions=instructions,
        opening=opening,
        conversational=reading.conversational,
        fields={name: text for name in fields if (text := _text_at(root, name))},
        person=_text_at(root, "user") or _text_at(root, "safety_identifier"),
    )


def _parse(body: bytes, *, complete: bool) -> dict[str, Any] | None:
    try:
        root = jiter.from_json(
            body,
            # Caching values, too, would keep pieces of prompts in memory.
            cache_mode="keys",
            partial_mode=False if complete else "trailing-strings",
        )
    except ValueError:
        return None
    if not isinstance(root, dict):
        return None
    return root if complete else _mark(root)


def _mark(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Mark everything that is still open where the body ends; jiter's depth bounds the recursion.

    Open values are the last members of open ones. A trailing number is dropped: it may
    have more digits.
    """
    if isinstance(value, str):
        return CutText(value)
    if isinstance(value, dict):
        marked = CutObject(value)
        if marked:
            name, last = marked.popitem()
            if isinstance(last, str | dict | list):
                marked[name] = _mark(last)
        return marked
    members = CutList(value)
    if members:
        last = members.pop()
        if isinstance(last, str | dict | list):
            members.append(_mark(last))
    return members


def _recognise(root: dict[str, Any], place: str) -> _Reading | None:
    """Tell the API by its fields; `place` is the path without query."""
    if isinstance(root.get("messages"), list):
        tools = root.get("tools", root.get("functions"))
        return _Reading(tools=tools, system=root.get("system"), turns=root["messages"])
    if place.endswith(_BATCH_PATHS):
        return _batch_reading(root.get("input"))
    if "prompt" in root:
        return _batch_reading(root["prompt"])
    given = root.get("input")
    if isinstance(given, str | list) and ("/responses" in place or "instructions" in root):
        turns = given if isinstance(given, list) else [given]
        return _Reading(tools=root.get("tools"), system=root.get("instructions"), turns=turns)
    if place.endswith(_GENERATE_PATHS) or "sampling_params" in root:
        return _batch_reading(root.get("input_ids", root.get("text")))
    return None


def _batch_reading(prompts: object) -> _Reading | None:
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts):
        return _Reading(turns=prompts, conversational=False)
    return None


def _conversation(reading: _Reading) -> tuple[Sequence, int, int]:
    """Give the segments, how many are instructions, and how many open the conversation."""
    segments: list[Segment] = []
    instructions = opening = -1
    try:
        _add_instructions(reading, segments)
        leading = True
        for message in reading.turns:
            room = MAX_SEGMENTS - len(segments)
            if not room:
                break
            role = speaker_of(message)
            if leading and role != "system":
                leading, instructions = False, len(segments)
            content = message.get("content") if type(message) is dict else None
            if type(content) is str and "role" in message and not _CALLS & message.keys():
                # The short way for nearly every message; types are exact, so it is whole.
                segments.append(text_segment(content, role))
            else:
                segments.extend(islice(message_segments(message), room))
            if opening < 0 and role == "user":
                opening = len(segments)
    except CutError:
        pass
    instructions = len(segments) if instructions < 0 else instructions
    opening = len(segments) if opening < 0 else opening
    return tuple(segments), instructions, opening


def _add_instructions(reading: _Reading, segments: list[Segment]) -> None:
    """Add tools, then system; raises CutError when either is cut, after what is known of it."""
    if isinstance(reading.tools, list):
        known = islice(reading.tools, MAX_SEGMENTS)
        segments.extend(json_segment(tool, "tools") for tool in known)
    elif reading.tools is not None:
        segments.append(json_segment(reading.tools, "tools"))
    if is_cut(reading.tools):
        raise CutError
    room = MAX_SEGMENTS - len(segments)
    segments.extend(islice(content_segments(reading.system, "system"), room))


def _batch(prompts: Any) -> tuple[Sequence, ...]:  # noqa: ANN401 - JSON
    if isinstance(prompts, str):
        return ((text_segment(prompts, "text"),),)
    if isinstance(prompts[0] if prompts else 0, int):
        return (_single(prompts),)
    return tuple(_single(prompt) for prompt in prompts[:MAX_SEQUENCES])


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
    value: Any = root
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, str) and not is_cut(value) else ""
