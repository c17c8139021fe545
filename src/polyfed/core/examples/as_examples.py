"""Converts a user's arrays, data sets or frames to `Examples`, tensors in memory whose values are checked."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.converters import Collate, names_of_frame_columns, read_inputs_and_labels
from polyfed.core.examples.examples import Examples, Normalise, PartwiseTransform, _length_error
from polyfed.core.examples.nan_checks import check_examples_finite
from polyfed.core.examples.pytree import Inputs, explain_unreadable_rows, named_leaves, tree_map
from polyfed.core.examples.text_labels import NumberedLabels


def as_examples(
    source: Any, name: str = "examples", *, labelled: bool = True, collate: Collate | None = None
) -> Examples:
    """Converts a user's arrays, tensors, data sets or frames to `Examples`.

    Takes `Examples`, which are returned unchanged; a pair (x, y) of tensors or arrays, or of a pandas frame of numbers and a
    series; a torch `Dataset` of (input, label) pairs, or of mappings with a label; a torch `DataLoader`, whose data set and
    collate_fn are taken; a Hugging Face dataset with a column `label`. Labels that are texts are numbered by their
    alphabetical order (`Examples.classes` has their names).

    Inputs may have any structure: in a pair (x, y), x may be a tuple or dict of tensors or arrays, nested at will, and so
    may an input of a `Dataset`. All columns of numbers of a Hugging Face dataset are inputs: a single one as a tensor,
    several as a dict by their names. Its columns of texts and of further classes become `Examples.columns`.

    Numbers become float32, integers keep their type; only tensors of float64 stay float64. Images, that is uint8 inputs of
    shape (n, channels, height, width) or (n, height, width), which gets a channel axis, stay uint8 in memory and reach the
    network as floats from 0 to 1, by a `Normalise` of mean 0 and std 1.

    Args:
        source: one of the above.
        name: its name in errors.
        labelled: False to accept inputs alone too (a tensor, array or dict) where nobody uses labels; the labels become 0.
        collate: from the list of all items of a `Dataset` to (inputs, labels), or to a mapping with labels, as `collate_fn`
            of a `DataLoader` and the data collators of `transformers` do; for items that must be padded, for example.

    Raises:
        UserError: an unknown type, labels that are neither numbers nor texts, or inputs or targets that are NaN or
            infinite.

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
        else _examples_with_channels(name, *read_inputs_and_labels(source, name, labelled, collate))
    )
    is_pair = isinstance(source, tuple | list) and len(source) == 2
    if not isinstance(source, Examples) and (names := names_of_frame_columns(source[0] if is_pair else source)):
        examples = replace(examples, features=names)
    for _, tensor in (*named_leaves(examples.x), ("", examples.y)):
        if error := explain_unreadable_rows(tensor):
            raise UserError(f"{name} are {error}")
    if not isinstance(source, Examples) and examples.device.type != "cpu":
        examples = examples.to(torch.device("cpu"))  # each engine copies them to the device on which clients compute
    check_examples_finite(examples, name)
    return examples


def _examples_with_channels(
    name: str, x: Inputs, labels: NumberedLabels, columns: Mapping[str, Any] | None
) -> Examples:
    """Builds examples whose uint8 images have a channel axis and are scaled to 0..1 when a batch is taken."""
    y = labels.numbers
    if error := _length_error(x, y):
        raise UserError(f"{name}: {error}")

    x = tree_map(lambda part: part.unsqueeze(1) if part.dtype == torch.uint8 and part.dim() == 3 else part, x)
    scaled = {
        name: Normalise((0.0,) * part.shape[1], (1.0,) * part.shape[1])
        for name, part in named_leaves(x)
        if part.dtype == torch.uint8 and part.dim() > 3
    }
    transform = None if not scaled else scaled[""] if isinstance(x, Tensor) else PartwiseTransform(scaled)
    return Examples(x, y, transform=transform, columns=columns, classes=labels.classes)
