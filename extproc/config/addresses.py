"""Addresses, paths and header names as a config file writes them."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

_MAX_PORT = 65_535
_UNIX = "unix:"
# Linux limits a socket path to 107 bytes; other systems to 103.
MAX_UNIX_PATH_BYTES = 103
_LOG_SCHEMES = ("valkey", "valkeys", "redis", "rediss")
_LOG_PORT = 6379


def split_address(text: str, *, ephemeral: bool = False) -> tuple[str, int]:
    """Split `host:port` (or `[ipv6]:port`), raise ValueError for anything else.

    Port 0 is accepted only when `ephemeral`: a listener may ask for a free port.
    """
    host, colon, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or "/" in host or any(c.isspace() for c in host):
        message = f"not a host:port: {text[:80]!r}"
        raise ValueError(message)
    lowest = 0 if ephemeral else 1
    if not (port.isascii() and port.isdigit() and lowest <= int(port) <= _MAX_PORT):
        message = f"no port from {lowest} to {_MAX_PORT} in {text[:80]!r}"
        raise ValueError(message)
    return host, int(port)


def _check_target(text: str) -> str:
    split_address(text)
    return text.strip()


def _check_tcp(text: str) -> str:
    split_address(text, ephemeral=True)
    return text.strip()


def check_listen_address(text: str) -> str:
    """Give `host:port` or `unix:/path` as it is; raise ValueError for anything else."""
    if not text.startswith(_UNIX):
        return _check_tcp(text)
    path = text.removeprefix(_UNIX)
    if not path or len(path.encode()) > MAX_UNIX_PATH_BYTES:
        message = f"a unix socket path has 1 to {MAX_UNIX_PATH_BYTES} bytes"
        raise ValueError(message)
    return text


def _check_log_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in _LOG_SCHEMES:
        message = f"a log's address starts with {', '.join(f'{s}://' for s in _LOG_SCHEMES)}"
        raise ValueError(message)
    if "@" in parts.netloc:
        message = "no user or password here: use username and password_file or password_env"
        raise ValueError(message)
    if parts.query or parts.fragment or not re.fullmatch(r"/?[0-9]{0,4}", parts.path):
        message = "nothing but /N, the number of a database, follows host:port"
        raise ValueError(message)
    has_port = ":" in parts.netloc.rpartition("]")[2]
    split_address(parts.netloc if has_port else f"{parts.netloc}:{_LOG_PORT}")
    return text


def _check_path(text: str) -> str:
    if not text.startswith("/"):
        message = "a path starts with '/'"
        raise ValueError(message)
    return text


Target = Annotated[str, AfterValidator(_check_target)]
TcpAddress = Annotated[str, AfterValidator(_check_tcp)]
ListenAddress = Annotated[str, AfterValidator(check_listen_address)]
LogUrl = Annotated[str, AfterValidator(_check_log_url)]
UrlPath = Annotated[str, AfterValidator(_check_path)]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9!#$%&'*+.^_`|~-]{1,128}$")]
