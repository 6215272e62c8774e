import asyncio
import json
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from extproc.conversations import ConversationError, Workload, converse, write_scripts
from extproc.standin.faults import Fault, FaultKind
from extproc.standin.server import start_standin
from extproc.standin.settings import StandinSettings

LIMIT_S = 10
ENGINE = StandinSettings(prefill_tokens_per_s=float("inf"), decode_tokens_per_s=float("inf"))


def workload(**changes):
    sizes = {"instruction_tokens": (200, 300), "turn_tokens": 64, "answer_tokens": 16}
    return Workload(
        **{"prefixes": 2, "conversations": 4, "turns": 3, "clients": 2, **sizes, **changes}
    )


@asynccontextmanager
async def engine():
    standin = await start_standin(ENGINE)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield standin
    finally:
        await standin.stop()


def test_a_seed_writes_the_same_conversations_again():
    assert write_scripts(workload(), 7) == write_scripts(workload(), 7)
    assert write_scripts(workload(), 7) != write_scripts(workload(), 8)


def test_conversations_share_instructions_and_nothing_else():
    scripts = write_scripts(workload(prefixes=2, conversations=6), 1)
    turns = [turn for script in scripts for turn in script.turns]

    assert len({script.instructions for script in scripts}) == 2
    assert len(set(turns)) == len(turns) == 18


def test_lengths_are_in_tokens_of_four_bytes():
    script = write_scripts(workload(instruction_tokens=(250, 250), turn_tokens=64), 1)[0]

    assert len(script.instructions) == 1_000
    assert {len(turn) for turn in script.turns} == {256}


async def test_every_turn_is_asked_and_each_answer_joins_its_conversation():
    load = workload(conversations=1, clients=1, turns=3)
    async with engine() as standin:
        answers = await converse(standin.url, load, write_scripts(load, 1), seed=1)

    grown = [b.prompt_tokens - a.prompt_tokens for a, b in pairwise(answers)]
    assert len(answers) == 3
    assert all(growth >= 64 + 16 for growth in grown)
    # The next prompt continues what was generated, so all of it but the last block is found.
    for before, after in pairwise(answers):
        assert after.cached_tokens >= before.prompt_tokens + 16 - ENGINE.block_tokens
    assert {one.endpoint for one in answers} == {str(standin.endpoint)}


async def test_all_conversations_are_held_whatever_the_number_of_clients():
    load = workload(conversations=3, turns=2, clients=8)
    told = []
    async with engine() as standin:
        answers = await converse(
            standin.url, load, write_scripts(load, 1), seed=1, on_answer=lambda: told.append(1)
        )

    assert len(answers) == len(told) == 6


@pytest.mark.parametrize("kind", [FaultKind.CUT, FaultKind.STATUS])
async def test_a_request_that_fails_ends_the_conversations(kind):
    load = workload()
    async with engine() as standin:
        standin.fail(Fault(kind=kind))
        with pytest.raises(ConversationError, match="a chat request"):
            await converse(standin.url, load, write_scripts(load, 1), seed=1)


async def test_an_answer_that_is_no_chat_is_an_error():
    async def answer_with_nothing(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = b"data: " + json.dumps({"choices": []}).encode() + b"\n\n"
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    load = workload(conversations=1)
    server = await asyncio.start_server(answer_with_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(LIMIT_S):
        with pytest.raises(ConversationError, match="KeyError"):
            await converse(f"http://127.0.0.1:{port}", load, write_scripts(load, 1), seed=1)
