"""Encodes the messages between server and sites, called envelopes: a header of plain values (JSON), and a payload of
tensors and numbers.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import safetensors.torch
import torch

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.messages.compressors import NO_COMPRESSION, Compressor, parse_compressor
from polyfed.core.state_dict import StateDict, name_of_first_nonfinite
from polyfed.deploy.protocol.framing import MAX_GROUPS, MAX_SCALARS, SerializedEnvelope
from polyfed.simulation.settings import Settings

PROTOCOL = 6  # changes when a site and a server of different versions could misunderstand each other
COUNTING_PROTOCOL = 7  # of runs whose secure sums count norms (`polyfed.core.robust.counted_median`), else as PROTOCOL
DATA_SPEC_REQUIREMENTS = frozenset({"one_data_spec", "one_input_spec"})
"""Entries of `Algorithm.requires` for which sites report their data spec."""
TensorSpec = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor
MAX_TENSORS = 20_000
# Largest header from a site, and from the server, whose headers hold a method's fields.
SITE_HEAD_BYTES, SERVER_HEAD_BYTES = 64 * 2**10, 2**20
TENSOR_HEADER_BYTES = 4 * 2**20  # names, shapes and types in one group
_FACTORY_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}  # fmt: skip


@final
@dataclass(frozen=True)
class Envelope:
    """Holds a message between server and site: a header (`head`), and tensors and numbers (`body`).

    Headers from the server have `kind`, `protocol`, `run` (identifier of the run, which a resumed run keeps) and `algorithm`
    (name and fields). The kinds are:

    - "introduce" adds `architecture` (the federation's, if the method needs one), in a new run `public` (types and shapes of
      the public examples, if there are any), and `prepared` (the preprocessing that sites with tables have agreed on);
    - "prepare" comes before that agreement and asks for a summary of the site's table (`polyfed.deploy.site.preprocessing`);
    - "task" adds `phase`, `round`, `client`, `seed`, `run_seed`, `state` (the round after which the client's private state
      was written, None before the first), `keep` (the round to which the server may still go back), `metrics` (names of the
      metrics of an evaluation; an empty list means the task's own) and, if the run compresses, `compress` and
      `compress_down` (the compressors of the reply and of this payload). A training task may have `evaluation`, the
      evaluation of the previous round, which the site does first (`polyfed.deploy.protocol.piggyback`);
    - "sum" asks for single steps of a secure sum: `advertise`, `share` and `hand_out`
      (`polyfed.deploy.secure_aggregation.client`).

    With secure sums, all headers have `secure`, true. Training tasks then add `part`, whether the site's reply enters the
    sum; training tasks and evaluations add `advertise`, the round for which the site sends keys. (Each site knows by itself
    how many sites may add to a sum.)

    Headers from a site have `client` and, if the site refuses, the sentence `refused`. The answer to "introduce" adds `task`
    and what the method needs the server to know (`num_examples`, `architecture`, `form`, types and shapes of the `inputs`,
    `width` of the last layer). The answer to "task" adds `run`, `round`, `phase`, `seconds`, `metrics`, and `failure`, a
    sentence or None; with a piggybacked evaluation also `evaluation`, the header of the answer to that.
    """

    head: Mapping[str, Any]
    body: Message = field(default_factory=Message)


FailureReason = str
"""A sentence that says why a site gave no reply."""


def pack_tensors(tensors: StateDict) -> bytes:
    """Serialises named tensors to safetensors bytes with the order of their names.

    >>> list(unpack_tensors(pack_tensors({"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.zeros(())})))
    ['w', 'b']
    """
    # Copies, since safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    names = sorted(copies)
    position_by_name = {name: position for position, name in enumerate(names)}
    order = [position_by_name[name] for name in copies]
    return bytes(safetensors.torch.save(copies, metadata={"order": json.dumps(order, separators=(",", ":"))}))


def pack_envelope(envelope: Envelope) -> SerializedEnvelope:
    """Serialises a message, and returns its header as JSON, its scalars, and the bytes of each group of tensors."""
    groups = {group: pack_tensors(tensors) for group, tensors in envelope.body.tensors.items()}
    return SerializedEnvelope(json.dumps(dict(envelope.head)), envelope.body.scalars, groups)


def read_tensor_specs(packed_group: bytes) -> dict[str, TensorSpec]:
    """Returns {name: (shape, data type)} of the tensors in a serialised group, without loading them.

    Raises:
        UserError: `packed_group` is damaged, or is not a group, or exceeds the limits on number and length of names.

    >>> read_tensor_specs(pack_tensors({"w": torch.ones(2, 3)}))
    {'w': ((2, 3), torch.float32)}
    """
    length = int.from_bytes(packed_group[:8], "little")
    if length > TENSOR_HEADER_BYTES:  # checked before parsing, since parsed JSON takes many times its size
        raise UserError(f"a group of tensors has a header of {length} bytes; at most {TENSOR_HEADER_BYTES} are read")
    try:
        header = json.loads(packed_group[8 : 8 + length])
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise ValueError(f"it has {len(header)} tensors; at most {MAX_TENSORS} are read")
        return {name: _read_tensor_spec(entry, len(packed_group) - 8 - length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"a group of tensors of {len(packed_group)} bytes cannot be read: {error}") from error


def _read_tensor_spec(entry: Mapping[str, Any], data_length: int) -> TensorSpec:
    """Returns the shape and data type of one serialised tensor, and checks that its data has the right length."""
    shape, dtype, (start, end) = tuple(entry["shape"]), _DTYPES[entry["dtype"]], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a shape or an offset is not a number")
    if end > data_length or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} is not there")
    return shape, dtype


def unpack_small_tensors(packed_group: bytes, max_bytes_per_tensor: int) -> dict[str, torch.Tensor]:
    """Loads from a serialised group only the tensors of at most `max_bytes_per_tensor` bytes, and returns them by name.

    Raises:
        UserError: as `read_tensor_specs`.

    >>> unpack_small_tensors(pack_tensors({"large": torch.zeros(9), "small": torch.arange(2)}), 16)
    {'small': tensor([0, 1])}
    """
    specs, start, small = read_tensor_specs(packed_group), 8 + int.from_bytes(packed_group[:8], "little"), {}
    header = json.loads(packed_group[8:start])
    for name, (shape, dtype) in specs.items():
        begin, end = header[name]["data_offsets"]
        if end - begin <= max_bytes_per_tensor:
            flat = (
                torch.frombuffer(bytearray(packed_group[start + begin : start + end]), dtype=dtype)
                if end > begin
                else ()
            )
            small[name] = torch.as_tensor(flat, dtype=dtype).reshape(shape)
    return small


def unpack_tensors(packed_group: bytes) -> dict[str, torch.Tensor]:
    """Loads all tensors of a group that `pack_tensors` serialised, and returns them by name in their original order.

    Raises:
        UserError: as `read_tensor_specs`.
    """
    read_tensor_specs(packed_group)
    try:
        tensors = safetensors.torch.load(packed_group)
        length = int.from_bytes(packed_group[:8], "little")
        order = json.loads(json.loads(packed_group[8 : 8 + length]).get("__metadata__", {}).get("order", "null"))
        names = sorted(tensors)
        if sorted(order) != list(range(len(names))):
            raise ValueError("the order of its tensors does not fit")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError) as error:
        raise UserError(f"a group of tensors of {len(packed_group)} bytes cannot be read: {error}") from error
    return {names[position]: tensors[names[position]] for position in order}


def build_compressor_head_fields(settings: Settings) -> dict[str, str]:
    """Returns the header fields that name a run's compressors, as a dict; an empty dict if the run compresses nothing."""
    fields = {"compress": settings.compress, "compress_down": settings.compress_down}
    return {} if set(fields.values()) == {NO_COMPRESSION} else fields


@final
class TaskCompressors(NamedTuple):
    """Holds the compressors of the site's reply and of the server's message, or None."""

    reply: Compressor | None
    received_message: Compressor | None


def parse_compressors(head: Mapping[str, Any]) -> TaskCompressors:
    """Returns the compressors that a header names for reply and message, or None for each.

    Raises:
        UserError: the header names an unknown compressor.

    >>> parse_compressors({"compress": "int8"}), parse_compressors({})
    (TaskCompressors(reply=Int8(), received_message=None), TaskCompressors(reply=None, received_message=None))
    """
    return TaskCompressors(
        *(parse_compressor(str(head.get(key, NO_COMPRESSION))) for key in ("compress", "compress_down"))
    )


@final
@dataclass(frozen=True)
class PackedEnvelope:
    """Holds a received message whose header and tensors are still serialised.

    Args:
        head: header, as JSON.
        scalars: numbers of the payload.
        groups: packed groups of tensors.
        max_head_length: largest length of the header, in characters.

    Raises:
        UserError: the header is too long, or there are too many numbers or groups.
    """

    head: str
    scalars: Mapping[str, Any]
    groups: Mapping[str, bytes]
    max_head_length: int = SITE_HEAD_BYTES

    def __post_init__(self) -> None:
        if len(self.head) > self.max_head_length:
            raise UserError(
                f"the header of a message has {len(self.head)} characters; at most {self.max_head_length} are read"
            )
        if len(self.scalars) > MAX_SCALARS or len(self.groups) > MAX_GROUPS:
            raise UserError(
                f"a message has {len(self.scalars)} numbers and {len(self.groups)} groups of tensors; at most "
                f"{MAX_SCALARS} and {MAX_GROUPS} are read"
            )

    def tensor_specs_by_group(self) -> dict[str, dict[str, TensorSpec]]:
        """Returns {group: {name: (shape, data type)}} of all tensors in the message, without loading them."""
        return {group: read_tensor_specs(data) for group, data in self.groups.items()}

    def unpack_body(self) -> Message:
        """Loads all tensors of the message, and returns them with its scalars as a `Message`."""
        return Message({group: unpack_tensors(data) for group, data in self.groups.items()}, self.scalars)


def parse_head(text: str) -> dict[str, Any]:
    """Parses the JSON text of a message's header to a dict.

    Raises:
        UserError: the text is not JSON, or no mapping.

    >>> parse_head('{"kind": "task"}')
    {'kind': 'task'}
    """
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the header of a message is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise UserError(f"the header of a message must be a mapping, got {type(head).__name__}")
    return head


def first_non_finite_tensor(message: Message) -> str | None:
    """Returns the first tensor (GROUP/TENSOR) with NaN or infinite values; None if there is none.

    >>> first_non_finite_tensor(Message({"model": {"w": torch.tensor([1.0]), "b": torch.tensor([torch.nan])}}))
    'model/b'
    """
    return next(
        (f"{group}/{name}" for group, tensors in message.tensors.items() if (name := name_of_first_nonfinite(tensors))),
        None,
    )


def find_first_importable_name(value: Any) -> str | None:
    """Returns the first text `module:name`, which would import code, in a method's fields; or None.

    >>> (find_first_importable_name({"teacher": {"name": "os:system"}}),
    ...  find_first_importable_name({"lr": 0.1, "catalogue": "C:/catalogue.yaml"}))
    ('os:system', None)
    """
    if isinstance(value, Mapping):
        return next((reference for item in value.values() if (reference := find_first_importable_name(item))), None)
    if isinstance(value, list | tuple):
        return next((reference for item in value if (reference := find_first_importable_name(item))), None)
    return value if isinstance(value, str) and _FACTORY_PATTERN.fullmatch(value) else None


def count_record_bytes(flower_record: Any) -> int:
    """Returns the size of a Flower RecordDict in bytes, names included, without unpacking it."""
    total = 0
    for records in flower_record.array_records.values():
        total += sum(len(name) + len(array.data) + len(array.dtype) + 8 for name, array in records.items())
    for numbers in flower_record.metric_records.values():
        total += sum(len(n) + 8 * (len(v) if isinstance(v, list) else 1) for n, v in numbers.items())
    for texts in flower_record.config_records.values():
        total += sum(len(n) + _count_value_bytes(v) for n, v in texts.items())
    return total


def _count_value_bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_count_value_bytes, value))
    return len(value) if isinstance(value, str | bytes) else 8
