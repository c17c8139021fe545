"""Defines the operations on feature maps among which an edge of a cell can choose (FedPNAS, Table 3; as in SNAS)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.errors import UserError, did_you_mean
from polyfed.nas.depthwise import DepthwiseConv2d


@final
class GroupedNorm(nn.BatchNorm2d):
    """Applies BatchNorm to a group of a batch's examples, even if the group has only one example.

    If a channel has only one value and so no variance, the running statistics take the place of the group's.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns a group's normalised feature maps, (images in the group, channels, height, width)."""
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


@contextmanager
def normalise_by_batch_without_tracking(module: nn.Module) -> Iterator[None]:
    """Makes BatchNorm layers use batch statistics inside the block, without updating running ones."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def _separable_layers(channels: int, size: int, stride: int, dilation: int = 1) -> list[nn.Module]:
    """Builds the layers of a separable convolution: ReLU, depthwise convolution, 1×1 convolution and BatchNorm."""
    depthwise = DepthwiseConv2d(channels, size, stride, dilation)
    return [nn.ReLU(), depthwise, nn.Conv2d(channels, channels, 1, bias=False), GroupedNorm(channels)]


def _sep_conv(channels: int, size: int, stride: int) -> nn.Module:
    return nn.Sequential(*_separable_layers(channels, size, stride), *_separable_layers(channels, size, 1))


def _build_hourglass(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, channels, (1, 7), (1, stride), (0, 3), bias=False),
        nn.Conv2d(channels, channels, (7, 1), (stride, 1), (3, 0), bias=False),
        GroupedNorm(channels),
    )


def _build_pooling(pool: nn.Module, channels: int) -> nn.Module:
    return nn.Sequential(pool, GroupedNorm(channels))


@final
class _Halve(nn.Module):
    """Halves feature maps: the skip connection of stride 2 (factorised reduction of DARTS and SNAS).

    Every second pixel and its diagonal neighbour each go through a 1×1 convolution, and the results are concatenated.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, channels - channels // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels, channels // 2, 1, 2, bias=False)
        self.norm = GroupedNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Returns maps (group, channels, ⌈height / 2⌉, ⌈width / 2⌉); an odd edge has zeros beside it."""
        x = F.relu(x)
        height, width = x.shape[2:]
        shifted = F.pad(x, (0, width % 2, 0, height % 2))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))  # type: ignore[no-any-return]


OPERATION_NAMES = (
    "avg_pool_3", "max_pool_3", "sep_conv_3", "sep_conv_5", "sep_conv_7", "dil_conv_3", "dil_conv_5", "conv_7x1_1x7", "skip",
)  # fmt: skip
"""The nine operations, in the order of their indices."""

SMALL_OPERATION_NAMES = ("avg_pool_3", "max_pool_3", "sep_conv_3", "dil_conv_3", "skip")
"""The operations without a kernel of 5 or 7, from which a personal cell chooses (section 3.1)."""


def build_operation(name: str, channels: int, stride: int = 1) -> nn.Module:
    """Builds the operation of this name, a layer on feature maps (group, channels, height, width).

    With stride 2 it halves height and width, rounded up.

    Raises:
        UserError: `name` is unknown.

    >>> build_operation("sep_conv_5", 16, stride=2)(torch.zeros(3, 16, 7, 7)).shape
    torch.Size([3, 16, 4, 4])
    """
    kind, _, size = name.rpartition("_")
    if name == "conv_7x1_1x7":
        return _build_hourglass(channels, stride)
    if name == "skip":
        return nn.Identity() if stride == 1 else _Halve(channels)
    if name not in OPERATION_NAMES:
        raise UserError(f"unknown operation {name!r}; {did_you_mean(name, OPERATION_NAMES)}")
    if kind == "avg_pool":
        return _build_pooling(nn.AvgPool2d(3, stride, 1, count_include_pad=False), channels)
    if kind == "max_pool":
        return _build_pooling(nn.MaxPool2d(3, stride, 1), channels)
    if kind == "dil_conv":
        return nn.Sequential(*_separable_layers(channels, int(size), stride, dilation=2))
    return _sep_conv(channels, int(size), stride)


def check_operation_names(names: Sequence[str]) -> None:
    """Raises a `UserError` unless `names` is a list of different names of operations among which an edge can choose."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UserError(f"operations must be a list of names, got {names!r}; choices: {', '.join(OPERATION_NAMES)}")
    if not names or len(set(names)) < len(names):
        raise UserError(f"an edge needs operations of different names, got {tuple(names)}")
    if unknown := [name for name in names if name not in OPERATION_NAMES]:
        raise UserError(f"unknown operation {unknown[0]!r}; {did_you_mean(unknown[0], OPERATION_NAMES)}")


def build_operations(channels: int, names: Sequence[str] = OPERATION_NAMES, stride: int = 1) -> nn.ModuleDict:
    """Returns `{name: layer}` as an `nn.ModuleDict`, with the operations among which one edge chooses.

    Args:
        channels: channels of the input and output feature maps (paper: 32 for CIFAR-10 and 16 for MNIST).
        names: some of `OPERATION_NAMES`; an operation's index is its position here.
        stride: 1, or 2 for an edge that halves height and width.

    Raises:
        UserError: `channels` or `stride` is out of range, or `names` is empty, has a name twice or an unknown one.

    >>> edge = build_operations(32)
    >>> {name: sum(p.numel() for p in edge[name].parameters()) for name in ("avg_pool_3", "sep_conv_3", "skip")}
    {'avg_pool_3': 64, 'sep_conv_3': 2752, 'skip': 0}
    >>> sum(p.numel() for p in edge.parameters())
    29632
    """
    if channels < 1:
        raise UserError(f"channels must be at least 1, got {channels}")
    if stride not in (1, 2):
        raise UserError(f"stride must be 1 or 2, got {stride}")
    check_operation_names(names)
    return nn.ModuleDict({name: build_operation(name, channels, stride) for name in names})
