from __future__ import annotations

import asyncio
import math

import pytest

from extproc.standin.body import BusyError, CallError, read_call
from extproc.standin.engine import Engine
from extproc.standin.settings import StandinSettings

SECOND = 10_000.0  # prefill tokens per second in these tests


def make_engine(**changes):
    defaults = {
        "prefill_tokens_per_s": SECOND,
        "decode_tokens_per_s": math.inf,
        "first_token_overhead_s": 0.0,
    }
    settings = StandinSettings(**{**defaults, **changes})
    return Engine(settings, asyncio.get_running_loop().time)


def call(engine, prompt, **fields):
    body = {"max_tokens": 4, **fields}
    return read_call(body, (prompt,), engine.settings, limits=("max_tokens",))


def tokens(count, fill=b"a"):
    return fill * 4 * count


async def complete(engine, prompt, **fields):
    (generation,) = engine.admit(call(engine, prompt, **fields))
    try:
        await generation.await_first_token()
        await generation.finish()
    finally:
        generation.close()
    return generation


def modelled_ttft_s(generation):
    return generation._first_token_s - generation._arrival_s


async def test_the_first_token_waits_for_uncached_tokens_only():
    engine = make_engine()
    cold = await complete(engine, tokens(160))
    warm = await complete(engine, tokens(160))

    assert modelled_ttft_s(cold) == pytest.approx(160 / SECOND)
    assert warm.cached_tokens == 144
    assert modelled_ttft_s(warm) == pytest.approx(16 / SECOND)


async def test_the_last_block_is_always_computed():
    engine = make_engine()
    await complete(engine, tokens(32))

    assert (await complete(engine, tokens(32))).cached_tokens == 16
    assert (await complete(engine, tokens(33))).cached_tokens == 32


async def test_generated_tokens_are_cached_for_the_next_turn():
    engine = make_engine()
    first = await complete(engine, tokens(30), max_tokens=20)
    second = await complete(engine, tokens(30) + first.text.encode() + tokens(20, b"b"))

    assert second.cached_tokens == 48


async def test_sequences_are_prefilled_one_after_another():
    engine = make_engine()
    first, second = [engine.admit(call(engine, tokens(200, fill)))[0] for fill in (b"a", b"b")]
    await asyncio.gather(first.await_first_token(), second.await_first_token())
    between_s = second._first_token_s - first._first_token_s
    first.close()
    second.close()

    assert between_s == pytest.approx(200 / SECOND)


async def test_a_cancelled_sequence_leaves_the_queue():
    engine = make_engine()
    generations = [engine.admit(call(engine, tokens(300, f)))[0] for f in (b"a", b"b", b"c")]
    first, second, third = [asyncio.create_task(g.await_first_token()) for g in generations]
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    for generation in (generations[0], generations[2]):
        await generation.finish()
    for generation in generations:
        generation.close()

    between_s = generations[2]._first_token_s - generations[0]._first_token_s
    assert between_s == pytest.approx(300 / SECOND)
    assert engine.inflight == 0
    assert engine.cache.used_blocks == 0
    assert engine.counters.ended == {"stop": 0, "length": 2, "abort": 1}


async def test_a_sequence_waits_until_the_cache_has_room_for_it():
    engine = make_engine(cache_tokens=160, prefill_tokens_per_s=math.inf)
    (first,) = engine.admit(call(engine, tokens(120)))
    await first.await_first_token()
    (second,) = engine.admit(call(engine, tokens(120, b"b")))
    waiting = asyncio.create_task(second.await_first_token())
    await asyncio.sleep(0)

    assert (engine.running, engine.waiting) == (1, 1)
    first.close()
    await waiting
    assert (engine.running, engine.waiting) == (1, 0)
    second.close()


async def test_a_salt_separates_the_cache():
    engine = make_engine()
    await complete(engine, tokens(64), cache_salt="a")

    assert (await complete(engine, tokens(64), cache_salt="b")).cached_tokens == 0
    assert (await complete(engine, tokens(64), cache_salt="a")).cached_tokens == 48


async def test_the_limit_of_inflight_sequences_refuses_the_next():
    engine = make_engine(max_inflight=1)
    (held,) = engine.admit(call(engine, tokens(1)))
    with pytest.raises(BusyError):
        engine.admit(call(engine, tokens(1)))
    held.close()
    held.close()

    assert engine.inflight == 0
    assert engine.counters.rejections == 1


async def test_a_prompt_beyond_the_context_length_is_refused():
    engine = make_engine(max_model_tokens=100)
    with pytest.raises(CallError, match="maximum context length is 100"):
        engine.admit(call(engine, tokens(97)))


async def test_tokens_fall_due_at_the_decode_rate():
    engine = make_engine(decode_tokens_per_s=500.0)
    (generation,) = engine.admit(call(engine, tokens(8), max_tokens=10))
    await generation.await_first_token()
    words = [word async for batch in generation.decode() for word in batch]
    took_s = engine.clock() - generation._first_token_s
    generation.close()

    assert "".join(words) == generation.text
    assert len(words) == 10
    assert took_s >= 9 / 500.0
