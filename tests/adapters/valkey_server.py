"""A real Valkey or Redis server for a test, on a free port of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
LIMIT_S = 20.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ValkeyServer:
    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    async def start(self) -> None:
        assert BINARY
        fixed = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder))
        self._process = await asyncio.create_subprocess_exec(
            BINARY, *fixed, "--save", "", *self._options, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout
        async with asyncio.timeout(LIMIT_S):
            async for line in self._process.stdout:
                if b"Ready to accept connections" in line:
                    return
        pytest.fail("the server ended before it was ready")

    def hang(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process brings about."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - another process brings it about
            await asyncio.sleep(0.01)
