"""Makes examples for forecasting from time series: a window of past values as input, and the values after it as
targets.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.times import times_as_numbers
from polyfed.data.concat import rows_in_stored_tensors

_GAP = 1.5  # usual steps of time from which on two rows are not neighbours


def windows(values: Any, *, past: int, horizons: int, time: Any = None, step: int = 1) -> Examples:
    """Makes examples of one series: inputs are `past` consecutive values, targets the next `horizons` values.

    Windows with a missing value, or across a gap of time, are left out. The time of an example is that of its last past
    value, so that examples are split by time.

    Args:
        values: of the series in the order of time, shape (T,), or (T, features) with the predicted one first.
        past: number of past values of an example.
        horizons: number of next values.
        time: of each value, ascending numbers or dates; None counts them.
        step: an example begins at every `step`-th value.

    Returns:
        Examples with inputs (n, past) or (n, past, features), and targets (n, horizons).

    Raises:
        UserError: the series is too short, or times do not ascend.

    >>> few = windows([1, 2, 3, 4, 5], past=2, horizons=2)
    >>> few.x.tolist(), few.y.tolist(), few.column("time").tolist()
    ([[1.0, 2.0], [2.0, 3.0]], [[3.0, 4.0], [4.0, 5.0]], [1.0, 2.0])
    """
    series = np.asarray(values, dtype=np.float64)
    if series.ndim not in (1, 2) or min(past, horizons, step) < 1 or len(series) < past + horizons:
        raise UserError(
            f"windows need a series of shape (T,) or (T, features) with T of at least past + horizons, got shape "
            f"{series.shape}, past={past}, horizons={horizons}, step={step}"
        )
    times = np.arange(len(series)) if time is None else np.asarray(time)
    if len(times) != len(series):
        raise UserError(f"windows: there are {len(times)} times for {len(series)} values; give one each")
    seconds = times_as_numbers(times, "time")
    steps = np.diff(seconds)
    if (steps <= 0).any():
        row = int(np.flatnonzero(steps <= 0)[0]) + 1
        raise UserError(f"windows: the time of row {row} is not after that of row {row - 1}; sort the rows by time")
    size = past + horizons
    rows = np.arange(0, len(series) - size + 1, step)[:, None] + np.arange(size)
    is_whole = np.isfinite(series[rows].reshape(len(rows), -1)).all(1)
    is_whole &= ~(steps > _GAP * np.median(steps))[rows[:, :-1]].any(1)
    rows = rows[is_whole]
    if not len(rows):
        raise UserError(f"windows: no {size} values in a row are without a gap; give a smaller past or horizons")
    y = series if series.ndim == 1 else series[:, 0]
    x, future = (np.asarray(part, np.float32) for part in (series[rows[:, :past]], y[rows[:, past:]]))
    return Examples(torch.from_numpy(x), torch.from_numpy(future), time=times[rows[:, past - 1]])


def windows_by_series(
    table: Any,
    *,
    series: str,
    value: str,
    time: str,
    past: int,
    horizons: int,
    features: Sequence[str] = (),
    step: int = 1,
) -> dict[str, Examples]:
    """Returns `{series: examples}` of a table with a row per series and time (see `windows`).

    Args:
        table: columns by name, such as a pandas frame or a dict of arrays; its rows may have any order.
        series: the column with the name of the series: a site, a household.
        value: the column that is predicted.
        time: the column with the time.
        past, horizons, step: as for `windows`.
        features: further columns that are inputs too.

    Returns:
        Name of a series -> its examples.

    Raises:
        UserError: as `windows`; the message has the series.
    """
    names, times = np.asarray(table[series]).astype(str), np.asarray(table[time])
    columns = np.stack([np.asarray(table[name], dtype=np.float64) for name in (value, *features)], axis=1)
    examples = {}
    for name in dict.fromkeys(names.tolist()):
        rows = np.flatnonzero(names == name)
        rows = rows[np.argsort(times[rows], kind="stable")]
        values: NDArray[np.float64] = columns[rows] if features else columns[rows, 0]
        try:
            examples[name] = windows(values, past=past, horizons=horizons, time=times[rows], step=step)
        except UserError as error:
            raise UserError(f"series {name!r}: {error}") from error
    return examples


@final
class WindowSets(NamedTuple):
    """Holds a series' examples for training, validation (or None) and testing, each later than the one before."""

    train: Examples
    val: Examples | None
    test: Examples


def split_windows(examples: Examples, *, test: float = 0.25, val: float = 0.0) -> WindowSets:
    """Splits the examples of one series by time so that no target is in two sets.

    As many windows as a target has further horizons are left out before each later set. Neighbouring windows overlap, and
    their errors are alike: unless the examples have groups, as many as one window has values become a group, which counts
    as one in intervals.

    Args:
        examples: of `windows`, with step 1, in the order of time.
        test, val: shares of the examples.

    Raises:
        UserError: a set would be empty.

    >>> sets = split_windows(windows(range(12), past=2, horizons=2), test=0.4)
    >>> sets.train.y[sets.train.index][-1].tolist(), sets.test.y[sets.test.index][0].tolist()
    ([5.0, 6.0], [7.0, 8.0])
    """
    number, gap = len(examples), examples.y.shape[1] - 1
    num_test, num_val = max(1, round(test * number)), round(val * number)
    val_end = number - num_test - gap
    train_end = val_end - num_val - gap if num_val else val_end
    if train_end < 1 or not 0 < test < 1 or not 0 <= val < 1:
        raise UserError(
            f"split_windows: {number} windows of {gap + 1} horizons cannot be split by test={test}, val={val}; give smaller "
            "shares or a longer series"
        )
    bounds = ((0, train_end), (val_end - num_val, val_end), (number - num_test, number))
    if examples.group is None:
        examples = replace(examples, group=_group_neighbours(examples, bounds))
    train, later, last = (examples.select(torch.arange(*ends)) for ends in bounds)
    return WindowSets(train, later if num_val else None, last)


def _group_neighbours(examples: Examples, bounds: Sequence[tuple[int, int]]) -> list[str]:
    """Names each stored window, by one name for as many neighbours of one set as a window has values.

    Another series has other names.
    """
    length, series = examples.input_tensor.shape[1] + examples.y.shape[1], zlib.crc32(examples.labels.numpy().tobytes())
    names, rows = [""] * len(examples.y), rows_in_stored_tensors(examples).tolist()
    for first, last in bounds:
        for place in range(first, last):
            names[rows[place]] = f"{series:08x} {first + (place - first) // length * length}"
    return names
