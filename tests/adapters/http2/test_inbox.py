"""gRPC messages, cut out of DATA of any size."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.http2.inbox import Budget, CallFaultError, Inbox


def framed(messages):
    return b"".join(struct.pack(">BL", 0, len(one)) + one for one in messages)


@given(st.lists(st.binary(max_size=50), max_size=6), st.lists(st.integers(0, 350), max_size=8))
def test_messages_come_out_as_they_were_put_in(messages, cuts):
    data, budget = framed(messages), Budget(1_000)
    inbox = Inbox(100, budget)
    places = sorted({min(cut, len(data)) for cut in cuts})
    parts = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]

    assert [one for part in parts for one in inbox.feed(part)] == messages
    assert inbox.empty
    assert budget.used_bytes == 0


@pytest.mark.parametrize(
    ("data", "status"), [(b"\x01\0\0\0\0", 12), (b"\0\0\0\0\x65", 8), (b"\0\xff\xff\xff\xff", 8)]
)
def test_a_message_not_to_be_taken_is_a_fault_at_its_first_bytes(data, status):
    with pytest.raises(CallFaultError) as caught:
        list(Inbox(100, Budget(1_000)).feed(data))

    assert caught.value.status == status


def test_all_inboxes_together_hold_no_more_than_their_budget():
    budget = Budget(150)
    first, second = Inbox(100, budget), Inbox(100, budget)
    list(first.feed(framed([b"x" * 100])[:95]))
    with pytest.raises(CallFaultError):
        list(second.feed(framed([b"x" * 100])[:95]))
    first.clear()
    second.clear()

    assert budget.used_bytes == 0
