import asyncio
from pathlib import Path

import pytest

from extproc.adapters.discovery import Discovery, DiscoverySettings, Listed, resolve_name
from extproc.core.endpoint import Endpoint
from extproc.core.errors import ExtprocError
from extproc.core.events import EndpointDown, EndpointUp

A, B = Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")


def listed(host: str, **rest) -> Listed:
    return Listed(host=host, port=8000, **rest)


def up(endpoint: Endpoint, **rest) -> EndpointUp:
    return EndpointUp(endpoint=endpoint, **rest)


def read_lines(file: Path) -> list[Listed]:
    try:
        hosts = file.read_text().split()
    except OSError as error:
        raise ExtprocError(str(error)) from None
    if "broken" in hosts:
        message = f"{file}: broken"
        raise ExtprocError(message)
    return [listed(host) for host in hosts]


async def test_a_static_list_becomes_endpoints():
    events = []
    settings = DiscoverySettings(listed=(listed(A.host, weight=2.0), listed(B.host)))
    discovery = Discovery(settings, events.append)
    await discovery.start()

    assert events == [up(A, weight=2.0), up(B)]
    assert discovery.known == (A, B)


async def test_an_ipv6_address_is_bracketed():
    events = []
    await Discovery(DiscoverySettings(listed=(listed("::1"),)), events.append).start()

    assert events == [up(Endpoint("[::1]:8000"))]


async def test_a_file_is_reconciled(tmp_path):
    events, file = [], tmp_path / "pool"
    file.write_text(A.host)
    discovery = Discovery(DiscoverySettings(file=file, read_file=read_lines), events.append)
    await discovery.start()
    file.write_text(f"{B.host} ")
    assert await discovery.read()
    await discovery.reconcile()

    assert events == [up(A), EndpointDown(A, gone=True), up(B)]


@pytest.mark.parametrize("content", ["broken", None], ids=["a broken file", "a removed file"])
async def test_the_last_good_list_is_kept(tmp_path, caplog, content):
    events, file = [], tmp_path / "pool"
    file.write_text(A.host)
    discovery = Discovery(DiscoverySettings(file=file, read_file=read_lines), events.append)
    await discovery.start()
    file.unlink() if content is None else file.write_text(content)
    changed = await discovery.read()
    await discovery.reconcile()

    assert not changed
    assert discovery.known == (A,)
    assert "endpoint list kept at 1 entries" in caplog.text


async def test_an_unchanged_file_is_not_read_again(tmp_path):
    file = tmp_path / "pool"
    file.write_text(A.host)
    discovery = Discovery(DiscoverySettings(file=file, read_file=read_lines), [].append)

    assert [await discovery.read(), await discovery.read()] == [True, False]


async def test_a_name_follows_its_addresses():
    events, answers = [], [[A.host], [B.host]]

    async def resolve(host):
        assert host == "engines"
        return answers.pop(0)

    settings = DiscoverySettings(listed=(listed("engines"),))
    discovery = Discovery(settings, events.append, resolve=resolve)
    await discovery.start()
    await discovery.reconcile()

    assert events == [up(A), EndpointDown(A, gone=True), up(B)]


async def test_a_name_that_no_longer_resolves_keeps_its_addresses(caplog):
    events, answers = [], [[A.host]]

    async def resolve(_host):
        if not answers:
            raise OSError
        return answers.pop()

    settings = DiscoverySettings(listed=(listed("engines"),))
    discovery = Discovery(settings, events.append, resolve=resolve)
    await discovery.start()
    await discovery.reconcile()

    assert events == [up(A)]
    assert "engines: name not resolved" in caplog.text


async def test_running_follows_the_file(tmp_path):
    events, file = asyncio.Queue(), tmp_path / "pool"
    file.write_text(A.host)
    settings = DiscoverySettings(file=file, read_file=read_lines, poll_s=0.01)
    discovery = Discovery(settings, events.put_nowait)
    await discovery.start()
    running = asyncio.create_task(discovery.run())
    fresh = tmp_path / "fresh"
    fresh.write_text(f"{A.host} {B.host}")
    fresh.replace(file)
    async with asyncio.timeout(5):
        assert [await events.get(), await events.get()] == [up(A), up(B)]
    running.cancel()


async def test_localhost_resolves():
    assert await resolve_name("localhost") in (["127.0.0.1"], ["::1"])
