"""Header blocks: what they say, and that what is remembered of them stays true."""

from contextlib import suppress

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.http2 import headers
from extproc.adapters.http2.frames import Code, ConnectionFaultError
from extproc.adapters.http2.headers import Head, HeaderReader

CALL = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/a.B/C",
    ":authority": "x",
    "te": "trailers",
    "content-type": "application/grpc",
}


def read(**changes):
    fields = {
        name: value for name, value in (CALL | changes.pop("also", {})).items() if value is not None
    }
    return HeaderReader().read(Encoder().encode([*fields.items(), *changes.get("more", [])]))


def test_a_call_is_told_by_its_path():
    assert read() == Head("/a.B/C")
    assert read(also={"content-type": "application/grpc+proto"}) == Head("/a.B/C")


@pytest.mark.parametrize(
    ("also", "refusal"),
    [
        ({":method": "GET"}, 405),
        ({"content-type": "application/json"}, 415),
        ({"content-type": "application/grpcx"}, 415),
        ({"content-type": None}, 415),
    ],
)
def test_a_request_that_is_no_call_has_a_status(also, refusal):
    assert read(also=also).refusal == refusal


@pytest.mark.parametrize(
    "fields",
    [
        [("X", "upper case")],
        [("a b", "")],
        [("", "")],
        [("x", "line\nbreak")],
        [("x", " spaced ")],
        [(":path", "/twice")],
        [(":status", "200")],
        [("connection", "close")],
        [("te", "gzip")],
        [("x", "y"), (":late", "z")],
    ],
)
def test_malformed_headers_are_told(fields):
    assert read(more=fields).fault


@pytest.mark.parametrize("name", [":method", ":scheme", ":path"])
def test_a_missing_pseudo_header_is_told(name):
    assert read(also={name: None}).fault


paths = st.sampled_from(["/a", "/b", "/c" * 700, "/d" * 900])
blocks = st.lists(
    st.tuples(paths, st.sampled_from([None, 0, 100, 4_096]), st.booleans()), max_size=25
)


@given(blocks)
def test_what_is_remembered_of_a_block_is_what_another_decoder_reads(sequence):
    encoder, reader, oracle = Encoder(), HeaderReader(), Decoder()
    for path, table_size, sensitive in sequence:
        if table_size is not None:
            encoder.header_table_size = table_size
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path, sensitive)]
        block = encoder.encode([*fields, ("content-type", "application/grpc")])

        assert reader.read(block).path == dict(oracle.decode(block))[":path"]


def test_the_same_bytes_mean_something_else_once_the_table_has_changed():
    reader, encoder = HeaderReader(), Encoder()
    reader.read(encoder.encode({**CALL, ":path": "/first"}.items()))
    again = encoder.encode({**CALL, ":path": "/first"}.items())

    assert reader.read(again).path == reader.read(again).path == "/first"
    # A path put into the table after it moves what the old index means.
    moved = b"\x44\x07/second" + b"\x83\x86\xbe" + b"\x0f\x10\x10application/grpc"
    reader.read(moved)
    assert reader.read(b"\x83\x86\xbe\x0f\x10\x10application/grpc").path == "/second"


@given(st.binary(max_size=60))
def test_any_block_is_read_or_a_fault(block):
    with suppress(ConnectionFaultError):
        HeaderReader().read(block)


def test_a_small_block_that_grows_without_end_is_a_fault():
    # One long entry in the table, then pointers to it.
    bomb = Encoder().encode([("a", "x" * 4_000)], huffman=False) + b"\xbe" * 100
    with pytest.raises(ConnectionFaultError) as caught:
        HeaderReader().read(bomb)

    assert caught.value.code is Code.ENHANCE_YOUR_CALM


def test_what_is_written_is_read_by_another_implementation():
    def decoded(data):
        return dict(Decoder().decode(data[9:]))

    assert decoded(headers.opening(1)) == {":status": "200", "content-type": "application/grpc"}
    assert decoded(headers.closing(1, 0, "", begun=True)) == {"grpc-status": "0"}
    assert decoded(headers.closing(1, 13, "a b", begun=False)) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "13",
        "grpc-message": "a%20b",
    }
    assert [decoded(headers.refusing(1, status))[":status"] for status in (404, 405, 415)] == [
        "404",
        "405",
        "415",
    ]
