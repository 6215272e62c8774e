"""A docker engine for the tests: the one that runs, or one of our own in a folder of its own.

Ours has no default bridge and touches no firewall rule: containers reach each other by
name over the stack's network, builds use the host's network, and clients come through
published ports of 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

START_S = 30.0
_DATA_SIZE = "4g"


class NoDockerError(Exception):
    """Why no docker engine can be had."""


@contextlib.contextmanager
def docker_engine() -> Iterator[Mapping[str, str]]:
    """Give the environment in which `docker` works; raise NoDockerError."""
    if shutil.which("docker") is None or shutil.which("docker-compose") is None:
        message = "docker and docker-compose are not installed"
        raise NoDockerError(message)
    environment = dict(os.environ)
    if answers(environment):
        yield environment
        return
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        message = "no docker engine answers, and one can only be started by root"
        raise NoDockerError(message)
    folder = Path(tempfile.mkdtemp(prefix="extproc-docker-"))
    try:
        with _own_engine(folder) as environment:
            yield environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answers(environment: Mapping[str, str]) -> bool:
    """Whether an engine answers."""
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return done.returncode == 0


@contextlib.contextmanager
def _own_engine(folder: Path) -> Iterator[Mapping[str, str]]:
    data = folder / "data"
    data.mkdir()
    mounted = _run("mount", "-t", "tmpfs", "-o", f"size={_DATA_SIZE}", "extproc-docker", str(data))
    socket = f"unix://{folder}/docker.sock"
    environment = {
        **os.environ,
        "DOCKER_HOST": socket,
        "DOCKER_CONFIG": str(folder / "client"),
        "DOCKER_BUILDKIT": "0",
        "COMPOSE_DOCKER_CLI_BUILD": "0",
    }
    command = [
        *("dockerd", "--data-root", str(data), "--exec-root", str(folder / "exec")),
        *("--pidfile", str(folder / "dockerd.pid"), "-H", socket, "--bridge=none"),
        *("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
        *("--cgroup-parent", f"/{folder.name}", "--storage-driver", "overlay2"),
    ]
    log = folder / "dockerd.log"
    with log.open("wb") as sink:
        daemon = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    try:
        deadline_s = time.monotonic() + START_S
        while not answers(environment):
            if daemon.poll() is not None or time.monotonic() > deadline_s:
                last = log.read_text(encoding="utf-8", errors="replace")[-400:]
                message = f"dockerd does not start: {last}"
                raise NoDockerError(message)
            time.sleep(0.2)
        yield environment
    finally:
        _remove_all(environment)
        with contextlib.suppress(ProcessLookupError):
            daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(START_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        for mount in reversed(_mounts_below(folder)):
            _run("umount", "-l", mount)
        if mounted and str(data) in _mounts_below(folder):
            _run("umount", "-l", str(data))


def _remove_all(environment: Mapping[str, str]) -> None:
    """Remove containers at once: an engine that ends waits for each to drain."""
    listed = subprocess.run(
        ["docker", "ps", "-aq"], env=environment, capture_output=True, text=True, check=False
    )
    if ids := listed.stdout.split():
        command = ["docker", "rm", "-fv", *ids]
        subprocess.run(command, env=environment, capture_output=True, check=False)
    command = ["docker", "network", "prune", "-f"]
    subprocess.run(command, env=environment, capture_output=True, check=False)


def _mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    return [line.split()[1] for line in lines if line.split()[1].startswith(f"{folder}/")]


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
