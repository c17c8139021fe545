"""Turns a user's data, in any of many forms, into `Examples`: checked tensors in memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.converters import Collate, convert_inputs, read_source, to_number_tensor
from polyfed.core.examples.examples import Examples, Normalise, PartwiseTransform, _length_error
from polyfed.core.examples.nan_checks import check_examples_finite
from polyfed.core.examples.pytree import (
    Inputs,
    dense_tensor_error,
    first_leaf,
    named_leaves,
    tree_map,
)


def as_examples(
    source: Any, name: str = "examples", *, labelled: bool = True, collate: Collate | None = None
) -> Examples:
    """Examples from what users have: `Examples`; a pair (x, y) of tensors or arrays, or of a pandas frame of numbers and a
    series; a torch `Dataset` of (input, label) pairs, or of mappings with a label; a Hugging Face dataset with a column
    `label`.

    Inputs may have any structure: in a pair (x, y), x may be a tuple or dict of tensors or arrays, nested at will, and so
    may an input of a `Dataset`. All columns of numbers of a Hugging Face dataset are inputs: a lone one as a tensor,
    several as a dict by their names. Texts and further classes among its columns are `Examples.columns`.

    Numbers become float32, integers keep their type; only tensors of float64 stay float64. Images, that is uint8 inputs
    of shape (n, channels, height, width) or (n, height, width), which gets a channel axis, stay uint8 in memory and reach
    the network as floats from 0 to 1, by a `Normalise` of mean 0 and std 1. `Examples` are taken as they are.

    Args:
        source: one of the above.
        name: what errors call it.
        labelled: False takes inputs alone too, a tensor, array or dict, of examples whose labels nobody uses; they become 0.
        collate: from the list of all items of a `Dataset` to (inputs, labels), or to a mapping with labels, as `collate_fn`
            of a `DataLoader` and the data collators of `transformers` do; for items that must be padded, say.

    Raises:
        UserError: nothing of the above, labels that are no numbers, or inputs or targets that are NaN or infinite.

    >>> len(as_examples(([[1.0], [2.0]], [0, 1])))
    2
    >>> as_examples(torch.ones(3, 5), labelled=False).labels.tolist()
    [0, 0, 0]
    >>> data = [((torch.ones(2), 60.0), 1), ((torch.zeros(2), 40.0), 0), ((torch.ones(2), 50.0), 1)]
    >>> as_examples(data).batch(torch.tensor([1]))
    ((tensor([[0., 0.]]), tensor([40.])), tensor([0]))
    """
    examples: Examples = (
        source
        if isinstance(source, Examples)
        else _examples_with_channels(name, *read_source(source, name, labelled, collate))
    )
    for _, tensor in (*named_leaves(examples.x), ("", examples.y)):
        if error := dense_tensor_error(tensor):
            raise UserError(f"{name} are {error}")
    check_examples_finite(examples, name)
    return examples


def convert_inputs_like(reference: Examples, x: Any, name: str) -> Examples:
    """Inputs without labels in the form of other examples, transformed as they are.

    Args:
        reference: what the inputs must be like.
        x: a tensor or array, shape (n, ...), or a tuple or dict of them, where the client's are; images of uint8 may lack
            the axis of their one channel. Where examples are rows of a table, raw rows: a pandas frame, a mapping of
            columns, or a list of {name: value}.
        name: what errors call it.

    Raises:
        UserError: no inputs, another structure, shape or type, or values that are not finite.

    >>> convert_inputs_like(Examples(torch.zeros(4, 2), torch.zeros(4)), [[1, 2], [3, 4], [5, 6]], "x").x
    tensor([[1., 2.],
            [3., 4.],
            [5., 6.]])
    """
    inputs: Inputs
    if isinstance(reference.x, Tensor):
        inputs = _convert_part_like(reference.x, reference.transform, x, name)
    else:
        parts = dict(named_leaves(convert_inputs(x, name)))
        reference_parts = dict(named_leaves(reference.x))
        if parts.keys() != reference_parts.keys():
            raise UserError(
                f"{name} have the parts {sorted(parts)}, the client's {sorted(reference_parts)}; give the same"
            )
        transforms = reference.transform.transforms if isinstance(reference.transform, PartwiseTransform) else {}
        converted_parts = iter(
            [
                _convert_part_like(reference_parts[part], transforms.get(part), parts[part], f"{name}: {part!r}")
                for part in reference_parts
            ]
        )
        inputs = tree_map(lambda _: next(converted_parts), reference.x)
    return Examples(inputs, torch.zeros(len(first_leaf(inputs)), dtype=torch.int64), transform=reference.transform)


def _convert_part_like(store: Tensor, transform: Any, x: Any, name: str) -> Tensor:
    encode = None if isinstance(x, Tensor | np.ndarray) else getattr(transform, "encode", None)
    inputs: Tensor = to_number_tensor(x, name) if encode is None else encode(x)  # rows of a table as they were stored
    shape = getattr(transform, "shape", None)  # of images that stay encoded: new ones come decoded
    store = store if shape is None else torch.empty((1, *shape), dtype=torch.uint8)
    if store.dtype == torch.uint8 and inputs.dim() == 3 and store.dim() == 4 and store.shape[1] == 1:
        inputs = inputs.unsqueeze(1)
    if inputs.dim() == 0 or not len(inputs) or inputs.shape[1:] != store.shape[1:]:
        raise UserError(
            f"{name} have shape {tuple(inputs.shape)}; they must be {('n', *store.shape[1:])}, as the client's are, with at "
            "least one example"
        )
    images = torch.uint8 in (inputs.dtype, store.dtype) and inputs.dtype != store.dtype and store.dim() > 2
    if images or (inputs.is_floating_point() and not store.is_floating_point()) or inputs.is_complex():
        raise UserError(f"{name} are {inputs.dtype}, the client's are {store.dtype}; give that type")
    if encode is None and not bool(torch.isfinite(inputs).all()):
        raise UserError(f"{name} have values that are NaN or infinite; leave these examples out, or fill them in")
    if (warn := getattr(transform, "warn_of_changed_constants", None)) is not None:
        warn(inputs, name)
    return inputs.to("cpu", store.dtype)


def _examples_with_channels(name: str, x: Inputs, y: Tensor, columns: Mapping[str, Any] | None) -> Examples:
    """Examples whose uint8 images a network can take: with a channel axis, and scaled to 0..1 batch by batch."""
    if error := _length_error(x, y):
        raise UserError(f"{name}: {error}")

    def with_channels(part: Tensor) -> Tensor:
        return part.unsqueeze(1) if part.dtype == torch.uint8 and part.dim() == 3 else part

    x = tree_map(with_channels, x)
    scaled = {
        name: Normalise((0.0,) * part.shape[1], (1.0,) * part.shape[1])
        for name, part in named_leaves(x)
        if part.dtype == torch.uint8 and part.dim() > 3
    }
    transform = None if not scaled else scaled[""] if isinstance(x, Tensor) else PartwiseTransform(scaled)
    return Examples(x, y, transform=transform, columns=columns)
