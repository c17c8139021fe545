"""Renders the parts of the page's section on a group of comparable runs: methods, learning curves, gains and scores of
clients, and class counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from markupsafe import Markup

from polyfed.core.io.text.number_format import (
    capitalize_first,
    count_with_noun,
    format_number,
    format_number_without_percent_sign,
    format_three_significant_digits,
    join_with_and,
)
from polyfed.report.data.predictions import GroupPredictions, methods_by_importance
from polyfed.report.data.run_groups import MethodRuns, RunGroup
from polyfed.report.data.run_records import mean_of_defined
from polyfed.report.data.score_format import ScoreFormat
from polyfed.report.data.small_counts import format_count_of_rows, format_counts_of_parts
from polyfed.report.page.advice.answer_table import name_of_rival
from polyfed.report.page.charts.svg_charts import (
    COLOUR_COUNT,
    ChartBar,
    ChartLine,
    svg_bar_chart,
    svg_heat_map,
    svg_line_chart,
)
from polyfed.report.page.elements import html_dropdown_panels, html_figure, html_paragraph, html_table, render_template

_AXES = {
    "rounds": ("rounds", "rounds"),
    "megabytes": ("MB", "MB up and down, all sites (1 MB = 2²⁰ bytes)"),
    "seconds": ("seconds", "seconds of sites and server"),
}
_OPEN = 12  # up to this number of clients their table is open at first
_SEEDS = 6  # seeds whose classes are shown
_BARS = 400  # gains in a chart and in a table
_CELLS = 5000  # cells of a table of classes


@final
@dataclass(frozen=True, eq=False)
class PageDetails:
    """Holds what the page shows of a group besides scores: class counts, predictions, panels.

    Attributes:
        class_counts: by seed, the number of training examples per class of each client.
        class_names: one name per class.
        class_note: a sentence on the class counts, or why there are none.
        method_views: by heading and method, the panels that methods add.
        predictions: predictions of the test examples; None without any.
        predictions_note: a sentence that says why there are none; may be empty.
        subgroup_columns: columns of the test examples by whose values the page has scores.
        panels: further panels of the group by heading: look at the data, scores of every model at every site, audits.
        data_warnings: sentences on the sites' data that can change an answer, the most serious first.
    """

    class_counts: Mapping[int, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    class_names: Sequence[str] = ()
    class_note: str = ""
    method_views: Mapping[str, Mapping[str, Markup]] = field(default_factory=dict)
    predictions: GroupPredictions | None = None
    predictions_note: str = ""
    subgroup_columns: Sequence[str] = ()
    panels: Mapping[str, Markup] = field(default_factory=dict)
    data_warnings: Sequence[str] = ()


def html_methods_table(run_group: RunGroup) -> Markup:
    """Renders one row per method, with the cost of reaching a comparison's target score, if it has one."""
    unit = run_group.score_format.unit
    several_seeds = len(run_group.seeds) > 1
    is_comparison = bool(run_group.comparison_results)
    columns = ["method", run_group.score_format.mean_label]
    compared_ends = is_comparison and any(method.statistics.get("interval") for method in run_group.methods)
    level = f"{100 * float(run_group.comparison_results.get('level', 0.95)):g} % interval"
    if several_seeds or compared_ends:
        columns.append(level if is_comparison else f"lowest to highest {run_group.repeat}")
    columns += ["worst site", "10th percentile", "90th percentile"]
    columns += [f"gain{', points' if unit else ''}", "better / worse"] if run_group.local_method else []
    columns += ["p (training alone)", "p (best)"] if is_comparison and run_group.local_method else []
    columns += ["MB", "seconds", "rounds"]
    rows, worst = [], 0 if run_group.score_format.higher_is_better else 100
    for method in sorted(run_group.methods, key=run_group.ranking_key, reverse=True):
        scores = [value for value in run_group.mean_score_by_participant(method).values() if not math.isnan(value)]
        counted_runs = run_group.runs_of_common_seeds_or_all(method)
        all_scores = [[score for score in run.score_by_client.values() if score is not None] for run in counted_runs]
        finals = [defined_scores for defined_scores in all_scores if defined_scores]
        row = [run_group.name_on_page(method.label), format_number(run_group.mean_score(method), unit)]
        if several_seeds or compared_ends:
            seeds = [mean_of_defined(defined_scores) for defined_scores in finals]
            ends = method.statistics.get("interval") if is_comparison else (min(seeds), max(seeds)) if seeds else None
            row.append(f"{format_number(ends[0], unit)} to {format_number(ends[1], unit)}" if ends and scores else "–")
        row += [
            format_number(
                _stored_statistic(
                    method,
                    name,
                    mean_of_defined([float(np.percentile(defined_scores, q)) for defined_scores in finals]),
                ),
                unit,
            )
            for name, q in (("worst", worst), ("p10", 10), ("p90", 90))
        ]
        if run_group.local_method:
            gains = run_group.gains_over_local(method)
            gain = _stored_statistic(method, "gain", mean_of_defined([gain.mean for gain in gains]))
            row.append(format_number_without_percent_sign(gain, unit, signed=True))
            ups, downs = (sum(sign * gain.mean > 0 for gain in gains) for sign in (1, -1))
            row.append(f"{ups} / {downs}" if gains else "–")
            if is_comparison:
                p_values = [method.statistics.get(name) for name in ("p_reference", "p_best")]
                row += ["–" if p_value is None else f"{float(p_value):.2g}" for p_value in p_values]
        costs = [run.cost_until_scored_round for run in method.runs]
        rounds = sorted({run.scored_round for run in method.runs})
        row += [
            format_three_significant_digits(mean_of_defined([moved for moved, _ in costs])),
            format_three_significant_digits(mean_of_defined([seconds for _, seconds in costs])),
        ]
        rows.append([*row, str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"])
    target, target_rows = _cost_to_target(run_group)
    return render_template(
        "methods_table",
        caption=_methods_table_caption(run_group, is_comparison=is_comparison),
        columns=columns,
        rows=rows,
        target=target,
        target_rows=target_rows,
        repeat=run_group.repeat,
    )


def _methods_table_caption(run_group: RunGroup, *, is_comparison: bool) -> str:
    caption = "Methods, best mean first; MB are those of all sites, up and down"
    if run_group.local_method:
        caption += "; gain over training alone"
        caption += "; p, corrected for the number of methods, against it and against the best" if is_comparison else ""
    if set(run_group.common_seeds) < set(run_group.seeds) and not is_comparison:
        caption += (
            f"; scores of the seeds that all have ({join_with_and(run_group.common_seeds)})"
            if run_group.common_seeds
            else ("; each method has scores of other seeds")
        )
    return caption


def _cost_to_target(run_group: RunGroup) -> tuple[str, list[list[str]]]:
    """Returns a sentence on the target score (empty without one), and each method's cost of reaching it."""
    target = run_group.comparison_results.get("target", {})
    if target.get("score") is None:
        return "", []
    rows = []
    for label, method in run_group.comparison_results["methods"].items():
        target_cost = method["statistics"]["to_target"]
        rounds, moved, seconds = (
            math.nan if target_cost[name] is None else target_cost[name] for name in ("round", "bytes", "seconds")
        )
        reached = f"{target_cost['reached']} of {len(method['runs'])}"
        rows.append(
            [
                run_group.name_on_page(label),
                reached,
                format_three_significant_digits(rounds),
                format_three_significant_digits(moved / 2**20),
                format_three_significant_digits(seconds),
            ]
        )
    return f"{format_number(target['score'], run_group.score_format.unit)} ({target['sentence']})", rows


def html_learning_curves(run_group: RunGroup, key: str, script_curves_by_key: dict[str, Any]) -> Markup:
    """Renders mean scores against rounds, megabytes and seconds, and adds them to `script_curves_by_key`.

    Args:
        run_group: the group.
        key: prefix of ids on the page.
        script_curves_by_key: gets the curves as numbers for the script, under `key`.
    """
    unit, name = run_group.score_format.unit, run_group.score_format.mean_label
    methods = run_group.methods
    panels = {}
    for axis, (short, label) in _AXES.items():
        chart_lines = []
        for method in methods:
            curve = method.learning_curve_columns
            x, mean, low, high = (curve[column] for column in (axis, "mean", "low", "high"))
            label_on_page, style = run_group.name_on_page(method.label), _line_style(run_group, method)
            chart_lines.append(ChartLine(label_on_page, x, mean, low, high, style))
        title = f"{capitalize_first(name)} over sites against {short}"
        chart = svg_line_chart(chart_lines, key=f"{key}-{axis}", title=title, x_label=label, y_label=name, unit=unit,
                               integer_x=axis == "rounds")  # fmt: skip
        panels[short] = render_template("line_panel", key=key, axis=axis, title=title, chart=chart)
    script_curves_by_key[key] = {
        "unit": unit,
        "up": run_group.score_format.higher_is_better,
        "lines": [{**_curve_for_script(method), "label": run_group.name_on_page(method.label)} for method in methods],
    }
    columns = ["method", "round", "MB", "seconds", name]
    columns += [f"lowest to highest {run_group.repeat}"] if len(run_group.seeds) > 1 else []
    caption = f"{capitalize_first(name)} over sites, after each round that was evaluated."
    if len(run_group.seeds) > 1:
        repeat, seed_counts = run_group.repeat, {len(method.runs) for method in methods}
        seeds = f"{max(seed_counts)} {repeat}s" if len(seed_counts) == 1 else f"the {repeat}s that a method has"
        caption += f" Lines: means of {seeds}; bands: from the lowest to the highest of them."
        caption += " Tables score the folds of a site together, so their values differ." if repeat == "fold" else ""
    if any(not any(method.learning_curve_columns["megabytes"]) for method in methods) and len(methods) > 1:
        caption += " Against MB, a method that sends nothing is a dotted line at its last value."
    lines = [(run_group.name_on_page(method.label), _line_style(run_group, method)) for method in methods]
    return render_template(
        "learning_curves",
        key=key,
        panels=panels,
        lines=lines,
        caption=caption,
        columns=columns,
        rows=[row for method in methods for row in _learning_curve_rows(run_group, method)],
    )


def _learning_curve_rows(run_group: RunGroup, method: MethodRuns) -> list[list[str]]:
    """Returns the rows of a method's learning curve in the table, at most as many as fit."""
    rows, c, unit = [], method.learning_curve_columns, run_group.score_format.unit
    for k in _evenly_spaced(len(c["rounds"])):
        row = [run_group.name_on_page(method.label), f"{c['rounds'][k]:.0f}"]
        row += [format_three_significant_digits(c[column][k]) for column in ("megabytes", "seconds")]
        row.append(format_number(c["mean"][k], unit))
        if len(run_group.seeds) > 1:
            row.append(f"{format_number(c['low'][k], unit)} to {format_number(c['high'][k], unit)}")
        rows.append(row)
    return rows


def html_gains_over_local(run_group: RunGroup, key: str) -> Markup:
    """Renders how much better each client scores than when it trains on its own data only, one chart per method."""
    unit, local_method, repeat = run_group.score_format.unit, run_group.local_method, run_group.repeat
    if local_method is None:
        reason = "has no score here" if run_group.comparison_results else "was not run"
        return html_paragraph(f"Training alone {reason}, so that there is nothing to compare with.")
    panels = {}
    for k, method in enumerate(method for method in run_group.methods if method is not local_method):
        gains = run_group.gains_over_local(method)
        if not gains:
            panels[method.label] = html_paragraph(f"No site of {method.label} has a score both ways.")
            continue
        drawn_gains = [gains[k] for k in _evenly_spaced(len(gains), _BARS)]
        bars = [ChartBar(gain.client, gain.mean, gain.low, gain.high) for gain in drawn_gains]
        axis_unit = f"{'points of' if unit == '%' else 'gain in'} {run_group.score_format.label}"
        chart = svg_bar_chart(bars, key=f"{key}-g{k}", title=f"Gain of {method.label} over training alone, by site",
                          x_label=axis_unit, unit=unit, signed=True)  # fmt: skip
        gain_count, loss_count = sum(g.mean > 0 for g in gains), sum(g.mean < 0 for g in gains)
        caption = (
            f"{method.label} against training alone, in these test examples: better at {gain_count}, worse at {loss_count}, "
            f"the same at {len(gains) - gain_count - loss_count} of {count_with_noun(len(gains), 'site')}; {axis_unit}."
        )
        caption += "" if run_group.score_format.higher_is_better else " A positive gain is better."
        if any(bar.low != bar.high for bar in bars):
            caption += f" Thin lines: from the lowest to the highest {repeat}."
        caption += f" Drawn are {len(drawn_gains)} of them, evenly." if len(drawn_gains) < len(gains) else ""
        rows = [
            [g.client, *(format_number_without_percent_sign(v, unit, signed=True) for v in (g.mean, g.low, g.high))]
            for g in drawn_gains
        ]
        numbers_html = html_table(
            f"Gain of {method.label}, {axis_unit}", ["site", "mean", f"lowest {repeat}", f"highest {repeat}"], rows
        )
        panels[method.label] = html_figure(chart, caption, numbers_html)
    if not panels:
        return html_paragraph("Only training alone was run.")
    best_first = sorted(
        panels, key=lambda label: -next(run_group.ranking_key(x) for x in run_group.methods if x.label == label)
    )
    return html_dropdown_panels(f"{key}-gain", "Method", {label: panels[label] for label in best_first})


def html_client_scores(run_group: RunGroup) -> Markup:
    """Renders a table of scores with a row per client and a column per method; the best score of each row is bold."""
    unit = run_group.score_format.unit
    order = sorted(
        run_group.methods, key=lambda method: (method is not run_group.local_method, -run_group.ranking_key(method))
    )
    scores = [run_group.mean_score_by_participant(method) for method in order]
    names = sorted({name for participant_scores in scores for name in participant_scores})
    references = {
        name: entry
        for name, entry in (run_group.comparison_results.get("references") or {}).items()
        if entry.get("alone", name != "pooled") or len(run_group.seeds) == 1  # else scored with fewer test examples
    }
    rows, bold = [], []
    for name in names:
        values = [participant_scores.get(name, math.nan) for participant_scores in scores]
        shown_values = [*values, *(reference.get("scores", {}).get(name) for reference in references.values())]
        rows.append([name, *(format_number(value, unit) for value in shown_values)])
        bold.append(_best_columns(values, run_group.score_format))
    means = [run_group.mean_score(method) for method in order]
    rows.append(
        [
            "mean",
            *(format_number(v, unit) for v in (*means, *(reference.get("mean") for reference in references.values()))),
        ]
    )
    bold.append(_best_columns(means, run_group.score_format) if run_group.common_seeds else set())
    return render_template(
        "client_scores",
        opened=len(names) <= _OPEN,
        clients=count_with_noun(len(names), "site"),
        caption=f"{capitalize_first(run_group.score_format.label)} of each site; "
        f"{'of the methods, ' if references else ''}the {run_group.score_format.highest_or_lowest} of a row is bold",
        columns=[
            "site",
            *(run_group.name_on_page(x.label) for x in order),
            *(_reference_label(name, entry, run_group) for name, entry in references.items()),
        ],
        rows=rows,
        bold=bold,
    )


def _reference_label(name: str, entry: Mapping[str, Any], run_group: RunGroup) -> str:
    is_alone = entry.get("alone", name != "pooled")
    return name_of_rival(name, run_group) if is_alone else f"{name.replace('_', ' ')} (for reference)"


def html_class_counts(details: PageDetails, key: str) -> Markup:
    """Renders each client's number of training examples per class, one chart per seed."""
    if not details.class_counts:
        return html_paragraph(details.class_note)
    panels = {}
    for seed in sorted(details.class_counts)[:_SEEDS]:
        counts = details.class_counts[seed]
        clients = sorted(counts)
        values = np.array([counts[client] for client in clients], np.float64)
        shown_counts = [format_counts_of_parts(by_class) for by_class in values.tolist()]
        drawn_counts = np.array([[float(text.strip("<≥")) for text in row] for row in shown_counts])
        title = "Training examples of each class that each site has"
        chart = svg_heat_map(drawn_counts, clients, details.class_names, key=f"{key}-c{seed}", title=title,
                         x_label="class", y_label="site", texts=shown_counts)  # fmt: skip
        sizes = values.sum(axis=1)
        smallest, largest = format_count_of_rows(sizes.min()), format_count_of_rows(sizes.max())
        caption = (
            f"Training examples by site and class{f', seed {seed}' if len(details.class_counts) > 1 else ''}; a site "
            f"has {smallest}{f' to {largest}' if smallest != largest else ''}. {details.class_note}"
        )
        client_positions = [k for k in range(len(clients)) if (k + 1) * values.shape[1] <= _CELLS]
        rows = [[clients[k], *shown_counts[k], format_count_of_rows(values[k].sum())] for k in client_positions]
        table_caption = "Training examples" + (
            f" of the first {len(client_positions)} sites" if len(client_positions) < len(clients) else ""
        )
        numbers_html = html_table(table_caption, ["site", *details.class_names, "all"], rows)
        panels[f"seed {seed}"] = html_figure(chart, caption.strip(), numbers_html)
    return html_dropdown_panels(f"{key}-class", "Seed", panels)


def _stored_statistic(method: MethodRuns, name: str, default: float) -> float:
    """Returns a method's stored statistic, NaN if undefined, or `default` without a finished comparison."""
    value = method.statistics.get(name, default)
    return math.nan if value is None else float(value)


def _line_style(run_group: RunGroup, method: MethodRuns) -> int:
    """Returns the style number of a method's line in all figures; training alone is grey and dashed."""
    if method is run_group.local_method:
        return 2 * COLOUR_COUNT - 1
    position = [x for x in methods_by_importance(run_group) if x is not run_group.local_method].index(method)
    return position % (COLOUR_COUNT - 1) + position // (COLOUR_COUNT - 1) * COLOUR_COUNT


def _curve_for_script(method: MethodRuns) -> dict[str, Any]:
    """Returns a learning curve for the page's script: rounded numbers, null where undefined."""
    table = {
        name: [None if math.isnan(v) else float(f"{v:.5g}") for v in values]
        for name, values in method.learning_curve_columns.items()
    }
    return {**table, "rounds": [int(v) for v in method.learning_curve_columns["rounds"]]}


def _evenly_spaced(size: int, max_count: int = 30) -> list[int]:
    """Returns at most `max_count` evenly spaced positions of a sequence of length `size`, the last among them."""
    return sorted({round(k) for k in np.linspace(0, size - 1, min(size, max_count))}) if size else []


def _best_columns(values: Sequence[float], score_format: ScoreFormat) -> set[int]:
    """Returns the columns with a row's best value, where column 0 is its name; empty if all are equal."""
    defined = [value for value in values if not math.isnan(value)]
    if len(defined) < 2 or max(defined) == min(defined):
        return set()
    return {k for k, value in enumerate(values, 1) if value == score_format.best_value(defined)}
