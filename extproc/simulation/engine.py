"""One model server in virtual time: continuous batching over a block cache.

The step loop follows vLLM's scheduler as its documentation describes it: running requests
first, then waiting ones in order of arrival, one token budget for all. Steps without
prefill are alike, so a run of them is taken as one stretch. Simplified: attention costs
nothing that grows with the context, and memory of a whole prompt is taken at admission.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

from extproc.simulation.kv import BlockCache

if TYPE_CHECKING:
    from extproc.core.decision import Chain
    from extproc.simulation.workload import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The constants of the model, all in one place.

    A step takes `step_s` + its prompt tokens / `prefill_tokens_per_s` + its decoding
    requests x `decode_s`; `step_tokens` is its budget and `slots` the requests that may run.
    The defaults are the study's: a large model on one node of GPUs.
    """

    kv_tokens: int = 320_000
    block_tokens: int = 128
    prefill_tokens_per_s: float = 12_000.0
    step_tokens: int = 2_048
    slots: int = 64
    step_s: float = 0.012
    decode_s: float = 0.000_25


@dataclass(slots=True, eq=False)
class Job:
    """One request on an engine. `cached_tokens` is what its first admission found."""

    turn: Turn
    tag: int
    first_token_s: float | None = None
    cached_tokens: int | None = None
    computed_tokens: int = 0
    produced: int = 0
    context: int = 0
    unwritten: int = 0
    tail_blocks: int = 0
    expected_tokens: int = 0

    @property
    def target(self) -> int:
        """Tokens that must be in the cache before the next one is produced."""
        return self.turn.prompt_tokens + self.produced


@dataclass(slots=True)
class Progress:
    """What one advance brought: jobs with their first token, jobs that ended."""

    first_tokens: list[Job]
    finished: list[Job]


class Engine:
    """A queue, the running requests and a cache; the caller moves time."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.cache = BlockCache(max(1, settings.kv_tokens // settings.block_tokens))
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: list[Job] = []
        self._began_s = 0.0
        self._step_s = 0.0
        self._steps = 0
        self._shares: list[tuple[Job, int]] = []
        self.computed_tokens = 0
        self.preemptions = 0
        self._expected_tokens = 0

    @property
    def next_s(self) -> float:
        """When `advance` is due; infinite while idle."""
        return self._began_s + self._steps * self._step_s if self._steps else inf

    @property
    def running(self) -> int:
        """Requests admitted."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens here that are not computed yet, as the cache stood when they came."""
        return self._expected_tokens

    def fits(self, turn: Turn) -> bool:
        """Tell whether the whole request can ever be in memory at once."""
        return self._blocks(turn.prompt_tokens + turn.output_tokens) < self.cache.capacity

    def submit(self, job: Job, now_s: float) -> None:
        """Take a request that `fits`; it is considered at the end of the running step."""
        turn = job.turn
        held = self.cache.held_blocks(turn.chain) * self._settings.block_tokens
        self._expect(job, turn.prompt_tokens - held)
        self._waiting.append(job)
        if not self._steps:
            self._plan(now_s)
        elif not self._shares:
            # Decode steps were taken as one stretch: end it with the step that runs now.
            done = ceil((now_s - self._began_s) / self._step_s - 1e-9)
            self._steps = max(1, min(self._steps, done))

    def advance(self, now_s: float) -> Progress:
        """End the stretch that is due at `now_s` and begin the next one."""
        progress = Progress([], [])
        self._decode(self._steps, progress)
        self._prefill(now_s, progress)
        self._steps, self._shares = 0, []
        for job in progress.finished:
            self._leave(job)
        self._plan(now_s)
        return progress

    def jobs(self) -> list[Job]:
        """List every request here, running or waiting."""
        return [*self._decoding, *self._prefilling, *self._waiting]

    def _decode(self, steps: int, progress: Progress) -> None:
        going: list[Job] = []
        for job in self._decoding:
            job.produced += steps
            job.context += steps
            (progress.finished if job.produced >= job.turn.output_tokens else going).append(job)
            self._grow_tail(job)
        self._decoding = going

    def _prefill(self, now_s: float, progress: Progress) -> None:
        for job, tokens in self._shares:
            self._expect(job, job.expected_tokens - tokens)
            job.context += tokens
            job.computed_tokens += tokens
            self.computed_tokens += tokens
            self._write(job)
            if job.context < job.target:
                continue
            self._prefilling.remove(job)
            self._expect(job, 0)
            job.produced += 1
            if job.first_token_s is None:
                job.first_token_s = now_s
                progress.first_tokens.append(job)
            done = job.produced >= job.turn.output_tokens
            (progress.finished if done else self._decoding).append(job)

    def _plan(self, now_s: float) -> None:
        """Begin the next step, or a stretch of decode steps alike."""
        settings = self._settings
        self._make_room()
        budget = settings.step_tokens - len(self._decoding)
        shares: list[tuple[Job, int]] = []
        for job in self._prefilling:
            budget = self._share(job, budget, shares)
        while budget > 0 and self._waiting and self.running < settings.slots:
            if not self._admit(self._waiting[0]):
                break
            job = self._waiting.popleft()
            self._prefilling.append(job)
            budget = self._share(job, budget, shares)
        self._shares = shares
        tokens = sum([share for _, share in shares])
        self._began_s = now_s
        self._step_s = (
            settings.step_s
            + tokens / settings.prefill_tokens_per_s
            + settings.decode_s * len(self._decoding)
        )
        if shares:
            self._steps = 1
        elif self._decoding:
            left = min([job.turn.output_tokens - job.produced for job in self._decoding])
            room = self.cache.available // len(self._decoding) * settings.block_tokens
            self._steps = max(1, min(left, room))

    @staticmethod
    def _share(job: Job, budget: int, shares: list[tuple[Job, int]]) -> int:
        tokens = min(budget, job.target - job.context)
        if tokens > 0:
            shares.append((job, tokens))
        return budget - tokens

    def _admit(self, job: Job) -> bool:
        """Pin what the cache holds of a request and take memory for the rest."""
        chain, bt = job.turn.chain, self._settings.block_tokens
        held = self.cache.held_blocks(chain)
        # The last token is always computed: its output is what comes next.
        while held and held * bt >= job.target:
            held -= 1
        total = self._blocks(job.target + 1)
        if not self.cache.pin(chain[:held], reserve=total - held, spare=len(self._decoding)):
            return False
        job.context = held * bt
        job.unwritten = held
        job.tail_blocks = total - len(chain)
        self._expect(job, job.target - job.context)
        if job.cached_tokens is None:
            job.cached_tokens = job.context
        return True

    def _write(self, job: Job) -> None:
        """Make the blocks computed so far reusable."""
        chain = job.turn.chain
        full = min(len(chain), job.context // self._settings.block_tokens)
        if full > job.unwritten:
            self.cache.write(chain[job.unwritten : full])
            job.unwritten = full

    def _grow_tail(self, job: Job) -> None:
        needed = self._blocks(job.target + 1) - len(job.turn.chain)
        if needed > job.tail_blocks:
            self.cache.reserve(needed - job.tail_blocks)
            job.tail_blocks = needed

    def _make_room(self) -> None:
        """Preempt the latest while the next decode step might not fit in memory."""
        while len(self._decoding) > 1 and self.cache.available < len(self._decoding):
            job = self._decoding.pop()
            self._release(job, answer=())
            self.preemptions += 1
            self._expect(job, job.target)
            self._waiting.appendleft(job)

    def _leave(self, job: Job) -> None:
        self._release(job, answer=job.turn.answer_chain)

    def _release(self, job: Job, *, answer: Chain) -> None:
        chain = job.turn.chain
        unwritten = len(chain) - job.unwritten
        self.cache.release(
            chain[: job.unwritten], reserved=job.tail_blocks + unwritten, answer=answer
        )

    def _expect(self, job: Job, tokens: int) -> None:
        self._expected_tokens += tokens - job.expected_tokens
        job.expected_tokens = tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._settings.block_tokens)
