"""Converts packed messages to Flower's RecordDict and back, with few objects, since Flower makes four HTTP requests per
object.

The record "head" has the header as one JSON text. The record "body" has the numbers and the packed groups of tensors, each
under its name after a character for its type; sites that get the same body share one object at the SuperLink. Groups above
`MAX_INLINE_BYTES` bytes travel in the record "arrays" as arrays of bytes, which Flower cuts into pieces. (Arrays of tensors
would be three objects each, and Flower cannot carry bfloat16.) This module does not need torch.
"""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.deploy.protocol.framing import MAX_GROUPS, MAX_SCALARS, SerializedEnvelope

MAX_INLINE_BYTES = 8 * 2**20
_NUMBER, _GROUP = "#", "@"


def build_flower_record(head_json: str, scalars: Mapping[str, Any], packed_groups: Mapping[str, bytes]) -> RecordDict:
    """Builds a Flower RecordDict from a message's serialised header, its scalars, and its serialised groups of tensors.

    >>> parse_flower_record(build_flower_record("{}", {"lr": 0.1}, {"model": b"bytes"}))
    SerializedEnvelope(head='{}', scalars={'lr': 0.1}, groups={'model': b'bytes'})
    """
    body: dict[str, Any] = {f"{_NUMBER}{name}": number for name, number in scalars.items()}
    large = {name: data for name, data in packed_groups.items() if len(data) > MAX_INLINE_BYTES}
    body |= {f"{_GROUP}{name}": data for name, data in packed_groups.items() if name not in large}
    records: dict[str, Any] = {"head": ConfigRecord({"json": head_json}), "body": ConfigRecord(body)}
    if large:
        arrays = {name: Array(np.frombuffer(data, dtype=np.uint8)) for name, data in large.items()}
        records["arrays"] = ArrayRecord(arrays)
    return RecordDict(records)


def parse_flower_record(record: RecordDict) -> SerializedEnvelope:
    """Returns a RecordDict's header, scalars and groups of tensors, still serialised.

    Raises:
        Exception: the records hold something else, or exceed the limits. (Flower and numpy may raise anything.)
    """
    if (names := sorted(record)) not in (["body", "head"], ["arrays", "body", "head"]):
        raise ValueError(f"it holds the records {names[:9]}")
    body, large = record.config_records["body"], record.array_records.get("arrays", ArrayRecord())
    head = record.config_records["head"]["json"]
    # Counted first, so that none of a million entries is touched.
    scalar_count = sum(name[:1] == _NUMBER for name in body)
    group_count = sum(name[:1] == _GROUP for name in body) + len(large)
    if scalar_count > MAX_SCALARS or group_count > MAX_GROUPS:
        raise ValueError(
            f"it has {scalar_count} numbers and {group_count} groups of tensors; at most {MAX_SCALARS} and "
            f"{MAX_GROUPS} are read"
        )
    scalars = {name[1:]: value for name, value in body.items() if name[:1] == _NUMBER}
    groups = {name[1:]: value for name, value in body.items() if name[:1] == _GROUP and isinstance(value, bytes)}
    wrong_scalars = [name for name, value in scalars.items() if isinstance(value, bool | str | bytes)]
    if wrong_scalars or len(scalars) + len(groups) < len(body) or not isinstance(head, str) or set(groups) & set(large):
        raise ValueError("it holds what is neither a head nor a number nor a group of tensors")
    return SerializedEnvelope(
        head, scalars, {**groups, **{name: _array_payload(array) for name, array in large.items()}}
    )


def _array_payload(array: Array) -> bytes:
    """Extracts a group's bytes from a Flower Array, which stores them like `numpy.save`.

    Their number must be the one in the format's header, since numpy would allocate that much.
    """
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if version != (1, 0) or dtype != np.uint8 or shape != (len(array.data) - file.tell(),):
        raise ValueError(f"a group of tensors must be so many bytes, it is {dtype} of shape {shape}")
    return array.data[file.tell() :]
