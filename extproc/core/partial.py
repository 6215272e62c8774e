"""JSON objects read as far as their bytes go; what may go on behind the end is marked.

A value is marked cut when it was still open where the bytes end, or may have been: a text
that seems to end there, the last member of a list. Marked values are subclasses of the
plain ones, so only who must know looks.
"""

from __future__ import annotations

import re
from typing import Any

import jiter

from extproc.core.segments import CutList, CutObject, CutText

# Every escape in a JSON text, one by one; group 1 is a half of a surrogate pair alone.
_HALF_PAIR = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
# What can still become a pair when more bytes come.
_BEGUN_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?"
)


def parse_object(body: bytes, *, complete: bool) -> dict[str, Any] | None:
    """Read a JSON object, of which only the first bytes are there unless `complete`.

    None when it is none. Of a repeated key the last value counts, as in the engines.
    """
    try:
        root = _parse(body, complete=complete)
    except ValueError as error:
        if "escape" not in str(error):
            return None
        try:
            root = _parse(_mend_escapes(body, complete=complete), complete=complete)
        except ValueError:
            return None
    if not isinstance(root, dict):
        return None
    return root if complete else _mark(root)


def _parse(body: bytes, *, complete: bool) -> object:
    parsed: object = jiter.from_json(
        body,
        # Caching values, too, would keep pieces of prompts in memory.
        cache_mode="keys",
        partial_mode=False if complete else "trailing-strings",
    )
    return parsed


def _mend_escapes(body: bytes, *, complete: bool) -> bytes:
    """Replace halves of surrogate pairs, which clients make by cutting texts inside an emoji.

    Engines accept them. At the end of a cut body the other half may be yet to come.
    """

    def mend(found: re.Match[bytes]) -> bytes:
        if not found[1] or (not complete and _BEGUN_PAIR.fullmatch(body, found.start())):
            return found[0]
        return rb"\ufffd"

    return _HALF_PAIR.sub(mend, body)


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
