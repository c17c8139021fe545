"""Defines `Examples`, which holds a client's inputs and labels as tensors in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.examples.pytree import (
    Inputs,
    check_and_convert_inputs,
    explain_unreadable_rows,
    first_leaf,
    input_spec_of,
    named_leaves,
    tree_map,
)
from polyfed.core.examples.times import times_as_numbers
from polyfed.core.io.values.keyword_names import suggest_keywords

_MOST_TRANSFORMED = 2**24  # numbers of a set that are kept transformed: 64 MiB
Batch = tuple[Any, Tensor]  # inputs are `Inputs`, most often a tensor


@dataclass(frozen=True)
class Normalise:
    """Converts uint8 images to normalised floats, (x / 255 − mean) / std with one mean and std per channel.

    >>> Normalise((0.5,), (0.5,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-1.,  1.]]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or any(s <= 0 for s in self.std):
            raise UserError(f"Normalise needs one positive std per mean, got mean={self.mean}, std={self.std}")

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the normalised images as float32, shape (batch, channels, height, width)."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = torch.tensor([1 / (255 * s) for s in self.std], device=x.device).view(shape)
        offset = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)], device=x.device).view(shape)
        return x.to(torch.float32).mul_(scale).add_(offset)


@final
@dataclass(frozen=True)
class PartwiseTransform:
    """Applies a function to each named part of nested inputs; other parts stay unchanged.

    >>> halved = PartwiseTransform({"image": Normalise((0.5,), (0.5,))})
    >>> batch = halved({"image": torch.tensor([[[[255]]]], dtype=torch.uint8), "age": torch.tensor([[60.0]])})
    >>> batch["image"].item(), batch["age"].item()
    (1.0, 60.0)
    """

    transforms: Mapping[str, Callable[[Tensor], Tensor]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", {name: self.transforms[name] for name in sorted(self.transforms)})

    def __call__(self, x: Any) -> Any:
        """Returns the nested inputs with the parts that have a function transformed by it.

        Raises:
            UserError: the inputs have no such part.
        """
        parts = dict(named_leaves(x))
        if unknown := sorted(self.transforms.keys() - parts.keys()):
            raise UserError(
                f"PartwiseTransform: the inputs have no part {unknown[0]!r}; {did_you_mean(unknown[0], parts)}"
            )
        changed = iter(
            [self.transforms[name](part) if name in self.transforms else part for name, part in parts.items()]
        )
        return tree_map(lambda _: next(changed), x)


@suggest_keywords
@dataclass(frozen=True)
class Examples:
    """Holds the inputs and labels of examples, as positions (`index`) in stored tensors that several clients may share.

    The clients of a simulation hold the same `x` and `y`, the store, and differ in `index`, so that 500 clients need no more
    memory than the data set. A batch is an index operation followed by `transform`.

    Args:
        x: inputs, shape (num_stored, ...); uint8 for images (channels first), int64 for tokens, floats otherwise. Or a
            tuple, list or dict of such tensors, nested at will: then `transform` and `augment` get batches of this
            structure, and a network gets the parts as arguments (see `polyfed.core.examples.pytree`). Lists become tuples.
        y: targets; int64 (num_stored,) for classes, float (num_stored, num_labels) for multi-label, float for regression.
        index: int64 rows of the store that these examples are; None for all of them.
        transform: from a batch of stored inputs to the model's input (normalisation); None for no change. See
            `PartwiseTransform` for structured inputs.
        augment: random change of a training batch, `augment(batch, generator)`; applied before `transform`, never in
            evaluation.
        columns: further values of the examples, such as {"sex": ["f", "m", ...]}: a string or number per example of the
            store. No network gets them; they are kept beside predictions, for scores of subgroups.
        group: which examples are of one unit, such as a patient: a value per example of the store, or the name of a column.
            Examples of one group never go to different sets when examples are split, and count as one in intervals.
            Group ids
            stay in memory: predictions are stored with anonymous numbers. None if each example is a unit.
        time: when each example was measured: numbers or dates, one per example of the store, or the name of a column.
            None if there is no order. Examples with a time are not split again at random.
        classes: the names of the classes that `y` numbers, where labels were texts; else None.
        features: the names of the inputs' columns, where they were a pandas frame; else None. Sets of other columns, or of
            the same in another order, do not fit together.

    After construction, `group` and `time` are names of columns ("group" and "time" if arrays were given).

    Raises:
        UserError: x and y differ in length, a row of `index` is outside the store, a column, a group or a time does not
            fit, or a time is missing.

    >>> few = Examples(torch.arange(6.0).view(6, 1), torch.tensor([0, 1, 0, 1, 0, 1]), index=torch.tensor([1, 3]))
    >>> len(few), few.labels.tolist()
    (2, [1, 1])
    >>> few.batch(torch.tensor([1]))
    (tensor([[3.]]), tensor([1]))
    >>> Examples(few.x, few.y, few.index, columns={"sex": list("fmfmfm")}).column("sex").tolist()
    ['m', 'm']
    >>> Examples(few.x, few.y, group=[7, 7, 8, 8, 9, 9], time=[1, 2, 3, 4, 5, 6]).column("group").tolist()
    [7, 7, 8, 8, 9, 9]
    """

    x: Inputs
    y: Tensor
    index: Tensor | None = None
    transform: Callable[[Any], Any] | None = None
    augment: Callable[[Any, torch.Generator], Any] | None = None
    columns: Mapping[str, Any] | None = None
    group: Any = None
    time: Any = None
    classes: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor):
            object.__setattr__(self, "x", check_and_convert_inputs(self.x))
        index: Any = self.index
        if isinstance(index, np.ndarray):
            object.__setattr__(self, "index", torch.as_tensor(index))
        if error := _store_error(self.x, self.y, self.index) or _length_error(self.x, self.y):
            raise UserError(error)
        x = first_leaf(self.x)
        if self.index is not None and len(self.index):
            low, high = int(self.index.min()), int(self.index.max())
            if low < 0 or high >= len(x):
                raise UserError(f"index holds rows {low} to {high}, but the store has {len(x)}")
        if self.columns is not None:
            if not isinstance(self.columns, Mapping):
                raise UserError(f"columns must be a mapping of names to values, got {type(self.columns).__name__}")
            columns = {name: _check_column(name, values, len(x)) for name, values in self.columns.items()}
            object.__setattr__(self, "columns", columns)
        for role in ("group", "time"):
            self._set_role(role, len(x))

    def _set_role(self, role: str, number: int) -> None:
        """Checks `group` or `time`, and stores an array that was given for it as the column of this name."""
        value, columns = getattr(self, role), self.columns or {}
        if value is None:
            return
        if not isinstance(value, str):
            if role in columns:
                raise UserError(
                    f"{role} was given as an array, and the examples have a column {role!r} too; rename the column, or give "
                    f"{role}={role!r} to use it"
                )
            values = times_as_numbers(value, role) if role == "time" else value
            object.__setattr__(self, "columns", {**columns, role: _check_column(role, values, number)})
            object.__setattr__(self, role, role)
        elif value not in columns:
            hint = did_you_mean(value, columns) if columns else "give an array, or Examples(..., columns={...})"
            raise UserError(f"{role}={value!r} is not a column of the examples; {hint}")
        elif role == "time":
            times_as_numbers(columns[value], f"time: column {value!r}")

    def __len__(self) -> int:
        return len(self.y) if self.index is None else len(self.index)

    def __repr__(self) -> str:
        # and no client's data
        return f"Examples({len(self)} of inputs {input_spec_of(self.x)}, labels {input_spec_of(self.y)})"

    def __getstate__(self) -> dict[str, Any]:
        # Made again where needed.
        return {name: value for name, value in self.__dict__.items() if name != "_transformed"}

    @property
    def device(self) -> torch.device:
        """Returns the device on which the inputs, targets and index are stored."""
        return first_leaf(self.x).device

    @property
    def input_tensor(self) -> Tensor:
        """Returns the stored inputs as one tensor.

        Raises:
            UserError: the inputs are several tensors.
        """
        if isinstance(self.x, Tensor):
            return self.x
        raise UserError(f"this needs inputs of one tensor, got several ({input_spec_of(self.x)})")

    @property
    def raw_inputs(self) -> Inputs:
        """Returns the inputs before `transform`, in order; copies them if the examples have an `index`."""
        return self.x if self.index is None else tree_map(lambda part: part[self.index], self.x)

    @property
    def labels(self) -> Tensor:
        """Returns the targets of these examples, in their order."""
        return self.y if self.index is None else self.y[self.index]

    def features_of_part(self, part: str) -> tuple[str, ...]:
        """Returns the names of the columns of one part of the inputs ("" if they are one tensor); empty if it was no frame.

        >>> examples = Examples(torch.zeros(1, 2), torch.tensor([0]), features=("age", "lab"))
        >>> examples.features_of_part("")
        ('age', 'lab')
        """
        prefix = f"{part}/" if part else ""
        return tuple(name.removeprefix(prefix) for name in self.features or () if name.startswith(prefix))

    def column(self, name: str) -> NDArray[Any]:
        """Returns the values of the column `name` for these examples, in their order.

        Raises:
            UserError: there is no such column.
        """
        columns = self.columns or {}
        if name not in columns:
            hint = did_you_mean(name, columns) if columns else "give Examples(..., columns={...})"
            raise UserError(f"the examples have no column {name!r}; {hint}")
        values: NDArray[Any] = columns[name]
        return values if self.index is None else values[self.index.cpu().numpy()]

    @property
    def times(self) -> NDArray[np.float64] | None:
        """Returns the times of these examples as numbers, in their order; None if they have no times."""
        return None if self.time is None else times_as_numbers(self.column(self.time), f"time: column {self.time!r}")

    @property
    def columns_for_subgroup_scores(self) -> tuple[str, ...]:
        """Returns the names of all columns but the group column and the time column."""
        return tuple(name for name in self.columns or {} if name not in (self.group, self.time))

    def batch(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Returns the transformed inputs and the targets at the positions `rows`, int64, (batch,).

        With a `generator` the batch is a training batch and is augmented.
        """
        stored = rows if self.index is None else self.index[rows]
        if self._transformed is not None and (generator is None or self.augment is None):
            return self._transformed[rows], self.y[stored]
        x, y = (
            self.x[stored] if isinstance(self.x, Tensor) else tree_map(lambda part: part[stored], self.x),
            self.y[stored],
        )
        if generator is not None and self.augment is not None:
            x = self.augment(x, generator)
        return (x if self.transform is None else self.transform(x)), y

    @cached_property
    def _transformed(self) -> Tensor | None:
        """Returns all transformed inputs, if they are small and the transform is a table's; else None.

        Rows are transformed once, and not whenever a minibatch needs them; the bits are the same.
        """
        if not getattr(self.transform, "is_rowwise", False) or not isinstance(self.x, Tensor) or self.x.is_meta:
            return None
        num_features = self.transform(self.x[:1]).shape[1] if len(self.x) else 0  # type: ignore[misc]
        if not 0 < len(self) * num_features <= _MOST_TRANSFORMED:
            return None
        transformed: Tensor = self.transform(self.raw_inputs)  # type: ignore[misc]
        return transformed

    @property
    def first_input(self) -> Any:
        """Returns the transformed input of the first example, as a batch of size one.

        >>> Examples(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0])).first_input
        tensor([[0., 1.]])
        """
        return self.batch(self._first(1))[0]

    def select(self, rows: Tensor) -> "Examples":
        """Returns the examples at the positions `rows`, without copying the stored tensors."""
        return replace(self, index=rows if self.index is None else self.index[rows])

    def head(self, count: int = 1) -> "Examples":
        """Returns the first `count` examples, or all examples if there are fewer.

        >>> Examples(torch.zeros(3, 2), torch.tensor([2, 1, 0])).head(2).labels
        tensor([2, 1])
        """
        return self.select(self._first(count))

    def _first(self, count: int) -> Tensor:
        return torch.arange(min(count, len(self)), device=self.device)

    def to(self, device: torch.device) -> "Examples":
        """Returns the same examples with their stored tensors and index moved to `device`."""
        index = None if self.index is None else self.index.to(device)
        return replace(self, x=tree_map(lambda part: part.to(device), self.x), y=self.y.to(device), index=index)


def _store_error(x: Inputs, y: Any, index: Any) -> str:
    """Returns why inputs, labels and index are not valid tensors, as a sentence, or "" if they are."""
    if not isinstance(y, Tensor):
        return f"labels must be a tensor, got {type(y).__name__}; as_examples((x, y)) reads arrays and lists too"
    for name, tensor in (
        *((f"inputs {part!r}" if part else "inputs", part_tensor) for part, part_tensor in named_leaves(x)),
        ("labels", y),
    ):
        # Meta tensors stand for the form of inputs alone.
        if not tensor.is_meta and (error := explain_unreadable_rows(tensor)):
            return f"{name} are {error}"
    if index is None:
        return ""
    if not isinstance(index, Tensor):
        return f"index must be a tensor of rows, got {type(index).__name__}; give torch.as_tensor(index)"
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        cure = "; give mask.nonzero().squeeze(1)" if index.dtype == torch.bool else ""
        return f"index must be int64 rows of shape (n,), got {index.dtype} of shape {tuple(index.shape)}{cure}"
    return ""


def _length_error(x: Inputs, y: Tensor) -> str:
    """Returns a sentence if the numbers of inputs and labels differ, or "" if they agree."""
    first_part = first_leaf(x)
    if first_part.dim() and y.dim() and len(first_part) == len(y):
        return ""
    return f"inputs and labels must have one row per example, got shapes {tuple(first_part.shape)} and {tuple(y.shape)}"


def _check_column(name: str, values: Any, number: int) -> NDArray[Any]:
    column = np.asarray(values)
    if column.dtype.kind == "U" and isinstance(values, list | tuple) and not all(isinstance(v, str) for v in values):
        column = np.asarray(values, dtype=object)  # else NaN among texts becomes the text "nan"
    if column.ndim != 1 or len(column) != number:
        raise UserError(
            f"column {name!r} has shape {column.shape} for {number} examples; it needs one value an example"
        )
    if column.dtype.kind not in "biufUO":
        raise UserError(f"column {name!r} is of type {column.dtype}; give strings or numbers")
    return column


def split_into_batches(rows: Tensor, batch_size: int, *, at_least_two: bool = False) -> list[Tensor]:
    """Splits row numbers into batches of `batch_size`; the last batch may be smaller.

    With `at_least_two` a last batch of one example joins the one before it, because BatchNorm in training cannot take the
    variance of a single value.

    >>> ([len(b) for b in split_into_batches(torch.arange(5), 2)],
    ...  [len(b) for b in split_into_batches(torch.arange(5), 2, at_least_two=True)])
    ([2, 2, 1], [2, 3])
    """
    batches = list(torch.split(rows, batch_size))
    if at_least_two and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches
