"""One stream of a Valkey server, typed: connect, append, read, and what it holds."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from valkey.asyncio import Valkey
from valkey.asyncio.retry import Retry
from valkey.backoff import NoBackoff
from valkey.credentials import UsernamePasswordCredentialProvider
from valkey.exceptions import ResponseError, ValkeyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from extproc.adapters.log_settings import LogSettings

FAILURES = (ValkeyError, OSError, TimeoutError, ValueError)
"""What a server that is down, slow, full, too old or not ours ends in."""

_FIELD = b"b"


@dataclass(frozen=True, slots=True, order=True)
class EntryId:
    """Where an entry stands: milliseconds of the server's clock, and a count within them."""

    milliseconds: int = 0
    count: int = 0

    def __str__(self) -> str:
        return f"{self.milliseconds}-{self.count}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The first entry that is there, and the last one that ever was."""

    first: EntryId
    last: EntryId


@contextlib.asynccontextmanager
async def connect(settings: LogSettings) -> AsyncIterator[LogStream]:
    """Connect for the time of the block; what fails, then or later, is one of FAILURES."""
    password = settings.read_password()
    options: dict[str, Any] = {}
    if settings.ca_file is not None:
        options["ssl_ca_certs"] = str(settings.ca_file)
    if password or settings.username:
        options["credential_provider"] = UsernamePasswordCredentialProvider(
            settings.username, password
        )
    client = Valkey.from_url(
        settings.url,
        socket_timeout=settings.timeout_s,
        socket_connect_timeout=settings.timeout_s,
        retry=Retry(NoBackoff(), 0),
        single_connection_client=True,
        **options,
    )
    try:
        yield LogStream(client, settings)
    finally:
        with contextlib.suppress(*FAILURES):
            await client.aclose()


class LogStream:
    """A connected client of the stream; every method raises FAILURES."""

    def __init__(self, client: Valkey, settings: LogSettings) -> None:
        self._client = client
        self._settings = settings

    async def append(self, data: bytes) -> EntryId:
        """Add an entry at the end; far too many lose their oldest."""
        limit = ("MAXLEN", "~", self._settings.max_entries)
        return _parse(await self._ask("XADD", self._settings.stream, *limit, "*", _FIELD, data))

    async def trim(self, now: EntryId) -> None:
        """Drop entries older than `max_age_s`; servers before 6.2 can't."""
        oldest_ms = max(0, now.milliseconds - int(self._settings.max_age_s * 1e3))
        with contextlib.suppress(ResponseError):
            await self._ask("XTRIM", self._settings.stream, "MINID", "~", oldest_ms)

    async def read(
        self, after: EntryId, count: int, *, wait: bool = False
    ) -> list[tuple[EntryId, bytes]]:
        """Read at most `count` entries, waiting half of `timeout_s` for one if told to."""
        block = ("BLOCK", int(self._settings.timeout_s * 500)) if wait else ()
        stream = self._settings.stream
        reply = await self._ask("XREAD", "COUNT", count, *block, "STREAMS", stream, str(after))
        entries = reply[0][1] if reply else ()
        return [(_parse(entry_id), fields.get(_FIELD, b"")) for entry_id, fields in entries]

    async def bounds(self) -> Bounds:
        """Say what is there; zeros for a stream nobody has written."""
        try:
            about: Any = await _heed(self._client.xinfo_stream(self._settings.stream))
        except ResponseError as error:
            if "no such key" not in str(error):
                raise
            return Bounds(EntryId(), EntryId())
        first = about["first-entry"]
        return Bounds(_parse(first[0]) if first else EntryId(), _parse(about["last-generated-id"]))

    async def time_s(self) -> float:
        """Read the server's clock, which entries are dated by."""
        seconds, microseconds = await _heed(self._client.time())
        return float(seconds) + float(microseconds) / 1e6

    async def _ask(self, *command: object) -> Any:  # noqa: ANN401 - as the server answers
        return await _heed(self._client.execute_command(*command))  # type: ignore[no-untyped-call]


async def _heed(answer: Awaitable[Any]) -> Any:  # noqa: ANN401 - as the server answers
    """Await an answer; raise the cancellation that the client may have swallowed meanwhile."""
    try:
        return await answer
    finally:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


def _parse(entry_id: bytes) -> EntryId:
    milliseconds, _, count = entry_id.decode().partition("-")
    return EntryId(int(milliseconds), int(count))
