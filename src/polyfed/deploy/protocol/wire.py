"""What travels between server and sites: a head of plain values, and a message."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import safetensors.torch
import torch

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.messages.compressors import NO_COMPRESSION, Compressor, parse_compressor
from polyfed.core.state_dict import StateDict, first_nonfinite
from polyfed.deploy.protocol.framing import MAX_GROUPS, MAX_SCALARS
from polyfed.simulation.settings import Settings

PROTOCOL = 6  # changes when a site and a server of different versions could misunderstand one another
DATA_SPEC_REQUIREMENTS = frozenset({"one_data_spec", "one_input_spec"})
"""Words of `Algorithm.requires` for which sites tell the form of their data."""
TensorSpec = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor
MAX_TENSORS = 20_000
SITE_HEAD_BYTES, SERVER_HEAD_BYTES = (
    64 * 2**10,
    2**20,
)  # of the head from a site, and from the server, which has a method's fields
TENSOR_HEADER_BYTES = 4 * 2**20  # of names, shapes and types in one group
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
    """One message in either direction: `head` (for JSON) says what it is about, `unpack_body` is what the method sends.

    Heads from the server have `kind` "introduce" or "task", `protocol`, `run` (an identifier of the run, the same after
    it was resumed) and `algorithm` (name and fields). To "introduce" they add `architecture`, that of the federation
    where the method needs one, and in a new run `public`, the form of its public examples, where it has some. To "task"
    they add `phase`, `round`, `client`, `seed`, `run_seed`, `state` (the round after which the client's private state
    is as the server knows it, None before the first), `keep` (the round to which the server may still go back),
    `metrics` (names of those to compute at evaluation; none are the task's own) and, where the run compresses,
    `compress` and `compress_down`, how `unpack_body` does in either direction.

    Where sites of tables have agreed on one preprocessing, "introduce" adds `prepared`, what it is. Before that a letter of
    the kind "prepare" asks what a site's table is like (`polyfed.deploy.site.preprocessing`).

    A task of training may have `evaluation`: the evaluation of the round before, which the site makes first
    (`polyfed.deploy.protocol.piggyback`). The answer then has `evaluation` too, the head that the answer to it alone would have.

    With secure sums all have `secure`, true. (How many sites may add to a sum each knows itself.) Tasks of training then
    add `part`, whether the site's numbers enter the sum; these and evaluations `advertise`, for which round the site sends
    keys. A letter of the kind "sum" asks for steps of a sum by themselves, `advertise`, `share` and `hand_out`
    (`polyfed.deploy.secure_aggregation.client`).

    Heads from a site have `client`, and `refused`, a sentence, if it does nothing. To "introduce" they add `task` and
    what the method needs the server to know (`num_examples`, `architecture`, `form`, types and shapes of its `inputs`,
    `width` of the last layer). To "task" they add `run`, `round`, `phase`, `seconds`, `metrics`, and `failure`, a
    sentence or None.
    """

    head: Mapping[str, Any]
    body: Message = field(default_factory=Message)


def pack_tensors(tree: StateDict) -> bytes:
    """A group of tensors as one safetensors file, which carries every type of torch's, with the order of the names.

    >>> list(unpack_tensors(pack_tensors({"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.zeros(())})))
    ['w', 'b']
    """
    # Copies, since safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tree.items()}
    names = sorted(copies)
    position_by_name = {name: position for position, name in enumerate(names)}
    order = [position_by_name[name] for name in copies]
    return bytes(safetensors.torch.save(copies, metadata={"order": json.dumps(order, separators=(",", ":"))}))


def pack_envelope(envelope: Envelope) -> tuple[str, Mapping[str, Any], dict[str, bytes]]:
    """A letter as it travels: its head as JSON, its numbers, and its groups of tensors, packed."""
    groups = {group: pack_tensors(tree) for group, tree in envelope.body.tensors.items()}
    return json.dumps(dict(envelope.head)), envelope.body.scalars, groups


def read_tensor_specs(data: bytes) -> dict[str, TensorSpec]:
    """Names, shapes and types of the group that `pack_tensors` wrote; its tensors are not looked at.

    Raises:
        UserError: `data` is damaged, or something else, or has more or longer names than can be meant.

    >>> read_tensor_specs(pack_tensors({"w": torch.ones(2, 3)}))
    {'w': ((2, 3), torch.float32)}
    """
    length = int.from_bytes(data[:8], "little")
    if length > TENSOR_HEADER_BYTES:  # before it is read: a thousand bytes of JSON take many times their size
        raise UserError(f"a group of tensors has a header of {length} bytes; at most {TENSOR_HEADER_BYTES} are read")
    try:
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise ValueError(f"it has {len(header)} tensors; at most {MAX_TENSORS} are read")
        return {name: _read_tensor_spec(entry, len(data) - 8 - length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"a group of tensors of {len(data)} bytes cannot be read: {error}") from error


def _read_tensor_spec(entry: Mapping[str, Any], data_length: int) -> TensorSpec:
    """Shape and type of a tensor, if its bytes are there."""
    shape, dtype, (start, end) = tuple(entry["shape"]), _DTYPES[entry["dtype"]], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a shape or place is no number")
    if end > data_length or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} is not there")
    return shape, dtype


def unpack_small_tensors(data: bytes, max_bytes: int) -> dict[str, torch.Tensor]:
    """Of a group that `pack_tensors` wrote the tensors of at most so many bytes; the others are not looked at.

    Raises:
        UserError: as `read_tensor_specs`.

    >>> unpack_small_tensors(pack_tensors({"large": torch.zeros(9), "small": torch.arange(2)}), 16)
    {'small': tensor([0, 1])}
    """
    specs, start, small = read_tensor_specs(data), 8 + int.from_bytes(data[:8], "little"), {}
    header = json.loads(data[8:start])
    for name, (shape, dtype) in specs.items():
        begin, end = header[name]["data_offsets"]
        if end - begin <= max_bytes:
            flat = torch.frombuffer(bytearray(data[start + begin : start + end]), dtype=dtype) if end > begin else ()
            small[name] = torch.as_tensor(flat, dtype=dtype).reshape(shape)
    return small


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The group that `pack_tensors` wrote.

    Raises:
        UserError: as `read_tensor_specs`.
    """
    read_tensor_specs(data)
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        order = json.loads(json.loads(data[8 : 8 + length]).get("__metadata__", {}).get("order", "null"))
        names = sorted(tensors)
        if sorted(order) != list(range(len(names))):
            raise ValueError("the order of its tensors does not fit")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError) as error:
        raise UserError(f"a group of tensors of {len(data)} bytes cannot be read: {error}") from error
    return {names[position]: tensors[names[position]] for position in order}


def compression_fields(settings: Settings) -> dict[str, str]:
    """What of a run's settings the head of a task says of its body and of the reply's; nothing, where they travel as they
    are."""
    fields = {"compress": settings.compress, "compress_down": settings.compress_down}
    return {} if set(fields.values()) == {NO_COMPRESSION} else fields


def parse_compression(head: Mapping[str, Any]) -> tuple[Compressor | None, Compressor | None]:
    """How a site compresses its reply, and how the body that it got is compressed.

    Raises:
        UserError: the head names what this version does not know.

    >>> parse_compression({"compress": "int8"}), parse_compression({})
    ((Int8(), None), (None, None))
    """
    reply_compression, message_compression = (
        parse_compressor(str(head.get(key, NO_COMPRESSION))) for key in ("compress", "compress_down")
    )
    return reply_compression, message_compression


@final
@dataclass(frozen=True)
class PackedEnvelope:
    """A letter as it came, before anything of it is read: the JSON of its head, numbers, and packed groups.

    Raises:
        UserError: the head, or the number of numbers or groups, is beyond what can be meant.
    """

    head: str
    scalars: Mapping[str, Any]
    groups: Mapping[str, bytes]
    max_head_length: int = SITE_HEAD_BYTES

    def __post_init__(self) -> None:
        if len(self.head) > self.max_head_length:
            raise UserError(
                f"the head of a message has {len(self.head)} characters; at most {self.max_head_length} are read"
            )
        if len(self.scalars) > MAX_SCALARS or len(self.groups) > MAX_GROUPS:
            raise UserError(
                f"a message has {len(self.scalars)} numbers and {len(self.groups)} groups of tensors; at most "
                f"{MAX_SCALARS} and {MAX_GROUPS} are read"
            )

    def tensor_specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Names, shapes and types of all groups."""
        return {group: read_tensor_specs(data) for group, data in self.groups.items()}

    def unpack_body(self) -> Message:
        """The message, with its tensors."""
        return Message({group: unpack_tensors(data) for group, data in self.groups.items()}, self.scalars)


def parse_head(text: str) -> dict[str, Any]:
    """A head from its JSON.

    Raises:
        UserError: it is no mapping.

    >>> parse_head('{"kind": "task"}')
    {'kind': 'task'}
    """
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the head of a message is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise UserError(f"the head of a message must be a mapping, got {type(head).__name__}")
    return head


def first_non_finite_tensor(message: Message) -> str | None:
    """The first tensor of a message that is not finite.

    >>> first_non_finite_tensor(Message({"model": {"w": torch.tensor([1.0]), "b": torch.tensor([torch.nan])}}))
    'model/b'
    """
    return next((f"{group}/{name}" for group, tree in message.tensors.items() if (name := first_nonfinite(tree))), None)


def find_code_reference(value: Any) -> str | None:
    """The first text in the fields of a method that names a factory of a module, as `fedavg_kd`'s teacher may.

    >>> (find_code_reference({"teacher": {"name": "os:system"}}),
    ...  find_code_reference({"lr": 0.1, "catalogue": "C:/catalogue.yaml"}))
    ('os:system', None)
    """
    if isinstance(value, Mapping):
        return next((reference for item in value.values() if (reference := find_code_reference(item))), None)
    if isinstance(value, list | tuple):
        return next((reference for item in value if (reference := find_code_reference(item))), None)
    return value if isinstance(value, str) and _FACTORY_PATTERN.fullmatch(value) else None


def count_record_bytes(record: Any) -> int:
    """Bytes of all that Flower's record holds, names too, before any of it is unpacked."""
    total = 0
    for records in record.array_records.values():
        total += sum(len(name) + len(array.data) + len(array.dtype) + 8 for name, array in records.items())
    for numbers in record.metric_records.values():
        total += sum(len(n) + 8 * (len(v) if isinstance(v, list) else 1) for n, v in numbers.items())
    for texts in record.config_records.values():
        total += sum(len(n) + _count_value_bytes(v) for n, v in texts.items())
    return total


def _count_value_bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_count_value_bytes, value))
    return len(value) if isinstance(value, str | bytes) else 8
