"""Where the decision log is kept; apart from its client, which not everybody installs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Which stream of which server; the password is read anew at each connection.

    `max_entries` and `max_age_s` bound the stream; `timeout_s` every answer of the server.
    """

    url: str
    stream: str
    username: str | None = None
    read_password: Callable[[], str | None] = lambda: None
    ca_file: Path | None = None
    max_entries: int = 100_000
    max_age_s: float = 1_800.0
    timeout_s: float = 2.0
