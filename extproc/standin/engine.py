"""The modelled engine: one prefill server over uncached tokens, a block cache, steady decode.

Sequences are prefilled one after another in order of arrival; a cancelled one leaves the
queue. `Generation.close` gives back all a sequence holds, however it ended.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING

from extproc.standin.body import BusyError, CallError
from extproc.standin.cache import BlockCache
from extproc.standin.metrics import Counters
from extproc.standin.tokens import BYTES_PER_TOKEN, count_tokens, hash_blocks, write_words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from extproc.standin.body import Call
    from extproc.standin.cache import Lease
    from extproc.standin.settings import StandinSettings
    from extproc.standin.tokens import StoredHash


class Engine:
    """All sequences of one stand-in, its cache and its counters."""

    def __init__(self, settings: StandinSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self.cache = BlockCache(settings.cache_blocks)
        self.counters = Counters()
        self.waiting = 0
        self.running = 0
        self.prefill = asyncio.Lock()
        """Held by the sequence being prefilled; asyncio locks are first come, first served."""
        self.prefill_free_s = -math.inf
        self.released = asyncio.Event()
        self.numbers = itertools.count(1)
        """Numbers for the ids of replies."""

    @property
    def inflight(self) -> int:
        """Sequences waiting or running."""
        return self.waiting + self.running

    def admit(self, call: Call) -> list[Generation]:
        """Queue every prompt of a call; the caller closes each Generation.

        BusyError above `max_inflight`, CallError for a prompt beyond the context length.
        """
        limit = self.settings.max_inflight
        if limit is not None and self.inflight + len(call.prompts) > limit:
            self.counters.rejections += 1
            message = (
                "The engine is currently busy and cannot accept new requests. "
                "Please try again later or on a different instance."
            )
            raise BusyError(message)
        longest = count_tokens(max(map(len, call.prompts)))
        if longest + call.max_tokens > self.settings.max_model_tokens:
            message = (
                f"This model's maximum context length is {self.settings.max_model_tokens} "
                f"tokens, but {longest + call.max_tokens} were asked for."
            )
            raise CallError(message)
        return [Generation(self, call, prompt) for prompt in call.prompts]


class Generation:
    """One sequence from queue to last token; counted as waiting from the start."""

    def __init__(self, engine: Engine, call: Call, prompt: bytes) -> None:
        self.prompt_tokens = count_tokens(len(prompt))
        self.cached_tokens = 0
        self.done_tokens = 0
        self._engine = engine
        self._prompt = prompt
        self._seed = call.seed
        self._chain = hash_blocks(prompt, call.seed, engine.settings.block_tokens)
        last = self._chain[-1] if self._chain else call.seed
        self.words, self.stopped = write_words(last, call.max_tokens, call.stop)
        self.stopped = self.stopped or call.ends_itself
        self._arrival_s = engine.clock()
        self._first_token_s = math.inf
        self._lease: Lease | None = None
        self._closed = False
        engine.waiting += 1

    @property
    def text(self) -> str:
        """What was generated up to here."""
        return "".join(self.words[: self.done_tokens])

    @property
    def finish_reason(self) -> str:
        """Why the answer ended: `stop` or `length`, as OpenAI names them."""
        return "stop" if self.stopped else "length"

    async def await_first_token(self) -> None:
        """Wait in the queue, compute what is not cached, and wait for the first token."""
        engine = self._engine
        async with engine.prefill:
            lease = await self._reserve()
            await self._prefill(lease)
        counters = engine.counters
        counters.prompt_tokens += self.prompt_tokens
        self._first_token_s = engine.prefill_free_s + engine.settings.first_token_overhead_s
        await self._sleep_until(self._first_token_s)
        counters.record_first_token(engine.clock() - self._arrival_s)

    async def decode(self) -> AsyncIterator[Sequence[str]]:
        """Yield tokens as they fall due, several at once when the reader is slower."""
        total = len(self.words)
        rate = self._engine.settings.decode_tokens_per_s
        while self.done_tokens < total:
            begin = self.done_tokens
            await self._sleep_until(self._first_token_s + begin / rate)
            late_s = max(0.0, self._engine.clock() - self._first_token_s)
            due = total if math.isinf(rate) else 1 + int(late_s * rate)
            self._advance(min(total, max(begin + 1, due)))
            yield self.words[begin : self.done_tokens]

    async def finish(self) -> None:
        """Wait for the last token."""
        total = len(self.words)
        if total:
            rate = self._engine.settings.decode_tokens_per_s
            await self._sleep_until(self._first_token_s + (total - 1) / rate)
        self._advance(total)

    def close(self) -> None:
        """Release everything; what was computed stays in the cache. May be called twice."""
        if self._closed:
            return
        self._closed = True
        engine = self._engine
        whole = self._first_token_s < math.inf and self.done_tokens == len(self.words)
        engine.counters.record_end(self.finish_reason if whole else "abort")
        if self._lease is None:
            engine.waiting -= 1
            return
        engine.running -= 1
        if self.done_tokens:
            self._lease.store(self._generated_blocks())
        self._lease.release()
        engine.released.set()

    def _advance(self, done_tokens: int) -> None:
        self._engine.counters.generation_tokens += done_tokens - self.done_tokens
        self.done_tokens = done_tokens

    async def _reserve(self) -> Lease:
        """Return the hold on the cache, once running sequences leave enough room."""
        engine = self._engine
        block_tokens = engine.settings.block_tokens
        blocks = -(-(self.prompt_tokens + len(self.words)) // block_tokens)
        # The last block is computed even when all are cached: its output is the first token.
        match_at_most = max(0, (self.prompt_tokens - 1) // block_tokens)
        while True:
            lease = engine.cache.reserve(self._chain, match_at_most=match_at_most, blocks=blocks)
            if lease is not None:
                break
            engine.released.clear()
            await engine.released.wait()
            engine.prefill_free_s = engine.clock()
        self._lease = lease
        engine.waiting -= 1
        engine.running += 1
        self.cached_tokens = lease.matched_blocks * block_tokens
        engine.counters.prefix_queries += self.prompt_tokens
        engine.counters.prefix_hits += self.cached_tokens
        return lease

    async def _prefill(self, lease: Lease) -> None:
        """Compute the uncached tokens; blocks are usable after each chunk."""
        engine, settings = self._engine, self._engine.settings
        # The server was free from this instant on, however late the loop woke us.
        ready_s = max(self._arrival_s, engine.prefill_free_s)
        done = self.cached_tokens
        try:
            while done < self.prompt_tokens:
                chunk = min(settings.prefill_chunk_tokens, self.prompt_tokens - done)
                ready_s += chunk / settings.prefill_tokens_per_s
                await self._sleep_until(ready_s)
                begin, done = done, done + chunk
                lease.store(
                    self._chain[begin // settings.block_tokens : done // settings.block_tokens]
                )
        except asyncio.CancelledError:
            ready_s = engine.clock()
            raise
        finally:
            engine.prefill_free_s = ready_s

    def _generated_blocks(self) -> list[StoredHash]:
        """Return the blocks that the answer filled, chained to those of the prompt."""
        block_tokens = self._engine.settings.block_tokens
        tail = self._prompt[len(self._chain) * block_tokens * BYTES_PER_TOKEN :]
        last = self._chain[-1] if self._chain else self._seed
        return hash_blocks(tail + self.text.encode(), last, block_tokens)

    async def _sleep_until(self, when_s: float) -> None:
        delay_s = when_s - self._engine.clock()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
