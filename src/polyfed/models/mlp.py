"""Builds the multilayer perceptron."""

import math
from collections import OrderedDict
from itertools import pairwise

from torch import nn

from polyfed.models.building.shapes import check_input_shape, check_sizes


def mlp(input_shape: tuple[int, ...], num_classes: int, *, hidden: tuple[int, ...] = (64,)) -> nn.Sequential:
    """Builds a multilayer perceptron: fully connected layers with ReLU between them; inputs of any shape are flattened.

    Args:
        input_shape: shape of one example, without the batch dimension.
        num_classes: number of outputs.
        hidden: width of each hidden layer (64: polyfed's choice); () is logistic regression.

    Shapes: (batch, *input_shape) floats to (batch, num_classes) logits.

    Raises:
        UserError: a size is not a positive whole number.

    >>> [name for name, _ in mlp((1, 8, 8), 10).named_children()]
    ['flatten', 'fc1', 'relu1', 'fc2']
    """
    widths = (math.prod(check_input_shape("mlp", input_shape, num_classes)), *check_sizes("mlp", "hidden", hidden))
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for i, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        layers[f"fc{i}"] = nn.Linear(fan_in, fan_out)
        layers[f"relu{i}"] = nn.ReLU()
    layers[f"fc{len(widths)}"] = nn.Linear(widths[-1], num_classes)
    return nn.Sequential(layers)
