"""Checks the arguments that all functions of the model zoo take: input shape, number of outputs, and sizes of layers."""

from collections.abc import Iterable, Sequence

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_whole_number


def check_sizes(model: str, name: str, sizes: Iterable[int], *, minimum: int = 1) -> tuple[int, ...]:
    """Raises a `UserError` unless each size is an integer of at least `minimum`; returns the sizes as a tuple.

    Raises:
        UserError: a size is not an int or is too small.

    >>> check_sizes("mlp", "hidden", [64, 32])
    (64, 32)
    """
    result = tuple(sizes)
    if not all(is_whole_number(size, minimum) for size in result):
        raise UserError(f"{model}: {name} must be whole numbers of at least {minimum}, got {result}")
    return result


def check_input_shape(model: str, input_shape: Sequence[int], num_classes: int) -> tuple[int, ...]:
    """Returns the shape as a tuple; raises a `UserError` unless all sizes are positive whole numbers.

    Raises:
        UserError: the shape is empty, a dimension is not a positive int, or there is not even one output.
    """
    check_sizes(model, "num_classes", [num_classes])
    if not input_shape:
        raise UserError(
            f"{model}: input_shape is empty; give the shape of one example without the batch, as (1, 28, 28); inputs of "
            "several parts need a network of your own, module:factory"
        )
    return check_sizes(model, "input_shape", input_shape)


def check_image_shape(model: str, input_shape: Sequence[int], num_classes: int) -> tuple[int, int, int]:
    """Returns (channels, height, width); raises a `UserError` unless the shape is an image's.

    Raises:
        UserError: as `check_input_shape`, or the shape does not have three dimensions.

    >>> check_image_shape("cnn_small", (1, 8, 8), 10)
    (1, 8, 8)
    """
    shape = check_input_shape(model, input_shape, num_classes)
    if len(shape) != 3:
        raise UserError(
            f"{model} takes images: input_shape must be (channels, height, width), got {shape}; "
            f"mlp takes inputs of any shape, lstm takes tokens"
        )
    return shape[0], shape[1], shape[2]
