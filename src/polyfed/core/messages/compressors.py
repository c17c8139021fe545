"""Makes the tensors of a message smaller: stores numbers in one byte each (int8), or sends only the entries that
changed most (top-k).

Some tensors travel as they are: integers; tensors of fewer than 16 values; tensors of one dimension up to 4,096, which are
biases and the scales and statistics of norm layers (few bytes, but a variance must not be rounded to 0 nor stay behind the
weights); tensors that are not finite (the server refuses them); and those that would not get smaller.

Nothing is kept from round to round: what was rounded or left out is not made up for later (error feedback), since that would
add to the private state of every method. `polyfed.core.messages.message_compression` makes messages of it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.number_checks import is_number
from polyfed.core.seeds import torch_generator

ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]
NO_COMPRESSION = "none"
MIN_COMPRESSED_SIZE = 16
"""Numbers of the smallest tensor that is compressed."""
MAX_UNCOMPRESSED_VECTOR = 4096
"""Numbers of the largest tensor of one dimension that travels as it is."""
_TOPK = "topk"
_STEPS = 127
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class CompressedTensor(NamedTuple):
    """Holds a compressed tensor: its encoding's name, its entry, and its part of the group's shared tensor."""

    encoding: str
    entry: Tensor
    shared_part: Tensor


class DecompressedForm(NamedTuple):
    """Describes a restored tensor, and how many numbers of which type it takes from the shared tensor."""

    tensor: ShapeAndDtype
    num_shared: int
    shared_dtype: torch.dtype


class Compressor(ABC):
    """Defines how single tensors of a message are compressed before they are sent, and restored by the receiver.

    Final subclasses are frozen dataclasses, named in `COMPRESSORS`; `str` gives the text that `parse_compressor` reads.
    """

    shared_entry: ClassVar[str]
    """The name of the group's entry with what its compressed tensors have in common."""
    needs_reference: ClassVar[bool]
    """Says whether a tensor is compressed only if the receiver already has a reference tensor for it."""

    @abstractmethod
    def compress_tensor_if_worthwhile(
        self, tensor: Tensor, reference: Tensor | None, seed: int
    ) -> CompressedTensor | None:
        """Compresses one tensor; returns None if the tensor is better sent uncompressed.

        Args:
            tensor: to be sent.
            reference: its counterpart, which the receiver has.
            seed: of what is drawn.
        """

    @abstractmethod
    def checked_decompressed_form(
        self, encoding: str, entry: ShapeAndDtype, reference: ShapeAndDtype | None
    ) -> DecompressedForm:
        """Returns the form of the tensor that a compressed entry restores to.

        Raises:
            ValueError: `compress_tensor_if_worthwhile` makes no such entry; the message is half a sentence.
        """

    @abstractmethod
    def decompress_tensor(self, encoding: str, entry: Tensor, shared: Tensor, reference: Tensor | None) -> Tensor:
        """Restores a tensor from an entry that `checked_decompressed_form` accepted, and its part of the shared tensor.

        Raises:
            ValueError: `compress_tensor_if_worthwhile` makes no such numbers; the message is half a sentence.
        """


@final
@dataclass(frozen=True)
class Int8(Compressor):
    """Compresses a tensor to one byte per number by stochastic rounding, which is correct on average.

    q = ⌊x/s + u⌋ with s = max|x|/127 for each tensor and u uniform in [0, 1), so that E[s·q] = x and |s·q − x| < s. x
    is the change from the tensor that the receiver has; where it has none, the value itself.

    Without the norm and the entropy coding of QSGD, whose idea stochastic rounding is (Alistarh, Grubic, Li, Tomioka and
    Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NIPS 2017, section 3.1).

    >>> str(Int8())
    'int8'
    """

    shared_entry: ClassVar[str] = ":scales"
    needs_reference: ClassVar[bool] = False

    def __str__(self) -> str:
        return "int8"

    def compress_tensor_if_worthwhile(
        self, tensor: Tensor, reference: Tensor | None, seed: int
    ) -> CompressedTensor | None:
        """Rounds a tensor to bytes q with one scale s; None if it is small or not finite throughout."""
        if not _is_worth_compressing((tuple(tensor.shape), tensor.dtype)):
            return None
        change = tensor.double() if reference is None else tensor.double() - reference.double()
        scale = _int8_scale(float(change.abs().max()))
        if not math.isfinite(scale):
            return None
        noise = torch.rand(change.shape, generator=torch_generator(seed))
        steps = (change / scale + noise).floor_() if scale else torch.zeros_like(change)
        return CompressedTensor(
            _DTYPE_NAMES[tensor.dtype], steps.to(torch.int8), torch.tensor([scale], dtype=torch.float32)
        )

    def checked_decompressed_form(
        self, encoding: str, entry: ShapeAndDtype, reference: ShapeAndDtype | None
    ) -> DecompressedForm:
        """Returns the form of the restored tensor, which uses one shared float32 number, its scale."""
        if encoding not in _DTYPES or not _is_worth_compressing((entry[0], _DTYPES[encoding])):
            raise ValueError(f"of shape {entry[0]} does not travel as {encoding!r}")
        if entry[1] != torch.int8:
            raise ValueError(f"has steps of type {entry[1]}, expected {torch.int8}")
        return DecompressedForm((entry[0], _DTYPES[encoding]), 1, torch.float32)

    def decompress_tensor(self, encoding: str, entry: Tensor, shared: Tensor, reference: Tensor | None) -> Tensor:
        """Restores a tensor as scale times bytes, s·q, added to the reference tensor that the receiver already has."""
        scale = float(shared[0])
        if not 0 <= scale < math.inf:
            raise ValueError(f"has the scale {scale}")
        if int(entry.min()) < -_STEPS:
            raise ValueError(f"has a step below -{_STEPS}")
        change = entry.double().mul_(scale)
        return (change if reference is None else change.add_(reference)).to(_DTYPES[encoding])


@final
@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the positions and new values of the entries that changed most; all others keep their values.

    The change is measured from the tensor of the same name that the receiver has. Positions are of the smallest type
    that holds them. A tensor that the receiver lacks travels whole: a change of few entries means something, a tensor
    of few entries does not.

    As sparse updates by Aji and Heafield ("Sparse Communication for Distributed Gradient Descent", EMNLP 2017), but for each
    tensor, and without their memory of what was left out.

    Args:
        share: of the entries of each tensor, above 0 and at most 1; at least one entry travels.

    Raises:
        UserError: a share out of range.

    >>> str(TopK(0.1)), TopK(0.1).num_entries_sent(64), TopK(0.001).num_entries_sent(64)
    ('topk:0.1', 6, 1)
    """

    share: float
    shared_entry: ClassVar[str] = ":values"
    needs_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (is_number(self.share) and 0 < self.share <= 1):
            raise UserError(
                f"the share of top-k must be above 0 and at most 1, got {self.share!r}; for example topk:0.1"
            )
        object.__setattr__(self, "share", float(self.share))

    def __str__(self) -> str:
        return f"topk:{self.share}"

    def num_entries_sent(self, entries: int) -> int:
        """Returns how many of a tensor's `entries` entries are sent."""
        return max(1, round(self.share * entries))

    def compress_tensor_if_worthwhile(
        self, tensor: Tensor, reference: Tensor | None, seed: int
    ) -> CompressedTensor | None:
        """Returns positions and values of the entries that changed most; None if that saves nothing.

        Of entries that changed equally, the first are sent.
        """
        positions_form = None if reference is None else self._positions((tuple(tensor.shape), tensor.dtype))
        if reference is None or positions_form is None:
            return None
        (number,), dtype = positions_form
        change = (tensor.double() - reference.double()).abs_().flatten()
        if not math.isfinite(change.max()):
            return None
        least = change.topk(number).values[-1]
        more = (change > least).nonzero().flatten()
        tied = (change == least).nonzero().flatten()[: number - len(more)]
        positions = torch.cat([more, tied]).sort().values
        return CompressedTensor(_TOPK, positions.to(dtype), tensor.flatten()[positions])

    def checked_decompressed_form(
        self, encoding: str, entry: ShapeAndDtype, reference: ShapeAndDtype | None
    ) -> DecompressedForm:
        """Returns the shape and type of the reference tensor, which the restored tensor also has."""
        expected = None if reference is None else self._positions(reference)
        if encoding != _TOPK or reference is None or expected is None:
            raise ValueError(f"does not travel as {encoding!r}")
        if entry != expected:
            raise ValueError(
                f"has positions of shape {entry[0]} and type {entry[1]}, expected {expected[0]} {expected[1]}"
            )
        return DecompressedForm(reference, expected[0][0], reference[1])

    def decompress_tensor(self, encoding: str, entry: Tensor, shared: Tensor, reference: Tensor | None) -> Tensor:
        """Copies the reference tensor that the receiver has, and writes the new values at the sent positions."""
        assert reference is not None  # `checked_decompressed_form` has refused it
        positions = entry.long()
        if int(positions[0]) < 0 or int(positions[-1]) >= reference.numel() or bool((positions.diff() <= 0).any()):
            raise ValueError(f"has positions that are not different, ascending and from 0 to {reference.numel() - 1}")
        values = reference.flatten().clone()
        values[positions] = shared.to(reference.dtype)
        return values.reshape(reference.shape)

    def _positions(self, form: ShapeAndDtype) -> ShapeAndDtype | None:
        """Returns the shape and type of a tensor's sent positions; None if it travels uncompressed."""
        if not _is_worth_compressing(form):
            return None
        entries = math.prod(form[0])
        number, dtype = self.num_entries_sent(entries), _smallest_index_dtype(entries)
        smaller = number * (dtype.itemsize + form[1].itemsize) < entries * form[1].itemsize
        return ((number,), dtype) if smaller else None


def _parse_int8(number: str) -> Int8:
    if number:
        raise UserError(f"int8 takes no number, got int8:{number}")
    return Int8()


def _parse_topk(number: str) -> TopK:
    try:
        return TopK(float(number))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"topk needs the share of entries that travel, got {number!r}; for example topk:0.1") from error


COMPRESSORS: Mapping[str, Callable[[str], Compressor]] = {"int8": _parse_int8, "topk": _parse_topk}
"""Name -> the compression of what stands after the colon."""


def parse_compressor(choice: str | Compressor | None) -> Compressor | None:
    """Returns the compressor for a text such as "int8" or "topk:0.1", None for "none".

    Raises:
        UserError: there is no such compression.

    >>> parse_compressor("topk:0.1"), parse_compressor("none"), parse_compressor(Int8())
    (TopK(share=0.1), None, Int8())
    """
    if choice is None or isinstance(choice, Compressor):
        return choice
    name, _, number = str(choice).partition(":")
    if str(choice) == NO_COMPRESSION:
        return None
    if name not in COMPRESSORS:
        raise UserError(f"unknown compression {choice!r}; {did_you_mean(name, [NO_COMPRESSION, *COMPRESSORS])}")
    return COMPRESSORS[name](number)


def _is_worth_compressing(form: ShapeAndDtype) -> bool:
    """Returns whether a tensor has a type and a size that make compression worthwhile."""
    shape, number = form[0], math.prod(form[0])
    return (
        form[1] in _DTYPE_NAMES
        and number >= MIN_COMPRESSED_SIZE
        and (len(shape) > 1 or number > MAX_UNCOMPRESSED_VECTOR)
    )


def _int8_scale(largest: float) -> float:
    """Returns the scale s = max|x|/127 in float32, rounded up so that no x exceeds 127·s."""
    scale = torch.tensor(largest / _STEPS, dtype=torch.float32)
    if float(scale) * _STEPS < largest:
        scale = torch.nextafter(scale, torch.tensor(math.inf))
    return float(scale)


def _smallest_index_dtype(entries: int) -> torch.dtype:
    """Returns the smallest integer type that can hold the positions of so many entries."""
    sizes = {torch.uint8: 8, torch.uint16: 16, torch.int32: 31}
    return next((dtype for dtype, bits in sizes.items() if entries <= 2**bits), torch.int64)
