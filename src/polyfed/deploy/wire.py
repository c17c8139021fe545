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
from polyfed.core.compression import NONE, Compression, compression
from polyfed.core.errors import UserError
from polyfed.core.tree import Tree, not_finite
from polyfed.deploy.frames import MOST_GROUPS, MOST_SCALARS
from polyfed.simulation.settings import Settings

PROTOCOL = 6  # changes when a site and a server of different versions could misunderstand one another
FORM_WORDS = frozenset({"one_data_spec", "one_input_spec"})
"""Words of `Algorithm.requires` for which sites tell the form of their data."""
Form = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor
MOST_TENSORS = 20_000
HEAD_BYTES, ORDER_BYTES = 64 * 2**10, 2**20  # of the head from a site, and from the server, which has a method's fields
HEADER_BYTES = 4 * 2**20  # of names, shapes and types in one group
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}  # fmt: skip


@final
@dataclass(frozen=True)
class Letter:
    """One message in either direction: `head` (for JSON) says what it is about, `body` is what the method sends.

    Heads from the server have `kind` "introduce" or "task", `protocol`, `run` (an identifier of the run, the same after
    it was resumed) and `algorithm` (name and fields). To "introduce" they add `architecture`, that of the federation
    where the method needs one, and in a new run `public`, the form of its public examples, where it has some. To "task"
    they add `phase`, `round`, `client`, `seed`, `run_seed`, `state` (the round after which the client's private state
    is as the server knows it, None before the first), `keep` (the round to which the server may still go back),
    `metrics` (names of those to compute at evaluation; none are the task's own) and, where the run compresses,
    `compress` and `compress_down`, how `body` does in either direction.

    Where sites of tables have agreed on one preprocessing, "introduce" adds `prepared`, what it is. Before that a letter of
    the kind "prepare" asks what a site's table is like (`polyfed.deploy.agreeing`).

    A task of training may have `evaluation`: the evaluation of the round before, which the site makes first
    (`polyfed.deploy.riding`). The answer then has `evaluation` too, the head that the answer to it alone would have.

    With secure sums all have `secure`, true. (How many sites may add to a sum each knows itself.) Tasks of training then
    add `part`, whether the site's numbers enter the sum; these and evaluations `advertise`, for which round the site sends
    keys. A letter of the kind "sum" asks for steps of a sum by themselves, `advertise`, `share` and `hand_out`
    (`polyfed.deploy.secure.member`).

    Heads from a site have `client`, and `refused`, a sentence, if it does nothing. To "introduce" they add `task` and
    what the method needs the server to know (`num_examples`, `architecture`, `form`, types and shapes of its `inputs`,
    `width` of the last layer). To "task" they add `run`, `round`, `phase`, `seconds`, `metrics`, and `failure`, a
    sentence or None.
    """

    head: Mapping[str, Any]
    body: Message = field(default_factory=Message)


def pack_tree(tree: Tree) -> bytes:
    """A group of tensors as one safetensors file, which carries every type of torch's, with the order of the names.

    >>> list(unpack_tree(pack_tree({"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.zeros(())})))
    ['w', 'b']
    """
    # Copies, since safetensors refuses tensors that share memory.
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tree.items()}
    names = sorted(own)
    place = {name: position for position, name in enumerate(names)}
    order = [place[name] for name in own]
    return bytes(safetensors.torch.save(own, metadata={"order": json.dumps(order, separators=(",", ":"))}))


def parts_of(letter: Letter) -> tuple[str, Mapping[str, Any], dict[str, bytes]]:
    """A letter as it travels: its head as JSON, its numbers, and its groups of tensors, packed."""
    groups = {group: pack_tree(tree) for group, tree in letter.body.tensors.items()}
    return json.dumps(dict(letter.head)), letter.body.scalars, groups


def form_of(data: bytes) -> dict[str, Form]:
    """Names, shapes and types of the group that `pack_tree` wrote; its tensors are not looked at.

    Raises:
        UserError: `data` is damaged, or something else, or has more or longer names than can be meant.

    >>> form_of(pack_tree({"w": torch.ones(2, 3)}))
    {'w': ((2, 3), torch.float32)}
    """
    length = int.from_bytes(data[:8], "little")
    if length > HEADER_BYTES:  # before it is read: a thousand bytes of JSON take many times their size
        raise UserError(f"a group of tensors has a header of {length} bytes; at most {HEADER_BYTES} are read")
    try:
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        if len(header) > MOST_TENSORS:
            raise ValueError(f"it has {len(header)} tensors; at most {MOST_TENSORS} are read")
        return {name: _form(entry, len(data) - 8 - length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"a group of tensors of {len(data)} bytes cannot be read: {error}") from error


def _form(entry: Mapping[str, Any], space: int) -> Form:
    """Shape and type of a tensor, if its bytes are there."""
    shape, dtype, (start, end) = tuple(entry["shape"]), _TYPES[entry["dtype"]], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a shape or place is no number")
    if end > space or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} is not there")
    return shape, dtype


def small_tensors(data: bytes, most: int) -> dict[str, torch.Tensor]:
    """Of a group that `pack_tree` wrote the tensors of at most so many bytes; the others are not looked at.

    Raises:
        UserError: as `form_of`.

    >>> small_tensors(pack_tree({"large": torch.zeros(9), "small": torch.arange(2)}), 16)
    {'small': tensor([0, 1])}
    """
    forms, start, found = form_of(data), 8 + int.from_bytes(data[:8], "little"), {}
    header = json.loads(data[8:start])
    for name, (shape, dtype) in forms.items():
        begin, end = header[name]["data_offsets"]
        if end - begin <= most:
            flat = torch.frombuffer(bytearray(data[start + begin : start + end]), dtype=dtype) if end > begin else ()
            found[name] = torch.as_tensor(flat, dtype=dtype).reshape(shape)
    return found


def unpack_tree(data: bytes) -> dict[str, torch.Tensor]:
    """The group that `pack_tree` wrote.

    Raises:
        UserError: as `form_of`.
    """
    form_of(data)
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


def compressing(settings: Settings) -> dict[str, str]:
    """What of a run's settings the head of a task says of its body and of the reply's; nothing, where they travel as they
    are."""
    told = {"compress": settings.compress, "compress_down": settings.compress_down}
    return {} if set(told.values()) == {NONE} else told


def compressed_by(head: Mapping[str, Any]) -> tuple[Compression | None, Compression | None]:
    """How a site compresses its reply, and how the body that it got is compressed.

    Raises:
        UserError: the head names what this version does not know.

    >>> compressed_by({"compress": "int8"}), compressed_by({})
    ((Int8(), None), (None, None))
    """
    up, down = (compression(str(head.get(way, NONE))) for way in ("compress", "compress_down"))
    return up, down


@final
@dataclass(frozen=True)
class Packed:
    """A letter as it came, before anything of it is read: the JSON of its head, numbers, and packed groups.

    Raises:
        UserError: the head, or the number of numbers or groups, is beyond what can be meant.
    """

    head: str
    scalars: Mapping[str, Any]
    groups: Mapping[str, bytes]
    most: int = HEAD_BYTES

    def __post_init__(self) -> None:
        if len(self.head) > self.most:
            raise UserError(f"the head of a message has {len(self.head)} characters; at most {self.most} are read")
        if len(self.scalars) > MOST_SCALARS or len(self.groups) > MOST_GROUPS:
            raise UserError(
                f"a message has {len(self.scalars)} numbers and {len(self.groups)} groups of tensors; at most "
                f"{MOST_SCALARS} and {MOST_GROUPS} are read"
            )

    def forms(self) -> dict[str, dict[str, Form]]:
        """Names, shapes and types of all groups."""
        return {group: form_of(data) for group, data in self.groups.items()}

    def body(self) -> Message:
        """The message, with its tensors."""
        return Message({group: unpack_tree(data) for group, data in self.groups.items()}, self.scalars)


def plain_head(text: str) -> dict[str, Any]:
    """A head from its JSON.

    Raises:
        UserError: it is no mapping.

    >>> plain_head('{"kind": "task"}')
    {'kind': 'task'}
    """
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the head of a message is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise UserError(f"the head of a message must be a mapping, got {type(head).__name__}")
    return head


def broken(message: Message) -> str | None:
    """The first tensor of a message that is not finite.

    >>> broken(Message({"model": {"w": torch.tensor([1.0]), "b": torch.tensor([torch.nan])}}))
    'model/b'
    """
    return next((f"{group}/{name}" for group, tree in message.tensors.items() if (name := not_finite(tree))), None)


def code_in(value: Any) -> str | None:
    """The first text in the fields of a method that names a factory of a module, as `fedavg_kd`'s teacher may.

    >>> code_in({"teacher": {"name": "os:system"}}), code_in({"lr": 0.1, "catalogue": "C:/catalogue.yaml"})
    ('os:system', None)
    """
    if isinstance(value, Mapping):
        return next((found for item in value.values() if (found := code_in(item))), None)
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := code_in(item))), None)
    return value if isinstance(value, str) and _FACTORY.fullmatch(value) else None


def size_of(record: Any) -> int:
    """Bytes of all that Flower's record holds, names too, before any of it is unpacked."""
    total = 0
    for records in record.array_records.values():
        total += sum(len(name) + len(array.data) + len(array.dtype) + 8 for name, array in records.items())
    for numbers in record.metric_records.values():
        total += sum(len(n) + 8 * (len(v) if isinstance(v, list) else 1) for n, v in numbers.items())
    for texts in record.config_records.values():
        total += sum(len(n) + _length(v) for n, v in texts.items())
    return total


def _length(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_length, value))
    return len(value) if isinstance(value, str | bytes) else 8
