"""Renders ROC curves, calibration curves and confusion tables from the predictions for the test examples.

The first choice, all sites together, is drawn here; `curves.js` draws the others from the same numbers.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray

from polyfed.comparison.statistics.score_intervals import mean_score_with_interval
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.io.text.number_format import capitalize_first, format_count
from polyfed.data.look.counts import MIN_COUNT
from polyfed.report.data.binary_stats import (
    FALSE_ALARM_GRID,
    BinaryPredictions,
    auc_interval,
    calibration_points,
    count_true_and_false_positives,
    roc_curve_and_area,
    z_of_confidence_level,
)
from polyfed.report.data.predictions import BinaryClassOutput, GroupPredictions
from polyfed.report.page.charts.svg_charts import CHART_WIDTH, COLOUR_COUNT, svg_element_with_title, svg_text
from polyfed.report.page.elements import html_paragraph, render_template
from polyfed.report.page.predictions.confusion import html_confusion_matrix, html_confusion_tables_at_threshold

ALL_SITES = "All sites"
_SITES = 40  # that a reader can choose among
_CELLS = 600  # sites x methods x classes
_CLASSES = 10
_MATRIX = 20  # classes up to which all counts are shown
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 50, 22, 10, 44, 384  # of the frame, in units of all charts
LOCAL_STYLE = 2 * COLOUR_COUNT - 1  # the style of training alone, here as in all charts
_SHARE_DIGITS = 3  # digits after the point of a share
NO_VERDICT = (
    "An AUC over the test examples of all sites together is not an answer: only the answers above say whether a method is "
    "better for a site."
)


def performance_numbers_for_script(predictions: GroupPredictions, level: float) -> dict[str, Any]:
    """Computes the page script's numbers of every curve and table that can be selected.

    Returns:
        `sites`, `methods`, `classes`: names. `reference`: position of training alone, or -1. `cells`: by site, class and
        method, from `binary_performance`. `matrices`: by site and method, for more than two classes; else null.
    """
    questions = predictions.binary_questions[:_CLASSES]
    sites = [
        (ALL_SITES, predictions.clients),
        *((client, (client,)) for client in _selectable_sites(predictions, questions)),
    ]
    cells = [
        [[binary_performance(predictions, m, clients, p, level) for m in predictions.methods] for p in questions]
        for _, clients in sites
    ]
    matrices = None
    if predictions.task.one_class_per_example and not predictions.is_binary and len(predictions.class_names) <= _MATRIX:
        matrices = [
            [_mean_confusion_matrix(predictions, m, clients) for m in predictions.methods] for _, clients in sites
        ]
    local_position = predictions.methods.index(predictions.local_label) if predictions.local_label else -1
    names = ["training alone" if method == predictions.local_label else method for method in predictions.methods]
    return {
        "sites": [name for name, _ in sites], "methods": names, "reference": local_position,
        "classes": [question.name for question in questions], "names": list(predictions.class_names), "cells": cells,
        "matrices": matrices, "level": level, "z": round(z_of_confidence_level(level), 6), "seeds": len(predictions.seeds),
        "others": predictions.class_names[0] if predictions.is_binary else "",
        "styles": [
            LOCAL_STYLE if k == local_position else k - (k > local_position >= 0) for k in range(len(predictions.methods))
        ],
    }  # fmt: skip


def binary_performance(
    predictions: GroupPredictions, method: str, clients: Sequence[str], question: BinaryClassOutput, level: float
) -> dict[str, Any] | None:
    """Computes a method's ROC and calibration curves and counts for a question; None without examples.

    Returns:
        None without test examples; else `n`, `yes`: numbers of examples and of positives, means over seeds. `area`: AUC with
        its interval, or null; `seeds`: its lowest and highest. `roc`: sensitivity at each of `FALSE_ALARM_GRID`, and `low`
        and `high` where seeds differ. `groups`: the calibration curve. `hits`, `alarms`: true and false positives by
        threshold, means over seeds; missing where the most probable of several classes decides. `units`: groups
        (patients, say)
        per example, where examples have groups: intervals count these.
    """
    parts_and_units = [
        (part, predictions.groups_of_predictions(method, seed, clients))
        for seed in predictions.seeds
        if len((part := predictions.binary_predictions(method, seed, clients, question))[0])
    ]
    if not parts_and_units:
        return None
    parts = [part for part, _ in parts_and_units]
    units_per_example = float(
        np.mean([1.0 if units is None else len(np.unique(units)) / len(units) for _, units in parts_and_units])
    )
    size = float(np.mean([len(p) for _, p in parts]))
    positives = float(np.mean([p.sum() for _, p in parts]))
    performance: dict[str, Any] = {"n": round(size, 1), "yes": round(positives, 1), "area": None, "roc": None}
    if curves_and_areas := [pair for part in parts if (pair := roc_curve_and_area(part)) is not None]:
        heights = np.array([curve for curve, _ in curves_and_areas])
        areas = [area for _, area in curves_and_areas]
        performance["roc"] = _round_values(heights.mean(axis=0))
        if len(curves_and_areas) > 1 and np.ptp(heights, axis=0).max() > 0.0005:
            performance |= {"low": _round_values(heights.min(axis=0)), "high": _round_values(heights.max(axis=0))}
        area = float(np.mean(areas))
        ends = auc_interval(area, positives, size - positives, level)
        if units_per_example < 1:
            ends = _auc_interval_of_groups(parts_and_units, level)
        performance["area"] = _round_values([area, *ends])
        performance["seeds"] = _round_values([min(areas), max(areas)])
    performance["groups"] = [
        _round_values([g.mean_probability, g.positive_share, g.low, g.high, g.examples])
        for g in calibration_points(parts, level, units_per_example)
    ]
    if units_per_example < 1:
        performance["units"] = _round_number(units_per_example, 4)
    if predictions.is_binary or not predictions.task.one_class_per_example:
        positives_by_part = [count_true_and_false_positives(part) for part in parts]
        performance |= {name: [_round_number(v) for v in np.mean([pair[k] for pair in positives_by_part], axis=0)]
                  for k, name in enumerate(("hits", "alarms"))}  # fmt: skip
    return performance


def _auc_interval_of_groups(
    parts_and_units: Sequence[tuple[BinaryPredictions, NDArray[np.int64] | None]], level: float
) -> tuple[float, float]:
    """Computes an AUC's interval over groups (patients, say), from the widest seed; (0, 1) for too few groups."""
    widest = (1.0, 0.0)
    for (score, positive), units in parts_and_units:
        outputs = torch.from_numpy(np.stack([-score, score], axis=1))
        interval = mean_score_with_interval(
            METRICS["auc"], [outputs], torch.from_numpy(positive.astype(np.int64)), level, groups=units
        )
        if interval is None:
            return 0.0, 1.0
        widest = min(widest[0], interval[1]), max(widest[1], interval[2])
    return max(0.0, widest[0]), min(1.0, widest[1])


def _mean_confusion_matrix(predictions: GroupPredictions, method: str, clients: Sequence[str]) -> list[list[float]]:
    matrix = np.mean([predictions.confusion_matrix(method, seed, clients) for seed in predictions.seeds], axis=0)
    return [[_round_number(v, _SHARE_DIGITS) for v in row] for row in matrix]


def _selectable_sites(predictions: GroupPredictions, questions: Sequence[BinaryClassOutput]) -> list[str]:
    """Returns the sites that a reader can select, in ascending order: those with the most test examples.

    Empty if an id is another client in each seed. Sites with fewer than `MIN_COUNT` examples of a class are left out: their
    curves and counts would tell single rows.
    """
    if not predictions.same_clients or len(predictions.clients) == 1:
        return []
    max_sites = min(_SITES, max(1, _CELLS // (len(predictions.methods) * max(len(questions), 1)) - 1))
    method, seed = predictions.methods[0], predictions.seeds[0]
    sizes = {}
    for client in predictions.clients:
        answers = [predictions.binary_predictions(method, seed, [client], question)[1] for question in questions]
        counts = [count for positive in answers for count in (positive.sum(), len(positive) - positive.sum())]
        if not any(0 < count < MIN_COUNT for count in counts):
            sizes[client] = len(predictions.prediction_tables[method, seed, client].targets)
    return sorted(sorted(sizes, key=lambda client: -sizes[client])[:max_sites])


def html_performance_section(predictions: GroupPredictions, level: float, key: str) -> Markup:
    """Renders ROC and calibration curves and confusion tables; one sentence for regression."""
    if not predictions.binary_questions:
        return html_paragraph(predictions.task.no_curves_reason)
    page_data = performance_numbers_for_script(predictions, level)
    shown_methods = [0, *([page_data["reference"]] if page_data["reference"] > 0 else [])]
    slots = [
        (page_data["cells"][0][0][m], page_data["methods"][m], page_data["styles"][m])
        for m in shown_methods
        if page_data["cells"][0][0][m] is not None
    ]
    matrices, seeds = page_data["matrices"], len(predictions.seeds)
    has_threshold = bool(slots) and "hits" in slots[0][0]
    names, matrix_names = page_data["methods"], page_data["names"]
    return render_template(
        "performance",
        key=key,
        data=page_data,
        class_label=capitalize_first(predictions.task.target_word),
        basis=_test_examples_sentence(page_data, page_data["cells"][0][0][0]),
        styles=[style for _, _, style in slots],
        roc=_roc_figure(slots, key, page_data, predictions),
        calibration=_calibration_figure(slots, key, page_data),
        threshold_tables=has_threshold
        and html_confusion_tables_at_threshold(
            [(performance, name) for performance, name, _ in slots], page_data["classes"][0], page_data["others"], level
        ),
        matrices=matrices and [html_confusion_matrix(matrices[0][m], names[m], matrix_names) for m in shown_methods],
        percent=f"{100 * level:g}",
        seeds_note=f" Counts are means over {predictions.counted_seeds} and may have decimals." if seeds > 1 else "",
        most_classes=_MATRIX,
        notes=_limit_notes(predictions, page_data),
    )


def _test_examples_sentence(page_data: dict[str, Any], performance: dict[str, Any] | None) -> str:
    if performance is None:
        return f"{page_data['sites'][0]}: no test examples."
    return (
        f"{page_data['sites'][0]}: {format_count(performance['n'])} test examples, "
        f"{format_count(performance['yes'])} of them {page_data['classes'][0]}."
    )


def _limit_notes(predictions: GroupPredictions, page_data: dict[str, Any]) -> list[str]:
    """Returns sentences that say what a reader cannot select on the page, and why."""
    notes = [NO_VERDICT, *predictions.notes]
    if not predictions.same_clients and len(predictions.clients) > 1:
        notes.append("Each seed divides the data in another way, so that a site cannot be chosen.")
    elif 1 < len(predictions.clients) >= len(page_data["sites"]):
        number = len(page_data["sites"]) - 1
        notes.append(
            f"The menu has {number} of {len(predictions.clients)} tested sites: those with the most test examples, and with "
            f"at least {MIN_COUNT} of each class, since smaller counts would tell single rows."
        )
    if len(predictions.binary_questions) > len(page_data["classes"]):
        notes.append(
            f"The menu has the first {len(page_data['classes'])} of {len(predictions.binary_questions)} classes."
        )
    return notes


# -- drawing ----------------------------------------------------------------------------------------------------------


def unit_square_point(x: float, y: float) -> str:
    """Converts the point (x, y) of the unit square to coordinates in the SVG drawing, as text.

    >>> unit_square_point(0, 0), unit_square_point(1, 1)
    ('50.0 340.0', '398.0 10.0')
    """
    return f"{LEFT + x * (CHART_WIDTH - LEFT - RIGHT):.1f} {HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM):.1f}"


def svg_unit_square(
    key: str, title: str, description: str, x_label: str, y_label: str, elements: Sequence[str], script_name: str = ""
) -> Markup:
    """Draws the frame of a chart whose axes both run from 0 to 100 %, with its diagonal and the given elements.

    The page's script finds the frame by `script_name`.
    """
    parts = []
    for k in range(6):
        share = k / 5
        x, y = (float(v) for v in unit_square_point(share, share).split())
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{CHART_WIDTH - RIGHT}M{x} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts += [
            svg_text(LEFT - 6, y + 4, f"{20 * k} %", "end"),
            svg_text(x, HEIGHT - BOTTOM + 16, f"{20 * k} %", "middle"),
        ]
    parts.append(f'<path class="diagonal" d="M{unit_square_point(0, 0)}L{unit_square_point(1, 1)}"/>')
    parts.append(svg_text((LEFT + CHART_WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle"))
    parts.append(svg_text(-(TOP + HEIGHT - BOTTOM) / 2, 11, y_label, "middle", rotated=True))
    attributes = f' data-frame="{script_name}"' if script_name else ""
    return svg_element_with_title(key, title, description, HEIGHT, [*parts, *elements], attributes)


def svg_roc_curve(performance: dict[str, Any], style: int, slot: int, threshold_index: int = 49) -> str:
    """Draws a ROC curve, its range over seeds, and a point at a threshold."""
    group = [f'<g data-slot="{slot}" class="s{style % COLOUR_COUNT} d{style // COLOUR_COUNT % 3}">']
    if performance["roc"] is not None:
        if "low" in performance:
            edge = [unit_square_point(x, y) for x, y in zip(FALSE_ALARM_GRID, performance["high"], strict=True)]
            edge += [
                unit_square_point(x, y) for x, y in zip(FALSE_ALARM_GRID[::-1], performance["low"][::-1], strict=True)
            ]
            group.append(f'<path class="band" d="M{"L".join(edge)}Z"/>')
        line = [
            unit_square_point(0, 0),
            *(unit_square_point(x, y) for x, y in zip(FALSE_ALARM_GRID, performance["roc"], strict=True)),
        ]
        group.append(f'<path class="line" d="M{"L".join(line)}"/>')
        if "hits" in performance:
            x, y = unit_square_point(
                performance["alarms"][threshold_index] / (performance["n"] - performance["yes"]),
                performance["hits"][threshold_index] / performance["yes"],
            ).split()
            group.append(f'<circle cx="{x}" cy="{y}" r="4.5"/>')
    return "".join([*group, "</g>"])


def describe_auc(name: str, performance: dict[str, Any], level: float) -> str:
    """Returns a method's AUC as text, with its confidence interval."""
    if performance["area"] is None:
        return f"{name}: no curve, since all test examples are of one class"
    area, low, high = performance["area"]
    return f"{name}: AUC {area:.3f} ({100 * level:g} % interval {low:.3f} to {high:.3f})"


PerformanceSlots = Sequence[tuple[dict[str, Any], str, int]]


def _roc_figure(
    slots: PerformanceSlots, key: str, page_data: dict[str, Any], predictions: GroupPredictions
) -> dict[str, Any]:
    """Builds the figure of the ROC curves for the template: the chart, its legend, caption and table."""
    lines = [svg_roc_curve(performance, style, k) for k, (performance, _, style) in enumerate(slots)]
    dot = " The dot is at the threshold chosen below." if any("hits" in slot[0] for slot in slots) else ""
    return {
        "chart": svg_unit_square(
            f"{key}-roc", "ROC curve", "Sensitivity against the false positive rate; numbers are below.",
            "false positive rate (1 − specificity)", "sensitivity", lines, "roc",
        ),
        "texts": [describe_auc(name, performance, page_data["level"]) for performance, name, _ in slots],
        "caption": f"ROC curve: sensitivity against the false positive rate at every threshold. The diagonal is chance. "
        f"{name_averaged_sites_and_seeds(predictions)}{dot} Intervals of AUC: {100 * page_data['level']:g} %, by the number "
        "of test examples (Newcombe).",
        "columns": ["method", *(f"sensitivity at {p} % specificity" for p in (95, 90, 80))],
        "rows": [[name, *(_sensitivity_at(performance, k) for k in (3, 6, 12))] for performance, name, _ in slots],
    }  # fmt: skip


def name_averaged_sites_and_seeds(predictions: GroupPredictions) -> str:
    """Returns sentences that name the sites and seeds over which a curve is averaged."""
    sentence = "All sites: their test examples together, each with its own site's network"
    sentence += ", which was not trained on it." if predictions.fold_of_rows else "."
    if len(predictions.seeds) == 1:
        return sentence if predictions.fold_of_rows else f"{sentence} One training (seed {predictions.seeds[0]})."
    return f"{sentence} Lines: means over {predictions.counted_seeds}; bands: lowest to highest."


def _sensitivity_at(performance: dict[str, Any], k: int) -> str:
    return "–" if performance["roc"] is None else f"{100 * performance['roc'][k]:.1f} %"


def _calibration_figure(slots: PerformanceSlots, key: str, page_data: dict[str, Any]) -> dict[str, Any]:
    """Builds the figure of the calibration curves for the template: the chart, its legend, caption and table."""
    groups = []
    for k, (performance, name, style) in enumerate(slots):
        inside = [f'<g data-slot="{k}" class="mark s{style % COLOUR_COUNT} d{style // COLOUR_COUNT % 3}">']
        if performance["groups"]:
            inside.append(
                f'<path class="line" d="M{"L".join(unit_square_point(g[0], g[1]) for g in performance["groups"])}"/>'
            )
        for predicted, observed, low, high, examples in performance["groups"]:
            x, y = unit_square_point(predicted, observed).split()
            shares = f"predicted {100 * predicted:.1f} %, observed {100 * observed:.1f} %"
            tooltip = f"{name}: {shares} of {format_count(examples)}"
            ends = f"M{unit_square_point(predicted, low)}L{unit_square_point(predicted, high)}"
            inside.append(f'<g data-t="{escape(tooltip)}"><path class="line thin" d="{ends}"/>'
                          f'<circle cx="{x}" cy="{y}" r="4"/></g>')  # fmt: skip
        groups.append("".join([*inside, "</g>"]))
    return {
        "chart": svg_unit_square(
            f"{key}-cal", "Calibration", "Observed share against predicted probability; numbers are below.",
            "predicted probability", "observed share", groups, "cal",
        ),
        "texts": [name for _, name, _ in slots],
        "caption": "Calibration: test examples in groups of equal size by predicted probability; on the diagonal a "
        f"predicted 30 % happens in 30 % of cases. Vertical lines: {100 * page_data['level']:g} % intervals (Wilson). "
        "Fewer than 20 test examples have no curve.",
        "columns": ["method", "predicted", "observed", "interval", "test examples"],
        "rows": [
            [name, f"{100 * predicted:.1f} %", f"{100 * observed:.1f} %", f"{100 * low:.1f} to {100 * high:.1f} %",
             format_count(examples)]
            for performance, name, _ in slots
            for predicted, observed, low, high, examples in performance["groups"]
        ],
    }  # fmt: skip


def _round_values(values: Any) -> list[float | None]:
    return [None if math.isnan(v) else round(float(v), _SHARE_DIGITS) + 0.0 for v in values]


def _round_number(value: float, digits: int = 1) -> float:
    result = round(float(value), digits)
    return int(result) if result == int(result) else result
