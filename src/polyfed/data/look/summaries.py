"""Computes the statistics of each site's columns from the counts and sums that the sites have computed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor

from polyfed.data.look.counts import MIN_COUNT, Counts, describe_count, find_numeric_column_positions, number_statistics
from polyfed.data.look.number_statistics import NumberStatistics
from polyfed.data.look.site_columns import LookColumn, SiteColumns

ALL_SITES = "all sites"


_SHARES_BELOW = (0.05, 0.5, 0.95)  # of the percentiles


@final
@dataclass(frozen=True)
class NumberSummary:
    """Holds the statistics of one column of numbers at one site.

    Args:
        statistics: counts and sums; a count of -1 is one below `MIN_COUNT` that is not shown.
        missing: rows without a value; None where too few to be shown.
        histogram: counts of values below the lowest edge, in cells of equal width, and from the highest edge on; -1 for a
            count that is not shown.
        percentiles: about the 5th, 50th and 95th percentile; None without values.
    """

    statistics: NumberStatistics
    missing: float | None
    histogram: tuple[float, ...]
    percentiles: tuple[float, float, float] | None

    @property
    def is_hidden(self) -> bool:
        """Returns whether the statistics are hidden, because the column has fewer than `MIN_COUNT` values at this site."""
        return self.statistics.count < 0


@final
@dataclass(frozen=True)
class SiteDataStatistics:
    """Holds the statistics of the examples of one site.

    Args:
        rows: number of examples that were looked at.
        parts: number of examples by set; empty if it is not known.
        numbers: by column of numbers.
        categories: by column of categories, how many rows have each; -1 for a count below `MIN_COUNT`, and -2 for a larger
            one that would tell such a count, which are not shown. The key "" counts the
            rows without a value.
        different_tokens: number of different token ids in texts; None if there are none, or it is not known.
    """

    rows: int
    parts: Mapping[str, int]
    numbers: Mapping[str, NumberSummary]
    categories: Mapping[str, Mapping[str, float]]
    different_tokens: int | None = None


@final
@dataclass(frozen=True)
class SiteSummaries:
    """Holds the columns of all sites, and the statistics of each site.

    Args:
        columns: features, then targets.
        sites: by name; only `ALL_SITES` if the sites sent masked sums.
        edges: lowest and highest edge of the histograms, by column of numbers.
        is_local: whether the data are in this process: sites with `MIN_COUNT` rows or more then show smaller counts, too.
    """

    columns: tuple[LookColumn, ...]
    sites: Mapping[str, SiteDataStatistics]
    edges: Mapping[str, tuple[float, float]]
    is_local: bool = True

    def table(self) -> list[dict[str, Any]]:
        """Returns a list of dicts, one per column and site, as `Look.table` does."""
        rows: list[dict[str, Any]] = []
        for column in self.columns:
            for name, site in self.sites.items():
                row: dict[str, Any] = {
                    "column": column.name,
                    "target": column.is_target,
                    "site": name,
                    "rows": site.rows,
                }
                if column.values is None:
                    row |= _number_fields(site.numbers[column.name])
                else:
                    categories = {v: _count_or_few(n) for v, n in site.categories[column.name].items()}
                    row |= {"missing": categories.pop("", 0), "categories": categories}
                rows.append(row)
        return rows


def _count_or_few(count: float) -> int | str:
    return describe_count(count) if count < 0 else round(count)


def _number_fields(summary: NumberSummary) -> dict[str, Any]:
    if summary.is_hidden:
        return {"values": f"<{MIN_COUNT}"}
    statistics = summary.statistics
    fields: dict[str, Any] = {
        "values": round(statistics.count),
        "missing": f"<{MIN_COUNT}" if summary.missing is None else round(summary.missing),
        "mean": _finite_or_none(statistics.mean),
        "sd": _finite_or_none(statistics.sd),
        "zeros": _count_or_few(statistics.codes.get(0.0, 0.0)),
        "codes": {f"{code:g}": _count_or_few(count) for code, count in statistics.codes.items() if count and code},
        "histogram": [_count_or_few(count) for count in summary.histogram],
    }
    if summary.percentiles is not None:
        fields |= dict(zip(("p5", "median", "p95"), summary.percentiles, strict=True))
    return fields


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


@final
@dataclass(frozen=True, eq=False)
class CommonScaleAndRange:
    """Holds what all sites use to count each column of numbers: center and scale for sums of squares, and the lowest
    and highest edge of the histogram.
    """

    center: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor


def build_summaries(
    columns: Sequence[LookColumn],
    counts: Mapping[str, Counts],
    frame: CommonScaleAndRange,
    local_sites: Mapping[str, SiteColumns] | None = None,
) -> SiteSummaries:
    """Computes the statistics of all sites from their counts, `{site: counts}`.

    Args:
        columns: of all sites.
        counts: of the three passes, by site.
        frame: centers, scales and edges of the columns of numbers.
        local_sites: the sites' examples, where they are in this process: for exact percentiles.
    """
    numeric = find_numeric_column_positions(columns)
    edges = {columns[i].name: (float(frame.low[k]), float(frame.high[k])) for k, i in enumerate(numeric)}
    sites = {}
    for name, site_counts in counts.items():
        local = None if local_sites is None else local_sites[name]
        numbers = {
            columns[i].name: _summarize_number(
                site_counts, k, frame, None if local is None else local.cells[:, i].numpy()
            )
            for k, i in enumerate(numeric)
        }
        categories, start = {}, 0
        for column in columns:
            if column.values is not None:
                part = site_counts["categories"][start : start + len(column.values) + 1].tolist()
                start += len(part)
                categories[column.name] = dict(zip((*column.values, ""), part, strict=True))
        sites[name] = SiteDataStatistics(
            round(float(site_counts["rows"][0])),
            {} if local is None else local.parts,
            numbers,
            categories,
            None if local is None else local.different_tokens,
        )
    return SiteSummaries(tuple(columns), sites, edges, local_sites is not None)


def _summarize_number(counts: Counts, position: int, frame: CommonScaleAndRange, values: Any) -> NumberSummary:
    statistics = number_statistics(counts, position, frame.center, frame.scale)
    histogram = tuple(counts["histograms"][position].tolist())
    missing = None if statistics.count < 0 else float(counts["rows"][0]) - statistics.count
    percentiles = None
    if values is not None and statistics.count > 0:
        low, middle, high = np.nanpercentile(values, [100 * share for share in _SHARES_BELOW]).tolist()
        percentiles = (low, middle, high)
    elif statistics.count > 0:
        percentiles = _percentiles_of_histogram(histogram, float(frame.low[position]), float(frame.high[position]))
        if percentiles is not None and statistics.is_whole:
            percentiles = (round(percentiles[0]), round(percentiles[1]), round(percentiles[2]))
        missing = None if 0 < (missing or 0) < MIN_COUNT else missing
    return NumberSummary(statistics, missing, histogram, percentiles)


def _percentiles_of_histogram(histogram: Sequence[float], low: float, high: float) -> tuple[float, float, float] | None:
    """Returns about the 5th, 50th and 95th percentile; values outside the edges count as at them."""
    cells = np.clip(np.asarray(histogram), 0, None)
    if not cells.sum():
        return None
    width = (high - low) / (len(cells) - 2)
    edges = np.concatenate([[low], np.linspace(low, high, len(cells) - 1), [high]])
    cumulative = np.concatenate([[0.0], np.cumsum(cells) / cells.sum()])
    result = []
    for share in _SHARES_BELOW:
        cell = int(np.searchsorted(cumulative, share, side="left")) - 1
        cell = min(max(cell, 0), len(cells) - 1)
        inside = (share - cumulative[cell]) / max(cumulative[cell + 1] - cumulative[cell], 1e-12)
        result.append(float(edges[cell] + inside * (width if 0 < cell < len(cells) - 1 else 0.0)))
    return result[0], result[1], result[2]
