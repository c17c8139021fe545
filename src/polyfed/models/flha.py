"""Builds the architectures of FLHA-GHN (Litany et al. 2022, "Federated Learning with Heterogeneous Architectures using
Graph HyperNetworks"): ResNet-18 and its three variants, hybrids with concatenation, the small CNN, and the chains of
the GNN ablation.

The paper gives the number of layers and the places of the skips (section 5, Table 2, appendices A and B). Where it leaves a
choice open, polyfed gives every convolution of Arch 1-3 a type that ResNet-18 has too (same channels, kernel and stride), so
that a hypernetwork can share weights between them.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError, did_you_mean
from polyfed.models.building.plain_cnn import ConvSpec, Norm, build_norm_layer, plain_cnn
from polyfed.models.building.shapes import check_image_shape, check_sizes

Stem = Literal["cifar", "xray"]
BranchJoin = Literal["add", "concat"]


@final
class ResidualBlock(nn.Module):
    """Applies two 3×3 convolutions and a shortcut, joined by a sum or by concatenation (the basic residual block of He
    et al. 2016).

    The shortcut is the identity, or a 1×1 convolution with norm where the shape changes. With join="concat" the branch and
    the shortcut are concatenated, and a 1×1 convolution with norm reduces them to the channels of a sum, so that the layers
    after the block keep their types (polyfed's choice; FLHA's appendix B says only that concatenation replaces the sum).

    Shapes: (batch, c_in, h, w) to (batch, c_out, ceil(h / stride), ceil(w / stride)).
    """

    def __init__(self, c_in: int, c_out: int, stride: int, norm: Norm, join: BranchJoin = "add") -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=bias)
        self.norm1 = build_norm_layer(norm, c_out) or nn.Identity()
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=bias)
        self.norm2 = build_norm_layer(norm, c_out) or nn.Identity()
        self.shortcut = nn.Sequential()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(c_in, c_out, 1, stride, bias=bias),
                    norm=build_norm_layer(norm, c_out) or nn.Identity(),
                )
            )
        self.join = join
        if join == "concat":
            self.fuse = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(2 * c_out, c_out, 1, bias=bias), norm=build_norm_layer(norm, c_out) or nn.Identity()
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the ReLU of the sum or concatenation of the two branches."""
        branch = torch.relu(self.norm1(self.conv1(x)))
        branch = self.norm2(self.conv2(branch))
        skip = self.shortcut(x)
        joined = self.fuse(torch.cat([branch, skip], dim=1)) if self.join == "concat" else branch + skip
        return torch.relu(joined)


@dataclass(frozen=True)
class StageSpec:
    """Describes one stage of a network: `num_blocks` residual blocks (plain convolutions if `skip` is false), of which
    the first has the stride `stride`.

    The stage has `multiplier` times the network's width as channels.
    """

    multiplier: int
    stride: int
    num_blocks: int
    skip: bool


_RESNET18 = (StageSpec(1, 1, 2, True), StageSpec(2, 2, 2, True), StageSpec(4, 2, 2, True), StageSpec(8, 2, 2, True))
_ARCH1 = (StageSpec(1, 1, 2, False), StageSpec(2, 2, 2, False), StageSpec(4, 2, 2, False), StageSpec(8, 2, 2, False))
_ARCH2 = (StageSpec(1, 1, 2, True), StageSpec(2, 2, 2, True), StageSpec(4, 2, 1, False), StageSpec(8, 2, 1, False))
_ARCH3 = (StageSpec(1, 1, 1, False), StageSpec(2, 2, 1, False), StageSpec(4, 2, 2, True), StageSpec(8, 2, 2, True))
# In each of the three hybrids of appendix B, the positions of the blocks (of ResNet-18's eight) that concatenate. The choice
# is polyfed's: the second blocks of two neighbouring stages, whose shortcuts are the identity.
_HYBRIDS = {1: (1, 3), 2: (3, 5), 3: (5, 7)}


def _build_staged_network(
    model: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    stages: Sequence[StageSpec],
    *,
    width: int,
    norm: Norm,
    stem: Stem,
    concat_blocks: Collection[int] = (),
) -> nn.Sequential:
    """Builds a network of a stem, stages (layer1, layer2, ...), an average over the image, and a linear layer (fc)."""
    c_in = check_image_shape(model, input_shape, num_classes)[0]
    check_sizes(model, "width", [width])
    bias = norm == "none"
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if stem == "cifar":
        layers["conv1"] = nn.Conv2d(c_in, width, 3, padding=1, bias=bias)
    elif stem == "xray":
        layers["conv1"] = nn.Conv2d(c_in, width, 7, stride=2, padding=3, bias=bias)
    else:
        raise UserError(f"{model}: stem={stem!r} is unknown; {did_you_mean(str(stem), get_args(Stem))}")
    layers["norm1"] = build_norm_layer(norm, width) or nn.Identity()
    layers["relu1"] = nn.ReLU()
    if stem == "xray":
        layers["pool1"] = nn.MaxPool2d(3, stride=2, padding=1)
    channels, index = width, 0
    for i, stage in enumerate(stages, start=1):
        c_out = width * stage.multiplier
        blocks: list[nn.Module] = []
        for j in range(stage.num_blocks):
            stride = stage.stride if j == 0 else 1
            if stage.skip:
                join: BranchJoin = "concat" if index in concat_blocks else "add"
                blocks.append(ResidualBlock(channels, c_out, stride, norm, join))
                index += 1
            else:
                blocks.append(_plain_block(channels, c_out, stride, norm))
            channels = c_out
        layers[f"layer{i}"] = nn.Sequential(*blocks)
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels, num_classes)
    return nn.Sequential(layers)


def _plain_block(c_in: int, c_out: int, stride: int, norm: Norm) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=norm == "none")
    return nn.Sequential(OrderedDict(conv=conv, norm=build_norm_layer(norm, c_out) or nn.Identity(), relu=nn.ReLU()))


def resnet18(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 64, norm: Norm = "batch", stem: Stem = "cifar"
) -> nn.Sequential:
    """Builds a ResNet-18 for small images (FLHA's Arch 0).

    He et al. (2016) with the CIFAR stem (3×3, stride 1, no max-pooling); 11,173,962 parameters at width 64 with 3 input
    channels and 10 classes.

    Args:
        input_shape: (channels, height, width), of any size.
        num_classes: number of outputs.
        width: channels of the first stage, doubled at each of the other three (64: paper; less for a CPU).
        norm: layer after each convolution ("batch": paper).
        stem: "cifar", or "xray": 7×7 with stride 2 (FLHA's appendix A) and the 3×3 max-pooling of He et al.'s ImageNet
            stem, for chest X-rays of 224×224.

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: a size is not a positive whole number, or `norm` or `stem` is unknown.

    >>> sum(p.numel() for p in resnet18((3, 32, 32), 10).parameters())
    11173962
    """
    return _build_staged_network("resnet18", input_shape, num_classes, _RESNET18, width=width, norm=norm, stem=stem)


def resnet18_hybrid(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    variant: int = 1,
    width: int = 64,
    norm: Norm = "batch",
    stem: Stem = "cifar",
) -> nn.Sequential:
    """Builds a ResNet-18 in which two blocks concatenate instead of adding: one of the three hybrids in appendix B of
    FLHA.

    The paper does not name the blocks; polyfed takes the second block of stages 1 and 2 (variant 1), 2 and 3 (variant 2),
    or 3 and 4 (variant 3).

    Args:
        input_shape: (channels, height, width), of any size.
        num_classes: number of outputs.
        variant: 1, 2 or 3.
        width: as in `resnet18`.
        norm: as in `resnet18`.
        stem: as in `resnet18`.

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: an unknown variant, or as `resnet18`.

    >>> resnet18_hybrid((3, 32, 32), 10, width=4).layer2[1].join
    'concat'
    """
    if variant not in _HYBRIDS:
        raise UserError(f"resnet18_hybrid: variant must be 1, 2 or 3, got {variant!r}")
    blocks = _HYBRIDS[variant]
    return _build_staged_network(
        "resnet18_hybrid", input_shape, num_classes, _RESNET18, width=width, norm=norm, stem=stem, concat_blocks=blocks
    )


def flha_arch1(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 64, norm: Norm = "batch", stem: Stem = "cifar"
) -> nn.Sequential:
    """Builds FLHA's Arch 1 with 10 layers and no skips (section 5): a first convolution, two 3×3 convolutions at each
    of four widths, and a linear layer.

    Args:
        input_shape: (channels, height, width), of any size.
        num_classes: number of outputs.
        width: channels of the first stage; the others have 2, 4 and 8 times as many (64: paper; less for a CPU).
        norm: layer after each convolution ("batch": paper).
        stem: "cifar" or "xray", as in `resnet18`, whose shapes and errors these are too.

    >>> sum(isinstance(m, nn.Conv2d | nn.Linear) for m in flha_arch1((3, 32, 32), 10, width=4).modules())
    10
    """
    return _build_staged_network("flha_arch1", input_shape, num_classes, _ARCH1, width=width, norm=norm, stem=stem)


def flha_arch2(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 64, norm: Norm = "batch", stem: Stem = "cifar"
) -> nn.Sequential:
    """Builds FLHA's Arch 2 (section 5): a CNN of 12 layers, with skip connections in the first 8 only.

    The layers are the stem, four residual blocks (8 layers; widths 1, 1, 2, 2), two plain convolutions (widths 4 and 8) and
    a linear layer. The 1×1 convolutions of shortcuts are not counted, as in the name ResNet-18.

    Args:
        input_shape: (channels, height, width), of any size.
        num_classes: number of outputs.
        width: channels of the first stage; the others have 2, 4 and 8 times as many (64: paper; less for a CPU).
        norm: layer after each convolution ("batch": paper).
        stem: "cifar" or "xray", as in `resnet18`, whose shapes and errors these are too.

    >>> flha_arch2((3, 32, 32), 10, width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return _build_staged_network("flha_arch2", input_shape, num_classes, _ARCH2, width=width, norm=norm, stem=stem)


def flha_arch3(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 64, norm: Norm = "batch", stem: Stem = "cifar"
) -> nn.Sequential:
    """Builds FLHA's Arch 3 (section 5): a CNN of 12 layers, with skip connections in the last 8 only.

    The layers are the stem, two plain convolutions (widths 1 and 2), four residual blocks (8 layers; widths 4, 4, 8, 8) and
    a linear layer.

    Args:
        input_shape: (channels, height, width), of any size.
        num_classes: number of outputs.
        width: channels of the first stage; the others have 2, 4 and 8 times as many (64: paper; less for a CPU).
        norm: layer after each convolution ("batch": paper).
        stem: "cifar" or "xray", as in `resnet18`, whose shapes and errors these are too.

    >>> flha_arch3((3, 32, 32), 10, width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return _build_staged_network("flha_arch3", input_shape, num_classes, _ARCH3, width=width, norm=norm, stem=stem)


def flha_small(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 64, norm: Norm = "batch"
) -> nn.Sequential:
    """Builds FLHA's small CNN for edge devices, with 4 layers (section 5.4, Table 7, Figure 7).

    The paper says only "4 layers"; polyfed takes ResNet-18's stem, its two stride-2 convolutions to widths 2 and 4, and a
    linear layer after averaging over the image.

    Args:
        input_shape: (channels, height, width), of any size.
        num_classes: number of outputs.
        width: channels of the first convolution (64: that of the paper's other networks).
        norm: layer after each convolution ("batch": paper's other networks).

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: a size is not a positive whole number, or `norm` is unknown.

    >>> sum(p.numel() for p in flha_small((3, 32, 32), 10).parameters())
    373834
    """
    convs = [ConvSpec(width, 3, padding=1), *(ConvSpec(width * m, 3, padding=1, stride=2) for m in (2, 4))]
    bias = norm == "none"
    return plain_cnn("flha_small", input_shape, num_classes, convs, norm=norm, conv_bias=bias, global_pool=True)


def flha_chain(
    input_shape: tuple[int, ...], num_classes: int, *, num_layers: int = 7, width: int = 64, norm: Norm = "batch"
) -> nn.Sequential:
    """Builds a CNN from FLHA's ablation of the GNN (Table 2), in which every layer is 3×3×64×64 except the first and
    the last.

    The paper has networks of 4, 7, 10 and 13 layers, of which the last is linear. The pooling is polyfed's choice: 2×2
    max-pooling after every third convolution except the last one, then the average over the image; so the paper's networks
    differ by whole groups of three convolutions.

    Args:
        input_shape: (channels, height, width); 13 layers need 8×8 pixels.
        num_classes: number of outputs.
        num_layers: number of convolutions plus the linear layer, at least 2 (4, 7, 10, 13: paper).
        width: channels of every convolution (64: paper).
        norm: layer after each convolution ("batch": paper's other networks).

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: the image is too small, fewer than two layers, or a size is not a positive whole number.

    >>> sum(isinstance(m, nn.Conv2d | nn.Linear) for m in flha_chain((3, 32, 32), 10, num_layers=13, width=4))
    13
    """
    check_sizes("flha_chain", "num_layers", [num_layers], minimum=2)
    last = num_layers - 1
    convs = [ConvSpec(width, 3, padding=1, pool=2 if i % 3 == 0 and i < last else 1) for i in range(1, num_layers)]
    bias = norm == "none"
    return plain_cnn("flha_chain", input_shape, num_classes, convs, norm=norm, conv_bias=bias, global_pool=True)
