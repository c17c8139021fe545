"""Draws classes and rows for clients; the functions here are shared by several partitions."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.seeds import numpy_generator

Rows = NDArray[np.int64]
Labels = NDArray[Any]


def rows_of_each_client(client_of_row: NDArray[np.int64], num_clients: int) -> list[Rows]:
    """Returns each client's rows, ascending, from each row's client (−1 for none)."""
    order = np.argsort(client_of_row, kind="stable")
    ends = np.searchsorted(client_of_row[order], np.arange(num_clients + 1))
    return [order[start:end] for start, end in itertools.pairwise(ends)]


def draw_rows_by_class(
    class_of_row: NDArray[np.int64], counts_by_client_and_class: NDArray[np.int64], rng: np.random.Generator
) -> list[Rows]:
    """Draws `counts_by_client_and_class[client, class]` random rows for each, without repetition."""
    owner = np.full(len(class_of_row), -1)
    for label, count_by_client in enumerate(counts_by_client_and_class.T):
        rows = rng.permutation(np.flatnonzero(class_of_row == label))
        owner[rows[: count_by_client.sum()]] = np.repeat(np.arange(len(counts_by_client_and_class)), count_by_client)
    return rows_of_each_client(owner, len(counts_by_client_and_class))


def assign_classes_evenly(num_clients: int, num_classes: int, k: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Gives each client the `k` classes that the fewest have (ties at random); mask (num_clients, num_classes)."""
    has = np.zeros((num_clients, num_classes), bool)
    for client in has:
        client[np.lexsort((rng.random(num_classes), has.sum(axis=0)))[:k]] = True
    return has


def draw_classes_per_client(num_clients: int, num_classes: int, k: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draws `k` classes for each client independently; returns a mask (num_clients, num_classes)."""
    return rng.random((num_clients, num_classes)).argsort(axis=1) < k


def top_up_small_clients_in_place(
    counts_by_client_and_class: NDArray[np.int64], shares: NDArray[np.float64], least: int
) -> None:
    """Moves examples from large to small clients, in place, until each has at least `least`.

    Each step moves at least one example, so it terminates.
    """
    totals = counts_by_client_and_class.sum(axis=1)
    for client in np.flatnonzero(totals < least):
        for label in np.argsort(-shares[client], kind="stable"):
            while totals[client] < least:
                offered = np.where(totals > least, counts_by_client_and_class[:, label], 0)
                donor = int(np.argmax(offered))
                amount = min(least - totals[client], totals[donor] - least, offered[donor])
                if amount <= 0:
                    break
                counts_by_client_and_class[donor, label] -= amount
                counts_by_client_and_class[client, label] += amount
                totals[donor] -= amount
                totals[client] += amount


def draw_stratified_rows(labels: Labels, size: int, seed: int, leave_one_per_class: bool = False) -> Rows:
    """Draws `size` random rows with each class's share within one example.

    Raises:
        UserError: there are fewer rows.

    Args:
        labels: shape (num_examples,) of integers; anything else is drawn without strata.
        size: number of rows, at most `len(labels)`.
        seed: of the draw.
        leave_one_per_class: if rounding leaves a choice, leave one example of every class undrawn.

    Returns:
        Rows, ascending, int64, shape (size,).

    >>> labels = np.array([0, 0, 0, 0, 1, 1])
    >>> labels[draw_stratified_rows(labels, 3, seed=0)].tolist()
    [0, 0, 1]
    """
    num, rng = len(labels), numpy_generator(seed)
    if not 0 <= size <= num:
        raise UserError(f"cannot draw {size} of {num} examples")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        return np.sort(rng.permutation(num)[:size])
    _, class_of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # Whole-number arithmetic: the quota is the floor of the exact share, the largest remainders get one more.
    quota, remainder = np.divmod(counts * size, max(num, 1))
    exhausts = (quota + 1 >= counts) & leave_one_per_class
    order = np.lexsort((rng.random(len(counts)), -remainder, exhausts, remainder == 0))
    quota[order[: size - quota.sum()]] += 1
    shuffled = rng.permutation(num)
    shuffled = shuffled[np.argsort(class_of[shuffled], kind="stable")]
    rank = np.arange(num) - np.repeat(counts.cumsum() - counts, counts)
    return np.sort(shuffled[rank < np.repeat(quota, counts)])


class ClassSizesAndIndices(NamedTuple):
    """Holds the size of each class, and for each example the position of its class among them."""

    sizes: NDArray[np.int64]
    class_of_row: NDArray[np.int64]


def class_sizes_and_indices(labels: Labels, partition_name: str) -> ClassSizesAndIndices:
    """Returns the size of each class that occurs, and each example's position among these classes.

    Raises:
        UserError: the labels are not one whole number per example.
    """
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{partition_name} divides examples by their class, but these labels have shape {labels.shape} and type "
            f"{labels.dtype}, not one whole number per example; use iid, quantity_skew or natural"
        )
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return ClassSizesAndIndices(sizes, class_of)


class UniqueTexts(NamedTuple):
    """Holds a column's unique values as text, their first rows and counts, and each row's value."""

    texts: tuple[str, ...]
    first_rows: NDArray[np.int64]
    text_index_of_row: NDArray[np.int64]
    num_rows: NDArray[np.int64]


def unique_values_as_texts(column: NDArray[Any], column_name: str) -> UniqueTexts:
    """Returns a column's values as texts for client ids, numbers by value, others alphabetically.

    Args:
        column: one value per example; numbers, strings, dates.
        column_name: of the column, for errors.

    Returns:
        The texts, each once; the first row of each; for each row the index of its text; the number of rows of each.

    Raises:
        UserError: more than one value per example, or a row without one.

    >>> ([part.tolist() for part in unique_values_as_texts(np.array([10, 9, 10]), "site")[1:]],
    ...  unique_values_as_texts(np.array([10, 9, 10]), "site")[0])
    ([[1, 0], [1, 0, 1], [1, 2]], ('9', '10'))
    """
    if column.ndim != 1:
        raise UserError(f"natural: column {column_name!r} has shape {column.shape}, not one value per example")
    if column.dtype.kind == "O":
        column = np.array([_as_text(value) for value in column.tolist()])
    elif column.dtype.kind == "S":
        column = np.char.decode(column, "utf-8", "backslashreplace")
    unique_values, first_rows, value_indices, sizes = np.unique(
        column, return_index=True, return_inverse=True, return_counts=True
    )
    texts = tuple(str(value) for value in unique_values)
    empty = [
        size
        for text, value, size in zip(texts, unique_values, sizes, strict=True)
        if not text.strip() or value != value
    ]
    if empty:
        raise UserError(
            f"natural: column {column_name!r} has no value in {sum(empty)} of {len(column)} rows; fill it in, "
            "or drop these rows"
        )
    return UniqueTexts(texts, first_rows, value_indices, sizes)


def _as_text(value: object) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return ""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def check_enough_examples(num_examples: int, num_clients: int, least: int = 1, why: str = "min_examples") -> None:
    """Raises a `UserError` if not every client can have at least `least` examples, or there are no clients."""
    if num_clients < 1:
        raise UserError(f"the number of clients must be at least 1, got {num_clients}")
    if num_examples < num_clients:
        raise UserError(f"{num_clients} clients cannot share {num_examples} examples; use at most {num_examples}")
    if num_examples < num_clients * least:
        raise UserError(
            f"{num_clients} clients with at least {least} examples each ({why}) need {num_clients * least}, but there "
            f"are {num_examples}; use at most {num_examples // least} clients or a smaller number"
        )


def check_classes_per_client(k: int, limit: int, why: str = "the data has no more") -> None:
    """Raises a `UserError` if `k`, the number of classes per client, exceeds `limit`."""
    if k > limit:
        raise UserError(f"k={k} classes per client is too many: choose at most {limit} ({why})")


def check_positive_integer(name: str, field: str, value: int) -> None:
    """Raises a `UserError` unless `value` is an integer of at least 1; the message names the field."""
    if not is_whole_number(value, 1):
        raise UserError(f"{name}: {field} must be a whole number of at least 1, got {value!r}")


def check_positive_number(name: str, field: str, value: float) -> None:
    """Raises a `UserError` unless `value` is a positive number; the message names the field."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name}: {field} must be a positive number, got {value!r}")
