"""Segments: the pieces of a prompt in the order a chat template renders them.

Content of any dialect (OpenAI chat and responses, Anthropic messages) becomes the same
few kinds, so that equal prompts are equal whatever API they came by. What can't be read
to its end because the body was cut ends the sequence: a cut prompt is a prefix of the
whole one, never something else.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_128_hexdigest

if TYPE_CHECKING:
    from collections.abc import Iterator

_TEXT_TYPES = frozenset(
    {"text", "input_text", "output_text", "summary_text", "refusal", "thinking"}
)
_BINARY_TYPES = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "document": "file",
    "file": "file",
    "input_file": "file",
}
_CALL_TYPES = frozenset({"tool_use", "function_call", "server_tool_use", "custom_tool_call"})
_RESULT_TYPES = frozenset(
    {"tool_result", "function_call_output", "custom_tool_call_output", "web_search_tool_result"}
)
_ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}


class Segment(NamedTuple):
    """One piece: its kind (a role, `role/call`, `role/image`, `tools`, `tokens`) and bytes.

    `complete` is False when the body was cut inside it. A tuple, since it is made for each
    message of each prompt and takes half the time of a frozen dataclass.
    """

    kind: str
    data: bytes
    complete: bool = True


class CutText(str):
    """A text that ends where the body was cut, maybe before its own end."""

    __slots__ = ()


class CutList(list[Any]):
    """A list whose later members lie behind the cut."""

    __slots__ = ()


class CutObject(dict[str, Any]):
    """An object whose later members lie behind the cut."""

    __slots__ = ()


# A tuple: building a union of types for every check takes longer than the check.
_CUT = (CutText, CutList, CutObject)


class CutError(Exception):
    """Raised inside this package where a sequence can't be read past the cut."""


def is_cut(value: object) -> bool:
    """Tell whether a value may go on behind the cut."""
    return isinstance(value, _CUT)


def message_segments(message: object) -> Iterator[Segment]:
    """Read one message of a conversation: its content, then its tool calls.

    Raises CutError where the message can't be read any further.
    """
    if not isinstance(message, dict):
        yield from content_segments(message, "user")
        return
    if "type" in message and "role" not in message:
        yield from _part_segments(message, speaker_of(message))
        return
    if isinstance(message, CutObject) and not _is_known(message, "role", "content"):
        raise CutError
    role = speaker_of(message)
    yield from content_segments(message.get("content"), role)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        yield _call(call, role)
    if message.get("function_call") is not None:
        yield _call(message["function_call"], role)
    if isinstance(message, CutObject):
        raise CutError


def speaker_of(message: object) -> str:
    """Name who speaks, in one word for each role whatever the dialect calls it."""
    if not isinstance(message, dict):
        return "user"
    role = message.get("role")
    if isinstance(role, str):
        return _ROLES.get(role, role)
    if "type" in message and "role" not in message:
        return "assistant" if _type_of(message) in _CALL_TYPES else "tool"
    return "user"


def content_segments(content: object, role: str) -> Iterator[Segment]:
    """Read content: a text, a list of parts, or nothing; a text equals a one-part list.

    Raises CutError behind what is known of cut content.
    """
    if isinstance(content, str):
        yield text_segment(content, role)
        if is_cut(content):
            raise CutError
    elif isinstance(content, list):
        for part in content:
            yield from _part_segments(part, role)
        if is_cut(content):
            raise CutError
    elif content is not None:
        yield json_segment(content, role)


def text_segment(text: str, kind: str) -> Segment:
    """Make a segment of a text."""
    return Segment(kind, text.encode("utf-8", "surrogatepass"), complete=not is_cut(text))


def json_segment(value: object, kind: str) -> Segment:
    """Make a segment of any JSON value, blind to spacing, key order and cache marks.

    Raises CutError for a value that is cut: sorted keys have no prefix.
    """
    if is_cut(value):
        raise CutError
    if isinstance(value, dict) and "cache_control" in value:
        # Clients move the mark from turn to turn; engines render nothing of it.
        value = {name: value[name] for name in value.keys() - {"cache_control"}}
    shown = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Segment(kind, shown.encode("utf-8", "surrogatepass"))


def digest_segment(value: object, kind: str) -> Segment:
    """Stand a hash in for an image, audio or file: equal content, equal segment."""
    return Segment(kind, xxh3_128_hexdigest(json_segment(value, kind).data).encode())


def token_segment(tokens: list[Any]) -> Segment:
    """Make a segment of token ids, 4 bytes each, little endian.

    Anything else in the list makes it plain JSON; raises CutError when that is cut.
    """
    try:
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        return json_segment(tokens, "tokens")
    return Segment("tokens", packed, complete=not is_cut(tokens))


def _part_segments(part: object, role: str) -> Iterator[Segment]:
    if isinstance(part, str):
        yield text_segment(part, role)
        return
    if not isinstance(part, dict):
        yield json_segment(part, role)
        return
    if isinstance(part, CutObject) and not _is_known(part, "type"):
        raise CutError
    kind = _type_of(part)
    if kind in _CALL_TYPES:
        yield _call(part, role)
    elif kind in _RESULT_TYPES:
        yield from content_segments(_result(part), "tool")
    elif kind in _BINARY_TYPES:
        content = {name: part[name] for name in part.keys() - {"type", "detail"}}
        yield digest_segment(part if is_cut(part) else content, f"{role}/{_BINARY_TYPES[kind]}")
    elif (not kind or kind in _TEXT_TYPES) and isinstance(text := _text(part), str):
        yield text_segment(text, role)
    else:
        yield json_segment(part, f"{role}/{kind}")
    if isinstance(part, CutObject):
        raise CutError


def _type_of(part: dict[str, Any]) -> str:
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _is_known(value: dict[str, Any], *names: str) -> bool:
    """Tell whether all of these members were seen, the ones that are names to their end."""
    return all(name in value for name in names) and not is_cut(value[names[0]])


def _text(part: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    return part.get("text", part.get("thinking", part.get("refusal")))


def _result(part: dict[str, Any]) -> object:
    if isinstance(part, CutObject) and not part.keys() & {"content", "output"}:
        raise CutError
    return part.get("content", part.get("output"))


def _call(call: object, role: str) -> Segment:
    """Read a tool call: its name, then its arguments as they were written."""
    if not isinstance(call, dict):
        return json_segment(call, f"{role}/call")
    inner = call.get("function", call.get("custom"))
    inner = inner if isinstance(inner, dict) else call
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("input"))
    if not isinstance(name, str):
        return json_segment(call, f"{role}/call")
    if is_cut(call) and (is_cut(name) or arguments is None):
        raise CutError
    if not isinstance(arguments, str):
        arguments = json_segment(arguments, "").data.decode("utf-8", "surrogatepass")
    head = f"{name}\0".encode("utf-8", "surrogatepass")
    tail = arguments.encode("utf-8", "surrogatepass")
    return Segment(f"{role}/call", head + tail, complete=not is_cut(arguments))
