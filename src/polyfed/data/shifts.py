"""Makes clients' data differ on purpose: changes the images of a client, or shifts its labels."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from polyfed.core.errors import UserError, check_extra_installed
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import input_spec_of

_CHUNK = 1024
"""Images that are converted to floats at a time."""


def _describe_tensor(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"


@final
@dataclass(frozen=True)
class Shift:
    """Describes one change of a client's data: rotated images, another hue, or a number added to the labels (the
    heterogeneous tasks of FedPNAS, section 4).

    Args:
        rotation: degrees, counter-clockwise. Multiples of 90 are exact; others are interpolated, with black corners.
        hue: turn of the colour circle, −0.5 to 0.5 (as in torchvision): both ends are the complementary colours. Only for
            RGB; it would not change grey images.
        labels: whole number added to each label, modulo the number of classes.

    Raises:
        UserError: a value outside its range.

    >>> images = Examples(torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8), torch.tensor([0]))
    >>> Shift(rotation=90).apply(images).x[0, 0].tolist()
    [[2, 4], [1, 3]]
    >>> Shift(labels=3).apply(images, num_classes=10).labels.tolist()
    [3]
    """

    rotation: float = 0.0
    hue: float = 0.0
    labels: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.rotation):
            raise UserError(f"rotation must be a number of degrees, got {self.rotation}")
        if not -0.5 <= self.hue <= 0.5:
            raise UserError(f"hue must be between -0.5 and 0.5, got {self.hue}")
        if not float(self.labels).is_integer():
            raise UserError(f"labels must be a whole number to add to each label, got {self.labels}")

    def apply(self, examples: Examples, num_classes: int | None = None) -> Examples:
        """Returns the examples with images or labels changed, in new memory; without a change, `examples` itself.

        Args:
            examples: of one client.
            num_classes: number of classes; None for data that have none.

        Raises:
            UserError: labels are shifted where there are no classes; the inputs are not uint8 images; hue on other than
                three channels; 90 degrees on images that are not square; hue, or a rotation by no multiple of 90
                degrees, without the extra `augment`.
        """
        if self.labels:
            examples = self._shift_labels(examples, num_classes)
        if self.rotation % 360 == 0 and self.hue == 0:
            return examples
        form = input_spec_of(examples.x)
        if len(form.shape) != 3 or form.dtype != torch.uint8:
            raise UserError(
                f"a shift transforms uint8 images (num, channels, height, width), but these inputs are "
                f"{form if form.container else _describe_tensor(examples.input_tensor)}; for images that stay encoded, "
                "leave lazy out"
            )
        if self.hue != 0 and form.shape[0] != 3:
            raise UserError(
                f"hue={self.hue} needs RGB images, but these have {form.shape[0]} channel(s) and no colour to "
                "change; use rotation, or a data set in colour"
            )
        x = examples.input_tensor if examples.index is None else examples.input_tensor[examples.index]
        if self.rotation % 360:
            x = _rotate_images(x, self.rotation)
        if self.hue:
            x = _apply_in_chunks(x, self._turn_hue)
        columns = None if examples.columns is None else {name: examples.column(name) for name in examples.columns}
        return replace(examples, x=x, y=examples.labels, index=None, columns=columns)

    def _shift_labels(self, examples: Examples, classes: int | None) -> Examples:
        if classes is None or examples.labels.ndim != 1 or examples.labels.is_floating_point():
            raise UserError(
                f"a shift with labels={self.labels} needs class labels, which these data do not have; leave it out"
            )
        return replace(examples, y=(examples.y + int(self.labels)) % classes)

    def _turn_hue(self, x: Tensor) -> Tensor:
        check_extra_installed("kornia", "augment", f"hue={self.hue}", "leave the hue as it is")
        from kornia.enhance import adjust_hue

        return adjust_hue(x / 255, self.hue * 2 * math.pi) * 255


def _rotate_images(x: Tensor, degrees: float) -> Tensor:
    quarters, remainder = divmod(degrees, 90)
    if remainder == 0:
        if quarters % 2 and x.shape[2] != x.shape[3]:
            raise UserError(
                f"a rotation by {degrees} degrees needs square images, got {x.shape[3]}×{x.shape[2]} pixels"
            )
        return torch.rot90(x, int(quarters) % 4, (2, 3)).contiguous()

    check_extra_installed("kornia", "augment", f"a rotation by {degrees} degrees", "turn by multiples of 90 degrees")

    def rotate(chunk: Tensor) -> Tensor:
        from kornia.geometry.transform import rotate

        return rotate(chunk, torch.full((len(chunk),), float(degrees)))

    return _apply_in_chunks(x, rotate)


def _apply_in_chunks(x: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies a transform to uint8 images as floats, and rounds the results to uint8; works in chunks to save memory."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start in range(0, len(x), _CHUNK):
        chunk = transform(x[start : start + _CHUNK].to(torch.float32))
        out[start : start + _CHUNK] = chunk.round_().clamp_(0, 255).to(torch.uint8)
    return out
