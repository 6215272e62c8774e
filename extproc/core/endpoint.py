"""An endpoint is one `ip:port` of a model server; its text form is what Envoy compares."""

from __future__ import annotations

import ipaddress
from typing import Self

from extproc.core.errors import EndpointError

_MAX_PORT = 65_535


class Endpoint(str):
    """The canonical text `ip:port` (`[ip]:port` for IPv6) of one model server.

    A `str`, so that it is hashed and compared at C speed on the hot path; made by
    `parse`, never from unchecked text.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `ip:port` or `[ip]:port`; raise EndpointError for anything else.

        Host names are refused: Envoy's override_host compares resolved addresses.
        """
        host, colon, port = text.strip().rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) <= _MAX_PORT:
            message = f"not an ip:port: {text[:80]!r}"
            raise EndpointError(message)
        bracketed = host.startswith("[") and host.endswith("]")
        try:
            address = ipaddress.ip_address(host[1:-1] if bracketed else host)
        except ValueError as error:
            message = f"not an IP address: {host[:80]!r}"
            raise EndpointError(message) from error
        if (address.version == 6) != bracketed:  # noqa: PLR2004 - the IP version
            message = f"IPv6 needs brackets, IPv4 takes none: {text[:80]!r}"
            raise EndpointError(message)
        shown = f"[{address.compressed}]" if bracketed else address.compressed
        return cls(f"{shown}:{int(port)}")

    @property
    def host(self) -> str:
        """The address without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.rpartition(":")[2])
