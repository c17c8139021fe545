"""Makes clients from the rows of a table, grouped by a column, one client at a time."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.core.tasks.task import DEFAULT_TASK, Task, TaskSpec
from polyfed.data.sources.by_client.row_index import RowIndex, index_rows
from polyfed.data.sources.client_source import SourceManifest


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class GroupedClients(ABC):
    """Makes a client from the rows of a table that have its id in a column; a subclass reads the table.

    Args:
        client_column: the column that says whose each row is.
        inputs: the columns of numbers that are a network's input, shape (rows, columns); or one column of lists of numbers,
            all of one length.
        target: the column of labels: whole numbers, texts (numbered in alphabetical order), or numbers for regression.
        model: builds the network of every client; None for methods that bring one.
        task: name of the task, such as "classification".
        test_fraction, val_fraction: shares of a client's rows for its test and validation examples, drawn from the seed and
            the client's id; at least one test row, and at least one to train on.
        shape: of one input, where lists of numbers are images, say.
        least_rows: clients with fewer rows are left out, and those with fewer than one for each set.
        seed: of the draws.
    """

    client_column: str
    inputs: str | Sequence[str]
    target: str
    model: Architecture | None = None
    task: Task | TaskSpec = DEFAULT_TASK
    test_fraction: float = 0.2
    val_fraction: float = 0.0
    shape: tuple[int, ...] | None = None
    least_rows: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1 or not 0 <= self.val_fraction < 1 - self.test_fraction:
            raise UserError(
                "test_fraction must be above 0, val_fraction from 0, and both together below 1, got "
                f"{self.test_fraction} and {self.val_fraction}"
            )

        if not self._input_columns:
            raise UserError("inputs must name a column at least, got none")
        if self.target in self._input_columns:
            raise UserError(f"the target {self.target!r} is among the inputs, which would tell the network the answer")

    @abstractmethod
    def _column_names(self) -> Sequence[str]:
        """Returns the names of the table's columns."""

    @abstractmethod
    def _read_column(self, name: str) -> Iterator[Any]:
        """Yields a column of the whole table in parts, as Arrow arrays."""

    @abstractmethod
    def _read_rows(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        """Returns some rows of some columns as an Arrow table, in the order of `rows`, which are ascending."""

    @abstractmethod
    def _fingerprint(self) -> str:
        """Returns a text that changes with the table."""

    def _build_index(self) -> RowIndex:
        return index_rows(self._read_column(self.client_column), self.client_column)

    @property
    def _input_columns(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else list(self.inputs)

    @cached_property
    def _index(self) -> RowIndex:
        names = self._column_names()
        for name in (self.client_column, self.target, *self._input_columns):
            if name not in names:
                raise UserError(f"the table has no column {name!r}; {did_you_mean(name, names)}")
        index = self._build_index().without_small_clients(self.least_rows)
        if not index.ids:
            raise UserError(
                f"no client has {self.least_rows} rows or more; give a smaller least_rows, or another column"
            )
        return index

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Returns the names of the classes in order if the labels are texts, from one pass over their column; else None."""
        values: set[Any] = set()
        for part in self._read_column(self.target):
            if not (str(part.type) in ("string", "large_string") or str(part.type).startswith("dictionary")):
                return None
            values.update(part.unique().to_pylist())
        return tuple(sorted(map(str, values)))

    @property
    def ids(self) -> Sequence[str]:
        """Returns the ids of all clients, sorted."""
        return self._index.ids

    def manifest(self) -> SourceManifest:
        """Returns the numbers of training examples of all clients, which the index knows."""
        counts = self._index.counts
        tests, vals = self._count_held_out(counts)
        models = () if self.model is None else (self.model,)
        facts = (self.client_column, tuple(self._input_columns), self.target, self.test_fraction, self.val_fraction)
        return SourceManifest(counts - tests - vals, models, None, f"{self._fingerprint()} {facts} {self.seed}")

    def _count_held_out(self, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns each client's numbers of test and validation rows from its number of rows.

        At least one each where the share is not 0, and at most what leaves one to train on.
        """
        has_val = int(self.val_fraction > 0)
        shares = [
            np.maximum(1, np.floor(f * counts + 1e-9).astype(np.int64)) for f in (self.test_fraction, self.val_fraction)
        ]
        tests = np.minimum(shares[0], counts - 1 - has_val)
        return tests, np.minimum(shares[1], counts - tests - 1) * has_val

    def client(self, id: str) -> Client:
        """Makes the client with this id from its rows.

        Raises:
            KeyError: no client has this id.
            UserError: a column of inputs or targets is not of numbers, or a cell is empty.
        """
        place = bisect_left(self.ids, id)
        if place == len(self.ids) or self.ids[place] != id:
            raise KeyError(id)
        rows = self._index.rows_at(place)
        x, y = self._read_examples(rows, id)
        order = torch.from_numpy(numpy_generator(derive_seed(self.seed, id, "split")).permutation(len(rows)))
        num_test, num_val = (int(count[0]) for count in self._count_held_out(np.array([len(rows)])))
        bounds = {
            "test": (0, num_test),
            "val": (num_test, num_test + num_val),
            "train": (num_test + num_val, len(rows)),
        }
        parts = {name: order[first:last] for name, (first, last) in bounds.items() if last > first}
        sets = {name: Examples(x[part], y[part], classes=self.classes) for name, part in parts.items()}
        return Client(id, self.model, sets["train"], sets["test"], sets.get("val"), task=self.task)

    def _read_examples(self, rows: NDArray[np.int64], client: str) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._read_rows(rows, [*self._input_columns, self.target])
        if empty := [name for name in table.column_names if table[name].null_count]:
            raise UserError(f"client {client!r}: column {empty[0]!r} has empty cells; fill them before")
        if isinstance(self.inputs, str) and "list" in str(table[self.inputs].type):
            lists = table[self.inputs].combine_chunks()
            lists = lists.combine_chunks() if hasattr(lists, "combine_chunks") else lists
            flat = lists.flatten().to_numpy(zero_copy_only=False)
            if len({len(row) for row in lists}) > 1:
                raise UserError(f"client {client!r}: the lists in column {self.inputs!r} are not of one length")
            x = flat.reshape(len(rows), *(self.shape or (-1,)))
        else:
            columns = [self._numbers(table, name, client) for name in self._input_columns]
            x = np.stack(columns, axis=1).astype(np.float32).reshape(len(rows), *(self.shape or (-1,)))
        if x.dtype == np.float64:
            x = x.astype(np.float32)
        if self.classes is not None:
            number = {name: place for place, name in enumerate(self.classes)}
            y = np.array([number[str(value)] for value in table[self.target].to_pylist()], dtype=np.int64)
        else:
            y = self._numbers(table, self.target, client)
        return torch.from_numpy(np.array(x)), torch.from_numpy(np.array(y))

    @staticmethod
    def _numbers(table: Any, name: str, client: str) -> NDArray[Any]:
        values = table[name].to_numpy()
        if values.dtype.kind not in "biuf":
            raise UserError(f"client {client!r}: column {name!r} is of {table[name].type}, and numbers are needed")
        return np.asarray(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(client_column={self.client_column!r}, target={self.target!r})"  # and no rows

    def __getstate__(self) -> Mapping[str, Any]:
        """Returns the fields alone: another process opens the table and its index again."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
