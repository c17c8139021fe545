"""Formats a `Look` for the terminal: a line for each column and site with a small histogram, then the differences
between sites.
"""

import math
from collections.abc import Sequence

from polyfed.core.io.text.number_format import capitalize_first, count_with_noun, end_with_period
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.data.look.counts import MIN_COUNT, describe_count
from polyfed.data.look.findings import (
    SiteDifferenceFinding,
    describe_class_counts_of_site,
    find_most_serious_kind_per_site_column,
)
from polyfed.data.look.summaries import NumberSummary, SiteSummaries

_SPARKS = "▁▂▃▄▅▆▇█"
_SITES, _COLUMNS = 8, 30  # shown on the terminal; the page and JSON have all


def format_sparkline(counts: Sequence[float]) -> str:
    """Returns counts as block characters; a space stands for none, a dot for a hidden count.

    >>> format_sparkline([0, 1, 8, -1])
    ' ▁█·'
    """
    most = max([*counts, 1.0])
    return "".join(
        "·" if count < 0 else " " if count == 0 else _SPARKS[min(7, math.ceil(8 * count / most) - 1)]
        for count in counts
    )


def format_look(look: SiteSummaries, findings: Sequence[SiteDifferenceFinding]) -> str:
    """Returns a description of several sites' data, with the differences between them, as text for a terminal."""
    marks = find_most_serious_kind_per_site_column(findings)
    shown_sites = list(look.sites)
    if len(shown_sites) > _SITES:
        marked = [site for site in shown_sites if any(place[1] == site for place in marks)]
        shown_sites = list(dict.fromkeys([*marked, *shown_sites]))[:_SITES]
    name_width = max(len(name) for name in shown_sites) + 4
    lines = []
    for name in shown_sites:
        site = look.sites[name]
        parts = f" ({', '.join(f'{count} {part}' for part, count in site.parts.items())})" if site.parts else ""
        tokens = f"; {site.different_tokens} different tokens" if site.different_tokens else ""
        events = describe_class_counts_of_site(look, site)
        total = sum(site.parts.values()) or site.rows
        lines.append(f"{name}: {count_with_noun(total, 'example')}{parts}{tokens}{'; ' if events else ''}{events}")
    if hidden := len(look.sites) - len(shown_sites):
        lines.append(f"and {count_with_noun(hidden, 'more site')}")
    marked_columns = {column for column, _ in marks}
    listed_columns = sorted(look.columns, key=lambda column: column.name not in marked_columns)[:_COLUMNS]
    lines.append("")
    lines.append(f"{'':{name_width}}{'missing':>8}{'mean ± sd':>20}{'zeros':>7}{'5 % to 95 %':>22}")
    for column in listed_columns:
        lines.append(f"{column.name}{' (target)' if column.is_target else ''}")
        for name in shown_sites:
            site, mark = look.sites[name], marks.get((column.name, name), "")
            if column.values is None:
                cells = _number_line(site.numbers[column.name], site.rows)
            elif site.rows < MIN_COUNT:
                cells = f"fewer than {MIN_COUNT} values"
            else:
                counts = site.categories[column.name]
                cells = f"{_format_percent(counts[''], site.rows):>8}  " + ", ".join(
                    f"{value} {_format_percent(counts[value], site.rows)}" for value in column.values[:6]
                ) + (" …" if len(column.values) > 6 else "")  # fmt: skip
            lines.append(f"  {name:{name_width - 2}}{cells}{f'  << {mark}' if mark else ''}")
    if len(look.columns) > len(listed_columns):
        num_unlisted = len(look.columns) - len(listed_columns)
        lines.append(f"and {count_with_noun(num_unlisted, 'more column')}: on the page, or --json")
    lines += ["", *format_findings(findings)]
    if not look.is_local:
        lines.append(f"Counts of fewer than {MIN_COUNT} rows are not shown (<{MIN_COUNT}).")
    return "\n".join(map(sanitise_for_terminal, lines))


def format_findings(findings: Sequence[SiteDifferenceFinding]) -> list[str]:
    """Returns the differences between sites as lines of text."""
    if not findings:
        return ["No column differs between the sites in a way that is known to mislead."]
    lines = [f"{count_with_noun(len(findings), 'difference')} between the sites:"]
    for finding in findings:
        lines += [f"- {end_with_period(finding.text)}", f"  {capitalize_first(finding.meaning)}."]
    return lines


def _format_percent(count: float | None, rows: int) -> str:
    if count is None or count < 0:
        return f"<{MIN_COUNT}" if count is None else describe_count(count)
    return f"{100 * count / rows:.0f} %" if rows else "–"


def format_short(value: float) -> str:
    """Returns a number as text with two significant digits, or without decimals from 100 on.

    >>> format_short(0.1234), format_short(113.4)
    ('0.12', '113')
    """
    return f"{value:.0f}" if 99.5 <= abs(value) < 1e6 else f"{value:.2g}"


def _number_line(summary: NumberSummary, rows: int) -> str:
    if summary.is_hidden:
        return f"fewer than {MIN_COUNT} values"
    statistics = summary.statistics
    if statistics.count == 0:
        return f"{'100 %':>8}{'no value':>20}"
    ends = "–" if summary.percentiles is None else f"{summary.percentiles[0]:.4g} to {summary.percentiles[2]:.4g}"
    moments = f"{statistics.mean:.4g} ± {format_short(statistics.sd)}"
    zeros = _format_percent(statistics.codes.get(0.0, 0.0), round(statistics.count))
    missing = _format_percent(summary.missing, rows)
    return f"{missing:>8}{moments:>20}{zeros:>7}{ends:>22}  {format_sparkline(summary.histogram)}"
