"""Renders confusion tables: counts at a threshold for two classes, and counts by the most probable class for more."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from markupsafe import Markup

from polyfed.core.io.text.number_format import format_count
from polyfed.report.data.binary_stats import wilson_interval
from polyfed.report.page.elements import render_template

HALF_INDEX = 49  # the position of 50 % among the thresholds


@final
class ShareOfExamples(NamedTuple):
    """Holds a count of examples, and the total of which the count is a share."""

    examples: float
    total: float


def html_confusion_tables_at_threshold(
    performances: Sequence[tuple[Mapping[str, Any], str]], positive_name: str, negative_name: str, level: float
) -> Markup:
    """Renders for each method the counts at the probability 0.5, and rates from them.

    Args:
        performances: from `polyfed.report.page.predictions.performance.binary_performance`, each with its method's name.
        positive_name: name of the class that is looked for.
        negative_name: name of the other class; empty for "not" and `positive_name`.
        level: confidence level of the intervals.
    """
    negative_label = negative_name or f"not {positive_name}"
    counts = []
    for performance, name in performances:
        hits, false_alarms = performance["hits"][HALF_INDEX], performance["alarms"][HALF_INDEX]
        negatives = performance["n"] - performance["yes"]
        rows = [
            [
                f"actual {positive_name}",
                format_count(hits),
                format_count(performance["yes"] - hits),
                format_count(performance["yes"]),
            ],
            [
                f"actual {negative_label}",
                format_count(false_alarms),
                format_count(negatives - false_alarms),
                format_count(negatives),
            ],
        ]
        counts.append((name, rows))
    rates_by_method = [
        sensitivity_specificity_and_predictive_values(performance, HALF_INDEX) for performance, _ in performances
    ]
    texts = (
        f"sensitivity: of the actual {positive_name}, predicted so",
        f"specificity: of the actual {negative_label}, predicted so",
        f"positive predictive value: of the predicted {positive_name}, actually so",
        f"negative predictive value: of the predicted {negative_label}, actually so",
    )
    return render_template(
        "confusion",
        counts=counts,
        columns=["", f"predicted {positive_name}", f"predicted {negative_label}", "all"],
        names=[name for _, name in performances],
        share_rows=[
            [
                text,
                *(
                    format_share_with_interval(*rates[k], level, performance.get("units", 1.0))
                    for rates, (performance, _) in zip(rates_by_method, performances, strict=True)
                ),
            ]
            for k, text in enumerate(texts)
        ],
    )


def sensitivity_specificity_and_predictive_values(
    performance: Mapping[str, Any], threshold_index: int
) -> list[ShareOfExamples]:
    """Returns these four shares at a probability threshold, each as a count of examples and the total."""
    hits = performance["hits"][threshold_index]
    false_alarms = performance["alarms"][threshold_index]
    positives = performance["yes"]
    negatives = performance["n"] - positives
    true_negatives = negatives - false_alarms
    return [
        ShareOfExamples(hits, positives),
        ShareOfExamples(true_negatives, negatives),
        ShareOfExamples(hits, hits + false_alarms),
        ShareOfExamples(true_negatives, true_negatives + positives - hits),
    ]


def format_share_with_interval(hits: float, examples: float, level: float, units: float = 1.0) -> str:
    """Returns a share of examples as text in per cent, with its confidence interval; "–" if there are no examples.

    An interval counts `units` per example: groups, such as patients, where examples have groups.

    >>> format_share_with_interval(8, 10, 0.95), format_share_with_interval(0, 0, 0.95)
    ('80.0 % (49.0 to 94.3 %)', '–')
    """
    low, high = wilson_interval(hits * units, examples * units, level)
    if math.isnan(low):
        return "–"
    return f"{100 * hits / examples:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"


def html_confusion_matrix(matrix: Sequence[Sequence[float]], method: str, class_names: Sequence[str]) -> Markup:
    """Renders true classes as rows and predicted ones as columns, darker for larger shares of a row."""
    rows = []
    for row in matrix:
        total = sum(row)
        percents = [round(100 * value / total) if total else 0 for value in row]
        rows.append({"cells": list(zip(map(format_count, row), percents, strict=True)), "total": format_count(total)})
    correct, examples = sum(row[k] for k, row in enumerate(matrix)), sum(map(sum, matrix))
    description = f"{method}: {format_count(correct)} of {format_count(examples)} test examples are predicted correctly"
    return render_template("confusion_matrix", description=description, names=class_names, rows=rows)
