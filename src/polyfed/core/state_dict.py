"""Trees of named tensors: means over clients, bytes on the wire, and a safe serialisation of nested state.

A `StateDict` is a flat mapping from names (keys of a `state_dict`) to tensors: what travels. A `PyTree` is what a method may
keep: dicts, lists, plain scalars and tensors to any depth. Both are stored as safetensors, never as pickle.
"""

import json
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, final

import safetensors.torch
import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.validation import size_limit_error

StateDict = Mapping[str, Tensor]
PyTree = Any  # dict[str, Nested] | list[Nested] | Tensor | str | int | float | bool | None; mypy has no such recursion
StateDictSpec = Mapping[
    str, tuple[tuple[int | None, ...], torch.dtype]
]  # name -> (shape with None for "any size", dtype)

# What bytes that are no state make readers raise; torch refuses shapes and types by RuntimeError.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError, RuntimeError)
_FORMAT_NAMES = {  # as safetensors writes them; the length of the header depends on them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.uint16: "U16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


@final
class RunningMean:
    """The weighted mean of trees that come one by one, in the order of their ids; one tree is held, whatever their number.

    Floating tensors are summed in float64; the mean of equal trees is that tree bit for bit. Whole numbers (BatchNorm's
    counters) are rounded to the nearest, up from the middle, and a boolean is whether any was true, as in a secure sum.

    Args:
        expected_weights: id -> weight of everyone who is expected. If all of them come with these weights, the mean
            is that of
            shares w_i/Σw, as `weighted_mean` takes it, bit for bit. If some do not, it is divided by the share that came,
            which may differ from that in the last bit.

    >>> mean = RunningMean({"a": 3.0, "b": 1.0})
    >>> mean.add("a", {"w": torch.tensor([0.0])}, 3.0)
    >>> mean.add("b", {"w": torch.tensor([4.0])}, 1.0)
    >>> mean.mean()
    {'w': tensor([1.])}
    """

    def __init__(self, expected_weights: Mapping[str, float] | None = None) -> None:
        self._expected = None if expected_weights is None else dict(expected_weights)
        self._expected_total = 1.0 if expected_weights is None else float(_check_weights(expected_weights).sum())
        self._weight_by_client: dict[str, float] = {}
        self._first: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}  # Σ share_i·t_i in float64; of whole numbers Σ w_i·(t_i − t_1)
        self._exact: dict[str, Tensor] = {}  # of tensors in float64: t_1 − Σ share_i·(t_1 − t_i)

    @property
    def client_ids(self) -> list[str]:
        """Whose trees have come, in their order."""
        return list(self._weight_by_client)

    def add(self, client: str, tensors: StateDict, weight: float = 1.0) -> None:
        """Takes in the tree of one client, which is not needed after.

        Raises:
            ValueError: an id that is not above the last, or a weight that is negative or not finite.
            IncompatibleTensorsError: names, shapes or types that are not those of the first tree.
        """
        if self._weight_by_client and client <= (last := next(reversed(self._weight_by_client))):
            raise ValueError(f"{client!r} comes after {last!r}; add trees in the order of their ids")
        _check_weights({client: weight}, need_positive=False)
        share = weight / self._expected_total
        if not self._weight_by_client:
            self._begin(tensors, share)
        elif difference := spec_mismatch(tensors, state_dict_spec(self._first)):
            raise IncompatibleTensorsError(next(iter(self._weight_by_client)), client, difference)
        else:
            self._accumulate(tensors, share, float(weight))
        self._weight_by_client[client] = float(weight)

    def _begin(self, tensors: StateDict, share: float) -> None:
        for name, tensor in tensors.items():
            double = tensor.dtype == torch.float64
            is_integer = not tensor.is_floating_point()
            self._first[name] = (
                tensor.clone() if double or is_integer else tensor.new_empty(()).expand(tensor.shape)
            )  # its form
            self._sums[name] = tensor.to(torch.float64) * (0.0 if is_integer else share)
            if double:
                # Shares sum to 1 only up to rounding. In float32 that does not show: float64 has 29 bits to spare. In
                # float64 the mean difference from the first tree is taken, which is exactly 0 where trees are equal.
                self._exact[name] = tensor.clone()

    def _accumulate(self, tensors: StateDict, share: float, weight: float) -> None:
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():  # exact while weights are whole and numbers below 2^53
                self._sums[name].add_(tensor.double() - self._first[name].double(), alpha=weight)
                continue
            self._sums[name].add_(tensor, alpha=share)
            if name in self._exact:  # not added: -0.0 - 0.0 is -0.0, as it was
                self._exact[name].sub_(self._first[name] - tensor, alpha=share)

    def mean(self) -> dict[str, Tensor]:
        """The mean of what has come.

        Raises:
            ValueError: nothing has, or all weights are 0.
        """
        if not self._weight_by_client:
            raise ValueError("cannot take the mean of no trees")
        total = float(_check_weights(self._weight_by_client).sum())
        scale = 1.0 if self._weight_by_client == self._expected else self._expected_total / total
        return {name: self._mean(name, value, scale, total) for name, value in self._sums.items()}

    def _mean(self, name: str, value: Tensor, scale: float, total: float) -> Tensor:
        first = self._first[name]
        if first.dtype == torch.bool:  # 0 unless another was unlike the first
            return first | (value != 0)
        if not first.is_floating_point():
            return (first.long() + (value / total + 0.5).floor().long()).to(first.dtype)
        value = value if scale == 1.0 else value * scale
        if name not in self._exact:
            return value.to(first.dtype)
        mean = self._exact[name]
        mean = mean if scale == 1.0 else first - (first - mean) * scale
        if math.isfinite(mean.sum()):
            return mean
        # The difference of two huge numbers may be infinite, though their mean is not.
        return torch.where(mean.isfinite(), mean, value)


@final
class IncompatibleTensorsError(ValueError):
    """Two trees have no mean: `first_client` and `other_client`, whose trees they are, and how the second `difference`."""

    def __init__(self, first_client: str, other_client: str, difference: str) -> None:
        super().__init__(f"the tensors of {other_client!r} are not those of {first_client!r}: {difference}")
        self.first_client, self.other_client, self.difference = first_client, other_client, difference


def weighted_mean(
    tensors_by_client: Mapping[str, StateDict], weights: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """The mean over clients of trees with the same names, weighted by `weights` (default: each client counts the same).
    It does not depend on the order of `tensors_by_client`; see `RunningMean` for what is exact.

    Args:
        tensors_by_client: client id -> tree.
        weights: client id -> weight ≥ 0, not all zero; scaled to sum to 1.

    Raises:
        ValueError: no trees, or weights that are negative, not finite or all zero.

    >>> mean = weighted_mean({"a": {"w": torch.tensor([0.0])}, "b": {"w": torch.tensor([4.0])}}, {"a": 3, "b": 1})
    >>> mean["w"]
    tensor([1.])
    """
    if not tensors_by_client:
        raise ValueError("cannot take the mean of no trees")
    shares = {i: 1.0 if weights is None else float(weights[i]) for i in sorted(tensors_by_client)}
    mean = RunningMean(shares)
    for i, weight in shares.items():
        mean.add(i, tensors_by_client[i], weight)
    return mean.mean()


def _check_weights(weights: Mapping[str, float], need_positive: bool = True) -> Tensor:
    """The weights in float64, if they can weigh."""
    raw = torch.tensor(list(weights.values()), dtype=torch.float64)
    if not bool(torch.isfinite(raw).all()) or bool((raw < 0).any()) or (need_positive and float(raw.sum()) == 0):
        raise ValueError(f"weights must be finite, not negative and not all zero, got {dict(weights)}")
    return raw


def clone_tensors(tensors: StateDict) -> dict[str, Tensor]:
    """A copy of every tensor, so that what is sent and what is kept share nothing.

    >>> weights = {"bias": torch.zeros(1)}
    >>> clone_tensors(weights)["bias"].add_(1), weights["bias"]
    (tensor([1.]), tensor([0.]))
    """
    return {name: tensor.clone() for name, tensor in tensors.items()}


def state_dict_spec(tensors: StateDict) -> StateDictSpec:
    """Names, shapes and dtypes of a tree.

    >>> state_dict_spec({"w": torch.zeros(2, 3)})
    {'w': ((2, 3), torch.float32)}
    """
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def spec_mismatch(tensors: StateDict, expected: StateDictSpec) -> str | None:
    """The first way in which `tensors` differs from `expected`, as half a sentence; None if it does not.

    >>> spec_mismatch({"w": torch.zeros(2)}, {"w": ((3,), torch.float32)})
    "tensor 'w' has shape (2,), expected (3,)"
    """
    if missing := sorted(expected.keys() - tensors.keys()):
        return f"tensor {missing[0]!r} is missing ({len(missing)} of {len(expected)} are)"
    if surplus := sorted(tensors.keys() - expected.keys()):
        return f"tensor {surplus[0]!r} is unexpected ({len(surplus)} are)"
    for name, (shape, dtype) in expected.items():
        tensor = tensors[name]
        if len(tensor.shape) != len(shape) or any(s not in (None, g) for s, g in zip(shape, tensor.shape, strict=True)):
            return f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {shape}"
        if tensor.dtype != dtype:
            return f"tensor {name!r} has dtype {tensor.dtype}, expected {dtype}"
    return None


def first_nonfinite(tensors: StateDict) -> str | None:
    """The name of the first tensor that holds NaN or infinity; None if all are finite.

    >>> first_nonfinite({"a": torch.ones(1), "b": torch.tensor([float("nan")])})
    'b'
    """
    for name, tensor in tensors.items():
        # A sum is ten times faster than a look at every element, and not finite if one of them is not.
        if tensor.is_floating_point() and not math.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def first_exceeding(tensors: StateDict, limit: float) -> str | None:
    """The name of the first tensor of floating-point numbers with an absolute value above `limit`, or none at all (NaN).

    >>> first_exceeding({"a": torch.ones(1), "b": torch.tensor([-3.0])}, limit=2.0)
    'b'
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (-limit <= float(low) and float(high) <= limit):
                return name
    return None


def safetensors_num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Exact size in bytes of these tensors as one safetensors file, without writing it; 0 for no tensors.

    >>> tensors = {"w": torch.zeros(3, 4), "n": torch.tensor(1)}
    >>> safetensors_num_bytes(tensors) == len(safetensors.torch.save(tensors))
    True
    """
    if not tensors:
        return 0
    # The format orders tensors by falling alignment, then by name; offsets are decimal text inside the header.
    ordered = sorted(tensors.items(), key=lambda item: (-_alignment(item[1].dtype), item[0]))
    header, offset = {}, 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        kind = _FORMAT_NAMES.get(tensor.dtype, str(tensor.dtype))
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + (length + 7) // 8 * 8 + offset


def _alignment(dtype: torch.dtype) -> int:
    # safetensors sorts by its enum, in which these types stand by size, floats after integers of the same size.
    order = ("BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "F32", "F64", "I64")
    name = _FORMAT_NAMES.get(dtype)
    return order.index(name) if name in order else -1


def serialize_state(state: PyTree, shared: Mapping[int, str] | None = None) -> bytes:
    """Nested state as safetensors bytes, its structure as JSON in the metadata. The inverse is `deserialize_state`.

    Args:
        state: dicts with string keys, lists, tuples (read back as lists), plain scalars and tensors.
        shared: `id(tensor)` -> name, for tensors that the reader already has: only the name is written.

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
            if shared is not None and id(value) in shared:
                return {"shared": shared[id(value)]}
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


def deserialize_state(data: bytes, shared: Mapping[str, Tensor] | None = None) -> PyTree:
    """The nested state that `serialize_state` wrote; `shared` supplies the tensors that were written by name only.

    Raises:
        UserError: `data` is not complete or not ours.
    """
    complaint = f"these {len(data)} bytes are not a complete polyfed state"
    try:
        length = int.from_bytes(data[:8], "little")
        structure = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["structure"])
        tensors = safetensors.torch.load(data)
    except (*_UNREADABLE, safetensors.SafetensorError) as error:
        raise UserError(f"{complaint} ({error})") from error
    if wrong := size_limit_error(structure):
        raise UserError(f"{complaint} ({wrong})")
    sources = {"tensor": tensors, "shared": shared or {}}

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


def iter_tensors(state: PyTree) -> Iterable[Tensor]:
    """Every tensor inside nested state, depth first.

    >>> [t.item() for t in iter_tensors({"a": torch.tensor(1), "b": [torch.tensor(2), "x"]})]
    [1, 2]
    """
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from iter_tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from iter_tensors(value)


def check_serializable(state: PyTree, name: str) -> None:
    """Raises a `TypeError` for state that would not come back from a checkpoint or another process as it was.

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
            raise TypeError(
                f"{name}{place} is a {type(item).__name__}; keep dicts with string keys, lists, plain scalars and tensors"
            )

    walk(state, "")


def check_scalars(scalars: Mapping[str, Any], name: str) -> None:
    """Raises a `TypeError` for scalars of a message that are no numbers, or not finite: they would not travel as they are.

    >>> check_scalars({"lr": 0.1, "steps": None}, "the message to 'north'")
    Traceback (most recent call last):
    TypeError: the message to 'north': scalar 'steps' is None; scalars are finite numbers
    """
    for key, number in scalars.items():
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise TypeError(f"{name}: scalar {key!r} is {number!r}; scalars are finite numbers")
