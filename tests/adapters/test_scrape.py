from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.scrape import Reading, Scraper, ScrapeSettings, read_metrics, restarted
from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointDown, EndpointReset, EndpointUp, Observed

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="32",note="a,\\"b\\"}",num_gpu_blocks="280"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 106447.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 52800.0
process_start_time_seconds 1.79609e+09
"""


def test_a_page_is_read():
    assert read_metrics(PAGE) == Reading(
        running=2,
        waiting=3,
        kv_usage=0.25,
        cache_tokens=8_960,
        computed_tokens=53_647.0,
        start_time_s=1.79609e09,
    )


def test_engines_of_one_server_are_summed():
    second = PAGE.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    reading = read_metrics(PAGE + second)

    assert (reading.running, reading.waiting, reading.kv_usage) == (4, 6, 0.5)


def test_locally_computed_tokens_are_preferred():
    page = (
        PAGE + 'vllm:prompt_tokens_by_source_total{source="local_compute"} 7.0\n'
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"} 9.0\n'
    )

    assert read_metrics(page).computed_tokens == 7.0


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("", id="empty"),
        pytest.param("<html>not metrics</html>", id="no metrics"),
        pytest.param("vllm:num_requests_running NaN", id="no number"),
        pytest.param("vllm:num_requests_running abc\nvllm:kv_cache_usage_perc +Inf", id="words"),
        pytest.param('vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1', id="None"),
    ],
)
def test_what_is_not_said_stays_unknown(page):
    assert read_metrics(page) == Reading()


@given(st.lists(st.sampled_from([*PAGE.splitlines(), "{", "vllm:cache_config_info{"]) | st.text()))
def test_no_page_is_an_error(lines):
    reading = read_metrics("\n".join(lines))

    assert reading.kv_usage is None or 0.0 <= reading.kv_usage <= 1.0


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(Reading(start_time_s=100), Reading(start_time_s=100.01), False, id="same"),
        pytest.param(Reading(start_time_s=100), Reading(start_time_s=200), True, id="later start"),
        pytest.param(Reading(computed_tokens=9), Reading(computed_tokens=2), True, id="reset"),
        pytest.param(Reading(computed_tokens=2), Reading(computed_tokens=9), False, id="grown"),
        pytest.param(Reading(), Reading(computed_tokens=9), False, id="unknown before"),
    ],
)
def test_a_restart_is_seen(before, after, expected):
    assert restarted(before, after) is expected


@asynccontextmanager
async def engine(pages):
    async def answer(_request):
        page = pages.pop(0)
        return web.Response(status=500) if page is None else web.Response(text=page)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Endpoint.parse(f"127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


async def scrape(pages):
    events, rounds = [], len(pages)
    scraper = Scraper(ScrapeSettings(), events.append)
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


async def test_a_page_too_large_is_left(caplog):
    assert await scrape(["# " + "x" * 5_000_000]) == []
    assert "more than" in caplog.text


async def test_an_endpoint_that_left_is_not_scraped():
    events = []
    scraper = Scraper(ScrapeSettings(), events.append)
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
