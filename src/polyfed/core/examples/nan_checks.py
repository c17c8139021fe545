"""Raises errors for NaN and infinite values in inputs, targets and weights before they are used.

Training on one gives weights of NaN, and a prediction from one is whatever class comes first; neither shows the cause.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import named_leaves, tree_map
from polyfed.core.state_dict import PyTree

_BLOCK = 2**22  # values per check
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sets that passed the check, by identity and by the version counters of their tensors: a common test set that 500 clients
# share is read once.
_FINITE_EXAMPLES: WeakValueDictionary[tuple[int, ...], Examples] = WeakValueDictionary()


@torch.no_grad()
def check_examples_finite(examples: Examples, name: str) -> None:
    """Raises a `UserError` if an input or target is NaN or infinite; ignores other stored rows.

    Args:
        examples: of any type; only floating-point numbers can be wrong. A stored value that `transform` turns into a number
            never reaches the network, and is not refused.
        name: whose examples they are, for the error.

    Raises:
        UserError: a value is NaN or infinite; the message has the row (its position in these examples) and the place in it.

    >>> check_examples_finite(Examples(torch.tensor([[0.0, 1.0], [2.0, torch.nan]]), torch.tensor([0, 1])),
    ...                       "client 'north': test")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: client 'north': test inputs: row 1, column 1 is nan; fill it in or drop the row
    """
    key = _cache_key(examples)
    if key is not None and _FINITE_EXAMPLES.get(key) is examples:
        return
    if examples.y.dtype in _FLOATS:
        raise_if_nonfinite(_nonfinite_blocks(examples.y, examples.index, None), f"{name} targets")
    for part, tensor in named_leaves(examples.x):
        if tensor.dtype in _FLOATS:
            label = f"{name} inputs {part!r}" if part else f"{name} inputs"
            blocks = _nonfinite_blocks(tensor, examples.index, _transform_of_part(examples, part))
            raise_if_nonfinite(blocks, label, features=examples.features_of_part(part))
    if key is not None:
        _FINITE_EXAMPLES[key] = examples


def raise_if_nonfinite(
    first_rows_and_blocks: Iterable[tuple[int, Tensor]],
    name: str,
    axis_name: str = "column",
    features: Sequence[str] = (),
) -> None:
    """Raises a `UserError` if a block contains NaN or infinity; each comes with its first row's number.

    Args:
        first_rows_and_blocks: the number of the first row of each block, and its rows.
        name: the name of the numbers, for the error.
        axis_name: the name of the second axis, for the error.
        features: names of the places on that axis; empty for their numbers.

    >>> raise_if_nonfinite([(0, torch.zeros(5, 2)), (5, torch.tensor([[0.0, torch.inf]]))], "column 'age'", "position")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: column 'age': row 5, position 1 is inf; fill it in or drop the row
    """
    first, count = "", 0
    for start, block in first_rows_and_blocks:
        is_wrong = ~torch.isfinite(block)
        num_wrong = int(is_wrong.sum())
        if num_wrong and not first:
            row, *other_axes = is_wrong.nonzero()[0].tolist()
            value = float(block[(row, *other_axes)])
            if len(other_axes) == 1:
                has_names = len(features) == block.shape[1]
                where = f", {axis_name} {repr(features[other_axes[0]]) if has_names else other_axes[0]}"
            else:
                where = f", position {tuple(other_axes)}" if other_axes else ""
            first = f"row {start + row}{where} is {value}"
        count += num_wrong
    if count == 1:
        raise UserError(f"{name}: {first}; fill it in or drop the row")
    if count:
        more = "1 more value is" if count == 2 else f"{count - 1} more values are"
        raise UserError(f"{name}: {first}; and {more} not finite; fill them in or drop the rows")


def _transform_of_part(examples: Examples, part: str) -> Callable[[Tensor, Any], Tensor] | None:
    """Returns a function that transforms stored rows of one part of the inputs; None without a transform.

    The function takes the part's rows and their positions in the store, since the transform needs the other parts too.
    """
    transform = examples.transform
    if transform is None:
        return None

    def apply(block: Tensor, rows: Any) -> Tensor:
        if not part:
            return transform(block)  # type: ignore[no-any-return]
        parts = dict(named_leaves(transform(tree_map(lambda store: store[rows], examples.x))))
        # A part that the transform drops does not reach the network.
        return parts.get(part, torch.zeros(0)) if part in parts or len(parts) > 1 else next(iter(parts.values()))

    return apply


def _nonfinite_blocks(
    store: Tensor, index: Tensor | None, transform: Callable[[Tensor, Any], Tensor] | None
) -> Iterator[tuple[int, Tensor]]:
    """Yields the blocks of rows that have a NaN or infinite value after the transform."""
    number = len(store) if index is None else len(index)
    step = max(1, _BLOCK // max(1, store[:1].numel()))
    for start in range(0, number, step):
        places = slice(start, start + step)
        rows = places if index is None else index[places]
        block = store[rows]
        # A sum is cheaper than a test of each value, and finite only if all of them are.
        if not bool(torch.isfinite(block.sum())):
            yield start, block if transform is None else transform(block, rows)


def _cache_key(examples: Examples) -> tuple[int, ...] | None:
    tensors = [tensor for _, tensor in named_leaves(examples.x)] + [examples.y]
    if any(tensor.is_inference() for tensor in tensors):
        return None  # such tensors do not count their changes
    return id(examples), *(tensor._version for tensor in tensors)


def nonfinite_state_error(state: PyTree, path: str = "") -> str | None:
    """Returns half a sentence with the place of the first number that is not finite; None if all are.

    Args:
        state: of a client or of the server, as a checkpoint holds it.
        path: a prefix of the names.

    >>> nonfinite_state_error({"model": {"bias": torch.tensor([0.0, float("nan")])}})
    "tensor 'model/bias' has NaN or infinite values"
    """
    if isinstance(state, Tensor):
        is_nonfinite = state.is_floating_point() and not bool(torch.isfinite(state).all())
        return f"tensor {path!r} has NaN or infinite values" if is_nonfinite else None
    if isinstance(state, Mapping | list):
        pairs = state.items() if isinstance(state, Mapping) else enumerate(state)
        inner = (nonfinite_state_error(value, f"{path}/{name}" if path else str(name)) for name, value in pairs)
        return next(filter(None, inner), None)
    return f"{path!r} is {state}" if isinstance(state, float) and not math.isfinite(state) else None
