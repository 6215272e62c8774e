"""A connection against a client of another implementation, and against clients that misbehave."""

import struct

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.adapters.http2 import frames
from extproc.adapters.http2.connection import Connection, Limits
from extproc.adapters.http2.control import CONNECTION_WINDOW
from extproc.adapters.http2.frames import Code, Setting
from extproc.adapters.http2.inbox import Budget
from extproc.adapters.http2.stream import RECEIVE_WINDOW

CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    (":authority", "x"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
BLOCK = Encoder().encode(CALL)
GREETING = frames.PREFACE + frames.settings_frame({})


class Echo:
    """A call that gives every message back; a message `end` ends it, `raise` breaks it."""

    def __init__(self, stream, calls):
        self.stream, self.closed, self.messages = stream, [], []
        calls.append(self)

    def receive(self, data):
        self.messages.append(data)
        if data == b"raise":
            raise RuntimeError
        if data == b"end":
            self.stream.finish(0)
        else:
            self.stream.send(data)

    def half_close(self):
        self.stream.finish(0)

    def close(self, sent):
        self.closed.append(sent)


class Served:
    """A connection, the calls it made, and what it wrote, as frames."""

    def __init__(self, *, budget=1_000_000, now=lambda: 0.0, **limits):
        self.calls, self.written, self.disconnected = [], [], 0
        self.budget = Budget(budget)
        self.connection = Connection(
            {"/test/Echo": lambda stream: Echo(stream, self.calls)},
            Limits(**limits),
            budget=self.budget,
            clock=now,
            write=self.written.append,
            disconnect=self._disconnect,
        )

    def _disconnect(self):
        self.disconnected += 1

    def frames(self):
        data, self.written[:] = b"".join(self.written), []
        reader = frames.FrameReader()
        return list(reader.feed(frames.PREFACE + data))

    def send(self, *parts, greet=True):
        if greet:
            self.connection.receive(GREETING)
            self.frames()
        for part in parts:
            self.connection.receive(part)
        return self.frames()

    def code(self, *parts, greet=True):
        """Send, and give the code with which the connection was closed."""
        kinds = self.send(*parts, greet=greet)
        assert self.disconnected == 1
        assert self.connection.closed
        assert self.connection.streams == 0
        assert self.budget.used_bytes == 0
        return Code(struct.unpack(">LL", kinds[-1][3])[1])


def head(stream_id, flags=frames.END_HEADERS, block=BLOCK):
    return frames.frame(frames.HEADERS, flags, stream_id, block)


def data(stream_id, payload, flags=0):
    return frames.frame(frames.DATA, flags, stream_id, payload)


def message(content):
    return struct.pack(">BL", 0, len(content)) + content


def resets(written):
    return {
        stream_id: Code(int.from_bytes(payload, "big"))
        for kind, _, stream_id, payload in written
        if kind == frames.RST_STREAM
    }


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.binary(max_size=60_000), min_size=1, max_size=4),
    st.integers(0, 70_000),
    st.integers(1, 40_000),
)
def test_messages_of_any_size_pass_both_ways_within_any_window(contents, window, piece):
    served = Served()
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
    client.send_headers(1, CALL)
    waiting, received, ended = b"".join(map(message, contents)), b"", False
    for _ in range(2_000):
        out = client.data_to_send()
        for at in range(0, len(out), piece):
            served.connection.receive(out[at : at + piece])
        back = b"".join(served.written)
        served.written.clear()
        for event in client.receive_data(back):
            if isinstance(event, h2.events.DataReceived):
                received += event.data
            ended = ended or isinstance(event, h2.events.StreamEnded)
        if ended:
            break
        if waiting:
            room = min(client.local_flow_control_window(1), client.max_outbound_frame_size)
            part, waiting = waiting[:room], waiting[room:]
            client.send_data(1, part, end_stream=not waiting)
        client.increment_flow_control_window(997)
        client.increment_flow_control_window(997, 1)

    assert ended
    assert received == b"".join(map(message, contents))
    assert served.calls[0].closed == [len(contents)]
    assert served.budget.used_bytes == 0
    assert served.connection.streams == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                frames.frame,
                st.integers(0, 11),
                st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D]),
                st.sampled_from([0, 1, 2, 3, 5, 7]),
                st.one_of(
                    st.binary(max_size=20), st.just(BLOCK), st.just(message(b"end")),
                    st.just(message(b"raise")), st.just(b"\0\0\0\1"),
                ),
            ),
        ),
        max_size=20,
    )
)  # fmt: skip
def test_no_bytes_break_a_connection_or_leave_a_call_behind(parts):
    served = Served()
    served.send(*parts)
    served.connection.lose()

    assert all(len(call.closed) == 1 for call in served.calls)
    assert served.budget.used_bytes == 0
    assert served.connection.streams == 0


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([data(0, b"x")], Code.PROTOCOL_ERROR),
        ([data(1, b"x")], Code.PROTOCOL_ERROR),
        ([head(2)], Code.PROTOCOL_ERROR),
        ([head(0)], Code.PROTOCOL_ERROR),
        ([head(3), head(1)], Code.STREAM_CLOSED),
        ([head(1, 0x4, b"\xff\xff\xff\xff\xff")], Code.COMPRESSION_ERROR),
        ([head(1, 0x4, b"\xc6")], Code.COMPRESSION_ERROR),
        ([head(1, 0x4 | 0x8, b"\xff")], Code.PROTOCOL_ERROR),
        ([head(1), data(1, b"\x09abc", frames.PADDED)], Code.PROTOCOL_ERROR),
        ([frames.frame(frames.CONTINUATION, 4, 1, BLOCK)], Code.PROTOCOL_ERROR),
        ([head(1, 0), data(1, b"")], Code.PROTOCOL_ERROR),
        ([head(1, 0), frames.frame(frames.CONTINUATION, 4, 3)], Code.PROTOCOL_ERROR),
        ([head(1, 0), frames.frame(77, 0, 1)], Code.PROTOCOL_ERROR),
        ([frames.frame(frames.SETTINGS, 0, 1)], Code.PROTOCOL_ERROR),
        ([frames.frame(frames.SETTINGS, 0, 0, b"12345")], Code.FRAME_SIZE_ERROR),
        ([frames.frame(frames.SETTINGS, 1, 0, b"123456")], Code.FRAME_SIZE_ERROR),
        ([frames.settings_frame({Setting.ENABLE_PUSH: 2})], Code.PROTOCOL_ERROR),
        ([frames.settings_frame({Setting.MAX_FRAME_SIZE: 16_383})], Code.PROTOCOL_ERROR),
        ([frames.settings_frame({Setting.MAX_FRAME_SIZE: 2**24})], Code.PROTOCOL_ERROR),
        ([frames.settings_frame({Setting.INITIAL_WINDOW_SIZE: 2**31})], Code.FLOW_CONTROL_ERROR),
        ([frames.frame(frames.PING, 0, 0, b"short")], Code.FRAME_SIZE_ERROR),
        ([frames.frame(frames.PING, 0, 1, b"8 bytes.")], Code.PROTOCOL_ERROR),
        ([frames.frame(frames.GOAWAY, 0, 1, b"8 bytes.")], Code.PROTOCOL_ERROR),
        ([frames.frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2")], Code.PROTOCOL_ERROR),
        ([frames.frame(frames.PRIORITY, 0, 0, b"12345")], Code.PROTOCOL_ERROR),
        ([frames.frame(frames.RST_STREAM, 0, 0, b"1234")], Code.PROTOCOL_ERROR),
        ([frames.frame(frames.RST_STREAM, 0, 1, b"1234")], Code.PROTOCOL_ERROR),
        ([head(1), frames.frame(frames.RST_STREAM, 0, 1, b"123")], Code.FRAME_SIZE_ERROR),
        ([frames.window_update(0, 0)], Code.PROTOCOL_ERROR),
        ([frames.window_update(1, 1)], Code.PROTOCOL_ERROR),
        ([frames.window_update(0, 2**31 - 1)], Code.FLOW_CONTROL_ERROR),
        ([frames.frame(frames.WINDOW_UPDATE, 0, 0, b"123")], Code.FRAME_SIZE_ERROR),
        (
            [
                head(1),
                frames.window_update(1, 2**31 - 1 - 65_535),
                frames.settings_frame({Setting.INITIAL_WINDOW_SIZE: 65_536}),
            ],
            Code.FLOW_CONTROL_ERROR,
        ),
        ([head(1, 5), data(1, b"")], Code.STREAM_CLOSED),
    ],
    ids=str,
)  # fmt: skip
def test_a_broken_rule_closes_the_connection_with_its_code(parts, code):
    assert Served().code(*parts) is code


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/1.1\r\n", b"\x16\x03\x01"]
)
def test_another_protocol_is_turned_away(first):
    assert Served().code(first, greet=False) is Code.PROTOCOL_ERROR


def test_settings_come_first():
    early = frames.PREFACE + frames.frame(frames.PING, 0, 0, b"8 bytes.")

    assert Served().code(early, greet=False) is Code.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([head(1), frames.window_update(1, 0)], Code.PROTOCOL_ERROR),
        ([head(1), frames.window_update(1, 2**31 - 1)], Code.FLOW_CONTROL_ERROR),
        ([head(1), frames.frame(frames.PRIORITY, 0, 1, b"1234")], Code.FRAME_SIZE_ERROR),
        ([head(1), head(1)], Code.PROTOCOL_ERROR),
        ([head(1, 4, Encoder().encode([("x", "y")]))], Code.PROTOCOL_ERROR),
        ([head(1), data(1, b"\0\0\0\0\x09half", frames.END_STREAM)], Code.PROTOCOL_ERROR),
    ],
    ids=str,
)
def test_a_broken_rule_within_a_stream_ends_the_stream_alone(parts, code):
    served = Served()
    written = served.send(*parts)

    assert resets(written) == {1: code}
    assert not served.connection.closed
    assert [kind for kind, *_ in served.send(head(3), data(3, message(b"hello")), greet=False)] == [
        frames.HEADERS,
        frames.DATA,
    ]


def test_more_than_the_streams_window_ends_the_stream():
    served = Served()
    served.send(head(1))
    served.connection._streams[1]._receive_window = 10

    assert resets(served.send(data(1, b"x" * 11), greet=False)) == {1: Code.FLOW_CONTROL_ERROR}


def test_more_than_the_connections_window_is_a_fault():
    served = Served()
    served.send(head(1))
    served.connection._receive_window = 10

    assert served.code(data(1, b"x" * 11), greet=False) is Code.FLOW_CONTROL_ERROR


def test_windows_are_opened_again_before_they_close():
    served = Served(max_message_bytes=64 * 1024 * 1024, budget=64 * 1024 * 1024)
    size = CONNECTION_WINDOW + 10 * RECEIVE_WINDOW
    whole = struct.pack(">BL", 0, size) + b"x" * size
    served.send(head(1))
    granted = {0: CONNECTION_WINDOW, 1: RECEIVE_WINDOW}
    for at in range(0, len(whole), 16_384):
        part = whole[at : at + 16_384]
        for stream_id in granted:
            granted[stream_id] -= len(part)
        assert min(granted.values()) >= 0
        for kind, _, stream_id, payload in served.send(data(1, part), greet=False):
            if kind == frames.WINDOW_UPDATE:
                granted[stream_id] += int.from_bytes(payload, "big")

    assert len(served.calls[0].messages[0]) == size


def test_a_client_that_takes_no_answers_may_send_no_more():
    served = Served(max_message_bytes=2 * 1024 * 1024, budget=64 * 1024 * 1024)
    served.send(head(1), frames.settings_frame({Setting.INITIAL_WINDOW_SIZE: 0}))
    written = []
    for _ in range(RECEIVE_WINDOW // 15_005):
        written += served.send(data(1, message(b"x" * 15_000)), greet=False)
    held = [one for one in written if one[0] == frames.WINDOW_UPDATE and one[2] == 1]

    assert held == []
    assert served.budget.used_bytes >= 15_000
    written = served.send(
        frames.window_update(0, 2**24), frames.window_update(1, 2**24), greet=False
    )
    assert (frames.WINDOW_UPDATE, 1) in {(kind, stream_id) for kind, _, stream_id, _ in written}
    assert served.budget.used_bytes == 0


def test_answers_beyond_the_budget_end_their_stream():
    served = Served(budget=20_000)
    served.send(head(1), frames.settings_frame({Setting.INITIAL_WINDOW_SIZE: 0}))
    written = [
        one for _ in range(3) for one in served.send(data(1, message(b"x" * 9_000)), greet=False)
    ]

    assert resets(written) == {1: Code.ENHANCE_YOUR_CALM}
    assert served.budget.used_bytes == 0


@pytest.mark.parametrize(
    "flood",
    [
        frames.frame(frames.PING, 0, 0, b"8 bytes."),
        frames.settings_frame({}),
        frames.frame(frames.PRIORITY, 0, 9, b"12345"),
        frames.frame(200, 0, 0),
    ],
    ids=["ping", "settings", "priority", "unknown"],
)
def test_a_flood_is_turned_away(flood):
    assert Served().code(*[flood * 1_000] * 25) is Code.ENHANCE_YOUR_CALM


def test_a_flood_of_empty_data_is_turned_away():
    assert Served().code(head(1), *[data(1, b"") * 1_000] * 25) is Code.ENHANCE_YOUR_CALM


def test_rapid_resets_are_turned_away():
    pairs = (
        head(stream_id) + frames.reset(stream_id, Code.CANCEL) for stream_id in range(1, 60_000, 2)
    )

    assert Served().code(*pairs) is Code.ENHANCE_YOUR_CALM


def test_resets_at_a_rate_that_envoy_may_reach_are_not():
    times = iter(range(10**9))
    served = Served(now=lambda: next(times) * 1e-3)
    served.send(*(head(one) + frames.reset(one, Code.CANCEL) for one in range(1, 50_000, 2)))

    assert not served.connection.closed


@pytest.mark.parametrize("fragment", [b"", b"\x40\x01a\x01b" * 3_000], ids=["empty", "long"])
def test_continuations_without_end_are_turned_away(fragment):
    more = frames.frame(frames.CONTINUATION, 0, 1, fragment)

    assert Served().code(head(1, 0, b""), *[more] * 40) is Code.ENHANCE_YOUR_CALM


def test_a_header_block_in_fragments_padded_and_with_priority_is_read():
    first = bytes([3]) + b"\0\0\0\0\x10" + BLOCK[:5] + b"\0\0\0"
    served = Served()
    written = served.send(
        frames.frame(frames.HEADERS, frames.PADDED | frames.WITH_PRIORITY, 1, first),
        frames.frame(frames.CONTINUATION, 0, 1, BLOCK[5:9]),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK[9:]),
        data(1, bytes([2]) + message(b"hi") + b"\0\0", frames.PADDED),
        data(1, b"\x00", frames.PADDED),
    )

    assert [(kind, payload) for kind, _, _, payload in written][-1] == (
        frames.DATA,
        message(b"hi"),
    )


def test_a_call_that_ends_before_its_client_tells_it_to_stop():
    written = Served().send(head(1), data(1, message(b"end")))

    assert [kind for kind, *_ in written] == [frames.HEADERS, frames.RST_STREAM]
    assert resets(written) == {1: Code.NO_ERROR}


def test_frames_on_their_way_to_an_ended_call_are_passed_over():
    served = Served()
    late = [data(1, b"x" * 100), data(1, b"", frames.END_STREAM)]
    served.send(head(1), data(1, message(b"end")), frames.window_update(1, 5), *late)

    assert not served.connection.closed


def test_a_call_that_fails_costs_itself_alone(caplog):
    served = Served()
    written = served.send(head(1), data(1, message(b"raise")), head(3), data(3, message(b"x")))

    assert resets(written) == {1: Code.NO_ERROR}
    assert served.calls[0].closed == [0]
    assert not served.calls[1].closed
    assert "a call failed" in caplog.text


def test_streams_above_the_limit_are_refused_and_their_headers_still_read():
    served = Served(max_streams=1)
    encoder = Encoder()
    first, second = (encoder.encode([*CALL, ("x", str(number))]) for number in range(2))
    third = encoder.encode([*CALL, ("x", "1")])
    written = served.send(head(1, block=first), head(3, block=second))

    assert resets(written) == {3: Code.REFUSED_STREAM}
    served.send(frames.reset(1, Code.CANCEL), head(5, block=third), greet=False)
    assert len(served.calls) == 2


def test_unknown_methods_and_requests_that_are_no_calls_are_answered():
    encoder = Encoder()
    served = Served()
    other = encoder.encode([*CALL[:2], (":path", "/no"), *CALL[3:]])
    page = encoder.encode([(":method", "GET"), (":scheme", "http"), (":path", "/")])
    written = served.send(head(1, 5, other), head(3, 5, page))

    assert [(kind, flags) for kind, flags, *_ in written] == [(frames.HEADERS, 5)] * 2
    assert b"12" in written[0][3]
    assert written[1][3] == b"\x08\x03405"


def test_a_drain_serves_what_is_open_and_on_its_way_and_then_leaves():
    served = Served()
    served.send(head(1))
    served.connection.drain()
    goaway, ping = served.frames()

    assert goaway[3][:4] == b"\x7f\xff\xff\xff"
    served.send(head(3), frames.frame(frames.PING, frames.ACK, 0, ping[3]), greet=False)
    assert len(served.calls) == 2
    written = served.send(head(5), greet=False)
    assert resets(written) == {5: Code.REFUSED_STREAM}
    served.send(data(1, message(b"end")), greet=False)
    assert not served.connection.closed
    served.send(data(3, message(b"end")), greet=False)
    assert served.connection.closed
    assert served.disconnected == 1


def test_a_client_that_does_not_answer_a_probe_is_given_up():
    served = Served()
    served.send(head(1))
    served.connection.probe()
    ping = served.frames()[-1]
    served.send(frames.frame(frames.PING, frames.ACK, 0, ping[3]), greet=False)
    served.connection.probe()

    assert not served.connection.closed
    served.connection.probe()
    assert served.connection.closed
    assert served.calls[0].closed == [0]


def test_an_abort_resets_what_is_open():
    served = Served()
    served.send(head(1))
    served.connection.abort()

    assert resets(served.frames()) == {1: Code.CANCEL}
    assert served.calls[0].closed == [0]
