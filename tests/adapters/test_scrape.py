from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web

from extproc.adapters.scrape import Scraper, ScrapeSettings
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointDown, EndpointReset, EndpointUp, Observed
from extproc.standin.server import start_standin
from extproc.standin.settings import ENGINES, StandinSettings

PAGE = """\
vllm:num_requests_running{engine="0"} 2.0
vllm:cache_config_info{block_size="32",num_gpu_blocks="280"} 1.0
process_start_time_seconds 1.79609e+09
"""


@asynccontextmanager
async def engine(pages, models=None):
    """Serve the pages one after the other (None: status 500), and say who it is if told."""

    async def answer(_request):
        page = pages.pop(0)
        return web.Response(status=500) if page is None else web.Response(text=page)

    async def tell(_request):
        return web.Response(text=models)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    if models is not None:
        app.router.add_get("/v1/models", tell)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Endpoint.parse(f"127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


async def scrape(pages, **settings):
    events, rounds = [], len(pages)
    given = ScrapeSettings(**{"dialect": "vllm", **settings})
    scraper = Scraper(given, events.append)
    async with engine(pages) as endpoint, ClientSession() as session:
        scraper.update(EndpointUp(endpoint=endpoint))
        for _ in range(rounds):
            await scraper.scrape_all(session)
    return events


async def test_a_restart_between_two_scrapes_resets_the_endpoint():
    later = PAGE.replace("1.79609e+09", "1.79700e+09")
    events = await scrape([PAGE, None, later])

    assert [type(event) for event in events] == [Observed, EndpointReset, Observed]
    assert (events[0].running, events[0].cache_tokens) == (2, 8_960)
    assert 0.0 <= events[0].age_s < 5.0


async def test_a_page_too_large_is_left(caplog):
    assert await scrape(["# " + "x" * 5_000_000]) == []
    assert "more than" in caplog.text


async def test_an_endpoint_that_left_is_not_scraped():
    events = []
    scraper = Scraper(ScrapeSettings(dialect="vllm"), events.append)
    async with engine([PAGE]) as endpoint, ClientSession() as session:
        scraper.update(EndpointUp(endpoint=endpoint))
        scraper.update(EndpointDown(endpoint))
        scraper.update(EndpointDown(endpoint, gone=True))
        await scraper.scrape_all(session)

    assert events == []


async def test_an_endpoint_that_refuses_is_left():
    events = []
    scraper = Scraper(ScrapeSettings(), events.append)
    async with engine([]) as endpoint:
        scraper.update(EndpointUp(endpoint=endpoint))
    async with ClientSession() as session:
        await scraper.scrape_all(session)

    assert events == []


@pytest.mark.parametrize("name", ENGINES)
async def test_every_engine_is_recognised_and_read(name):
    events = []
    scraper = Scraper(ScrapeSettings(), events.append)
    standin = await start_standin(StandinSettings(engine=name, block_tokens=32, cache_tokens=6_400))
    try:
        async with ClientSession() as session:
            body = {"model": "m", "prompt": "word " * 400, "max_tokens": 2}
            for _ in range(2):
                async with session.post(f"{standin.url}/v1/completions", json=body) as answer:
                    await answer.read()
            scraper.update(EndpointUp(endpoint=standin.endpoint))
            await scraper.scrape_all(session)
    finally:
        await standin.stop()

    assert scraper.dialect_of(standin.endpoint) == name
    (seen,) = events
    assert (seen.running, seen.waiting) == (0, 0)
    assert (seen.cache_tokens, seen.block_tokens) == (6_400, 32)
    counters = standin.engine.counters
    assert seen.prefix_hits == counters.prefix_hits > 0
    assert seen.computed_tokens == counters.prefix_queries - counters.prefix_hits
    # Reading it would take the statistics from whoever reads them next.
    assert standin.drained == 0


async def test_who_can_not_be_recognised_is_asked_again_later():
    events = []
    scraper = Scraper(ScrapeSettings(), events.append)
    pages = ["nothing known", PAGE, PAGE]
    async with engine(pages, models="{}") as endpoint, ClientSession() as session:
        scraper.update(EndpointUp(endpoint=endpoint))
        for _ in range(11):
            await scraper.scrape_all(session)
        assert (events, scraper.dialect_of(endpoint), len(pages)) == ([], None, 2)
        await scraper.scrape_all(session)

    assert (len(events), scraper.dialect_of(endpoint)) == (1, "vllm")


async def test_an_address_that_another_engine_took_over_is_recognised_anew():
    events = []
    scraper = Scraper(ScrapeSettings(), events.append)
    other = "sglang:num_running_reqs 5.0\n"
    async with engine([PAGE, PAGE, other, other, other]) as endpoint, ClientSession() as session:
        scraper.update(EndpointUp(endpoint=endpoint))
        for _ in range(3):
            await scraper.scrape_all(session)

    assert scraper.dialect_of(endpoint) == "sglang"
    assert [event.running for event in events] == [2, 5]


async def test_a_path_of_ones_own_replaces_the_dialects():
    events = []
    scraper = Scraper(ScrapeSettings(dialect="trtllm", path="/metrics"), events.append)
    async with (
        engine(["trtllm_num_requests_running 3.0\n"]) as endpoint,
        ClientSession() as session,
    ):
        scraper.update(EndpointUp(endpoint=endpoint))
        await scraper.scrape_all(session)

    assert [event.running for event in events] == [3]


async def test_endpoints_are_scraped_while_it_runs_and_dropped_when_gone():
    seen = asyncio.Event()
    scraper = Scraper(ScrapeSettings(interval_s=0.01, dialect="vllm"), lambda _: seen.set())
    task = asyncio.create_task(scraper.run())
    async with engine([PAGE] * 10_000) as endpoint:
        scraper.update(EndpointUp(endpoint=endpoint))
        async with asyncio.timeout(10.0):
            await seen.wait()
            seen.clear()
            await seen.wait()
        scraper.update(EndpointDown(endpoint, gone=True))
        assert scraper.dialect_of(endpoint) is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
