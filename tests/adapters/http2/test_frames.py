"""Frames: what is written is read again, however the bytes come."""

from contextlib import suppress

import pytest
from hyperframe.frame import Frame as Oracle
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.http2 import frames
from extproc.adapters.http2.frames import Code, ConnectionFaultError, FrameReader

payloads = st.binary(max_size=300)
some_frames = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1), payloads),
    max_size=6,
)


def pieces(data, cuts):
    places = sorted({min(cut, len(data)) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(some_frames, st.lists(st.integers(0, 2_000), max_size=8))
def test_frames_are_read_as_written_however_they_are_cut(sent, cuts):
    data = frames.PREFACE + b"".join(frames.frame(*one) for one in sent)
    reader = FrameReader()

    assert [one for part in pieces(data, cuts) for one in reader.feed(part)] == sent


@given(st.integers(0, 9), st.integers(1, 2**31 - 1), st.binary(min_size=8, max_size=8))
def test_heads_are_those_of_another_implementation(kind, stream_id, payload):
    head = frames.frame(kind, 0, stream_id, payload)[: frames.HEAD_BYTES]
    if kind in {frames.SETTINGS, frames.PING, frames.GOAWAY}:
        head = frames.frame(kind, 0, 0, payload)[: frames.HEAD_BYTES]
    parsed, length = Oracle.parse_frame_header(memoryview(head))

    assert (parsed.type, length) == (kind, len(payload))


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_a_fault(data):
    with suppress(ConnectionFaultError):
        list(FrameReader().feed(frames.PREFACE[: len(data)] + data))


def test_a_frame_above_the_limit_is_a_fault_before_its_payload_comes():
    head = frames.frame(frames.DATA, 0, 1, b"x" * (frames.MAX_FRAME_BYTES + 1))[:9]
    with pytest.raises(ConnectionFaultError) as caught:
        list(FrameReader().feed(frames.PREFACE + head))

    assert caught.value.code is Code.FRAME_SIZE_ERROR


@given(payloads, st.integers(0, 255))
def test_padding_and_priority_are_taken_off(data, padding):
    padded = bytes([padding]) + data + b"\0" * padding
    with_priority = bytes([padding]) + b"\0\0\0\0\x10" + data + b"\0" * padding

    assert frames.content(padded, frames.PADDED) == data
    assert frames.content(with_priority, frames.PADDED | frames.WITH_PRIORITY) == data


@pytest.mark.parametrize("payload", [b"", b"\x05abc", b"\x01"])
def test_padding_that_does_not_fit_is_a_fault(payload):
    with pytest.raises(ConnectionFaultError):
        frames.content(payload, frames.PADDED)
