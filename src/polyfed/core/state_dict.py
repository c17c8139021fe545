"""Computes the mean of clients' state dicts (`{name: tensor}`), and compares their names, shapes, types and values.

A `StateDict` is a flat mapping from names (keys of a module's `state_dict`) to tensors: messages consist of them. A `PyTree`
is what a method may keep as state: dicts, lists, plain scalars and tensors to any depth.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

StateDict = Mapping[str, Tensor]
PyTree = Any  # dict[str, Nested] | list[Nested] | Tensor | str | int | float | bool | None; mypy has no such recursion
# Name -> (shape with None for "any size", dtype).
StateDictSpec = Mapping[str, tuple[tuple[int | None, ...], torch.dtype]]


@final
class RunningMean:
    """Computes the weighted mean of state dicts added one by one, with one in memory.

    They are added in the order of the clients' ids.

    Floating tensors are summed in float64; the mean of equal tensors is that tensor bit for bit. Whole numbers (BatchNorm's
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
        """Returns the ids of the clients whose state dicts were added, in that order."""
        return list(self._weight_by_client)

    def add(self, client: str, tensors: StateDict, weight: float = 1.0) -> None:
        """Adds one client's state dict with a weight.

        Raises:
            ValueError: an id that is not above the last, or a weight that is negative or not finite.
            IncompatibleTensorsError: names, shapes or types that are not those of the first client.
        """
        if self._weight_by_client and client <= (last := next(reversed(self._weight_by_client))):
            raise ValueError(f"{client!r} comes after {last!r}; add state dicts in the order of their ids")
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
            # Its form.
            self._first[name] = tensor.clone() if double or is_integer else tensor.new_empty(()).expand(tensor.shape)
            self._sums[name] = tensor.to(torch.float64) * (0.0 if is_integer else share)
            if double:
                # Shares sum to 1 only up to rounding. In float32 that does not show: float64 has 29 bits to spare. In
                # float64 the mean difference from the first client is taken, which is exactly 0 where tensors are equal.
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
        """Returns the weighted mean of all state dicts added so far.

        Raises:
            ValueError: no state dict was added, or all weights are 0.
        """
        if not self._weight_by_client:
            raise ValueError("cannot take the mean of no state dicts")
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
    """Raised when two clients' tensors have no mean, because names, shapes or types differ.

    `first_client` and `other_client` are the two clients, and `difference` says how the tensors of the second differ.
    """

    def __init__(self, first_client: str, other_client: str, difference: str) -> None:
        super().__init__(f"the tensors of {other_client!r} are not those of {first_client!r}: {difference}")
        self.first_client, self.other_client, self.difference = first_client, other_client, difference


def weighted_mean(
    tensors_by_client: Mapping[str, StateDict], weights: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """Returns the weighted mean of the clients' state dicts (equal weights by default).

    The result does not depend on the order of `tensors_by_client`; see `RunningMean` for what is exact.

    Args:
        tensors_by_client: client id -> state dict.
        weights: client id -> weight ≥ 0, not all zero; scaled to sum to 1.

    Raises:
        ValueError: no state dicts, or weights that are negative, not finite or all zero.

    >>> mean = weighted_mean({"a": {"w": torch.tensor([0.0])}, "b": {"w": torch.tensor([4.0])}}, {"a": 3, "b": 1})
    >>> mean["w"]
    tensor([1.])
    """
    if not tensors_by_client:
        raise ValueError("cannot take the mean of no state dicts")
    shares = {i: 1.0 if weights is None else float(weights[i]) for i in sorted(tensors_by_client)}
    mean = RunningMean(shares)
    for i, weight in shares.items():
        mean.add(i, tensors_by_client[i], weight)
    return mean.mean()


def _check_weights(weights: Mapping[str, float], need_positive: bool = True) -> Tensor:
    """Returns the weights as a float64 tensor, or raises an error if they cannot be weights."""
    raw = torch.tensor(list(weights.values()), dtype=torch.float64)
    if not bool(torch.isfinite(raw).all()) or bool((raw < 0).any()) or (need_positive and float(raw.sum()) == 0):
        raise ValueError(f"weights must be finite, not negative and not all zero, got {dict(weights)}")
    return raw


def clone_tensors(tensors: StateDict) -> dict[str, Tensor]:
    """Returns `{name: copy}`; the copies share no memory with the original tensors.

    >>> weights = {"bias": torch.zeros(1)}
    >>> clone_tensors(weights)["bias"].add_(1), weights["bias"]
    (tensor([1.]), tensor([0.]))
    """
    return {name: tensor.clone() for name, tensor in tensors.items()}


def view_as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor on the CPU, its elements in order: uint8 of shape (bytes,), without a copy if possible.

    A tensor of one element may have any stride, with which torch views it as no bytes, hence the further axis.

    >>> view_as_bytes(torch.arange(9, dtype=torch.int16)[1::3][:1]).tolist()
    [1, 0]
    """
    return tensor.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).flatten()


def state_dict_spec(tensors: StateDict) -> StateDictSpec:
    """Returns `{name: (shape, dtype)}` for the tensors of a state dict.

    >>> state_dict_spec({"w": torch.zeros(2, 3)})
    {'w': ((2, 3), torch.float32)}
    """
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def spec_mismatch(tensors: StateDict, expected: StateDictSpec) -> str | None:
    """Returns half a sentence on the first difference in name, shape or dtype; None if there is none.

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


def name_of_first_nonfinite(tensors: StateDict) -> str | None:
    """Returns the name of the first tensor that contains NaN or infinity; None if all values are finite.

    >>> name_of_first_nonfinite({"a": torch.ones(1), "b": torch.tensor([float("nan")])})
    'b'
    """
    for name, tensor in tensors.items():
        # A sum is ten times faster than a look at every element, and not finite if one of them is not.
        if tensor.is_floating_point() and not math.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def name_of_first_exceeding(tensors: StateDict, limit: float) -> str | None:
    """Returns the name of the first tensor with NaN or an absolute value above `limit`; or None.

    >>> name_of_first_exceeding({"a": torch.ones(1), "b": torch.tensor([-3.0])}, limit=2.0)
    'b'
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (-limit <= float(low) and float(high) <= limit):
                return name
    return None


def find_value_error(tensors_by_group: Mapping[str, StateDict], limit: float) -> str | None:
    """Returns, as half a sentence, which tensor of a reply has NaN or an absolute value above `limit`; None if none has."""
    for group, tensors in tensors_by_group.items():
        if tensor_name := name_of_first_exceeding(tensors, limit):
            problem = (
                "NaN or infinite values"
                if name_of_first_nonfinite({tensor_name: tensors[tensor_name]})
                else f"values beyond {limit:g}"
            )
            return (
                f"group {group!r}: tensor {tensor_name!r} has {problem}; the local training diverged: lower lr or set "
                "clip_norm"
            )
    return None


_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


def iter_tensors(state: PyTree) -> Iterable[Tensor]:
    """Yields every tensor inside nested dicts and lists, depth first.

    >>> [t.item() for t in iter_tensors({"a": torch.tensor(1), "b": [torch.tensor(2), "x"]})]
    [1, 2]
    """
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            if type(value) not in _PLAIN_TYPES:  # a list of a million ids takes no million generators
                yield from iter_tensors(value)
