"""Processes that a measurement runs, and what they cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

START_S = 30.0


@contextlib.asynccontextmanager
async def child(
    *command: str, log: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command as a process that ends with the block; without `log` its output is a pipe."""
    with contextlib.ExitStack() as files:
        sink = files.enter_context(log.open("ab")) if log else asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdout=sink, stderr=sink if log else None
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), START_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """Give the command that runs a module of this Python."""
    return (sys.executable, "-m", name, *arguments)


async def first_line(process: asyncio.subprocess.Process) -> bytes:
    """Wait for the first line of a process's output."""
    if process.stdout is None:
        raise AssertionError(process)
    return await asyncio.wait_for(process.stdout.readline(), START_S)


def cpu_s(pid: int) -> float:
    """Read how long a process has computed, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Find a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
