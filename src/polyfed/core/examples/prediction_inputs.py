"""Converts inputs for a prediction to the form that a client's training examples have."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.converters import convert_inputs_to_tensors, names_of_frame_columns, to_number_tensor
from polyfed.core.examples.examples import Examples, PartwiseTransform
from polyfed.core.examples.pytree import Inputs, first_leaf, named_leaves, tree_map
from polyfed.core.io.text.number_format import format_batch_shape, join_first_and_count_rest

_SHOWN = 5  # names in a sentence


def convert_inputs_to_examples_like(reference: Examples, x: Any, name: str) -> Examples:
    """Converts inputs without labels to `Examples` with the structure, types and transform of `reference`.

    Args:
        reference: the examples whose form the inputs must have.
        x: a tensor or array, shape (n, ...), or a tuple or dict of them, as the client's are; images of uint8 may lack the
            axis of their one channel. For a client with a table, raw rows: a pandas frame, a mapping of columns, a list
            of {name: value}, or a tensor as `client.test.x`, NaN where there is no value. Or `Examples`, whose inputs count.
            Of a frame, the client's columns are taken by their names.
        name: the inputs' name in errors.

    Raises:
        UserError: no inputs, another structure, shape or type, or values that are not finite.

    >>> convert_inputs_to_examples_like(Examples(torch.zeros(4, 2), torch.zeros(4)), [[1, 2], [3, 4], [5, 6]], "x").x
    tensor([[1., 2.],
            [3., 4.],
            [5., 6.]])
    """
    if isinstance(x, Examples):
        x = x.x if x.index is None else tree_map(lambda part: part[x.index], x.x)
    if reference.features and (names_of_frame_columns(x) or reference.features) != reference.features:
        x = _select_columns_like(reference, x, name)
    inputs: Inputs
    if isinstance(reference.x, Tensor):
        inputs = _convert_part_like(reference.x, reference.transform, x, name)
    else:
        parts = dict(named_leaves(convert_inputs_to_tensors(x, name)))
        reference_parts = dict(named_leaves(reference.x))
        if parts.keys() != reference_parts.keys():
            names_of_parts = f"have the parts {sorted(parts)}" if all(parts) else "are one tensor"
            raise UserError(
                f"{name} {names_of_parts}, the client's have the parts {sorted(reference_parts)}; give the same"
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


def _select_columns_like(reference: Examples, x: Any, name: str) -> Any:
    """Returns a frame, or a mapping of frames, with the columns of the reference alone, in their order."""
    if isinstance(x, Mapping):
        return {part: _select_part_like(reference, str(part), frame, name) for part, frame in x.items()}
    return _select_part_like(reference, "", x, name)


def _select_part_like(reference: Examples, part: str, frame: Any, name: str) -> Any:
    features, names = reference.features_of_part(part), names_of_frame_columns(frame)
    if not features or not names:
        return frame
    if absent := [repr(feature) for feature in features if names.count(feature) != 1]:
        raise UserError(f"{name} need once each column of the client's: {join_first_and_count_rest(absent, _SHOWN)}")
    return frame.iloc[:, [names.index(feature) for feature in features]]


def _convert_part_like(store: Tensor, transform: Any, x: Any, name: str) -> Tensor:
    encode = None if isinstance(x, Tensor | np.ndarray) else getattr(transform, "encode", None)
    inputs: Tensor = to_number_tensor(x, name) if encode is None else encode(x)  # raw rows of a table are encoded
    shape = getattr(transform, "shape", None)  # lazy images are stored encoded, but new images arrive decoded
    store = store if shape is None else torch.empty((1, *shape), dtype=torch.uint8)
    if store.dtype == torch.uint8 and inputs.dim() == 3 and store.dim() == 4 and store.shape[1] == 1:
        inputs = inputs.unsqueeze(1)
    if inputs.dim() == 0 or not len(inputs) or inputs.shape[1:] != store.shape[1:]:
        raise UserError(
            f"{name} have shape {tuple(inputs.shape)}; they must be "
            f"{format_batch_shape(store.shape[1:], 'n')}, as the client's are, with at least one example"
        )
    images = torch.uint8 in (inputs.dtype, store.dtype) and inputs.dtype != store.dtype and store.dim() > 2
    if images or (inputs.is_floating_point() and not store.is_floating_point()) or inputs.is_complex():
        raise UserError(f"{name} are {inputs.dtype}, the client's are {store.dtype}; give that type")
    is_table = hasattr(transform, "encode")  # whose stored rows have NaN where there is no value
    if not is_table and not bool(torch.isfinite(inputs).all()):
        raise UserError(f"{name} have values that are NaN or infinite; leave these examples out, or fill them in")
    if (warn := getattr(transform, "warn_of_unlike_rows", None)) is not None:
        warn(inputs, name)
    return inputs.to("cpu", store.dtype)
