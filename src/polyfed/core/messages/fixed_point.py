"""Adds clients' tensors as 64-bit integers (fixed point), so that sums are exact whatever the order of the clients.

A reply with the weight n becomes words: n itself, and round(n·x·2^32) for each number x of a floating tensor, n·x for
each of a whole one. Words are added mod 2^64. From the sum comes the weighted mean Σ n_i x_i / Σ n_i, without a single reply
ever being known: this is what a secure sum adds up (`polyfed.deploy.secure_aggregation`), and what a simulation
computes in its place.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.state_dict import StateDict

FRACTION_BITS = 32
"""Binary digits after the point: a mean of n examples is exact to 2^-33/n̄ before it is rounded to its type."""

FixedPointWords = np.ndarray[tuple[int], np.dtype[np.uint64]]
TensorGroups = Mapping[str, StateDict]
_WORD_LIMIT = 2.0**63
_DTYPES = {str(t).removeprefix("torch."): t for t in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_WORDS, _MAX_BYTES, _MAX_DIMENSIONS = 2**34, 4 * 2**20, 64  # of what is read; a layout's bytes, a tensor's shape
_MAX_COUNTS = 16


class SummedTensor(NamedTuple):
    """Describes one tensor in a fixed-point sum: the group of the message that it belongs to, its name, shape and type."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class MeanAndWeight(NamedTuple):
    """Holds the weighted mean of clients' tensors, `{group: {name: tensor}}`, and the sum of the clients' weights."""

    tensors: dict[str, dict[str, Tensor]]
    total_weight: int


@final
@dataclass(frozen=True)
class SumLayout:
    """Describes which 64-bit words of a fixed-point sum belong to which tensor (group, name, shape and type).

    Tensors come in the order of groups and names. The first word is the weight; the last `num_counts` words are whole
    numbers that no weight multiplies.

    Raises:
        UserError: a type that has no place in a sum.

    >>> layout = SumLayout.from_tensor_groups({"model": {"w": torch.zeros(2, 3), "b": torch.zeros(3)}})
    >>> layout.num_words, SumLayout.from_byte_tensor(layout.to_byte_tensor()) == layout
    (10, True)
    """

    tensors: tuple[SummedTensor, ...]
    num_counts: int = 0

    def __post_init__(self) -> None:
        for group, name, _, dtype in self.tensors:
            if dtype not in _DTYPE_NAMES:
                raise UserError(
                    f"tensor {name!r} of group {group!r} is of type {dtype}, which a fixed-point sum cannot hold"
                )

    @classmethod
    def from_tensor_groups(cls, groups: TensorGroups, num_counts: int = 0) -> "SumLayout":
        """Builds the layout for the tensors of a message, given as `{group: {name: tensor}}`, and counts after them."""
        return cls(
            tuple(
                SummedTensor(group, name, tuple(groups[group][name].shape), groups[group][name].dtype)
                for group in sorted(groups)
                for name in sorted(groups[group])
            ),
            num_counts,
        )

    @property
    def num_words(self) -> int:
        """Returns the number of 64-bit words that tensors of this layout take."""
        return 1 + sum(prod(shape) for _, _, shape, _ in self.tensors) + self.num_counts

    def to_byte_tensor(self) -> Tensor:
        """Returns the layout as a tensor of bytes (JSON), which a message can contain."""
        entries: Any = [[group, name, list(shape), _DTYPE_NAMES[dtype]] for group, name, shape, dtype in self.tensors]
        content = {"counts": self.num_counts, "tensors": entries} if self.num_counts else entries
        return torch.frombuffer(bytearray(json.dumps(content, separators=(",", ":")).encode()), dtype=torch.uint8)

    @classmethod
    def from_byte_tensor(cls, data: Tensor) -> "SumLayout":
        """Reads a layout from the result of `to_byte_tensor`.

        Raises:
            UserError: the bytes are not a layout.
        """
        try:
            if data.numel() > _MAX_BYTES:  # before it is read: its JSON takes many times its size
                raise ValueError(f"it has {data.numel()} bytes; at most {_MAX_BYTES} are read")
            content = json.loads(bytes(data.numpy()))
            num_counts, content = (content["counts"], content["tensors"]) if isinstance(content, dict) else (0, content)
            entries = tuple(SummedTensor(g, n, tuple(s), _DTYPES[t]) for g, n, s, t in content)
            if type(num_counts) is not int or not 0 <= num_counts <= _MAX_COUNTS or not all(
                isinstance(g, str) and isinstance(n, str) and len(s) <= _MAX_DIMENSIONS
                # Each by itself: beside a 0, no product tells of a size that no tensor can have.
                and all(type(size) is int and 0 <= size <= _MAX_WORDS for size in s)
                for g, n, s, _ in entries
            ):  # fmt: skip
                raise ValueError("a name, a shape or the number of counts is not valid")
            layout = cls(entries, num_counts)
            if layout.num_words > _MAX_WORDS or len({entry[:2] for entry in entries}) < len(entries):
                raise ValueError("it is too large, or has a name twice")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"the layout of a sum cannot be read: {error}") from error
        return layout

    def meta_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns `{group: {name: tensor}}` of the layout on torch's "meta" device, which takes no memory."""
        groups: dict[str, dict[str, Tensor]] = {}
        for group, name, shape, dtype in self.tensors:
            groups.setdefault(group, {})[name] = torch.empty(shape, dtype=dtype, device="meta")
        return groups


def to_fixed_point(groups: TensorGroups, weight: int, num_parties: int) -> FixedPointWords:
    """Converts one client's tensors, multiplied by its weight, to 64-bit words.

    Args:
        groups: what it sends.
        weight: n, its number of examples, or 1.
        num_parties: how many add their words at most: each may take as much of the room, so that the sum always fits.

    Raises:
        UserError: a value that is not finite, or does not fit; nothing may be sent then.

    >>> words = to_fixed_point({"model": {"w": torch.tensor([0.5])}}, weight=3, num_parties=2)
    >>> words[0], words[1] == 3 * 2**31
    (np.uint64(3), np.True_)
    """
    layout, limit = SumLayout.from_tensor_groups(groups), _WORD_LIMIT / num_parties
    if isinstance(weight, bool) or weight != int(weight) or not 1 <= weight < limit:
        raise UserError(f"a weight in a fixed-point sum is a whole number from 1, got {weight!r}")
    words = np.empty(layout.num_words, dtype=np.int64)
    words[0], offset = int(weight), 1
    for group, name, _, dtype in layout.tensors:
        tensor = groups[group][name].detach().cpu()
        exact = tensor.to(torch.float64) * float(weight)
        exact = (exact * 2.0**FRACTION_BITS if dtype.is_floating_point else exact).flatten()
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        if not largest < limit:  # NaN too
            largest_value = float(tensor.to(torch.float64).abs().max())
            max_value = limit / weight / (2.0**FRACTION_BITS if dtype.is_floating_point else 1.0)
            cure = (
                "lower lr, set clip_norm, or scale the inputs" if dtype.is_floating_point
                else "it holds whole numbers: let the network count from 0, or keep it with buffers='local'"
            )  # fmt: skip
            raise UserError(
                f"group {group!r}: tensor {name!r} has the value {largest_value:.3g}, and a fixed-point sum of "
                f"{num_parties} sites with {weight} examples here holds up to {max_value:.3g}; {cure}"
            )
        if not dtype.is_floating_point:
            exact = (tensor.to(torch.int64) * int(weight)).flatten()
        words[offset : offset + len(exact)] = (
            exact.round().to(torch.int64).numpy() if dtype.is_floating_point else exact.numpy()
        )
        offset += len(exact)
    return words.view(np.uint64)


def mean_from_fixed_point(words: FixedPointWords, layout: SumLayout) -> MeanAndWeight:
    """Computes the clients' weighted mean and the sum of their weights from the sum of all clients' words.

    Whole numbers are rounded to the nearest (up from the middle); a mean of booleans is whether any was true.

    Raises:
        UserError: these words are not a sum of this layout.

    >>> total = to_fixed_point({"m": {"w": torch.tensor([1.0])}}, 1, 2)
    >>> total += to_fixed_point({"m": {"w": torch.tensor([5.0])}}, 3, 2)
    >>> mean_from_fixed_point(total, SumLayout.from_tensor_groups({"m": {"w": torch.zeros(1)}}))
    MeanAndWeight(tensors={'m': {'w': tensor([4.])}}, total_weight=4)
    """
    if len(words) != layout.num_words:
        raise UserError(f"a sum of {layout.num_words} words is expected, got {len(words)}")
    signed = words.view(np.int64)
    weight = int(signed[0])
    if weight < 1:
        raise UserError(f"the weights of a sum add up to {weight}, which cannot be")
    groups: dict[str, dict[str, Tensor]] = {}
    offset = 1
    for group, name, shape, dtype in layout.tensors:
        part = torch.from_numpy(signed[offset : offset + prod(shape)].copy()).reshape(shape)
        offset += prod(shape)
        if dtype.is_floating_point:
            mean = (part.to(torch.float64) / (float(weight) * 2.0**FRACTION_BITS)).to(dtype)
        elif dtype == torch.bool:
            mean = part != 0
        else:
            high = torch.div(part, weight, rounding_mode="floor")
            mean = (high + (part - high * weight >= weight - (part - high * weight)).to(torch.int64)).to(dtype)
        groups.setdefault(group, {})[name] = mean
    return MeanAndWeight(groups, weight)


def counts_in_sum(words: FixedPointWords, layout: SumLayout) -> list[int]:
    """Returns the counts at the end of the words of a sum; empty if its layout has none."""
    return [int(count) for count in words.view(np.int64)[len(words) - layout.num_counts :]]


def build_sum_message(words: FixedPointWords, layout: SumLayout) -> Message:
    """Builds a message that contains the words of a fixed-point sum, and their layout."""
    return Message({"sum": {"layout": layout.to_byte_tensor(), "words": torch.from_numpy(words.view(np.int64))}})


def parse_sum_message(message: Message) -> tuple[FixedPointWords, SumLayout]:
    """Returns the words and their layout from a message that `build_sum_message` built.

    Raises:
        UserError: the message is not such a sum.
    """
    names_by_group = {group: sorted(tensors) for group, tensors in message.tensors.items()}
    if names_by_group != {"sum": ["layout", "words"]}:
        raise UserError(f"a part of a secure sum is expected, and the reply holds {str(names_by_group)[:200]}")
    tensors = message.tensors["sum"]
    layout, words = tensors["layout"], tensors["words"]
    if layout.dtype != torch.uint8 or words.dtype != torch.int64 or layout.dim() != 1 or words.dim() != 1:
        raise UserError("the words of a secure sum, or their layout, are of another type or shape")
    parsed_layout = SumLayout.from_byte_tensor(layout)
    if len(words) != parsed_layout.num_words:
        raise UserError(f"a part of a secure sum has {len(words)} words, and its layout {parsed_layout.num_words}")
    return words.numpy().view(np.uint64), parsed_layout
