"""Computes statistics of several sites' columns in one process, and warns of numbers for "not measured"."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from polyfed.core.errors import warn_of_data
from polyfed.core.io.text.number_format import capitalize_first
from polyfed.data.clients import ClientData
from polyfed.data.look import counts as passes
from polyfed.data.look.findings import find_coded_values
from polyfed.data.look.number_statistics import NumberStatistics
from polyfed.data.look.site_columns import SiteColumns, merge_columns, read_columns_of_client
from polyfed.data.look.summaries import CommonScaleAndRange, SiteSummaries, build_summaries
from polyfed.data.tabular.suspicious_columns import describe_identifier


def summarise_sites(sites: Mapping[str, SiteColumns], *, hide_small_categories: bool = False) -> SiteSummaries:
    """Returns statistics of each site, of the columns that any of them has.

    With `hide_small_categories` counts of a few rows of a category or class are not among them.
    """
    columns = merge_columns([site.columns for site in sites.values()])
    common = {name: site.align_to_columns(columns) for name, site in sites.items()}
    counts = {name: passes.count_values(site) for name, site in common.items()}
    center, scale = passes.choose_center_and_scale(passes.add_counts(list(counts.values())))
    for name, site in common.items():
        counts[name] |= passes.sum_squares(site, center, scale)
    low, high = passes.choose_histogram_limits(passes.add_counts(list(counts.values())), center, scale)
    for name, site in common.items():
        counts[name] = passes.suppress_statistics_of_few_rows(
            counts[name] | passes.count_histograms(site, low, high),
            columns,
            hide_small_categories=hide_small_categories,
        )
    return build_summaries(columns, counts, CommonScaleAndRange(center, scale, low, high), common)


def find_identifiers(sites: Mapping[str, SiteColumns]) -> set[str]:
    """Returns the names of features that look like identifiers of rows."""
    columns = merge_columns([site.columns for site in sites.values()])
    cells = torch.cat([site.align_to_columns(columns).cells for site in sites.values()]).numpy()
    codes = np.repeat(np.arange(len(sites)), [len(site.cells) for site in sites.values()])
    return {
        column.name
        for column, numbers in zip(columns, cells.T, strict=True)
        if column.values is None and not column.is_target and describe_identifier(column.name, numbers, codes)
    }


def warn_of_coded_values(clients: Iterable[ClientData]) -> None:
    """Warns of numbers that seem to stand for "not measured", such as a cholesterol of 0."""
    sites = {client.id: read_columns_of_client(client) for client in clients}
    for column in merge_columns([site.columns for site in sites.values()]):
        if column.values is None:
            for finding in find_coded_values(column.name, _count_codes(column.name, sites)):
                warn_of_data(f"{finding.text} {capitalize_first(finding.meaning)}")


def _count_codes(name: str, sites: Mapping[str, SiteColumns]) -> dict[str, NumberStatistics]:
    """Returns the statistics of a column of numbers at the sites with at least `MIN_COUNT` values."""
    numbers = {}
    for site, columns in sites.items():
        positions = [position for position, column in enumerate(columns.columns) if column.name == name]
        x = columns.cells[:, positions].flatten().numpy()
        if len(x := x[~np.isnan(x)]) >= passes.MIN_COUNT:
            numbers[site] = x
    center = next((float(x.mean()) for x in numbers.values()), 0.0)
    return {
        site: NumberStatistics(
            len(x), float(x.sum()), center, float(((x - center) ** 2).sum()),
            {code: float(np.count_nonzero(x == code)) for code in passes.CODES}, bool((x == x.round()).all()),
        )
        for site, x in numbers.items()
    }  # fmt: skip
