"""The session key a client sends: which header or body field, and what counts as one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.prompt import Prompt

MAX_ID_BYTES = 256
# Engines, gateways and coding agents send these; the more specific the name, the earlier.
# Never request or trace ids, credentials, cookies or addresses: they change every turn or
# name more than one conversation.
SESSION_HEADERS = (
    "x-session-key",
    "x-claude-code-session-id",
    "x-session-affinity",
    "x-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "x-opencode-session",
    "x-amp-thread-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
    "x-sgl-routing-key",
    "x-litellm-session-id",
    "x-grok-conv-id",
)
SESSION_FIELDS = (
    "session_params.session_id",
    "session_params.id",
    "prompt_cache_key",
    "conversation",
    "conversation.id",
    "conversation_id",
    "metadata.session_id",
    "metadata.user_id",
)
_USER_ID_FIELD = "metadata.user_id"
# Anthropic's older form: user_<hash>_account_<uuid>_session_<uuid>.
_SESSION_PART = re.compile(r"_session_([0-9A-Za-z-]+)$")


@dataclass(frozen=True, slots=True)
class SessionRules:
    """Which headers (lower case), then which body fields (dotted) may hold a session key."""

    headers: tuple[str, ...] = SESSION_HEADERS
    fields: tuple[str, ...] = SESSION_FIELDS


@dataclass(frozen=True, slots=True)
class ClientSession:
    """A session key the client sent, and the header or body field it came in."""

    value: str
    source: str


def client_session(
    headers: Mapping[str, str], prompt: Prompt | None, rules: SessionRules
) -> ClientSession | None:
    """Give the first usable key; a header beats a body field. None when there is none."""
    for name in rules.headers:
        if name in headers and (value := usable_id(headers[name])):
            return ClientSession(value, name)
    fields = prompt.fields if prompt is not None else {}
    for name in rules.fields if fields else ():
        text = fields.get(name, "")
        value = usable_id(_session_part(text) if name == _USER_ID_FIELD else text)
        if value:
            return ClientSession(value, name)
    return None


def usable_id(text: str) -> str:
    """Trim an id; empty when it is blank, unprintable or longer than MAX_ID_BYTES."""
    trimmed = text.strip()
    if not trimmed.isprintable() or len(trimmed.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        return ""
    return trimmed


def _session_part(user_id: str) -> str:
    """Take the session out of Anthropic's user id: `…_session_<uuid>`, or JSON."""
    found = _SESSION_PART.search(user_id)
    if found:
        return found[1]
    if not user_id.startswith("{"):
        return ""
    try:
        value = json.loads(user_id)
    except (ValueError, RecursionError):
        return ""
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) else ""
