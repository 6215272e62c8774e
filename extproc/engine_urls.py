"""Engines as a command line names them: `http://host:port`, one or a list."""

from __future__ import annotations

from urllib.parse import urlsplit

from extproc.config.sections import Config, Member
from extproc.core.errors import ExtprocError

_DEFAULT_HTTP_PORT = 80


class EngineUrlError(ExtprocError):
    """A text that names no engine."""


def parse_endpoint_url(url: str) -> str:
    """Give `host:port` of `http://host:port`; raise EngineUrlError for anything else."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or _DEFAULT_HTTP_PORT
    except ValueError:
        host, port, parts = None, 0, urlsplit("")
    rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme != "http" or not host or rest:
        message = f"--endpoint {url}: should be http://host:port"
        raise EngineUrlError(message)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_engines(config: Config, urls: str | None) -> Config:
    """Give the config with the engines of a comma-separated list; None or empty: unchanged.

    Whatever else the config says of endpoints stays. Raise EngineUrlError.
    """
    if not urls or not urls.strip():
        return config
    texts = [text.strip() for text in urls.split(",") if text.strip()]
    members = tuple(Member(address=parse_endpoint_url(text)) for text in texts)
    endpoints = config.endpoints.model_copy(update={"static": members, "file": None})
    return config.model_copy(update={"endpoints": endpoints})
