"""Chat bodies of a given size: a shared instruction, then turns, in plain varied text."""

from __future__ import annotations

import json
import random

_WORDS = """
time person year way day thing man world life hand part child eye woman place work week
case point government company number group problem fact be have do say get make go know
take see come think look want give use find tell ask seem feel naïve “quoted” don't x=f(y);
""".split()  # noqa: SIM905 - reads better than a list
_INSTRUCTION_BYTES = 2_048
_TURN_BYTES = 900


def chat_body(body_bytes: int, seed: int, *, shared_bytes: int | None = None) -> bytes:
    """Make a body of about `body_bytes`; seeds share the instruction and nothing else.

    The instruction has `shared_bytes`; left out, 2 KiB or a quarter.
    """
    if shared_bytes is None:
        shared_bytes = min(_INSTRUCTION_BYTES, body_bytes // 4)
    text = _text(random.Random(0), shared_bytes)
    messages = [{"role": "system", "content": text}]
    chance = random.Random(seed)
    left = body_bytes - len(text)
    while left > 0:
        role = "user" if len(messages) % 2 else "assistant"
        content = _text(chance, min(_TURN_BYTES, left))
        messages.append({"role": role, "content": content})
        left -= len(content) + 45
    return json.dumps(
        {"model": "bench", "messages": messages, "max_tokens": 1}, ensure_ascii=False
    ).encode()


def _text(chance: random.Random, length: int) -> str:
    words = chance.choices(_WORDS, k=length // 4 + 1)
    return " ".join(words)[:length]
