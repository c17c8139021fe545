"""Renders summary statistics of the sites' data: what differs, then for each column the sites' histograms side by side,
and a table.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import write_file_atomically
from polyfed.core.io.text.number_format import capitalize_first, count_with_noun, end_with_period, shorten_name
from polyfed.core.machine.package_versions import package_versions
from polyfed.data.look.counts import BINS, MIN_COUNT, describe_count
from polyfed.data.look.findings import (
    SiteDifferenceFinding,
    describe_class_counts_of_site,
    find_most_serious_kind_per_site_column,
)
from polyfed.data.look.look import Look
from polyfed.data.look.site_columns import LookColumn
from polyfed.data.look.summaries import NumberSummary, SiteDataStatistics
from polyfed.report.data.small_counts import format_count_of_rows, hide_small_sites
from polyfed.report.page.charts.svg_charts import (
    CHART_WIDTH,
    choose_axis_ticks,
    estimate_text_width,
    format_axis_tick,
    svg_element_with_title,
    svg_text,
)
from polyfed.report.page.elements import (
    html_bullet_list,
    html_figure,
    html_side_by_side,
    html_table,
    read_asset,
    render_template,
)

LOOK_HEADING = "The sites' data side by side"
_MEANING_OF_MARK: Mapping[str, str] = {
    "code": 'a number that may stand for "not measured"',
    "unit": "another unit",
    "empty": "no value, or nearly none",
    "classes": "classes are absent",
    "few": "few examples of a class, or few events",
    "missing": "often no value",
    "constant": "one value alone",
    "category": "categories of its own",
    "balance": "another share of a class",
    "shift": "values lie elsewhere",
}
_CAN_CHANGE_AN_ANSWER = ("unit", "empty", "classes", "few")  # a run and a comparison have warned of "code"
_COLUMNS, _SITES = 60, 16  # columns with a figure; sites in a figure
_ROW = 30  # height of a site's histogram


def data_warnings(look: Look, most: int = 2) -> list[str]:
    """Returns the most serious differences between the sites' data, those that can change an answer, as sentences."""
    findings = [finding for finding in look.findings if finding.kind in _CAN_CHANGE_AN_ANSWER][:most]
    return [f"{_sentence_of_finding(finding)} See “{LOOK_HEADING}” below." for finding in findings]


def _sentence_of_finding(finding: SiteDifferenceFinding) -> str:
    text = hide_small_sites(finding.text) if finding.kind == "few" else finding.text
    return end_with_period(text if finding.column else capitalize_first(text))


def html_look(look: Look, key: str, *, remarks: Sequence[str] = (), show_splits: bool = True) -> Markup:
    """Renders what differs between the data of the sites, the sites' numbers of examples, and a figure for each column.

    Args:
        look: the sites' statistics.
        key: prefix of ids on the page.
        remarks: sentences about the data that come after the differences.
        show_splits: whether to say how many examples are for training, validation and test.
    """
    kinds = find_most_serious_kind_per_site_column(look.findings)
    marks = {place: _MEANING_OF_MARK[kind] for place, kind in kinds.items()}
    sentences = [
        f"{_sentence_of_finding(finding)} {capitalize_first(finding.meaning)}." for finding in look.findings
    ] or ["No column differs between the sites in a way that is known to mislead."]
    where = "" if look.summaries.is_local else "stay at their site and "
    sentences.append(
        f"Counts of fewer than {MIN_COUNT} rows {where}are shown as <{MIN_COUNT}, and drawn as {MIN_COUNT}."
    )
    sentences += [end_with_period(capitalize_first(remark)) for remark in remarks]
    splits = {"train": "training", "val": "validation", "test": "test"} if show_splits else {}
    sizes = [
        [name, str(site.rows), *(str(site.parts.get(part, "–")) for part in splits),
         describe_class_counts_of_site(look.summaries, site) or "–"]
        for name, site in look.sites.items()
    ]  # fmt: skip
    sizes_table = html_table("Examples of each site", ["site", "rows", *splits.values(), "targets"], sizes)
    marked_columns = {column for column, _ in marks}
    listed_columns = sorted(look.columns, key=lambda column: column.name not in marked_columns)[:_COLUMNS]
    sites = sorted(look.sites, key=lambda name: not any(place[1] == name for place in marks))[:_SITES]
    sites = [name for name in look.sites if name in sites]
    figures = [
        html_figure(
            svg_site_histograms(look, column, sites, marks, f"{key}-{k}"),
            _caption_of_column(column, marks),
            _numbers_table(look, column, marks),
        )
        for k, column in enumerate(listed_columns)
    ]
    rest = []
    if hidden := len(look.columns) - len(listed_columns):
        rest.append(f"{count_with_noun(hidden, 'more column')} without marks are not drawn.")
    if hidden := len(look.sites) - len(sites):
        rest.append(f"The figures leave out {count_with_noun(hidden, 'site')}; the tables below them have all.")
    return Markup("{}{}{}{}").format(
        html_bullet_list(sentences), sizes_table, html_side_by_side(figures), html_bullet_list(rest)
    )


def _caption_of_column(column: LookColumn, marks: Mapping[tuple[str, str], str]) -> str:
    meanings = dict.fromkeys(meaning for (name, _), meaning in marks.items() if name == column.name)
    marked = f" (orange: {', '.join(meanings)})" if meanings else ""
    return f"{column.name}{', the target' if column.is_target else ''}{marked}"


def _numbers_table(look: Look, column: LookColumn, marks: Mapping[tuple[str, str], str]) -> Markup:
    if column.values is None:
        percentiles = ["5th percentile", "median", "95th percentile"]
        columns = ["site", "values", "missing", "mean", "SD", "zeros", *percentiles, "mark"]
        rows = [
            [name, *_number_cells(site.numbers[column.name]), marks.get((column.name, name), "")]
            for name, site in look.sites.items()
        ]
    else:
        columns = ["site", *column.values, "missing", "mark"]
        rows = [
            [name, *(describe_count(site.categories[column.name][value]) for value in (*column.values, "")),
             marks.get((column.name, name), "")]
            for name, site in look.sites.items()
        ]  # fmt: skip
    return html_table(column.name, columns, rows)


def _number_cells(summary: NumberSummary) -> list[str]:
    statistics = summary.statistics
    if summary.is_hidden or statistics.count == 0:
        return [describe_count(statistics.count), *["–"] * 7]
    low, middle, high = ["–"] * 3 if summary.percentiles is None else map(_format_value, summary.percentiles)
    if 0.05 * statistics.count < MIN_COUNT:  # so few values lie outside that the ends would nearly be theirs
        low = high = "–"
    missing = f"<{MIN_COUNT}" if summary.missing is None else format_count_of_rows(summary.missing)
    zeros = statistics.codes.get(0.0, 0.0)
    misses_few = missing.startswith("<")  # the number of values would tell it
    return [
        f"≥{statistics.count - statistics.count % MIN_COUNT:.0f}" if misses_few else describe_count(statistics.count),
        missing,
        _format_value(statistics.mean),
        _format_value(statistics.sd),
        describe_count(zeros) if zeros < 0 else format_count_of_rows(zeros),
        low,
        middle,
        high,
    ]


def _format_value(value: float) -> str:
    """Formats a statistic with four significant digits, without an exponent up to a million.

    >>> _format_value(-1.923), _format_value(12345.6)
    ('−1.923', '12346')
    """
    return (f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}").replace("-", "−")


def svg_site_histograms(
    look: Look, column: LookColumn, sites: Sequence[str], marks: Mapping[tuple[str, str], str], key: str
) -> Markup:
    """Draws the sites' histograms of a column on one axis, marked sites in the colour of a loss.

    The heights are shares of the site's values, so that small sites can be compared with large ones.
    """
    labels = [shorten_name(name) for name in sites]
    left = round(max(map(estimate_text_width, labels))) + 10
    counts = {name: np.clip(np.asarray(_bar_heights(look.sites[name], column), dtype=float), 0, None) for name in sites}
    if column.values is None:
        counts, low, high = _drop_empty_ends(counts, *look.summaries.edges[column.name])
    size = max(len(bars) for bars in counts.values())
    width = (CHART_WIDTH - left - 8) / size
    parts = []
    for k, name in enumerate(sites):
        base = 6 + (k + 1) * _ROW - 4
        shares = counts[name] / max(counts[name].max(initial=0.0), 1e-9)
        kind = "less" if (column.name, name) in marks else "more"
        described = escape(f"{name}: {_describe_column(look.sites[name], column)}")
        parts.append(f'<g data-t="{described}"><path class="hit" d="M0 {base - _ROW + 4}H{CHART_WIDTH}V{base}H0Z"/>')
        parts.append(svg_text(left - 6, base - 4, labels[k], "end"))
        parts += [
            f'<rect class="{kind}" x="{left + cell * width + 0.5:.1f}" y="{base - share * (_ROW - 8):.1f}" '
            f'width="{max(width - 1, 0.8):.1f}" height="{share * (_ROW - 8):.1f}"/>'
            for cell, share in enumerate(shares)
            if share
        ]
        parts.append(f'<path class="grid" d="M{left} {base}H{CHART_WIDTH - 8}"/></g>')
    bottom = 6 + len(sites) * _ROW
    if column.values is None:
        inside = CHART_WIDTH - left - 8 - 2 * width
        # The outer cells hold what lies outside the axis.
        for x, sign, cell in ((left + width / 2, "<", 0), (CHART_WIDTH - 8 - width / 2, ">", -1)):
            parts += [svg_text(x, bottom + 12, sign, "middle")] if any(bars[cell] for bars in counts.values()) else []
        parts += [
            svg_text(
                left + width + (value - low) / (high - low) * inside, bottom + 12, format_axis_tick(value, ""), "middle"
            )
            for value in _labeled_values(low, high, size - 2)
        ]  # fmt: skip
    else:
        step = max(1, round(len(column.values) / 8))
        letters = max(8, round(step * width / 7))
        parts += [
            svg_text(left + (cell + 0.5) * width, bottom + 12, shorten_name(value, letters), "middle")
            for cell, value in enumerate(column.values[:size])
            if cell % step == 0
        ]
    parts.append(svg_text((left + CHART_WIDTH) / 2, bottom + 27, shorten_name(column.name, 40), "middle"))
    description = f"Histograms of {len(sites)} sites; the outer cells hold what lies outside the axis."
    return svg_element_with_title(key, f"Values of {column.name} at each site", description, bottom + 34, parts)


def _drop_empty_ends(
    counts: Mapping[str, NDArray[np.float64]], low: float, high: float
) -> tuple[dict[str, NDArray[np.float64]], float, float]:
    """Drops the inner cells at both ends of the axis that are empty at all sites, as beside values 0 and 1.

    The first and the last cell hold what lies outside the axis, and stay.
    """
    occupied = np.flatnonzero(np.sum(list(counts.values()), axis=0)[1:-1])
    if not len(occupied):
        return dict(counts), low, high
    first, last = int(occupied[0]), int(occupied[-1]) + 1
    step = (high - low) / (len(next(iter(counts.values()))) - 2)
    counts_left = {
        name: np.concatenate([bars[:1], bars[1 + first : 1 + last], bars[-1:]]) for name, bars in counts.items()
    }
    return counts_left, low + first * step, low + last * step


def _labeled_values(low: float, high: float, cells: int) -> list[float]:
    """Returns the values that an axis names: round ones, or the numbers inside cells of one whole number.

    >>> _labeled_values(-0.5, 1.5, 2), _labeled_values(20.0, 80.0, 20)
    ([0.0, 1.0], [20.0, 40.0, 60.0, 80.0])
    """
    if math.isclose(high - low, cells) and (low - 0.5).is_integer():
        return [low + 0.5 + cell for cell in sorted({0, cells // 2, cells - 1})]
    return [value for value in choose_axis_ticks(low, high, max_ticks=4) if low <= value <= high]


def _bar_heights(site: SiteDataStatistics, column: LookColumn) -> Sequence[float]:
    if column.values is not None:
        counts = [site.categories[column.name][value] for value in column.values[: 2 * BINS]]
        return [MIN_COUNT if count < 0 else count for count in counts]
    return site.numbers[column.name].histogram


def _describe_column(site: SiteDataStatistics, column: LookColumn) -> str:
    if column.values is not None:
        return ", ".join(
            f"{value} {describe_count(site.categories[column.name][value])}" for value in column.values[:8]
        )
    values, missing, mean, sd, *_ = _number_cells(site.numbers[column.name])
    return f"{values} values, {missing} missing, {mean} ± {sd}"


def write_look_page(look: Look, path: Path, remarks: Sequence[str] = ()) -> None:
    """Writes a page of the sites' summary statistics, and of remarks on the data, in one file that needs no network.

    Raises:
        UserError: the file cannot be written.
    """
    style, script, tables = map(read_asset, ("page.css", "page.js", "tables.js"))
    page = render_template(
        "page",
        title="polyfed look",
        heading=LOOK_HEADING,
        style=style,
        notes=[],
        groups=[html_look(look, "look", remarks=remarks)],
        origins=[],
        versions=package_versions(),
        curves={},
        scripts=Markup("{}\n{}").format(script, tables),
    )
    try:
        write_file_atomically(path, page.encode(), private=False)
    except OSError as error:
        raise UserError(
            f"cannot write the page {path} ({error.strerror}); give another out=... (--out FILE.html)"
        ) from error
