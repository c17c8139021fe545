"""Defines a whole data set before it is divided among clients, and the interface of data sources."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import flatten_inputs, input_spec_of
from polyfed.core.tasks.task import Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.tasks import Classification, Multilabel

Columns = Mapping[str, NDArray[Any]]


@final
@dataclass(frozen=True, eq=False)
class PooledDataset:
    """Holds a whole data set in memory, before it is divided among clients.

    Args:
        train: the examples that clients (and the public pool) get.
        test: the source's common test set, for an evaluation that is the same for everyone; None if it has none.
        class_names: the name of each class, label or target, in the order of the outputs.
        task: the task of the targets, or its name; `train.y` and `test.y` have the form that it needs.
        columns: further columns of `train` (users, patients), each of shape (num_train,), for `Natural`.
        vocabulary: the tokens of a text data set by their number in the inputs; empty otherwise.
        preprocessor: converts the rows of a table to inputs; not fitted yet, since that needs training rows.
        group: the column whose equal values never go to different sets (the rows of a patient); None for none.
        time: the column by which rows can be split into earlier and later ones; None for none.
        test_set_in_train: whether `train` includes the published test examples, so that there is no common test set.

    Raises:
        UserError: labels outside the classes, or a column of another length.

    >>> import torch
    >>> pool = PooledDataset(Examples(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])), None, ("a", "b"))
    >>> pool.num_outputs, pool.input_shape
    (2, (1, 8, 8))
    """

    train: Examples
    test: Examples | None
    class_names: tuple[str, ...]
    task: Task = field(default_factory=Classification)
    columns: Columns = field(default_factory=dict, repr=False)  # a `repr` must not show a patient's data
    vocabulary: tuple[str, ...] = ()
    preprocessor: TablePreprocessor | None = None
    group: str | None = None
    time: str | None = None
    test_set_in_train: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", get_task(self.task))
        if len(self.train) == 0:
            raise UserError("the data has no training examples")
        for name, examples in (("training", self.train), ("test", self.test)):
            if examples is not None and len(examples):
                self.task.check_targets(examples.labels, name, self.num_outputs)
        for name, column in self.columns.items():
            if len(column) != len(self.train):
                raise UserError(f"column {name!r} has {len(column)} values for {len(self.train)} training examples")

    def __repr__(self) -> str:
        test = "" if self.test is None else f", {len(self.test)} test"
        task = self.task.name or type(self.task).__name__
        return f"PooledDataset({len(self.train)} train{test}, {self.num_outputs} outputs, {task})"

    @property
    def num_outputs(self) -> int:
        """Returns the number of outputs that a network for the data needs: one for each class, label or target."""
        return self.task.num_outputs(self.train.labels, self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Returns the shape of one example's input, without the batch.

        This is (channels, height, width) of an image, (length,) of a text, (features,) of a table's row; () for inputs of
        several parts, which only a user's own network takes.
        """
        if self.preprocessor is not None:
            return (len(self.preprocessor.feature_names),)
        if (shape := getattr(self.train.transform, "shape", None)) is not None:
            return tuple(shape)
        return input_spec_of(self.train.x).shape

    @cached_property
    def fingerprint(self) -> str:
        """Hashes all inputs and labels (16 hexadecimal digits of SHA-256), at the first call."""
        digest = hashlib.sha256()
        for examples in (self.train, self.test):
            for tensor in () if examples is None else (*flatten_inputs(examples.x).values(), examples.y):
                digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
                content: Any = tensor.cpu().contiguous().numpy()
                digest.update(content)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Source(ABC):
    """Describes where a data set is, on the Hugging Face hub or in local files; `load` reads it."""

    @abstractmethod
    def load(self) -> PooledDataset:
        """Reads the data set into memory.

        Raises:
            UserError: the data set cannot be read; the message says what to give instead.
        """


def build_pooled_dataset(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor] | None,
    class_names: Sequence[str],
    transform: Callable[[Tensor], Tensor] | None = None,
    columns: Columns | None = None,
    vocabulary: tuple[str, ...] = (),
) -> PooledDataset:
    """Builds a data set from (inputs, labels); two-dimensional labels make it multi-label.

    >>> import torch
    >>> build_pooled_dataset((torch.zeros(2, 3), torch.zeros(2, 4)), None, "abcd").task.name
    'multilabel'
    """
    return PooledDataset(
        train=Examples(*train, transform=transform),
        test=None if test is None else Examples(*test, transform=transform),
        class_names=tuple(class_names),
        task=Multilabel() if train[1].dim() == 2 else Classification(),
        columns=columns or {},
        vocabulary=vocabulary,
    )


def move_test_set_to_train(pool: PooledDataset, columns: Columns) -> PooledDataset:
    """Returns a data set whose test examples are appended to its training examples, so that clients receive them too.

    The result has the columns that both sets have.

    Args:
        pool: with a test set.
        columns: of the test set.

    Raises:
        UserError: there is no test set.

    >>> import torch
    >>> train, test = (torch.zeros(3, 2), torch.tensor([0, 1, 0])), (torch.ones(1, 2), torch.tensor([1]))
    >>> pool = move_test_set_to_train(build_pooled_dataset(train, test, "ab", columns={"user": np.arange(3)}),
    ...                               {"user": np.array([7])})
    >>> len(pool.train), pool.test, pool.columns["user"].tolist()
    (4, None, [0, 1, 2, 7])
    """
    if pool.test is None:
        raise UserError("deal_test: these files hold no published test examples; leave it out, or add their test split")
    sets = pool.train, pool.test
    all_examples = Examples(
        torch.cat([part.input_tensor for part in sets]),
        torch.cat([part.y for part in sets]),
        transform=pool.train.transform,
    )
    joined_columns = {
        name: np.concatenate([train_column, columns[name]])
        for name, train_column in pool.columns.items()
        if name in columns
    }
    return replace(pool, train=all_examples, test=None, columns=joined_columns, test_set_in_train=True)


def encode_labels(
    labels: NDArray[Any], names: Sequence[str] | None = None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Converts labels to integers from 0; returns the integers and the class names.

    The names are `names` if given, otherwise the sorted texts, or the numbers.

    >>> encode_labels(np.array(["dog", "cat", "dog"]))
    (array([1, 0, 1]), ('cat', 'dog'))
    >>> encode_labels(np.array([2, 0]))
    (array([2, 0]), ('0', '1', '2'))
    """
    if np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool:
        largest = int(labels.max(initial=0))
        return labels.astype(np.int64), tuple(names or map(str, range(largest + 1)))
    if labels.dtype.kind in "OUT":
        unique_names, numbers = np.unique(labels.astype(str), return_inverse=True)
        return numbers.astype(np.int64), tuple(str(name) for name in unique_names)
    raise UserError(f"labels must be whole numbers or names, got type {labels.dtype}")
