"""Builds the convolutional networks of several papers, and one for small images."""

from collections import OrderedDict

from torch import nn

from polyfed.core.errors import UserError
from polyfed.models.building.plain_cnn import ConvSpec, Norm, plain_cnn
from polyfed.models.building.shapes import check_image_shape, check_sizes


def cnn_small(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    channels: tuple[int, ...] = (16, 32),
    hidden: int = 64,
    norm: Norm = "none",
) -> nn.Sequential:
    """Builds a CNN of 3×3 convolutions with padding 1, each followed by 2×2 max-pooling, and one hidden layer
    (polyfed's choice).

    It suits images as small as scikit-learn's digits: with two convolutions, 4×4 pixels are enough.

    Args:
        input_shape: (channels, height, width).
        num_classes: number of outputs.
        channels: output channels of each convolution (polyfed's choice).
        hidden: width of the hidden layer (polyfed's choice).
        norm: layer after each convolution.

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: the image is too small for so many poolings, or a size is not a positive whole number.

    >>> sum(p.numel() for p in cnn_small((1, 8, 8), 10).parameters())
    13706
    """
    convs = [ConvSpec(c, kernel=3, padding=1, pool=2) for c in channels]
    return plain_cnn("cnn_small", input_shape, num_classes, convs, [hidden], norm=norm)


def cnn_582k(
    input_shape: tuple[int, ...], num_classes: int, *, channels: tuple[int, int] = (32, 64), hidden: int = 512
) -> nn.Sequential:
    """Builds a CNN of two 5×5 convolutions (32 and 64 channels, no padding), each with 2×2 max-pooling, and a hidden
    layer of 512 units.

    It is the MNIST network of McMahan et al. (2017, "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", section 3) without the padding, as in public FL code: 582,026 parameters on 1×28×28 with 10 classes.

    Args:
        input_shape: (channels, height, width), at least 16×16 pixels.
        num_classes: number of outputs.
        channels: output channels of the two convolutions (32, 64: paper).
        hidden: width of the hidden layer (512: paper).

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: the image is too small, or a size is not a positive whole number.

    >>> sum(p.numel() for p in cnn_582k((1, 28, 28), 10).parameters())
    582026
    """
    convs = [ConvSpec(c, kernel=5, pool=2) for c in channels]
    return plain_cnn("cnn_582k", input_shape, num_classes, convs, [hidden])


def cnn_pfedla(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    channels: tuple[int, ...] = (16, 32),
    hidden: tuple[int, ...] = (120, 84),
    batch_norm: bool = False,
) -> nn.Sequential:
    """Builds pFedLA's network: two 5×5 convolutions (16 and 32 channels) with 2×2 max-pooling, and hidden layers of 120
    and 84 units.

    pFedLA (Ma et al. 2022, section 4.1) names "the same CNN as in FedFomo, FedBN and pFedHN", with BatchNorm after the
    convolutions for CIFAR and none for EMNIST and FashionMNIST. These three networks differ; the megabytes in Table 3
    identify pFedHN's: the savings 275.01, 36.72, 2.43 (CIFAR-10) and 2.43, 176.13 (EMNIST) are 750 times its fc1, conv2,
    fc3 and fc3, fc1 in single precision, and the totals are 750 times twice (up and down) its 85,822 parameters (EMNIST,
    10 classes) and 121,278 (CIFAR-10, BatchNorm), all within 0.03 MB.

    Args:
        input_shape: (channels, height, width), at least 16×16 pixels.
        num_classes: number of outputs.
        channels: output channels of each convolution (16, 32: pFedHN's code, and Table 3).
        hidden: widths of the hidden layers (120, 84: pFedHN's code, and Table 3).
        batch_norm: adds BatchNorm after each convolution (paper: True for CIFAR-10 and CIFAR-100, False otherwise).

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: the image is too small, or a size is not a positive whole number.

    >>> sum(p.numel() for p in cnn_pfedla((1, 28, 28), 10).parameters())
    85822
    """
    convs = [ConvSpec(c, kernel=5, pool=2) for c in channels]
    norm: Norm = "batch" if batch_norm else "none"
    return plain_cnn("cnn_pfedla", input_shape, num_classes, convs, hidden, norm=norm)


def cnn_fedhenn(
    input_shape: tuple[int, ...], num_classes: int, *, level: int = 1, channels: int = 64, padding: int = 0
) -> nn.Sequential:
    """Builds one of FedHeNN's five networks: from one convolution and one fully connected layer (level 1) to three of
    each (level 5).

    The paper (Makhija et al. 2022, section 4.1) gives levels 1 and 5; each level between adds one layer to the one before,
    alternating between the two kinds (polyfed's choice):

    ===== ============ ======================
    level convolutions fully connected layers
    ===== ============ ======================
    1     1            C
    2     1            64, C
    3     2            64, C
    4     2            120, 64, C
    5     3            120, 64, C
    ===== ============ ======================

    Convolutions are 5×5 with 2×2 max-pooling, as in the homogeneous network; the third is 3×3 with padding 1, since on
    CIFAR its input is 5×5 and a 5×5 kernel would leave nothing to pool (polyfed's choice). The representation (the input
    of the last layer) is wider at level 1 than at the others, as FedHeNN allows.

    Args:
        input_shape: (channels, height, width); at least 16×16 pixels at levels 3 and 4, 20×20 at level 5, unless
            padded.
        num_classes: number of outputs, C in the table.
        level: 1 to 5.
        channels: output channels of every convolution (64: the paper's released code).
        padding: padding of the 5×5 convolutions (0: released code; 2 allows 8×8 images at all levels).

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: the level is outside 1 to 5, the image is too small, or a size is not a positive whole number.

    >>> [cnn_fedhenn((3, 32, 32), 10, level=i)[-1].in_features for i in range(1, 6)]
    [12544, 64, 64, 64, 64]
    """
    if level not in range(1, 6):
        raise UserError(f"cnn_fedhenn: level must be 1, 2, 3, 4 or 5 (FedHeNN's five networks), got {level!r}")
    convs = [ConvSpec(channels, kernel=5, padding=padding, pool=2)] * 2 + [
        ConvSpec(channels, kernel=3, padding=1, pool=2)
    ]
    hidden = {1: (), 2: (64,), 3: (64,), 4: (120, 64), 5: (120, 64)}[level]
    num_convs = (level + 1) // 2
    return plain_cnn(f"cnn_fedhenn(level={level})", input_shape, num_classes, convs[:num_convs], hidden)


def cnn_fedhenn_homo(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    channels: tuple[int, int] = (64, 64),
    hidden: tuple[int, int] = (120, 64),
) -> nn.Sequential:
    """Builds the network that FedHeNN gives to all clients in its homogeneous setting: two 5×5 convolutions (64
    channels) with 2×2 max-pooling, then layers of 120, 64 and C units.

    Source: Makhija et al. 2022, section 4.1 (two convolutions, three fully connected layers); sizes from the released
    code, which widens the network for CIFAR-100 to channels=(64, 128), hidden=(256, 128).

    Args:
        input_shape: (channels, height, width), at least 16×16 pixels.
        num_classes: number of outputs.
        channels: output channels of the two convolutions.
        hidden: widths of the two hidden layers.

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: the image is too small, or a size is not a positive whole number.

    >>> cnn_fedhenn_homo((3, 32, 32), 10).fc3
    Linear(in_features=64, out_features=10, bias=True)
    """
    convs = [ConvSpec(c, kernel=5, pool=2) for c in channels]
    return plain_cnn("cnn_fedhenn_homo", input_shape, num_classes, convs, hidden)


def cnn_fedpnas(
    input_shape: tuple[int, ...], num_classes: int, *, channels: tuple[int, int, int, int] = (8, 32, 128, 768)
) -> nn.Sequential:
    """Builds the network that FedPNAS uses for its baseline FedAvg: four convolutions and one linear layer.

    Source: Hoang and Kingsford, appendix C, Fig. 4; kernels, strides and norms from the authors' code. Two 3×3
    convolutions with stride 2 follow each other without an activation, then come ReLU and 5×5 average pooling with
    stride 3, then 1×1 and 2×2 convolutions without bias, each followed by BatchNorm and ReLU. 409,354 parameters on
    3×32×32 with 10 classes.

    The sizes are for 32×32 pixels. Smaller images are padded with zeros on all sides, as the authors pad MNIST; of larger
    images, the output of the last convolution is averaged over all positions (polyfed's choice).

    Args:
        input_shape: (channels, height, width), of any size.
        num_classes: number of outputs.
        channels: output channels of the four convolutions (8, 32, 128, 768: authors' code).

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: not four channels, or a size is not a positive whole number.

    >>> sum(p.numel() for p in cnn_fedpnas((3, 32, 32), 10).parameters())
    409354
    """
    in_channels, height, width = check_image_shape("cnn_fedpnas", input_shape, num_classes)
    widths = check_sizes("cnn_fedpnas", "channels", channels)
    if len(widths) != 4:
        raise UserError(f"cnn_fedpnas: channels must be four numbers, one for each convolution, got {widths}")
    # Zeros around the image are padding of the first convolution. Where their number is odd, the one left out is the
    # last row or column, which a stride of 2 never reaches.
    top, left = (1 + max(0, 32 - side) // 2 for side in (height, width))
    first, second, third, fourth = widths
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(in_channels, first, 3, 2, (top, left))
    layers["conv2"] = nn.Conv2d(first, second, 3, 2, 1)
    layers["relu2"] = nn.ReLU()
    layers["pool2"] = nn.AvgPool2d(5, 3)
    layers["conv3"] = nn.Conv2d(second, third, 1, bias=False)
    layers["norm3"] = nn.BatchNorm2d(third)
    layers["relu3"] = nn.ReLU()
    layers["conv4"] = nn.Conv2d(third, fourth, 2, bias=False)
    layers["norm4"] = nn.BatchNorm2d(fourth)
    layers["relu4"] = nn.ReLU()
    layers["pool"] = nn.AdaptiveAvgPool2d(1)  # images of 32×32 have one position left, and averaging changes nothing
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(fourth, num_classes)
    return nn.Sequential(layers)
