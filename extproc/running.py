"""How our processes run: their event loop and their log lines."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine


def run_loop(coroutine: Coroutine[object, object, None]) -> None:
    """Run to the end, on uvloop where there is one."""
    try:
        import uvloop  # noqa: PLC0415 - absent on some systems
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


def set_up_logging(level: str, *, process: str = "") -> None:
    """Write lines from `level` up to stderr; `process` is told in each, if given."""
    name = f" {process}" if process else ""
    line = f"%(asctime)s{name} %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=level.upper(), format=line, force=True)
