"""A letter in Flower's records, of which each array would be three objects, and each object four HTTP requests on its way.

"head" has the head as one JSON text. "body" has the numbers and the packed groups of tensors, each under its name after a
letter that says which it is; all sites that are sent the same body share one object at the SuperLink. Groups of more than
`MAX_INLINE_BYTES` bytes travel as arrays of bytes instead, in the record "arrays", which Flower cuts into pieces. (Not
as arrays of tensors: Flower cannot carry bfloat16.) torch is not needed here.
"""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.deploy.protocol.framing import MAX_GROUPS, MAX_SCALARS

MAX_INLINE_BYTES = 8 * 2**20
_NUMBER, _GROUP = "#", "@"


def build_record(head: str, scalars: Mapping[str, Any], groups: Mapping[str, bytes]) -> RecordDict:
    """The records.

    >>> parse_record(build_record("{}", {"lr": 0.1}, {"model": b"bytes"}))
    ('{}', {'lr': 0.1}, {'model': b'bytes'})
    """
    body: dict[str, Any] = {f"{_NUMBER}{name}": number for name, number in scalars.items()}
    large = {name: data for name, data in groups.items() if len(data) > MAX_INLINE_BYTES}
    body |= {f"{_GROUP}{name}": data for name, data in groups.items() if name not in large}
    records: dict[str, Any] = {"head": ConfigRecord({"json": head}), "body": ConfigRecord(body)}
    if large:
        arrays = {name: Array(np.frombuffer(data, dtype=np.uint8)) for name, data in large.items()}
        records["arrays"] = ArrayRecord(arrays)
    return RecordDict(records)


def parse_record(record: RecordDict) -> tuple[str, dict[str, Any], dict[str, bytes]]:
    """Head, numbers and packed groups in Flower's records, of which nothing has been read yet.

    Raises:
        Exception: they hold something else, or too much; of hostile bytes numpy and Flower raise what they like.
    """
    if (names := sorted(record)) not in (["body", "head"], ["arrays", "body", "head"]):
        raise ValueError(f"it holds the records {names[:9]}")
    body, large = record.config_records["body"], record.array_records.get("arrays", ArrayRecord())
    head = record.config_records["head"]["json"]
    # Counted first: of a million, none is touched.
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
    return head, scalars, {**groups, **{name: _array_payload(array) for name, array in large.items()}}


def _array_payload(array: Array) -> bytes:
    """What `build_record` put into an array: bytes in the form of `numpy.save`, whose length must be what its header says,
    since numpy makes room for that."""
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if version != (1, 0) or dtype != np.uint8 or shape != (len(array.data) - file.tell(),):
        raise ValueError(f"a group of tensors must be so many bytes, it is {dtype} of shape {shape}")
    return array.data[file.tell() :]
