"""Tables of who is called what: counts at a threshold for two classes, and by the most probable class for more."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from polyfed.core.io.number_format import format_count
from polyfed.report.data.binary_stats import wilson_interval
from polyfed.report.page.elements import html_table

HALF_INDEX = 49  # the position of 50 % among the thresholds


def html_threshold_tables(
    performances: Sequence[tuple[Mapping[str, Any], str]],
    positive_name: str,
    negative_name: str,
    level: float,
    threshold_index: int = HALF_INDEX,
) -> str:
    """For each method the four counts at a threshold, and one table of the shares that follow from them.

    Args:
        performances: with the name of the method, as `polyfed.report.page.performance.binary_performance` makes them.
        positive_name: name of what is looked for.
        negative_name: name of the other class; empty for "not" and the name.
        level: of the intervals.
        threshold_index: position of the threshold.
    """
    negative_label = negative_name or f"not {positive_name}"
    shown = []
    for performance, name in performances:
        hits, false_alarms = performance["hits"][threshold_index], performance["alarms"][threshold_index]
        negatives = performance["n"] - performance["yes"]
        rows = [
            [
                f"is {positive_name}",
                format_count(hits),
                format_count(performance["yes"] - hits),
                format_count(performance["yes"]),
            ],
            [
                f"is {negative_label}",
                format_count(false_alarms),
                format_count(negatives - false_alarms),
                format_count(negatives),
            ],
        ]
        columns = ["", f"called {positive_name}", f"called {negative_label}", "all"]
        shown.append(f"<div>{html_table(f'{name}: test examples', columns, rows, bold=[{1}, {2}])}</div>")
    rates_by_method = [rates_at_threshold(performance, threshold_index) for performance, _ in performances]
    texts = (
        f"sensitivity: of those that are {positive_name}, called so",
        f"specificity: of those that are {negative_label}, called so",
        f"positive predictive value: of those called {positive_name}, are so",
        f"negative predictive value: of those called {negative_label}, are so",
    )
    rows = [
        [text, *(format_share_with_interval(*rates[k], level) for rates in rates_by_method)]
        for k, text in enumerate(texts)
    ]
    shares = html_table("Shares at this threshold", ["", *(name for _, name in performances)], rows)
    return f'<div class="sideways">{"".join(shown)}</div>{shares}'


def rates_at_threshold(performance: Mapping[str, Any], threshold_index: int) -> list[tuple[float, float]]:
    """Sensitivity, specificity, and the predictive values of yes and no at a threshold, each as hits and of how many."""
    hits, false_alarms, positives = (
        performance["hits"][threshold_index],
        performance["alarms"][threshold_index],
        performance["yes"],
    )
    negatives = performance["n"] - positives
    true_negatives = negatives - false_alarms
    return [
        (hits, positives),
        (true_negatives, negatives),
        (hits, hits + false_alarms),
        (true_negatives, true_negatives + positives - hits),
    ]


def format_share_with_interval(hits: float, examples: float, level: float) -> str:
    """A share with its interval in words.

    >>> format_share_with_interval(8, 10, 0.95), format_share_with_interval(0, 0, 0.95)
    ('80.0 % (49.0 to 94.3 %)', '–')
    """
    low, high = wilson_interval(hits, examples, level)
    if math.isnan(low):
        return "–"
    return f"{100 * hits / examples:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"


def html_confusion_matrix(matrix: Sequence[Sequence[float]], method: str, names: Sequence[str]) -> str:
    """Counts by true class (rows) and by the class that is called; the more of a row, the darker."""
    head = "".join(f'<th scope="col">called {escape(name)}</th>' for name in names)
    body = []
    for k, row in enumerate(matrix):
        row_total = sum(row)
        cells = [
            f'<td style="--share:{round(100 * value / row_total) if row_total else 0}%">'
            f"{f'<b>{format_count(value)}</b>' if j == k else format_count(value)}</td>"
            for j, value in enumerate(row)
        ]
        body.append(
            f'<tr><th scope="row">is {escape(names[k])}</th>{"".join(cells)}<td>{format_count(row_total)}</td></tr>'
        )
    correct = sum(row[k] for k, row in enumerate(matrix))
    description = (
        f"{method}: {format_count(correct)} of {format_count(sum(map(sum, matrix)))} test examples are called what "
        "they are"
    )
    label = escape(description)
    return (
        f'<p class="caption">{label}</p><div class="wide" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="matrix"><thead><tr><th scope="col"></th>{head}<th scope="col">all</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
