"""How tensors are made smaller on their way: numbers of one byte, or only the entries that changed most.

What travels as it is: integers; tensors of fewer than 16 values; tensors of one dimension up to 4,096, which are biases and
the scales and statistics of norm layers (few bytes, but a variance must not be rounded to 0 nor stay behind the weights);
what is not finite (the server sees it and refuses it); and what would not get smaller.

Nothing is kept from round to round: what was rounded or left out is not made up for later (error feedback), since that would
add to the private state of every method. `polyfed.core.compressed` makes messages of it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from polyfed.core.errors import UserError, nearest
from polyfed.core.seeds import torch_generator

Form = tuple[tuple[int, ...], torch.dtype]
NONE = "none"
FEWEST = 16
"""Numbers of the smallest tensor that is compressed."""
LONGEST_VECTOR = 4096
"""Numbers of the largest tensor of one dimension that travels as it is."""
_TOPK = "topk"
_STEPS = 127
_TYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class Compression(ABC):
    """How tensors are made smaller. Final subclasses are frozen dataclasses, named in `COMPRESSIONS`; `str` gives what
    `compression` reads."""

    rest: ClassVar[str]
    """The name of the group's entry with what its compressed tensors have in common."""
    needs_counterpart: ClassVar[bool]
    """Whether only tensors that have one are compressed."""

    @abstractmethod
    def pack(self, tensor: Tensor, before: Tensor | None, seed: int) -> tuple[str, Tensor, Tensor] | None:
        """How a tensor travels, its own entry, and its part of the group's; None for one that travels as it is.

        Args:
            tensor: to be sent.
            before: its counterpart, which the receiver has.
            seed: of what is drawn.
        """

    @abstractmethod
    def form(self, kind: str, body: Form, before: Form | None) -> tuple[Form, int, torch.dtype]:
        """The form of the tensor that `pack` made an entry of, how many numbers of the group's entry belong to it, and the
        type that they need.

        Raises:
            ValueError: `pack` makes no such entry; half a sentence.
        """

    @abstractmethod
    def unpack(self, kind: str, body: Tensor, rest: Tensor, before: Tensor | None) -> Tensor:
        """The tensor of an entry whose form has been checked.

        Raises:
            ValueError: numbers that `pack` does not make; half a sentence.
        """


@final
@dataclass(frozen=True)
class Int8(Compression):
    """One byte a number: q = ⌊x/s + u⌋ with s = max|x|/127 for each tensor and u uniform in [0, 1), so that E[s·q] = x and
    |s·q − x| < s. x is the change from the counterpart; where there is none, the value itself.

    Without the norm and the entropy coding of QSGD, whose idea stochastic rounding is (Alistarh, Grubic, Li, Tomioka and
    Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NIPS 2017, section 3.1).

    >>> str(Int8())
    'int8'
    """

    rest: ClassVar[str] = ":scales"
    needs_counterpart: ClassVar[bool] = False

    def __str__(self) -> str:
        return "int8"

    def pack(self, tensor: Tensor, before: Tensor | None, seed: int) -> tuple[str, Tensor, Tensor] | None:
        """`TYPE`, q and s."""
        if not _large((tuple(tensor.shape), tensor.dtype)):
            return None
        change = tensor.double() if before is None else tensor.double() - before.double()
        scale = _scale(float(change.abs().max()))
        if not math.isfinite(scale):
            return None
        drawn = torch.rand(change.shape, generator=torch_generator(seed))
        steps = (change / scale + drawn).floor_() if scale else torch.zeros_like(change)
        return _NAMES[tensor.dtype], steps.to(torch.int8), torch.tensor([scale], dtype=torch.float32)

    def form(self, kind: str, body: Form, before: Form | None) -> tuple[Form, int, torch.dtype]:
        """The shape of q, and the type that the name says."""
        if kind not in _TYPES or not _large((body[0], _TYPES[kind])):
            raise ValueError(f"of shape {body[0]} does not travel as {kind!r}")
        if body[1] != torch.int8:
            raise ValueError(f"has steps of type {body[1]}, expected {torch.int8}")
        return (body[0], _TYPES[kind]), 1, torch.float32

    def unpack(self, kind: str, body: Tensor, rest: Tensor, before: Tensor | None) -> Tensor:
        """s·q, added to the counterpart."""
        scale = float(rest[0])
        if not 0 <= scale < math.inf:
            raise ValueError(f"has the scale {scale}")
        if int(body.min()) < -_STEPS:
            raise ValueError(f"has a step below -{_STEPS}")
        change = body.double().mul_(scale)
        return (change if before is None else change.add_(before)).to(_TYPES[kind])


@final
@dataclass(frozen=True)
class TopK(Compression):
    """The entries of each tensor that changed most, by |change| from the counterpart: their positions, in the smallest type
    that holds them, and their new values. The receiver has the counterpart's for the others. A tensor without counterpart
    is not thinned out: a change of few entries means something, a tensor of few entries does not.

    As sparse updates by Aji and Heafield ("Sparse Communication for Distributed Gradient Descent", EMNLP 2017), but for each
    tensor, and without their memory of what was left out.

    Args:
        share: of the entries of each tensor, above 0 and at most 1; at least one entry travels.

    Raises:
        UserError: a share out of range.

    >>> str(TopK(0.1)), TopK(0.1).number(64), TopK(0.001).number(64)
    ('topk:0.1', 6, 1)
    """

    share: float
    rest: ClassVar[str] = ":values"
    needs_counterpart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not (number and 0 < self.share <= 1):
            raise UserError(
                f"the share of top-k must be above 0 and at most 1, got {self.share!r}; for example topk:0.1"
            )
        object.__setattr__(self, "share", float(self.share))

    def __str__(self) -> str:
        return f"topk:{self.share}"

    def number(self, entries: int) -> int:
        """How many of the entries of a tensor travel."""
        return max(1, round(self.share * entries))

    def pack(self, tensor: Tensor, before: Tensor | None, seed: int) -> tuple[str, Tensor, Tensor] | None:
        """`topk`, positions and values. Of entries that changed alike the first travel."""
        form = None if before is None else self._positions((tuple(tensor.shape), tensor.dtype))
        if before is None or form is None:
            return None
        (number,), dtype = form
        change = (tensor.double() - before.double()).abs_().flatten()
        if not math.isfinite(change.max()):
            return None
        least = change.topk(number).values[-1]
        more = (change > least).nonzero().flatten()
        alike = (change == least).nonzero().flatten()[: number - len(more)]
        where = torch.cat([more, alike]).sort().values
        return _TOPK, where.to(dtype), tensor.flatten()[where]

    def form(self, kind: str, body: Form, before: Form | None) -> tuple[Form, int, torch.dtype]:
        """That of the counterpart."""
        expected = None if before is None else self._positions(before)
        if kind != _TOPK or before is None or expected is None:
            raise ValueError(f"does not travel as {kind!r}")
        if body != expected:
            raise ValueError(
                f"has positions of shape {body[0]} and type {body[1]}, expected {expected[0]} {expected[1]}"
            )
        return before, expected[0][0], before[1]

    def unpack(self, kind: str, body: Tensor, rest: Tensor, before: Tensor | None) -> Tensor:
        """The counterpart with the new values."""
        assert before is not None  # `form` has refused it
        where = body.long()
        if int(where[0]) < 0 or int(where[-1]) >= before.numel() or bool((where.diff() <= 0).any()):
            raise ValueError(f"has positions that are not different, ascending and from 0 to {before.numel() - 1}")
        found = before.flatten().clone()
        found[where] = rest.to(before.dtype)
        return found.reshape(before.shape)

    def _positions(self, form: Form) -> Form | None:
        """The form of the positions of a tensor; None for one that travels as it is."""
        if not _large(form):
            return None
        entries = math.prod(form[0])
        number, dtype = self.number(entries), _smallest(entries)
        smaller = number * (dtype.itemsize + form[1].itemsize) < entries * form[1].itemsize
        return ((number,), dtype) if smaller else None


def _int8(number: str) -> Int8:
    if number:
        raise UserError(f"int8 takes no number, got int8:{number}")
    return Int8()


def _topk(number: str) -> TopK:
    try:
        return TopK(float(number))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"topk needs the share of entries that travel, got {number!r}; for example topk:0.1") from error


COMPRESSIONS: Mapping[str, Callable[[str], Compression]] = {"int8": _int8, "topk": _topk}
"""Name -> the compression of what stands after the colon."""


def compression(given: str | Compression | None) -> Compression | None:
    """The compression of a text such as "int8" or "topk:0.1"; None for "none".

    Raises:
        UserError: there is no such compression.

    >>> compression("topk:0.1"), compression("none"), compression(Int8())
    (TopK(share=0.1), None, Int8())
    """
    if given is None or isinstance(given, Compression):
        return given
    name, _, number = str(given).partition(":")
    if str(given) == NONE:
        return None
    if name not in COMPRESSIONS:
        raise UserError(f"unknown compression {given!r}; {nearest(name, [NONE, *COMPRESSIONS])}")
    return COMPRESSIONS[name](number)


def _large(form: Form) -> bool:
    """Whether a tensor is worth compressing."""
    shape, number = form[0], math.prod(form[0])
    return form[1] in _NAMES and number >= FEWEST and (len(shape) > 1 or number > LONGEST_VECTOR)


def _scale(largest: float) -> float:
    """max|x|/127 in float32, rounded up, so that no x is more than 127 of it; NaN or infinite if there is none."""
    scale = torch.tensor(largest / _STEPS, dtype=torch.float32)
    if float(scale) * _STEPS < largest:
        scale = torch.nextafter(scale, torch.tensor(math.inf))
    return float(scale)


def _smallest(entries: int) -> torch.dtype:
    """The smallest type that holds the positions of so many entries."""
    sizes = {torch.uint8: 8, torch.uint16: 16, torch.int32: 31}
    return next((dtype for dtype, bits in sizes.items() if entries <= 2**bits), torch.int64)
