"""Sends and receives messages over the socket between a site's SuperNode and its long-lived process; one such message
is called a frame.

A frame is a prefix of fixed length (a mark, and the lengths of the two parts after it), a JSON header, and bytes. A frame
with a damaged header is read to its end and reported, and the next one can be read. After a frame without the mark, or above
the size limits, the reader cannot find the next one and gives up the connection. This module needs neither torch nor Flower.
"""

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

MAX_SCALARS, MAX_GROUPS = 1000, 64  # in one message
_MARK = b"pfed"
_PREFIX = struct.Struct(">4sIQ")
_MAX_HEAD_BYTES, _MAX_BODY_BYTES = 16 * 2**20, 2**34
_CHUNK = 2**20


class FrameError(Exception):
    """Raised for a message from the other process that cannot be read; the next one still can."""


@final
class BrokenStreamError(FrameError):
    """Raised when the bytes received on the socket are not a message; the connection cannot be used any more."""


@final
@dataclass(frozen=True)
class Frame:
    """Holds one message between a site's SuperNode and the site's process.

    Args:
        kind: "start" with a node configuration, "letter" and "answer" with an envelope between server and site, or "again",
            by which the process asks for a new one in its place.
        head: header of the envelope, as JSON.
        scalars: numbers of the payload.
        groups: packed groups of tensors of the payload.
    """

    kind: str
    head: str = ""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, bytes] = field(default_factory=dict)


@final
class SerializedEnvelope(NamedTuple):
    """Holds a message in parts: header as JSON, scalars, and the bytes of each group of tensors."""

    head: str
    scalars: Mapping[str, Any]
    groups: Mapping[str, bytes]


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Sends one message (a frame) over the socket between a site's SuperNode and its process.

    Raises:
        FrameError: the frame is larger than the other side reads, and was not sent.
        OSError: the other side has closed the connection.
    """
    sizes = [[name, len(data)] for name, data in frame.groups.items()]
    header = {"kind": frame.kind, "head": frame.head, "scalars": dict(frame.scalars), "groups": sizes}
    head, body = json.dumps(header).encode(), sum(len(data) for data in frame.groups.values())
    if len(head) > _MAX_HEAD_BYTES or body > _MAX_BODY_BYTES:
        raise FrameError(
            f"a frame of {len(head)} and {body} bytes; at most {_MAX_HEAD_BYTES} and {_MAX_BODY_BYTES} are read"
        )
    connection.sendall(_PREFIX.pack(_MARK, len(head), body) + head)
    for data in frame.groups.values():
        connection.sendall(data)


def receive_frame(connection: socket.socket) -> Frame:
    """Waits for the next message (a frame) on the socket between a site's SuperNode and its process, and returns it.

    Raises:
        EOFError: the other side has closed the connection.
        BrokenStreamError: the bytes are not a frame, or end inside one.
        FrameError: the frame cannot be understood, but was read to its end.
    """
    prefix = _receive_exactly(connection, _PREFIX.size, may_end=True)
    mark, length, body = _PREFIX.unpack(prefix)
    if mark != _MARK or length > _MAX_HEAD_BYTES or body > _MAX_BODY_BYTES:
        raise BrokenStreamError("what came is not a frame")
    head = _receive_exactly(connection, length)
    try:
        header = json.loads(head)
        sizes = {str(name): int(size) for name, size in header["groups"]}
        if len(sizes) != len(header["groups"]) or len(sizes) > MAX_GROUPS or min(sizes.values(), default=0) < 0:
            raise ValueError("its groups have a name twice, a negative size, or are too many")
        if sum(sizes.values()) != body:
            raise ValueError("its groups are not as long as it says")
        frame = Frame(str(header["kind"]), str(header["head"]), dict(header["scalars"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        while body > 0:
            body -= len(_receive_exactly(connection, min(body, _CHUNK)))
        raise FrameError(f"a frame cannot be read: {type(error).__name__}: {error}") from error
    return Frame(
        frame.kind,
        frame.head,
        frame.scalars,
        {name: _receive_exactly(connection, size) for name, size in sizes.items()},
    )


def _receive_exactly(connection: socket.socket, size: int, may_end: bool = False) -> bytes:
    """Reads `size` bytes from a socket; memory grows as they arrive, since the size may be false."""
    received = bytearray()
    while len(received) < size:
        data = connection.recv(min(_CHUNK, size - len(received)))
        if not data:
            if may_end and not received:
                raise EOFError
            raise BrokenStreamError("the other side has ended inside a frame")
        received += data
    return bytes(received)
