"""Numbers that are none: NaN and infinite values in inputs and targets are found before anything is trained on them.

Training on one gives weights of NaN, and a prediction from one is whatever class comes first; neither says why.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.inputs import Inputs, leaves, mapped
from polyfed.core.tree import Nested


class Stored(Protocol):
    """What of `Examples` is looked at here."""

    @property
    def x(self) -> Inputs:
        """Inputs."""

    @property
    def y(self) -> Tensor:
        """Targets."""

    @property
    def index(self) -> Tensor | None:
        """Rows of the two that count; None for all."""

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """What a batch goes through before the network."""


_BLOCK = 2**22  # values that are looked at together
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sets that were found sound, by identity and by how often their store was changed in place: a common test set that 500
# clients share is read once.
_SOUND: WeakValueDictionary[tuple[int, ...], Stored] = WeakValueDictionary()


@torch.no_grad()
def check_finite(examples: Stored, name: str) -> None:
    """Looks at inputs and targets of examples, at no other row of their store.

    Args:
        examples: of any type; only floating-point numbers can be wrong. A stored value that `transform` turns into a number
            is none of the network's concern, and is not refused.
        name: whose examples they are, for the error.

    Raises:
        UserError: a value is NaN or infinite; with the row (its position in these examples) and the place in it.

    >>> from polyfed.core.examples import Examples
    >>> check_finite(Examples(torch.tensor([[0.0, 1.0], [2.0, torch.nan]]), torch.tensor([0, 1])), "client 'north': test")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: client 'north': test inputs: row 1, column 1 is nan; fill it in or drop the row
    """
    key = _key(examples)
    if key is not None and _SOUND.get(key) is examples:
        return
    if examples.y.dtype in _FLOATS:
        refuse(_blocks(examples.y, examples.index, None), f"{name} targets")
    for part, tensor in leaves(examples.x):
        if tensor.dtype in _FLOATS:
            told = f"{name} inputs {part!r}" if part else f"{name} inputs"
            refuse(_blocks(tensor, examples.index, _prepared(examples, part)), told)
    if key is not None:
        _SOUND[key] = examples


def refuse(blocks: Iterable[tuple[int, Tensor]], name: str, place: str = "column") -> None:
    """Raises a `UserError` if a value in one of the blocks is NaN or infinite.

    Args:
        blocks: the number of the first row of each block, and its rows.
        name: what the numbers are.
        place: what the second axis counts.

    >>> refuse([(0, torch.zeros(5, 2)), (5, torch.tensor([[0.0, torch.inf]]))], "column 'age'", "position")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: column 'age': row 5, position 1 is inf; fill it in or drop the row
    """
    first, count = "", 0
    for start, block in blocks:
        wrong = ~torch.isfinite(block)
        found = int(wrong.sum())
        if found and not first:
            row, *rest = wrong.nonzero()[0].tolist()
            value = float(block[(row, *rest)])
            where = "" if not rest else f", {place} {rest[0]}" if len(rest) == 1 else f", position {tuple(rest)}"
            first = f"row {start + row}{where} is {value}"
        count += found
    if count == 1:
        raise UserError(f"{name}: {first}; fill it in or drop the row")
    if count:
        more = "1 more value is" if count == 2 else f"{count - 1} more values are"
        raise UserError(f"{name}: {first}; and {more} not finite; fill them in or drop the rows")


def _prepared(examples: Stored, part: str) -> Callable[[Tensor, Any], Tensor] | None:
    """What makes of stored rows of a part, and of the places where they lie, what reaches the network."""
    transform = examples.transform
    if transform is None:
        return None

    def change(block: Tensor, rows: Any) -> Tensor:
        if not part:
            return transform(block)  # type: ignore[no-any-return]
        found = dict(leaves(transform(mapped(lambda store: store[rows], examples.x))))
        # A part that the network does not get cannot harm it.
        return found.get(part, torch.zeros(0)) if part in found or len(found) > 1 else next(iter(found.values()))

    return change


def _blocks(
    store: Tensor, index: Tensor | None, prepared: Callable[[Tensor, Any], Tensor] | None
) -> Iterator[tuple[int, Tensor]]:
    """The blocks of rows that have a value which is not finite, as they reach the network."""
    number = len(store) if index is None else len(index)
    step = max(1, _BLOCK // max(1, store[:1].numel()))
    for start in range(0, number, step):
        places = slice(start, start + step)
        rows = places if index is None else index[places]
        block = store[rows]
        # A sum is cheaper than a look at each value, and finite only if all of them are.
        if not bool(torch.isfinite(block.sum())):
            yield start, block if prepared is None else prepared(block, rows)


def _key(examples: Stored) -> tuple[int, ...] | None:
    tensors = [tensor for _, tensor in leaves(examples.x)] + [examples.y]
    if any(tensor.is_inference() for tensor in tensors):
        return None  # such tensors do not count their changes
    return id(examples), *(tensor._version for tensor in tensors)


def not_finite_in(state: Nested, place: str = "") -> str:
    """Half a sentence about the first number of a state that is NaN or infinite; empty if there is none.

    Args:
        state: of a client or of the server, as a checkpoint holds it.
        place: what comes before the names.

    >>> not_finite_in({"model": {"bias": torch.tensor([0.0, float("nan")])}})
    "tensor 'model/bias' has NaN or infinite values"
    """
    if isinstance(state, Tensor):
        bad = state.is_floating_point() and not bool(torch.isfinite(state).all())
        return f"tensor {place!r} has NaN or infinite values" if bad else ""
    if isinstance(state, Mapping | list):
        pairs = state.items() if isinstance(state, Mapping) else enumerate(state)
        inner = (not_finite_in(value, f"{place}/{name}" if place else str(name)) for name, value in pairs)
        return next(filter(None, inner), "")
    return f"{place!r} is {state}" if isinstance(state, float) and not math.isfinite(state) else ""
