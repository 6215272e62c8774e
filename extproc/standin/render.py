"""Bodies rendered to the bytes an engine would tokenize: tools, system, then the turns.

The form is that of a ChatML template: what was generated continues the rendered prompt, so
the next turn of a conversation begins with all bytes of this one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING

from extproc.standin.body import CallError

if TYPE_CHECKING:
    from extproc.standin.body import Body

_MAX_TOKEN_ID = 0xFFFF_FFFF
_OPEN_ANSWER = "<|im_start|>assistant\n"


def render_chat(body: Body) -> tuple[bytes, ...]:
    """Render OpenAI chat or Anthropic messages (`system` beside the turns)."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        message = "messages must be a list of at least one message."
        raise CallError(message)
    parts = [_tools(body)]
    if body.get("system") is not None:
        parts.append(_turn("system", _content(body["system"])))
    parts.extend(_message(message) for message in messages)
    return (_encode("".join([*parts, _OPEN_ANSWER])),)


def render_responses(body: Body) -> tuple[bytes, ...]:
    """Render OpenAI Responses: `instructions`, then `input` as text or as items.

    Earlier responses are not stored: `previous_response_id` is accepted and adds nothing.
    """
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        message = "input must be a string or a list."
        raise CallError(message)
    parts = [_tools(body)]
    if isinstance(body.get("instructions"), str):
        parts.append(_turn("system", str(body["instructions"])))
    parts.extend(_item(item) for item in items)
    return (_encode("".join([*parts, _OPEN_ANSWER])),)


def render_prompts(value: object) -> tuple[bytes, ...]:
    """Render a plain prompt: text, texts, token ids (one token each), or lists of ids."""
    if isinstance(value, str):
        return (_encode(value),)
    if isinstance(value, list) and value:
        if all(isinstance(entry, int) for entry in value):
            return (_pack(value),)
        return tuple(_encode(e) if isinstance(e, str) else _pack(e) for e in value)
    message = "The prompt must be text, token ids, or a list of these."
    raise CallError(message)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _pack(ids: object) -> bytes:
    valid = isinstance(ids, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _MAX_TOKEN_ID for i in ids
    )
    if not valid:
        message = "Token ids must be lists of integers from 0."
        raise CallError(message)
    assert isinstance(ids, list)  # noqa: S101 - checked above, for the type checker
    return struct.pack(f"<{len(ids)}I", *ids)


def _tools(body: Body) -> str:
    tools = body.get("tools")
    return f"<tools>{_dump(tools)}</tools>\n" if tools else ""


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _message(message: object) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        text = "Every message must be an object with a role."
        raise CallError(text)
    text = _content(message.get("content"))
    for field in ("tool_call_id", "tool_calls", "reasoning_content"):
        if message.get(field):
            text += f"<{field}>{_dump(message[field])}"
    return _turn(message["role"], text)


def _item(item: object) -> str:
    if not isinstance(item, dict):
        text = "Every input item must be an object."
        raise CallError(text)
    role = item.get("role")
    if isinstance(role, str):
        return _turn(role, _content(item.get("content")))
    return _turn("tool", _dump({key: value for key, value in item.items() if key != "id"}))


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return "" if content is None else _dump(content)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    text = _dump(part)
    media = isinstance(part, dict) and part.get("type") in {
        *("image_url", "input_image", "image", "input_audio", "document", "file", "input_file"),
    }
    return f"<media {hashlib.sha256(_encode(text)).hexdigest()}>" if media else text


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
