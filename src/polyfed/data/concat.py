"""Concatenates several `Examples`, without a copy if they share their stored tensors."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import Inputs, concatenate_batches, input_spec_of, named_leaves


def concat_examples(parts: Sequence[Examples]) -> Examples:
    """Joins examples in order, with the first part's transform, and the columns that all parts have.

    Args:
        parts: at least one; of one structure and transform (`concatenation_obstacle` checks it) and on one device.

    Returns:
        A view if all parts are views of one store; otherwise examples with a store of their own.

    >>> store = Examples(torch.arange(4.0).view(4, 1), torch.tensor([0, 1, 0, 1]))
    >>> both = concat_examples([store.select(torch.tensor([3])), store.select(torch.tensor([0, 1]))])
    >>> both.index.tolist(), both.x is store.x
    ([3, 0, 1], True)
    """
    first = parts[0]
    if all(share_stored_tensors(first, part) for part in parts[1:]):
        return replace(first, index=torch.cat([rows_in_stored_tensors(part) for part in parts]))
    stored = [(part.raw_inputs, part.labels) for part in parts]
    names = [name for name in first.columns or {} if all(name in (part.columns or {}) for part in parts)]
    columns = {name: np.concatenate([part.column(name) for part in parts]) for name in names}
    x, y = concatenate_batches([x for x, _ in stored]), torch.cat([y for _, y in stored])
    return replace(first, x=x, y=y, index=None, columns=columns or None)


def concatenation_obstacle(first: Examples, second: Examples) -> str | None:
    """Returns a few words on why two `Examples` cannot be concatenated; None if they can (augmentation may differ).

    >>> concatenation_obstacle(Examples(torch.ones(2, 3), torch.ones(2)), Examples(torch.ones(2, 4), torch.ones(2)))
    'inputs are torch.float32 of shape (3,) and torch.float32 of shape (4,)'
    """
    for name in ("x", "y"):
        texts = [str(input_spec_of(getattr(examples, name))) for examples in (first, second)]
        if texts[0] != texts[1]:
            return f"{'inputs' if name == 'x' else 'labels'} are {texts[0]} and {texts[1]}"
    if first.transform != second.transform:
        return "inputs are prepared by different transforms"
    if first.features and second.features and first.features != second.features:
        return "inputs have other columns, or in another order"
    for role in ("group", "time"):
        names = [getattr(examples, role) for examples in (first, second)]
        if names[0] != names[1]:
            return f"{role}s are {' and '.join('missing' if name is None else f'column {name!r}' for name in names)}"
    return None


def share_stored_tensors(first: Examples, second: Examples) -> bool:
    """Returns whether two `Examples` select from the same stored tensors in memory.

    Labels may be an equal copy: a client converts several labels an example to floats.

    >>> x, y = torch.ones(3, 1), torch.ones(3)
    >>> [share_stored_tensors(Examples(x, y), other) for other in (Examples(x.detach(), y.clone()), Examples(x.clone(), y))]
    [True, False]
    """
    if input_memory_locations(first.x) != input_memory_locations(second.x):
        return False
    return tensor_memory_location(first.y) == tensor_memory_location(second.y) or (
        first.y.shape == second.y.shape and torch.equal(first.y, second.y)
    )


def tensor_memory_location(tensor: Tensor) -> tuple[object, ...]:
    """Returns device, address, type, shape and strides; tensors with equal tuples are the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def input_memory_locations(x: Inputs) -> tuple[object, ...]:
    """Returns the name and the `tensor_memory_location` of each tensor of nested inputs."""
    return tuple((name, tensor_memory_location(part)) for name, part in named_leaves(x))


def rows_in_stored_tensors(examples: Examples) -> Tensor:
    """Returns the positions of these examples in their stored tensors, int64, shape (n,)."""
    return torch.arange(len(examples.y), device=examples.device) if examples.index is None else examples.index
