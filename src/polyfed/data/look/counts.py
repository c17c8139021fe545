"""Counts and sums the columns of one site in three passes, which are the same for data in memory and for real sites
that send messages.

1. `count_values`: how many values a column of numbers has, their sum, how many are a number that often stands for "not
   measured" (0, -9, 999), and a histogram over cells that are the same for all data; how often each category occurs.
2. `sum_squares`: squared differences from the mean of all sites.
3. `count_histograms`: a histogram between two edges that suit all sites.

No pass holds a row. `suppress_small_counts` hides counts of fewer than `MIN_COUNT` rows, for sites that send them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.data.look.number_statistics import NumberStatistics
from polyfed.data.look.site_columns import LookColumn, SiteColumns

MIN_COUNT = 5
"""Sets the smallest number of rows whose count or sum leaves a real site."""
SUPPRESSED = -1.0
"""Stands for a count from 1 to `MIN_COUNT` - 1."""
NOT_SHOWN = -2.0
"""Stands for a count of at least `MIN_COUNT` that would tell a smaller one."""
CODES = (0.0, -1.0, -8.0, -9.0, -88.0, -99.0, -888.0, -999.0, -9999.0, 9.0, 77.0, 88.0, 99.0, 777.0, 888.0, 999.0, 7777.0,
         8888.0, 9999.0, 99999.0)  # fmt: skip
"""Lists the numbers that often stand for "not measured"."""
BINS = 20
_DECADES = (-6, 9)  # of the cells that are the same for all data
_PER_DECADE = 5
_POSITIVE_EDGES = torch.tensor(
    [10 ** (k / _PER_DECADE) for k in range(_DECADES[0] * _PER_DECADE, _DECADES[1] * _PER_DECADE + 1)],
    dtype=torch.float64,
)
UNIVERSAL_EDGES = torch.cat([-_POSITIVE_EDGES.flip(0), torch.tensor([-1e-12, 1e-12]), _POSITIVE_EDGES])
Counts = dict[str, Tensor]


def find_numeric_column_positions(columns: Sequence[LookColumn]) -> list[int]:
    """Returns the positions of those columns that hold numbers, not categories."""
    return [position for position, column in enumerate(columns) if column.values is None]


def count_values(site: SiteColumns) -> Counts:
    """Computes counts and sums by column, as `{kind: tensor}` with kinds such as "rows" (first pass).

    Returns:
        rows (1,); count, total and whole (values that are whole numbers), (numbers,); codes (numbers, codes); cells
        (numbers, universal cells); categories, (sum of categories + 1 for each column,), the last of each column being
        rows without a value. All float64.
    """
    numeric = find_numeric_column_positions(site.columns)
    x = site.cells[:, numeric]
    present = ~x.isnan()
    values = torch.where(present, x, 0.0)
    cells = [_count_in_cells(x[:, k], UNIVERSAL_EDGES) for k in range(len(numeric))]
    categories = [
        torch.bincount(torch.where(cells_.isnan(), len(column.values), cells_).long(), minlength=len(column.values) + 1)
        for position, column in enumerate(site.columns)
        if column.values is not None
        for cells_ in [site.cells[:, position]]
    ]
    return {
        "rows": torch.tensor([float(len(site.cells))], dtype=torch.float64),
        "count": present.sum(0).double(),
        "total": values.sum(0),
        "whole": (present & (values == values.round())).sum(0).double(),
        "codes": torch.stack([(x == code).sum(0).double() for code in CODES], dim=1),
        "cells": torch.stack(cells) if cells else x.new_zeros(0, len(UNIVERSAL_EDGES) + 1),
        "categories": torch.cat(categories).double() if categories else torch.zeros(0, dtype=torch.float64),
    }


def sum_squares(site: SiteColumns, center: Tensor, scale: Tensor) -> Counts:
    """Returns `{"squares": Σ((x − center) / scale)²}` over a site's rows by column of numbers (second pass)."""
    x = (site.cells[:, find_numeric_column_positions(site.columns)] - center) / scale
    return {"squares": torch.where(x.isnan(), 0.0, x**2).sum(0)}


def count_histograms(site: SiteColumns, low: Tensor, high: Tensor) -> Counts:
    """Returns `{"histograms": counts}` below `low`, in `BINS` equal cells, and from `high` on (third pass)."""
    x = site.cells[:, find_numeric_column_positions(site.columns)]
    rows = [
        _count_in_cells(x[:, k], torch.linspace(float(low[k]), float(high[k]), BINS + 1, dtype=torch.float64))
        for k in range(x.shape[1])
    ]
    return {"histograms": torch.stack(rows) if rows else torch.zeros(0, BINS + 2, dtype=torch.float64)}


def _count_in_cells(values: Tensor, edges: Tensor) -> Tensor:
    """Counts the values below the first edge, between edges, and from the last edge on; NaN is not a value."""
    present = values[~values.isnan()]
    cell = torch.bucketize(present.contiguous(), edges, right=True)
    return torch.bincount(cell, minlength=len(edges) + 1).double()


def drop_values_of_few_rows(site: SiteColumns) -> SiteColumns:
    """Drops values of fewer than `MIN_COUNT` rows where all others are equal: moments would tell them.

    >>> site = SiteColumns((LookColumn("a"),), torch.tensor([[0.0]] * 9 + [[7.5]], dtype=torch.float64), {})
    >>> drop_values_of_few_rows(site).cells.nansum()
    tensor(0., dtype=torch.float64)
    """
    cells = site.cells.clone()
    for position in find_numeric_column_positions(site.columns):
        is_unlike = unlike_most_values(cells[:, position])
        if int(is_unlike.sum()) < MIN_COUNT:
            cells[is_unlike, position] = math.nan
    return replace(site, cells=cells)


def unlike_most_values(values: Tensor) -> Tensor:
    """Returns which numbers differ from the one that more than half are, bool; none without such a one.

    >>> unlike_most_values(torch.tensor([0.0, 0.0, 7.5, math.nan])).tolist()
    [False, False, True, False]
    """
    numbers = values[~values.isnan()]
    if not len(numbers):
        return torch.zeros_like(values, dtype=torch.bool)
    is_unlike = ~values.isnan() & (values != numbers.median())  # a number that more than half are is the median
    return is_unlike & (2 * is_unlike.sum() < len(numbers))


def suppress_small_counts(counts: Mapping[str, Tensor], columns: Sequence[LookColumn]) -> Counts:
    """Replaces counts of fewer than `MIN_COUNT` rows by the mark `SUPPRESSED`.

    A column with so few values has no sum. Where the hidden categories of a column could be computed from the others, the
    smallest of those is hidden, too. Where fewer than `MIN_COUNT` rows have no value, the count is rounded down to a
    multiple of `MIN_COUNT`, and the sums with it. Counts in cells are rounded down so, and empty cells hidden: two
    histograms with other edges would tell the rows between the edges.

    >>> counts = {"categories": torch.tensor([20.0, 3.0, 9.0, 0.0])}
    >>> suppress_small_counts(counts, [LookColumn("a", ("x", "y", "z"))])["categories"].tolist()
    [20.0, -1.0, -2.0, 0.0]
    """
    safe = dict(counts)
    if "count" in counts:
        count, rows = counts["count"], float(counts["rows"][0])
        missing = rows - count
        misses_few = (missing > 0) & (missing < MIN_COUNT)
        rounded = torch.where(misses_few, _round_down(count), count)
        is_hidden = (count > 0) & (count < MIN_COUNT)
        share = torch.where(count > 0, rounded / count.clamp(min=1.0), 0.0)
        safe["count"] = torch.where(is_hidden, SUPPRESSED, rounded)
        safe["total"] = torch.where(is_hidden, 0.0, counts["total"] * share)
        safe["whole"] = torch.where(counts["whole"] == count, safe["count"].clamp(min=0.0), 0.0)
        codes = torch.where((counts["codes"] > 0) & (counts["codes"] < MIN_COUNT), SUPPRESSED, counts["codes"])
        others = count - codes.clamp(min=0.0).sum(1)
        tells_few = misses_few | ((others > 0) & (others < MIN_COUNT))
        safe["codes"] = torch.where(tells_few[:, None] & (codes > 0), _round_down(codes), codes)
        if "squares" in counts:
            safe["squares"] = torch.where(is_hidden, 0.0, counts["squares"] * share)
    for name in ("cells", "histograms"):
        if name in counts:
            safe[name] = torch.where(counts[name] < MIN_COUNT, SUPPRESSED, _round_down(counts[name]))
    if "categories" in counts:
        sizes = [len(column.values) + 1 for column in columns if column.values is not None]
        parts = torch.split(counts["categories"], sizes) if sizes else ()
        safe["categories"] = torch.cat([hide_small_cells(part) for part in parts]) if sizes else counts["categories"]
    return safe


def suppress_statistics_of_few_rows(
    counts: Mapping[str, Tensor], columns: Sequence[LookColumn], *, hide_small_categories: bool = False
) -> Counts:
    """Replaces statistics of columns and sites of fewer than `MIN_COUNT` rows, which would nearly be the rows.

    With `hide_small_categories` also how many rows of larger sites have a category or class, where they are as few.
    """
    safe = suppress_small_counts(counts, columns)
    is_hidden = safe["count"] == SUPPRESSED
    if int(counts["rows"][0]) < MIN_COUNT:
        safe["categories"] = torch.full_like(counts["categories"], SUPPRESSED)
    elif not hide_small_categories:
        safe["categories"] = counts["categories"]
    for name in counts.keys() - {"rows", "categories"}:
        mask = is_hidden.view(-1, *[1] * (counts[name].dim() - 1))
        safe[name] = torch.where(mask, safe[name], counts[name])
    return safe


def _round_down(counts: Tensor) -> Tensor:
    return (counts / MIN_COUNT).floor() * MIN_COUNT


def hide_small_cells(cells: Tensor) -> Tensor:
    """Replaces counts of fewer than `MIN_COUNT` rows by marks, and the smallest others that would tell them.

    Whoever knows the sum of all cells knows the sum of the hidden ones: it must leave more than one solution.

    >>> hide_small_cells(torch.tensor([4.0, 4.0, 17.0, 98.0])).tolist()  # a sum of 8 would be 4 + 4
    [-1.0, -1.0, -2.0, 98.0]
    """
    is_small = (cells > 0) & (cells < MIN_COUNT)
    is_hidden = is_small.clone()
    for cell in cells.argsort(stable=True).tolist() if bool(is_small.any()) else ():
        if int(is_hidden.sum()) > 1 and float(cells[is_hidden].sum()) >= MIN_COUNT and not _sum_tells(cells, is_hidden):
            break
        is_hidden[cell] |= bool(cells[cell] > 0)
    marks = torch.where(cells < MIN_COUNT, SUPPRESSED, NOT_SHOWN).to(cells)
    return torch.where(is_hidden, marks, cells)


def _sum_tells(cells: Tensor, is_hidden: Tensor) -> bool:
    """Returns whether the sum of the hidden cells fits one choice of counts alone, given which are small."""
    hidden = cells[is_hidden]
    num_small = int((hidden < MIN_COUNT).sum())
    fewest = num_small + MIN_COUNT * (len(hidden) - num_small)
    most = (MIN_COUNT - 1) * num_small if num_small == len(hidden) else math.inf
    return float(hidden.sum()) in (fewest, most)


def describe_count(count: float) -> str:
    """Returns a count as text, or if it is a mark of one that is not shown, its limit.

    >>> [describe_count(count) for count in (12.0, SUPPRESSED, NOT_SHOWN)]
    ['12', '<5', '≥5']
    """
    return f"{count:.0f}" if count >= 0 else f"{'≥' if count == NOT_SHOWN else '<'}{MIN_COUNT}"


def add_counts(parts: Sequence[Mapping[str, Tensor]]) -> Counts:
    """Adds the counts of several sites; a count that a site has suppressed adds nothing."""
    return {name: torch.stack([part[name] for part in parts]).clamp(min=0.0).sum(0) if name != "total"
            else torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}  # fmt: skip


def choose_center_and_scale(counts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the mean over all sites and a scale for each column of numbers, given the sum of all sites' counts."""
    count = counts["count"].clamp(min=1.0)
    scales = []
    for cells in counts["cells"]:
        first, last = _ends_of_cells(cells.nonzero().flatten().tolist())
        scales.append(max(last - first, 1e-9))
    return counts["total"] / count, torch.tensor(scales, dtype=torch.float64)


def _ends_of_cells(occupied: Sequence[int]) -> tuple[float, float]:
    """Returns the ends of occupied universal cells with their neighbours, whose few values may be hidden."""
    if not occupied:
        return 0.0, 1.0
    edges = torch.cat([UNIVERSAL_EDGES[:1] * 2, UNIVERSAL_EDGES, UNIVERSAL_EDGES[-1:] * 2]).tolist()
    zero_cell = len(_POSITIVE_EDGES) + 1
    first = occupied[0] if occupied[0] in (0, zero_cell) else occupied[0] - 1
    last = occupied[-1] if occupied[-1] in (len(edges) - 2, zero_cell) else occupied[-1] + 1
    return edges[first], edges[last + 1]


def choose_histogram_limits(counts: Mapping[str, Tensor], center: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each histogram's lowest and highest edge from the sum of all sites' counts.

    They are 3.5 standard deviations from the mean, without numbers far outside that stand for "not measured", and no wider
    than the values.
    """
    lows, highs = [], []
    for k, cells in enumerate(counts["cells"]):
        statistics = number_statistics(counts, k, center, scale)
        far_codes = statistics.codes_far_from_other_values(min_share=0.005)
        rest = statistics.without(far_codes)
        is_occupied = cells > 0
        for code in far_codes:
            code_cell = int(torch.bucketize(torch.tensor(code, dtype=torch.float64), UNIVERSAL_EDGES, right=True))
            if float(cells[code_cell]) <= statistics.codes[code]:
                is_occupied[code_cell] = False
        occupied = is_occupied.nonzero().flatten().tolist()
        first, last = _ends_of_cells(occupied)
        low, high = max(rest.mean - 3.5 * rest.sd, first), min(rest.mean + 3.5 * rest.sd, last)
        if bool(counts["whole"][k] == counts["count"][k]) and high - low <= BINS:  # one cell for each whole number
            low = math.floor(low + 0.5) - 0.5
            high = low + BINS * math.ceil((math.floor(high) + 0.5 - low) / BINS)
        if not high > low:
            margin = 0.5 * max(abs(rest.mean), 1.0)
            low, high = rest.mean - margin, rest.mean + margin
        lows.append(low)
        highs.append(high)
    return torch.tensor(lows, dtype=torch.float64), torch.tensor(highs, dtype=torch.float64)


def number_statistics(counts: Mapping[str, Tensor], position: int, center: Tensor, scale: Tensor) -> NumberStatistics:
    """Returns the statistics of the column of numbers at `position` from the counts of one or all sites."""
    count = float(counts["count"][position])
    return NumberStatistics(
        count,
        float(counts["total"][position]),
        float(center[position]),
        float(counts["squares"][position] * scale[position] ** 2),
        dict(zip(CODES, counts["codes"][position].tolist(), strict=True)),
        bool(counts["whole"][position] == counts["count"][position].clamp(min=0.0)),
    )
