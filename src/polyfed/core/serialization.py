"""Writes nested dicts and lists of tensors as safetensors bytes, never as pickle, and reads them back."""

import json
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.values.validation import explain_exceeded_size_limit
from polyfed.core.state_dict import PyTree

# Readers raise these for bytes that are not a state; torch refuses shapes and types by RuntimeError.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError, RuntimeError)


_FORMAT_NAMES = {  # as safetensors writes them; the length of the header depends on them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.uint16: "U16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def safetensors_num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Returns the exact size in bytes that these tensors would have as one safetensors file; 0 for no tensors.

    >>> tensors = {"w": torch.zeros(3, 4), "n": torch.tensor(1)}
    >>> safetensors_num_bytes(tensors) == len(safetensors.torch.save(tensors))
    True
    """
    if not tensors:
        return 0
    # The format orders tensors by falling alignment, then by name; offsets are decimal text inside the header.
    ordered = sorted(tensors.items(), key=lambda item: (-_alignment_of_dtype(item[1].dtype), item[0]))
    header, offset = {}, 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        kind = _FORMAT_NAMES.get(tensor.dtype, str(tensor.dtype))
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + (length + 7) // 8 * 8 + offset


def _alignment_of_dtype(dtype: torch.dtype) -> int:
    # safetensors sorts by its enum, in which these types stand by size, floats after integers of the same size.
    order = ("BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "F32", "F64", "I64")
    name = _FORMAT_NAMES.get(dtype)
    return order.index(name) if name in order else -1


def serialize_state(state: PyTree, shared_names_by_id: Mapping[int, str] | None = None) -> bytes:
    """Returns nested state (dicts, lists, scalars and tensors) as safetensors bytes, for `deserialize_state`.

    The structure is JSON in the metadata.

    Args:
        state: dicts with string keys, lists, tuples (read back as lists), plain scalars and tensors.
        shared_names_by_id: `id(tensor)` -> name, for tensors that the reader already has: only the name is written.

    Raises:
        TypeError: a value of another type, with its path.

    >>> deserialize_state(serialize_state({"round": 3, "model": {"w": torch.ones(2)}}))
    {'round': 3, 'model': {'w': tensor([1., 1.])}}
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # a tensor that occurs several times is written once
    storages: set[int] = set()

    def walk(value: PyTree, path: str) -> Any:
        if isinstance(value, Tensor):
            if shared_names_by_id is not None and id(value) in shared_names_by_id:
                return {"shared": shared_names_by_id[id(value)]}
            if id(value) in names:
                return {"tensor": names[id(value)]}
            name = path if path not in tensors else f"{path}#{len(tensors)}"
            names[id(value)] = name
            copy = value.detach().cpu().contiguous()
            pointer = copy.untyped_storage().data_ptr()
            if pointer in storages or copy.untyped_storage().nbytes() != copy.numel() * copy.element_size():
                copy = copy.clone()  # safetensors refuses tensors that share memory
            storages.add(copy.untyped_storage().data_ptr())
            tensors[name] = copy
            return {"tensor": name}
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise TypeError(f"state at {path or 'the top'!r} has keys that are not strings: {list(value)[:3]}")
            return {"dict": {key: walk(item, f"{path}/{key}" if path else key) for key, item in value.items()}}
        if isinstance(value, list | tuple):
            return [walk(item, f"{path}/{i}") for i, item in enumerate(value)]
        if value is None or isinstance(value, str | bool | int | float):
            return value
        raise TypeError(f"state at {path!r} is a {type(value).__name__}; keep dicts, lists, scalars and tensors")

    structure = json.dumps(walk(state, ""))
    return bytes(safetensors.torch.save(tensors, metadata={"structure": structure}))


def deserialize_state(data: bytes, shared_tensors: Mapping[str, Tensor] | None = None) -> PyTree:
    """Returns the nested state from bytes of `serialize_state`; `shared_tensors` supplies tensors stored by name only.

    Raises:
        UserError: `data` is damaged, or something that `serialize_state` does not write.
    """
    complaint = f"these {len(data)} bytes are not a complete polyfed state"
    try:
        length = int.from_bytes(data[:8], "little")
        structure = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["structure"])
        tensors = safetensors.torch.load(data)
    except (*_UNREADABLE, safetensors.SafetensorError) as error:
        raise UserError(f"{complaint} ({error})") from error
    if error_text := explain_exceeded_size_limit(structure):
        raise UserError(f"{complaint} ({error_text})")
    sources = {"tensor": tensors, "shared": shared_tensors or {}}

    def walk(value: Any) -> PyTree:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind, inner = next(iter(value.items()), (None, None))
        if len(value) == 1 and kind == "dict" and isinstance(inner, dict):
            return {key: walk(item) for key, item in inner.items()}
        if len(value) == 1 and kind in sources and isinstance(inner, str) and inner in sources[kind]:
            return sources[kind][inner]
        raise UserError(f"{complaint} ({str(value)[:60]} stands where a tensor or a mapping should)")

    return walk(structure)


def check_serializable(state: PyTree, name: str) -> None:
    """Raises a `TypeError` if state contains a value that would come back changed from a checkpoint or another process.

    >>> check_serializable({"seen": (1, 2)}, "the private state")
    Traceback (most recent call last):
    TypeError: the private state at 'seen' is a tuple; keep dicts with string keys, lists, plain scalars and tensors
    """

    def walk(item: PyTree, path: str) -> None:
        if isinstance(item, dict) and all(isinstance(key, str) for key in item):
            for key, inner in item.items():
                walk(inner, f"{path}/{key}" if path else key)
        elif isinstance(item, list):
            for position, inner in enumerate(item):
                walk(inner, f"{path}/{position}")
        elif not isinstance(item, torch.Tensor) and type(item) not in (str, int, float, bool, type(None)):
            place = f" at {path!r}" if path else ""
            keys = [key for key in item if not isinstance(key, str)] if isinstance(item, dict) else []
            kind = f"has the key {keys[0]!r}" if keys else f"is a {type(item).__name__}"
            raise TypeError(f"{name}{place} {kind}; keep dicts with string keys, lists, plain scalars and tensors")

    walk(state, "")


def check_scalars_finite(scalars: Mapping[str, Any], name: str) -> None:
    """Raises a `TypeError` if a scalar of a message is not a finite number.

    >>> check_scalars_finite({"lr": 0.1, "steps": None}, "the message to 'north'")
    Traceback (most recent call last):
    TypeError: the message to 'north': scalar 'steps' is None; scalars are finite numbers
    """
    for key, number in scalars.items():
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise TypeError(f"{name}: scalar {key!r} is {number!r}; scalars are finite numbers")
