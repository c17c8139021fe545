"""Fits the preprocessing of tables: computes means and spreads of numeric columns over the training rows of one site or of
several."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.examples.examples import Examples
from polyfed.data.tabular.preprocessing import RELATIVE_ROUNDING, Column, Scope, TablePreprocessor


def count_and_sum_numeric_columns(
    train: Examples, columns: Sequence[Column], mean: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns, for each numeric column, how many training rows have a value, and the sum of these values.

    With `mean` it sums the squared differences from it instead. Both float64, shape (columns of numbers,).
    """
    numeric = [i for i, column in enumerate(columns) if column.categories is None]
    x = (train.input_tensor if train.index is None else train.input_tensor[train.index])[:, numeric].double()
    is_present = ~x.isnan()
    deviation = x if mean is None else (x - mean) ** 2
    return is_present.sum(0).double(), torch.where(is_present, deviation, 0.0).sum(0)


def mean_or_zero(count: Tensor, total: Tensor) -> Tensor:
    """Returns the mean of each column, `total / count`; 0 for a column without values."""
    return torch.where(count > 0, total / torch.where(count > 0, count, 1.0), 0.0)


def preprocessor_with_statistics(
    template: TablePreprocessor, mean: Tensor, variance: Tensor, scope: Scope
) -> TablePreprocessor:
    """Returns a copy of the preprocessing in which the numeric columns have these means and variances.

    Further means and variances, after those of the columns, are of the targets.
    """
    num_numeric, spread = len(template.mean), standard_deviation_or_zero(mean, variance).tolist()
    units = [value or 1.0 for value in spread[num_numeric:]]  # targets that do not vary keep their unit
    target = tuple(zip(mean[num_numeric:].tolist(), units, strict=True)) or template.target
    return replace(
        template, mean=tuple(mean[:num_numeric].tolist()), spread=tuple(spread[:num_numeric]), target=target,
        scope=scope,
    )  # fmt: skip


def standard_deviation_or_zero(mean: Tensor, variance: Tensor) -> Tensor:
    """Returns the standard deviation of each column; 0 for columns that are constant up to rounding."""
    spread = variance.sqrt()
    return torch.where(spread <= RELATIVE_ROUNDING * mean.abs(), torch.zeros_like(spread), spread)


def fit_preprocessor(
    template: TablePreprocessor, trains: Sequence[Examples], scope: Scope = "site"
) -> TablePreprocessor:
    """Returns the preprocessing with statistics of the training rows of one or more sites.

    >>> like = TablePreprocessor((Column("age"),), (0.0,), (1.0,))
    >>> rows = Examples(torch.tensor([[40.0], [60.0], [torch.nan]]), torch.tensor([0, 1, 0]))
    >>> fit_preprocessor(like, [rows]).mean, fit_preprocessor(like, [rows]).spread
    ((50.0,), (10.0,))
    """
    mean = mean_or_zero(*_add_pairs([count_and_sum_numeric_columns(train, template.columns) for train in trains]))
    variance = mean_or_zero(
        *_add_pairs([count_and_sum_numeric_columns(train, template.columns, mean) for train in trains])
    )
    return preprocessor_with_statistics(template, mean, variance, scope)


def _add_pairs(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    count, total = (torch.zeros_like(part) for part in parts[0])
    for part_count, part_total in parts:
        count, total = count + part_count, total + part_total
    return count, total
