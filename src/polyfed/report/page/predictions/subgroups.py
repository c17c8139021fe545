"""Computes and renders scores for subgroups of the test examples, which are formed by the values of a column such as
"sex".
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.statistics.score_intervals import mean_gain_with_interval, mean_score_with_interval
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.io.text.number_format import capitalize_first, format_number
from polyfed.core.io.values.number_checks import is_number
from polyfed.report.data.predictions import GroupPredictions
from polyfed.report.data.score_format import ScoreFormat
from polyfed.report.data.small_counts import format_count_of_rows
from polyfed.report.data.subgroup_columns import check_subgroup_column
from polyfed.report.page.charts.forest_plot import ForestRow, IntervalMark, svg_forest_plot
from polyfed.report.page.charts.svg_charts import COLOUR_COUNT
from polyfed.report.page.elements import html_dropdown_panels, html_figure, html_legend, html_paragraph, html_table

ScoreInterval = tuple[float, float, float] | None
_GROUPS = 12  # of a column; further values are taken together
_NUMBERS = 8  # different numbers from which a column is divided into quarters
_SITES = 8  # sites up to which each has groups of its own
_UNKNOWN = "not known"
_NOTHING = (math.nan, math.nan, math.nan)


@final
@dataclass(frozen=True, eq=False)
class Subgroup:
    """Holds a subgroup's score by method as (value, low, high), and gains over training alone.

    None stands for a score that is not defined.

    Attributes:
        name: the value of the column.
        examples: how many.
        scores: by method.
        gains: by method, over training alone, positive where it is better.
    """

    name: str
    examples: int
    scores: dict[str, ScoreInterval]
    gains: dict[str, ScoreInterval]


def example_positions_by_group(column_values: Sequence[Any]) -> dict[str, list[int]]:
    """Groups examples by their values in a column, and returns {group's name: positions of its examples}.

    A column with many different numbers is divided into quarters; rare values of a long list form one group.

    Missing values are the last group.

    >>> example_positions_by_group(["f", "m", None, "f"])
    {'f': [0, 3], 'm': [1], 'not known': [2]}
    >>> list(example_positions_by_group([30, 40, 50, 60, 70, 80, 90, 100, 110]))
    ['30 to 50', '51 to 70', '71 to 90', '91 to 110']
    >>> list(example_positions_by_group(["from 100", "9.5 to below 100", "below 9.5", "grade 3"]))
    ['grade 3', 'below 9.5', '9.5 to below 100', 'from 100']
    """
    value_by_row = {k: v for k, v in enumerate(column_values) if v is not None and v == v and v != ""}
    numbers = all(map(is_number, value_by_row.values()))
    groups: dict[str, list[int]] = {}
    if numbers and len(set(value_by_row.values())) > _NUMBERS:
        groups = _rows_by_quartile(value_by_row)
    else:
        frequent = {v for v, _ in Counter(value_by_row.values()).most_common(_GROUPS)}
        order = sorted(frequent) if numbers else sorted(frequent, key=_order_of_text)
        groups = {str(v): [k for k, value in value_by_row.items() if value == v] for v in order}
        if rare_rows := [k for k, v in value_by_row.items() if v not in frequent]:
            groups["all other values"] = rare_rows
    if missing := [k for k in range(len(column_values)) if k not in value_by_row]:
        groups[_UNKNOWN] = missing
    return groups


def _order_of_text(value: Any) -> tuple[float, int, str]:
    """Returns a key that sorts texts by their numbers: "below 50", "50 to below 65", "from 65"."""
    ends = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", str(value))]
    return max(ends, default=math.inf), -len(ends), str(value)


def _rows_by_quartile(value_by_row: dict[int, Any]) -> dict[str, list[int]]:
    values = np.array([float(v) for v in value_by_row.values()])
    cuts = np.unique(np.quantile(values, [0.25, 0.5, 0.75], method="lower"))
    at = np.searchsorted(cuts, values, side="left")  # a cut belongs to the group below it
    all_integers = bool((values == np.round(values)).all())
    groups = {}
    for group in np.unique(at):
        low = float(values.min() if group == 0 else cuts[group - 1])
        high = float(cuts[group] if group < len(cuts) else values.max())
        ends = (
            f"{low + (group > 0):.0f} to {high:.0f}"
            if all_integers
            else _quartile_label(low, high, group == 0, group == len(cuts))
        )
        groups[ends] = [k for k, quartile in zip(value_by_row, at, strict=True) if quartile == group]
    return groups


def _quartile_label(low: float, high: float, is_first: bool, is_last: bool) -> str:
    """Returns a short label for a quarter of a column of fractional numbers; the chart has little room."""
    return f"up to {high:.4g}" if is_first else f"above {low:.4g}" if is_last else f"{low:.4g} to {high:.4g}"


def score_subgroups(
    predictions: GroupPredictions, column: str, clients: Sequence[str], metric: Metric, level: float
) -> list[Subgroup]:
    """Computes scores and gains over training alone by a column's values, first of all examples.

    Args:
        predictions: the predictions. Where seeds divide or order the data in another way, those of the first seed.
        column: of the examples.
        clients: whose test examples are taken together, each with its own network.
        metric: the score.
        level: of the intervals.
    """
    seeds = predictions.seeds if predictions.same_order else predictions.seeds[:1]
    tables = predictions.prediction_tables
    targets = torch.cat([tables[predictions.methods[0], seeds[0], c].targets for c in clients])
    outputs = {
        m: [torch.cat([tables[m, seed, c].outputs for c in clients]) for seed in seeds]
        for m in leader_and_local_labels(predictions)
    }
    rows_by_name = {
        "all": list(range(len(targets))),
        **example_positions_by_group(predictions.column_values(column, clients, seeds[0])),
    }
    units = predictions.groups(clients, seeds[0])
    return [
        _score_subgroup(name, rows, outputs, targets, units, predictions.local_label, metric, level)
        for name, rows in rows_by_name.items()
    ]


def leader_and_local_labels(predictions: GroupPredictions) -> list[str]:
    """Returns the labels of the best method and, if it was run, training alone.

    Intervals of more methods would take long.
    """
    first, reference = predictions.methods[0], predictions.local_label
    return [first] if reference in (None, first) else [first, str(reference)]


def _score_subgroup(
    name: str, rows: Sequence[int], outputs: dict[str, list[Tensor]], targets: Tensor,
    units: NDArray[np.int64] | None, local_label: str | None, metric: Metric, level: float,
) -> Subgroup:  # fmt: skip
    row_indices = torch.tensor(rows, dtype=torch.int64)
    groups = None if units is None else units[rows]
    group_outputs = {
        method: [seed_outputs[row_indices] for seed_outputs in by_seed] for method, by_seed in outputs.items()
    }
    scores = {
        m: _clip_estimate(
            mean_score_with_interval(metric, method_outputs, targets[row_indices], level, groups), metric, 0.0
        )
        for m, method_outputs in group_outputs.items()
    }
    gains = {
        m: _clip_estimate(
            mean_gain_with_interval(
                metric, method_outputs, group_outputs[local_label], targets[row_indices], level, groups
            ),
            metric,
            -1.0,
        )
        for m, method_outputs in group_outputs.items()
        if local_label is not None and m != local_label
    }
    return Subgroup(name, len(rows), scores, gains)


def _clip_estimate(estimate: ScoreInterval, metric: Metric, lowest: float) -> ScoreInterval:
    """Clips a score and its interval to the range that the metric can have."""
    if estimate is None or not math.isfinite(estimate[0]):
        return None
    if not metric.is_from_zero_to_one:
        return estimate
    value, low, high = estimate
    return value, max(low, lowest), min(high, 1.0)


def html_subgroup_scores(
    predictions: GroupPredictions, column: str, score_format: ScoreFormat, level: float, key: str
) -> Markup:
    """Renders the subgroups' scores as chart and table, for all sites and, if few, each.

    Raises:
        UserError: there is no such column.
    """
    check_subgroup_column(column, predictions.column_names())
    try:
        (metric,) = resolve_metrics([score_format.name], predictions.task)
    except UserError as error:
        return html_paragraph(f"No subgroups: {error}.")
    panels = {
        "All sites": _html_subgroup_panel(
            predictions, column, predictions.clients, metric, score_format, level, f"{key}-all"
        )
    }
    if 1 < len(predictions.clients) <= _SITES and predictions.same_clients:
        for k, client in enumerate(predictions.clients):
            panels[client] = _html_subgroup_panel(
                predictions, column, [client], metric, score_format, level, f"{key}-{k}"
            )
    return html_dropdown_panels(f"{key}-site", "Site", panels)


def _html_subgroup_panel(
    predictions: GroupPredictions,
    column: str,
    clients: Sequence[str],
    metric: Metric,
    score_format: ScoreFormat,
    level: float,
    key: str,
) -> Markup:
    groups = score_subgroups(predictions, column, clients, metric, level)
    method_names = leader_and_local_labels(predictions)
    styles = {m: 2 * COLOUR_COUNT - 1 if m == predictions.local_label else 0 for m in method_names}
    rows = [
        ForestRow(
            f"{group.name} ({format_count_of_rows(group.examples)})",
            tuple(IntervalMark(m, *(group.scores[m] or _NOTHING), styles[m]) for m in method_names),
        )
        for group in groups
    ]
    heading = f"{capitalize_first(score_format.label)} by {column}"
    chart = svg_forest_plot(
        rows,
        key=key,
        title=heading,
        x_label=f"{score_format.label}, {100 * level:g} % interval",
        unit=score_format.unit,
    )
    squares = f"; squares: {predictions.local_label}" if predictions.local_label in method_names[1:] else ""
    examples_text = "the test examples of this site" if len(clients) == 1 and len(predictions.clients) > 1 else (
        "the test examples of all sites together, each with its own site's network")  # fmt: skip
    caption = f"{heading}: {examples_text}; in brackets how many. Points: {method_names[0]}{squares}; lines: "
    caption += f"{100 * level:g} % intervals. "
    if not predictions.same_clients:
        caption += f"Each seed divides the data in another way; these are those of seed {predictions.seeds[0]}. "
    elif not predictions.same_order:
        caption += f"These are the networks of the first of {len(predictions.seeds)} repeats of the folds. "
    elif len(predictions.seeds) > 1:
        caption += f"Means over {len(predictions.seeds)} seeds. "
    caption += (
        "Over all sites together the score is not the mean of the sites' scores. Where groups are small, differences "
    )
    caption += "between them may be chance; no correction is made for looking at several."
    columns = [column, "test examples"]
    for method in method_names:
        columns += [f"{method} {score_format.label}", "interval"]
        columns += (
            [f"gain of {method}", "interval"] if method != predictions.local_label and predictions.local_label else []
        )
    cells = [
        [group.name, format_count_of_rows(group.examples), *_table_cells(group, predictions, score_format)]
        for group in groups
    ]
    bars = html_legend(method_names, [styles[m] for m in method_names])
    return html_figure(chart + bars, caption) + html_table(
        f"{capitalize_first(score_format.label)} and gain over training alone by {column}", columns, cells
    )


def _table_cells(group: Subgroup, predictions: GroupPredictions, score_format: ScoreFormat) -> list[str]:
    cells = []
    for method in leader_and_local_labels(predictions):
        score = group.scores[method]
        cells += (
            ["–", "–"]
            if score is None
            else [
                format_number(score[0], score_format.unit),
                _format_interval(
                    format_number(score[1], score_format.unit),
                    format_number(score[2], score_format.unit),
                    f" {score_format.unit}",
                ),
            ]
        )
        if method != predictions.local_label and predictions.local_label:
            gain = group.gains.get(method)
            cells += (
                ["–", "–"]
                if gain is None
                else [
                    score_format.format_signed(gain[0]),
                    _format_interval(
                        score_format.format_signed(gain[1]), score_format.format_signed(gain[2]), " points"
                    ),
                ]
            )
    return cells


def _format_interval(low: str, high: str, unit: str) -> str:
    """Returns an interval as text, with its unit written once."""
    return f"{low.removesuffix(unit)} to {high}"
