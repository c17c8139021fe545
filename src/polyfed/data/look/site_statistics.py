"""Computes statistics of several sites' columns in one process, and warns of numbers for "not measured"."""

from collections.abc import Mapping

from polyfed.core.errors import warn_of_data
from polyfed.core.io.text.number_format import capitalize_first
from polyfed.data.look import counts as passes
from polyfed.data.look.findings import find_differences
from polyfed.data.look.site_columns import SiteColumns, merge_columns
from polyfed.data.look.summaries import CommonScaleAndRange, SiteSummaries, build_summaries


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


def warn_of_coded_values(sites: Mapping[str, SiteColumns]) -> None:
    """Warns of numbers that seem to stand for "not measured", such as a cholesterol of 0."""
    for finding in find_differences(summarise_sites(sites)):
        if finding.kind == "code":
            warn_of_data(f"{finding.text} {capitalize_first(finding.meaning)}")
