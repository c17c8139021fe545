"""Renders Kaplan-Meier curves of groups of test patients by predicted risk, with the numbers at risk."""

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from polyfed.core.io.text.number_format import join_with_and
from polyfed.report.data.predictions import GroupPredictions
from polyfed.report.data.small_counts import format_count_of_rows
from polyfed.report.page.charts.svg_charts import ChartLine, choose_axis_ticks, svg_line_chart
from polyfed.report.page.elements import html_dropdown_panels, html_figure, html_legend, html_paragraph, html_table
from polyfed.tasks.scores.survival_scores import (
    kaplan_meier,
    read_times_and_events,
    risk_of_outputs,
    value_of_step_curve,
)

HEADING = "Kaplan-Meier curves of risk groups"
_GROUP_NAMES = {2: ("lower risk", "higher risk"), 3: ("low risk", "middle risk", "high risk")}
_PATIENTS_FOR_THIRDS = 60  # fewer patients are divided into halves
_MOST_CLIENTS = 20  # that have panels of their own
Floats = NDArray[np.float64]


def html_survival_curves(predictions: GroupPredictions, key: str) -> Markup:
    """Renders each method's Kaplan-Meier curves by predicted risk, of all clients and of each.

    A client's patients are divided by the risk that the client's own network gives them, into thirds, or halves where there
    are few; in folds, the patients of each fold. Equal groups of all clients are then drawn together, since risks of
    different networks have no common scale.

    Args:
        predictions: of a survival task; the first seed is shown.
        key: for ids on the page.
    """
    seed = predictions.seeds[0]
    panels = {}
    for m, method in enumerate(predictions.methods):
        by_client = {}
        for client in predictions.clients:
            table = predictions.prediction_tables[method, seed, client]
            risk = risk_of_outputs(table.outputs)
            if np.isfinite(risk).all():
                fold = predictions.fold_of_rows.get((seed, client), np.zeros(len(risk), np.int64))
                by_client[client] = risk, *read_times_and_events(table.targets), fold
        if not by_client:
            continue
        num_groups = 3 if sum(len(risk) for risk, *_ in by_client.values()) >= _PATIENTS_FOR_THIRDS else 2
        choices = {"all sites": list(by_client)} | {
            client: [client] for client in list(by_client)[:_MOST_CLIENTS] if len(by_client) > 1
        }
        for k, (name, clients) in enumerate(choices.items()):
            parts = [by_client[client] for client in clients]
            groups = np.concatenate([_divide_folds_by_risk(risk, fold, num_groups) for risk, _, _, fold in parts])
            time, event = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
            panels[f"{method}: {name}"] = _html_chart(groups, num_groups, time, event, f"{key}-km{m}-{k}", name)
    if not panels:
        return html_paragraph("No risk is a finite number, so that there are no groups to draw.")
    seeds = (
        "" if len(predictions.seeds) == 1 else f" They are of the first (seed {seed}) of {predictions.counted_seeds}."
    )
    note = (
        "Test patients, divided by predicted risk within each site: a network that orders patients well has curves that "
        f"lie apart, high risk lowest. These curves do not test a difference; the scores above have intervals.{seeds}"
    )
    return html_paragraph(note) + html_dropdown_panels(f"{key}-km", "Method and site", panels)


def _divide_folds_by_risk(risk: Floats, fold: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    groups = np.zeros(len(risk), np.int64)
    for k in np.unique(fold):
        groups[fold == k] = divide_by_risk(risk[fold == k], num_groups)
    return groups


def divide_by_risk(risk: Floats, num_groups: int) -> NDArray[np.int64]:
    """Divides patients into equal groups by risk, 0 the lowest, equal risks by row.

    >>> divide_by_risk(np.array([0.5, 0.1, 0.9, 0.2]), 2)
    array([1, 0, 1, 0])
    """
    rank = np.argsort(np.argsort(risk, kind="stable"), kind="stable")
    return np.asarray(rank * num_groups // len(risk), dtype=np.int64)


def _html_chart(
    groups: NDArray[np.int64], num_groups: int, time: Floats, event: NDArray[np.bool_], key: str, name: str
) -> Markup:
    """Renders one chart with its legend and the table of numbers at risk."""
    labels = _GROUP_NAMES[num_groups]
    lines, rows, counts = [], [], []
    ticks = [tick for tick in choose_axis_ticks(0.0, float(time.max())) if 0 <= tick <= time.max()]
    for group, label in enumerate(labels):
        own_time, own_event = time[groups == group], event[groups == group]
        counts.append(f"{label} {format_count_of_rows(len(own_time))} ({format_count_of_rows(own_event.sum())} events)")
        if not len(own_time):
            continue
        x, y = _step_corners(own_time, own_event)
        lines.append(ChartLine(label, tuple(x), tuple(y), tuple(y), tuple(y), group))
        at = np.asarray(ticks, dtype=np.float64)
        survival = value_of_step_curve(*kaplan_meier(own_time, own_event), at)
        followed = [int((own_time >= tick).sum()) for tick in ticks]
        rows.append([f"{label}: at risk", *map(format_count_of_rows, followed)])
        rows.append(
            [
                f"{label}: surviving",
                *(f"{100 * s:.0f} %" if n else "–" for s, n in zip(survival, followed, strict=True)),
            ]
        )
    chart = svg_line_chart(
        lines, key=key, title=f"Survival of risk groups, {name}", x_label="time", y_label="without the event", unit="%",
        has_dots=False,
    )  # fmt: skip
    numbers = html_table("Numbers at risk, and estimated survival", ["time", *(f"{tick:g}" for tick in ticks)], rows)
    caption = f"Share of patients without the event by time (Kaplan-Meier), {name}. Patients: {join_with_and(counts)}."
    return (
        html_legend([line.label for line in lines], [line.style for line in lines])
        + html_figure(chart, caption, "")
        + numbers
    )


def _step_corners(time: Floats, event: NDArray[np.bool_]) -> tuple[list[float], list[float]]:
    """Returns the corners of a Kaplan-Meier curve, from time 0 until the last patient's time."""
    x, y = [0.0], [1.0]
    for at, value in zip(*kaplan_meier(time, event), strict=True):
        x += [float(at), float(at)]
        y += [y[-1], float(value)]
    return [*x, float(time.max())], [*y, y[-1]]
