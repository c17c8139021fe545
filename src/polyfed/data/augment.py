"""Augments the training images of each batch at random."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.core.errors import UserError


@final
@dataclass(frozen=True)
class PadCropFlip:
    """Augments images at random: pads them with zeros, crops them at a random position, and mirrors each with
    probability one half.

    Every image of a batch gets its own draw; the result depends on the generator's state alone. Source: He et al. 2016,
    section 4.2 (padding 4 on CIFAR).

    Args:
        padding: pixels on each side; 0 for no crop.
        flip: mirror left and right with probability one half; leave it off where that changes the class (digits).

    Raises:
        UserError: a negative padding.

    >>> batch = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2)
    >>> PadCropFlip(padding=1, flip=False)(batch, torch.Generator().manual_seed(0)).shape
    torch.Size([1, 1, 2, 2])
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise UserError(f"padding must be 0 or more pixels, got {self.padding}")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Returns an augmented copy of images of shape (batch, channels, height, width), of any type."""
        if x.dim() != 4:
            raise UserError(f"PadCropFlip changes images (batch, channels, height, width), got shape {tuple(x.shape)}")
        num, (height, width) = len(x), x.shape[2:]
        if self.flip:
            mirrored = torch.rand(num, generator=generator) < 0.5
            x = torch.where(mirrored.view(-1, 1, 1, 1).to(x.device), x.flip(3), x)
        if self.padding:
            place = torch.randint(2 * self.padding + 1, (2, num), generator=generator).to(x.device)
            padded = functional.pad(x, [self.padding] * 4)
            # Every crop is a view of the padded image, so that one index operation copies all of them.
            crops = padded.unfold(2, height, 1).unfold(3, width, 1)
            x = crops[torch.arange(num, device=x.device), :, place[0], place[1]]
        return x
