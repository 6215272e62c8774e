import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.packing import JournalError, Reader, put_number, put_text

numbers = st.integers(0, 2**64 - 1)


@given(st.lists(numbers | st.text(max_size=20), max_size=10))
def test_what_is_put_is_read_back(values):
    out = bytearray()
    for value in values:
        put_text(out, value) if isinstance(value, str) else put_number(out, value)
    reader = Reader(bytes(out))

    assert [reader.text() if isinstance(v, str) else reader.number() for v in values] == values
    reader.end()


@pytest.mark.parametrize(
    ("data", "read", "reason"),
    [
        pytest.param(b"", Reader.byte, "cut short", id="no byte"),
        pytest.param(b"\x80", Reader.number, "cut short", id="a number that goes on"),
        pytest.param(b"\x80" * 10, Reader.number, "64 bits", id="a number without an end"),
        pytest.param(b"\x03ab", Reader.text, "cut short", id="a text shorter than it says"),
        pytest.param(b"\x01\xff", Reader.text, "UTF-8", id="a text that is none"),
        pytest.param(b"\x05", lambda reader: reader.count(4), "above 4", id="too many"),
        pytest.param(b"\x05", Reader.end, "after", id="bytes left"),
    ],
)
def test_what_is_not_as_expected_is_our_error(data, read, reason):
    with pytest.raises(JournalError, match=reason):
        read(Reader(data))
