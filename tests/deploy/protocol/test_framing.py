"""Frames between a SuperNode and its site process: what goes in comes out; what is damaged is refused."""

import json
import math
import os
import socket
import struct
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.deploy.protocol.framing import BrokenStreamError, Frame, FrameError, receive_frame, send_frame

NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1)
LINE = ">4sIQ"


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.settimeout(5)
        yield ours, theirs


@settings(deadline=None, max_examples=25)
@given(
    head=st.text(max_size=50),
    scalars=st.dictionaries(st.text(max_size=8), NUMBERS, max_size=4),
    groups=st.dictionaries(st.text(max_size=8), st.binary(max_size=60), max_size=4),
)
def test_a_frame_comes_as_it_was_sent(head, scalars, groups):
    frame = Frame("letter", head, scalars, groups)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, frame)
        send_frame(ours, Frame("again"))
        found = receive_frame(theirs)
        assert found == frame
        assert list(found.groups) == list(groups)
        assert all(type(found.scalars[name]) is type(value) for name, value in scalars.items())
        assert receive_frame(theirs) == Frame("again")


def test_numbers_that_are_not_finite_come_too(pair):
    ours, theirs = pair
    send_frame(ours, Frame("letter", scalars={"a": math.nan, "b": -math.inf}))
    found = receive_frame(theirs).scalars
    assert math.isnan(found["a"])
    assert found["b"] == -math.inf


def test_a_frame_larger_than_what_a_socket_holds(pair):
    ours, theirs = pair
    frame = Frame("letter", "{}", {}, {"model": os.urandom(3 * 2**20), "more": b"x" * 2**20})
    thread = threading.Thread(target=send_frame, args=(ours, frame))
    thread.start()
    assert receive_frame(theirs) == frame
    thread.join()


def framed(head, body=b"", length=None, mark=b"pfed"):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack(LINE, mark, len(text), len(body) if length is None else length) + text + body


GOOD = {"kind": "letter", "head": "", "scalars": {}, "groups": []}
DAMAGED = {
    "not JSON": framed(b"{", b"abc"),
    "not UTF-8": framed(b"\xff\xfe", b"abc"),
    "a list": framed([], b"abc"),
    "without a kind": framed({"head": "", "scalars": {}, "groups": []}),
    "numbers as a list": framed({**GOOD, "scalars": [1]}),
    "groups as a number": framed({**GOOD, "groups": 3}),
    "a group without a size": framed({**GOOD, "groups": [["a"]]}),
    "a size below zero": framed({**GOOD, "groups": [["a", -3], ["b", 6]]}, b"abc"),
    "sizes that do not fit": framed({**GOOD, "groups": [["a", 2]]}, b"abc"),
    "a group twice": framed({**GOOD, "groups": [["a", 1], ["a", 2]]}, b"abc"),
    "too many groups": framed({**GOOD, "groups": [[str(k), 0] for k in range(65)]}),
    "nested": framed(b"[" * 100_000, b"abc"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_frame_is_told_and_the_next_one_read(pair, case):
    ours, theirs = pair
    thread = threading.Thread(target=ours.sendall, args=(DAMAGED[case],))
    thread.start()
    with pytest.raises(FrameError) as caught:
        receive_frame(theirs)
    thread.join()
    assert type(caught.value) is FrameError
    send_frame(ours, Frame("letter", "next"))
    assert receive_frame(theirs).head == "next"


BROKEN = {
    "another mark": framed(GOOD, mark=b"HTTP"),
    "a head of 4 GB": struct.pack(LINE, b"pfed", 2**32 - 1, 0),
    "a body of 2^63 bytes": struct.pack(LINE, b"pfed", 2, 2**63) + b"{}",
    "an end in the line": framed(GOOD)[:9],
    "an end in the head": framed(GOOD)[:-5],
    "an end in the body": framed({**GOOD, "groups": [["a", 9]]}, b"abc", length=9),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_frame_ends_the_connection(pair, case):
    ours, theirs = pair
    ours.sendall(BROKEN[case])
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenStreamError):
        receive_frame(theirs)


def test_an_end_between_frames_is_no_fault(pair):
    ours, theirs = pair
    ours.close()
    with pytest.raises(EOFError):
        receive_frame(theirs)


def test_memory_is_taken_as_bytes_come_not_as_they_are_announced(pair):
    ours, theirs = pair
    ours.sendall(framed({**GOOD, "groups": [["a", 2**33]]}, b"abc", length=2**33))
    ours.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    with pytest.raises(BrokenStreamError):
        receive_frame(theirs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_what_would_not_be_read_is_not_sent(pair):
    ours, theirs = pair
    with pytest.raises(FrameError, match="at most") as caught:
        send_frame(ours, Frame("letter", "x" * (16 * 2**20)))
    assert type(caught.value) is FrameError, "the connection is as good as before"
    send_frame(ours, Frame("letter", "next"))
    assert receive_frame(theirs).head == "next"
