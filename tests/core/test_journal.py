import contextlib
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.endpoint import Endpoint
from extproc.core.events import EndpointReset, Finished, FirstByte, Routed
from extproc.core.journal import VERSION, Batch, Journal
from extproc.core.packing import JournalError

A, B, C = (Endpoint.parse(f"10.0.0.{n}:8000") for n in (1, 2, 3))
SIX = Endpoint.parse("[2001:db8::1]:8000")

numbers = st.integers(0, 2**63)
hashes = st.integers(0, 2**64 - 1)
endpoints = st.sampled_from([A, B, C, SIX])
ids = st.from_regex(r"\A(r1|r2|)-(0|00|1|7|0999|9{17}|9{18}|1{40}|x|)\Z") | st.text(max_size=8)


def hashed(blocks):
    """Make each number a hash of itself and those before it, as the wire's blocks are."""
    return tuple(
        int.from_bytes(sha256(repr(blocks[: n + 1]).encode()).digest()[:8])
        for n in range(len(blocks))
    )


chains = st.lists(st.lists(st.integers(0, 3), max_size=8).map(hashed), max_size=3).map(tuple)
routed_events = st.builds(
    Routed,
    decision_id=ids,
    endpoint=endpoints,
    chains=chains,
    prompt_tokens=numbers,
    matched_tokens=numbers,
    tier1=hashes,
    tier2=st.sampled_from([0, 1, 2**64 - 1]),
)
finished_events = st.builds(
    Finished, decision_id=ids, served=st.none() | endpoints, status=st.integers(0, 999)
)
shared_events = (
    routed_events
    | finished_events
    | st.builds(FirstByte, decision_id=ids)
    | st.builds(EndpointReset, endpoint=endpoints)
)


def chain_of(conversation, length):
    """Each block's hash stands for all blocks before it, as in the wire's chains."""
    return tuple(conversation * 1_000_000 + n for n in range(1, length + 1))


def turn(length, *, conversation=1, tier2=None, decision_id="r1-1", endpoint=A):
    return Routed(
        decision_id=decision_id,
        endpoint=endpoint,
        chains=(chain_of(conversation, length),),
        prompt_tokens=128 * length,
        matched_tokens=0,
        tier1=7,
        tier2=conversation if tier2 is None else tier2,
    )


def pass_on(writer, *readers, events, sequence=1, now_s=0.0):
    data = writer.encode("r1", sequence, events, now_s)
    return data, *(reader.decode(data, now_s) for reader in readers)


@given(st.lists(shared_events, max_size=12), st.integers(1, 2**63))
def test_events_are_read_as_they_were_written(events, sequence):
    data = Journal().encode("r1", sequence, events, 0.0)

    assert Journal().decode(data, 0.0) == Batch(
        router_id="r1", sequence=sequence, events=tuple(events)
    )


steps = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 9), st.integers(1, 2)),
    max_size=30,
)


@given(steps, st.integers(1, 40))
def test_who_reads_all_knows_every_chain_whoever_writes_and_however_conversations_branch(
    moves, room
):
    """Routers of little memory take turns to write; the reader has more than all of them."""
    writers = [Journal(max_known_blocks=room, whole_s=5.0) for _ in range(3)]
    reader = Journal()
    for now_s, (at, conversation, length, branch) in enumerate(moves):
        event = turn(length, conversation=conversation * 10 + branch, tier2=conversation)
        data = writers[at].encode("r1", now_s, [event], float(now_s))
        for other in writers[:at] + writers[at + 1 :]:
            other.decode(data, float(now_s))
        batch = reader.decode(data, float(now_s))

        assert (batch.events, batch.unknown) == ((event,), 0)
        assert all(journal.known_blocks <= room for journal in writers)


@given(steps, st.integers(0, 30))
def test_who_starts_amid_the_log_reads_a_chain_right_or_not_at_all(moves, missed):
    writer, reader = Journal(whole_s=5.0), Journal()
    for now_s, (_, conversation, length, branch) in enumerate(moves):
        event = turn(length, conversation=conversation * 10 + branch, tier2=conversation)
        data = writer.encode("r1", now_s, [event], float(now_s))
        if now_s >= missed:
            batch = reader.decode(data, float(now_s))
            (read,) = batch.events

            assert read.chains == (() if batch.unknown else event.chains)


def test_only_new_blocks_are_written_of_a_known_conversation():
    writer, reader = Journal(), Journal()
    first, _ = pass_on(writer, reader, events=[turn(200)])
    second, batch = pass_on(writer, reader, events=[turn(205)], now_s=1.0)

    assert len(first) > 200 * 8
    assert len(second) < 120
    assert batch.events == (turn(205),)


def test_blocks_that_another_router_wrote_are_not_written_again():
    one, two = Journal(), Journal()
    pass_on(one, two, events=[turn(200)])
    data, batch = pass_on(two, one, events=[turn(205)], now_s=1.0)

    assert len(data) < 120
    assert batch.events == (turn(205),)


def test_a_reader_without_the_beginning_learns_the_chain_within_the_time_of_whole_ones():
    writer, late = Journal(whole_s=60.0), Journal()
    pass_on(writer, events=[turn(5)])
    _, amid = pass_on(writer, late, events=[turn(6)], now_s=59.0)
    _, after = pass_on(writer, late, events=[turn(7)], now_s=61.0)

    assert (amid.unknown, amid.events[0].chains) == (1, ())
    assert amid.events[0].endpoint == A
    assert (after.unknown, after.events) == (0, (turn(7),))


def test_after_a_restart_chains_are_written_whole():
    writer, late = Journal(), Journal()
    pass_on(writer, events=[turn(5)])
    writer.restart()
    _, batch = pass_on(writer, late, events=[turn(6)], now_s=1.0)

    assert batch.events == (turn(6),)


def test_more_conversations_than_there_is_room_for_forget_the_oldest():
    writer = Journal(max_known_blocks=10)
    for conversation in range(1, 10):
        pass_on(writer, events=[turn(4, conversation=conversation)])

    assert writer.known_blocks == 8


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_our_error(data):
    for candidate in (data, bytes((VERSION,)) + data):
        with contextlib.suppress(JournalError):
            Journal().decode(candidate, 0.0)


@given(
    st.lists(shared_events, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3),
    st.integers(0, 10**6),
)
def test_a_batch_with_broken_bytes_is_a_batch_or_our_error(events, changes, cut):
    data = bytearray(Journal().encode("r1", 1, events, 0.0))
    for place, value in changes:
        data[place % len(data)] = value
    reader = Journal()
    with contextlib.suppress(JournalError):
        reader.decode(bytes(data[: cut % (len(data) + 1)]), 0.0)

    assert reader.known_blocks <= 500_000


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"\x02", "version 2", id="another version"),
        pytest.param(b"\x01\x02r1\x01\x00\x01\x09\x01", "kind 9", id="an unknown kind"),
        pytest.param(b"\x01\x02r1\x01\x00\x01\x04\x05", "endpoint", id="an endpoint not listed"),
        pytest.param(b"\x01\x02r1\x01\x01\x01x\x00", "endpoint", id="an endpoint that is none"),
    ],
)
def test_what_is_no_batch_is_named(data, reason):
    with pytest.raises(JournalError, match=reason):
        Journal().decode(data, 0.0)


def test_a_chain_without_end_is_refused():
    """A few bytes that continue a long chain must not grow into any memory."""
    reader = Journal(max_known_blocks=1_000_000)
    writer = Journal(max_known_blocks=1_000_000)
    longest = tuple(range(1, 70_000))
    event = Routed(
        decision_id="r1-1",
        endpoint=A,
        chains=(longest,),
        prompt_tokens=1,
        matched_tokens=0,
        tier1=7,
        tier2=1,
    )
    data, batch = pass_on(writer, reader, events=[event])

    assert batch.events[0].chains == (longest[: 1 << 16],)
    with pytest.raises(JournalError, match="chain"):
        reader.decode(one_more_block(data, longest[(1 << 16) - 1]), 0.0)


def one_more_block(data, last):
    """Continue the longest chain: keep all, add one block."""
    head = data[: data.index((1).to_bytes(8, "little") + (2).to_bytes(8, "little")) - 4]
    kept = b"\x80\x80\x04" + last.to_bytes(8, "little")
    return head + kept + b"\x01" + (9).to_bytes(8, "little")


def test_what_is_known_of_endpoints_is_bounded():
    reader = Journal()
    for batch in range(6):
        resets = [
            EndpointReset(Endpoint(f"10.{batch}.{n // 256}.{n % 256}:80")) for n in range(1_000)
        ]
        _, read = pass_on(Journal(), reader, events=resets)
        assert read.events == tuple(resets)

    assert len(reader._endpoints) <= 4_096
