from __future__ import annotations

import math
from contextlib import asynccontextmanager

import aiohttp
import pytest

from extproc.standin.server import start_standin
from extproc.standin.settings import StandinSettings

INSTANT = {
    "prefill_tokens_per_s": math.inf,
    "decode_tokens_per_s": math.inf,
    "first_token_overhead_s": 0.0,
    "shutdown_timeout_s": 0.05,
}


@asynccontextmanager
async def _running(**changes):
    standin = await start_standin(StandinSettings(**{**INSTANT, **changes}))
    try:
        yield standin
    finally:
        await standin.stop()


@pytest.fixture
def running():
    """Start a stand-in without delays, in an `async with`."""
    return _running


@pytest.fixture
async def http():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
