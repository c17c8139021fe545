"""Builds U-Nets, which give each pixel of an image, or voxel of a volume, a logit for each class."""

import math
from typing import ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import UserError, did_you_mean
from polyfed.models.building.shapes import check_input_shape, check_sizes

UNetNorm = Literal["instance", "batch", "group", "none"]
_CONV = {2: nn.Conv2d, 3: nn.Conv3d}
_BATCH = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


@final
class ConvPair(nn.Module):
    """Applies two convolutions of 3 pixels a side, each followed by a norm layer and a ReLU; keeps the image's size."""

    def __init__(self, dimensions: int, c_in: int, c_out: int, norm: UNetNorm) -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = _CONV[dimensions](c_in, c_out, 3, padding=1, bias=bias)
        self.norm1 = _build_norm(dimensions, c_out, norm)
        self.conv2 = _CONV[dimensions](c_out, c_out, 3, padding=1, bias=bias)
        self.norm2 = _build_norm(dimensions, c_out, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Returns features of shape (n, c_out, ...)."""
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


@final
class UNet(nn.Module):
    """Gives each pixel logits: convolutions at halved and halved sizes, then back, joined with the features of each size.

    `unet` explains the layers. The representation, which FedHeNN aligns, is the mean over positions of the features at the
    smallest size: the input of the module `representation`.

    Shapes: (batch, channels, ...) floats to (batch, num_classes, ...) logits of the same height and width (and depth), of
    any size of at least 2 to the power `depth`.
    """

    representation_module: ClassVar[str] = "representation"

    def __init__(
        self, dimensions: int, channels: int, num_classes: int, *, width: int, depth: int, norm: UNetNorm
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.dimensions, self.depth = dimensions, depth
        self.down = nn.ModuleList(
            ConvPair(dimensions, c_in, c_out, norm) for c_in, c_out in zip([channels, *widths], widths, strict=False)
        )
        self.representation = nn.Identity()
        self.reduce = nn.ModuleList(_CONV[dimensions](2 * c, c, 1) for c in reversed(widths[:-1]))
        self.up = nn.ModuleList(ConvPair(dimensions, 2 * c, c, norm) for c in reversed(widths[:-1]))
        self.head = _CONV[dimensions](width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of each pixel."""
        pool, mode = (F.max_pool2d, "bilinear") if self.dimensions == 2 else (F.max_pool3d, "trilinear")
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(pool(x, 2) if level else x)
            skips.append(x)
        self.representation(x.flatten(2).mean(2))
        for level, block in enumerate(self.up):
            skip = skips[self.depth - 1 - level]
            x = F.interpolate(self.reduce[level](x), skip.shape[2:], mode=mode, align_corners=False)
            x = block(torch.cat([skip, x], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def unet(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 8, depth: int = 2, norm: UNetNorm = "instance"
) -> UNet:
    """Builds a U-Net for images (Ronneberger et al. 2015), small enough to train on a CPU; all default sizes are
    polyfed's choice.

    At each of `depth` + 1 sizes there are two 3×3 convolutions with norm and ReLU; max-pooling halves the size and the
    channels double. On the way back, a 1×1 convolution halves the channels and bilinear interpolation doubles the size, in
    place of a transposed convolution: so every layer is of a kind that hypernetworks generate, and images of odd sizes fit.
    The last 1×1 convolution gives the logits. Instance norm suits small batches and scanners of different brightness
    (as in nnU-Net, Isensee et al. 2021).

    Args:
        input_shape: (channels, height, width), at least 2^depth pixels a side.
        num_classes: number of outputs a pixel.
        width: channels at the full size.
        depth: number of poolings.
        norm: layer after each convolution but the last and the 1×1.

    Shapes: (batch, channels, height, width) floats to (batch, num_classes, height, width) logits.

    Raises:
        UserError: the image is too small for so many poolings, or a size is not a positive whole number.

    >>> unet((1, 20, 17), 2, width=4)(torch.zeros(3, 1, 20, 17)).shape
    torch.Size([3, 2, 20, 17])
    """
    return _build_unet("unet", 2, input_shape, num_classes, width, depth, norm)


def unet3d(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 8, depth: int = 2, norm: UNetNorm = "instance"
) -> UNet:
    """Builds a U-Net for volumes (Çiçek et al. 2016): `unet` with 3×3×3 convolutions and trilinear interpolation.

    Args:
        input_shape: (channels, depth, height, width), at least 2^depth voxels a side.
        num_classes, width, depth, norm: as for `unet`.

    Shapes: (batch, channels, depth, height, width) floats to (batch, num_classes, depth, height, width) logits.

    Raises:
        UserError: as for `unet`.

    >>> unet3d((1, 8, 9, 12), 3, width=2)(torch.zeros(1, 1, 8, 9, 12)).shape
    torch.Size([1, 3, 8, 9, 12])
    """
    return _build_unet("unet3d", 3, input_shape, num_classes, width, depth, norm)


def _build_unet(
    model: str, dimensions: int, input_shape: tuple[int, ...], num_classes: int, width: int, depth: int, norm: UNetNorm
) -> UNet:
    shape = check_input_shape(model, input_shape, num_classes)
    check_sizes(model, "width", [width])
    check_sizes(model, "depth", [depth], minimum=0)
    if len(shape) != dimensions + 1:
        form = "(channels, height, width)" if dimensions == 2 else "(channels, depth, height, width)"
        other = {2: "unet3d takes volumes", 3: "unet takes images"}[dimensions]
        raise UserError(f"{model}: input_shape must be {form}, got {shape}; {other}")
    least = 2**depth * (1 if norm in ("none", "batch") else 2)  # an instance norm has nothing to norm in a single pixel
    if min(shape[1:]) < least:
        raise UserError(
            f"{model}: {'images' if dimensions == 2 else 'volumes'} of {'x'.join(map(str, shape))} are too small for "
            f"{depth} poolings with norm={norm!r}, which need {least} pixels a side; give a smaller depth"
        )
    return UNet(dimensions, shape[0], num_classes, width=width, depth=depth, norm=norm)


def _build_norm(dimensions: int, channels: int, norm: UNetNorm) -> nn.Module:
    if norm == "instance":
        return _INSTANCE[dimensions](channels, affine=True)
    if norm == "batch":
        return _BATCH[dimensions](channels)
    if norm == "group":
        return nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)
    if norm == "none":
        return nn.Identity()
    raise UserError(f"norm={norm!r} is unknown; {did_you_mean(str(norm), get_args(UNetNorm))}")
