"""Builds convolutional networks without branches from a list of layers, and norm layers by name.

The CNNs of the papers (`cnn.py`) and FLHA's chain-shaped ones (`flha.py`) are built here.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from torch import nn

from polyfed.core.errors import UserError, did_you_mean
from polyfed.models.building.shapes import check_image_shape, check_sizes

Norm = Literal["batch", "group", "none"]


def build_norm_layer(norm: Norm, channels: int) -> nn.Module | None:
    """Builds BatchNorm2d, GroupNorm with 16 channels per group, or None for "none".

    Wu and He (2018, "Group Normalization", Table 3) find 16 channels per group one of the two best settings. Where 16 does
    not divide `channels`, groups are larger; a layer of less than 32 channels has one group.

    Raises:
        UserError: `norm` is unknown.

    >>> build_norm_layer("group", 64).num_groups
    4
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)
    if norm == "none":
        return None
    raise UserError(f"norm={norm!r} is unknown; {did_you_mean(str(norm), get_args(Norm))}")


@dataclass(frozen=True)
class ConvSpec:
    """Describes one convolution of a CNN without branches; `pool` is the side of the max-pooling after it (1 for none)."""

    channels: int
    kernel: int
    padding: int = 0
    stride: int = 1
    pool: int = 1


def plain_cnn(
    model: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    convs: Sequence[ConvSpec],
    hidden: Sequence[int] = (),
    *,
    norm: Norm = "none",
    conv_bias: bool = True,
    global_pool: bool = False,
) -> nn.Sequential:
    """Builds a CNN without branches: convolutions, each with ReLU and optional norm and max-pooling, then fully
    connected layers.

    The layers are named conv1, norm1, pool1, relu1, conv2, ..., flatten, fc1, relu_fc1, ...; the last fc is the output.

    Args:
        model: name of the network in error messages.
        input_shape: (channels, height, width).
        num_classes: number of outputs.
        convs: the convolutions in order.
        hidden: widths of the hidden fully connected layers.
        norm: norm layer between convolution and ReLU.
        conv_bias: whether convolutions have a bias.
        global_pool: averages over the image before the fully connected layers, so that the network takes images of any size.

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: the image is too small for a kernel or a pooling, or a size is not a positive whole number.

    >>> len(plain_cnn("demo", (1, 8, 8), 10, [ConvSpec(4, 3, pool=2), ConvSpec(8, 3)], [16]))
    9
    """
    channels, height, width = check_image_shape(model, input_shape, num_classes)
    sizes = check_sizes(model, "hidden", hidden)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, conv in enumerate(convs, start=1):
        check_sizes(model, f"the sizes of convolution {i}", (conv.channels, conv.kernel, conv.stride, conv.pool))
        check_sizes(model, f"the padding of convolution {i}", (conv.padding,), minimum=0)
        layers[f"conv{i}"] = nn.Conv2d(channels, conv.channels, conv.kernel, conv.stride, conv.padding, bias=conv_bias)
        if (layer := build_norm_layer(norm, conv.channels)) is not None:
            layers[f"norm{i}"] = layer
        # Max-pooling and ReLU commute, in the gradient too; pooling first leaves ReLU a quarter of the work, and saves
        # 5 to 25 % of the training time of cnn_582k.
        if conv.pool > 1:
            layers[f"pool{i}"] = nn.MaxPool2d(conv.pool)
        layers[f"relu{i}"] = nn.ReLU()
        before = (height, width)
        height, width = (_output_size(side, conv) for side in before)
        if min(height, width) < 1:
            raise UserError(
                f"{model}: images of {'x'.join(map(str, input_shape))} are too small: convolution {i} (kernel "
                f"{conv.kernel}, padding {conv.padding}, pooling {conv.pool}) gets {before[0]}x{before[1]} and leaves "
                f"nothing; use larger images, or a model for small ones such as cnn_small or mlp"
            )
        channels = conv.channels
    if global_pool:
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        height = width = 1
    layers["flatten"] = nn.Flatten()
    widths = (channels * height * width, *sizes)
    for i, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        layers[f"fc{i}"] = nn.Linear(fan_in, fan_out)
        layers[f"relu_fc{i}"] = nn.ReLU()
    layers[f"fc{len(widths)}"] = nn.Linear(widths[-1], num_classes)
    return nn.Sequential(layers)


def _output_size(side: int, conv: ConvSpec) -> int:
    """Returns the side of an image after a convolution and its pooling; below 1 where none fits."""
    padded = side + 2 * conv.padding - conv.kernel
    return 0 if padded < 0 else (padded // conv.stride + 1) // conv.pool
