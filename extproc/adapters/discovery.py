"""Who serves the model: a list or a file of `host:port`, resolved and reconciled into events.

Envoy compares resolved addresses, so names are resolved here and again from time to time.
Whatever fails later (a broken file, a name that no longer resolves) keeps the last good
view: losing the list must not lose the endpoints.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.core.endpoint import Endpoint
from extproc.core.errors import ExtprocError
from extproc.core.events import EndpointDown, EndpointUp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from pathlib import Path

_LOG = logging.getLogger(__name__)
_RESOLVE_TIMEOUT_S = 5.0
_MAX_ADDRESSES_PER_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One entry of the list: `host` may be a name or an address."""

    host: str
    port: int
    weight: float = 1.0
    max_inflight: int | None = None
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """`listed` is the static list; with a `file`, `read_file` parses it (raises ExtprocError)."""

    listed: tuple[Listed, ...] = ()
    file: Path | None = None
    read_file: Callable[[Path], Sequence[Listed]] | None = None
    poll_s: float = 1.0
    resolve_s: float = 30.0


class Discovery:
    """Turns the list into EndpointUp and EndpointDown(gone) events for `apply`."""

    def __init__(
        self,
        settings: DiscoverySettings,
        apply: Callable[[EndpointUp | EndpointDown], None],
        *,
        resolve: Callable[[str], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        self._settings = settings
        self._apply = apply
        self._resolve = resolve or resolve_name
        self._listed: Sequence[Listed] = settings.listed
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._members: dict[Endpoint, EndpointUp] = {}
        self._stamp: tuple[int, int, int] | None = None

    @property
    def known(self) -> tuple[Endpoint, ...]:
        """The endpoints that are listed and resolved."""
        return tuple(self._members)

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint in self._members

    async def start(self) -> None:
        """Read and resolve once, so that the first request finds a pool."""
        await self.read()
        await self.reconcile()

    async def run(self) -> None:
        """Follow the file and the names until cancelled."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        next_resolve_s = loop.time() + settings.resolve_s
        while True:
            await asyncio.sleep(min(settings.poll_s, settings.resolve_s))
            due = loop.time() >= next_resolve_s
            if await self.read() or due:
                await self.reconcile()
                next_resolve_s = loop.time() + settings.resolve_s

    async def read(self) -> bool:
        """Read the file when it changed; a broken one keeps the last good list and is logged."""
        file, parse = self._settings.file, self._settings.read_file
        if file is None or parse is None:
            return False
        stamp = _stamp(file)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            # In a thread: parsing thousands of entries would hold up every stream.
            self._listed = await asyncio.to_thread(parse, file)
        except ExtprocError as error:
            _LOG.warning("endpoint list kept at %d entries: %s", len(self._listed), error)
            return False
        _LOG.info("endpoint list %s has %d entries", file, len(self._listed))
        return True

    async def reconcile(self) -> None:
        """Resolve every name, then tell what joined, changed and left."""
        await self._refresh({entry.host for entry in self._listed})
        wanted = self._wanted()
        for endpoint in [known for known in self._members if known not in wanted]:
            del self._members[endpoint]
            self._apply(EndpointDown(endpoint, gone=True))
        for endpoint, event in wanted.items():
            if self._members.get(endpoint) != event:
                self._members[endpoint] = event
                self._apply(event)

    def _wanted(self) -> dict[Endpoint, EndpointUp]:
        wanted: dict[Endpoint, EndpointUp] = {}
        for entry in self._listed:
            for address in self._addresses.get(entry.host, ()):
                shown = f"[{address}]" if ":" in address else address
                endpoint = Endpoint.parse(f"{shown}:{entry.port}")
                wanted[endpoint] = EndpointUp(
                    endpoint=endpoint,
                    weight=entry.weight,
                    max_inflight=entry.max_inflight,
                    draining=entry.draining,
                )
        return wanted

    async def _refresh(self, hosts: Iterable[str]) -> None:
        hosts = list(hosts)
        found = await asyncio.gather(*(self._lookup(host) for host in hosts))
        self._addresses = dict(zip(hosts, found, strict=True))

    async def _lookup(self, host: str) -> tuple[str, ...]:
        try:
            return (ipaddress.ip_address(host).compressed,)
        except ValueError:
            pass
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                addresses = await self._resolve(host)
        except (OSError, UnicodeError, TimeoutError) as error:
            known = self._addresses.get(host, ())
            _LOG.warning("%s: name not resolved (%s), keeping %s", host, error, known or "none")
            return known
        return tuple(sorted(set(addresses)))[:_MAX_ADDRESSES_PER_NAME]


async def resolve_name(host: str) -> Sequence[str]:
    """Ask the system's resolver for the addresses of a host name; raise OSError.

    Where a name has IPv4 addresses, only those: a name with both families is one server.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ipv4 = [str(info[4][0]) for info in found if info[0] == socket.AF_INET]
    return ipv4 or [str(info[4][0]) for info in found if info[0] == socket.AF_INET6]


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        stat = file.stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
