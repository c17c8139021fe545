"""Renders the scores of every site's model on every site's test data as a table; the better the score, the darker the
cell.
"""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from polyfed.core.io.text.number_format import format_number, format_number_without_percent_sign
from polyfed.report.page.elements import html_bullet_list, html_div, html_dropdown_panels, html_table, render_template
from polyfed.simulation.results.across_sites.cross_site_scores import CrossSiteCell, CrossSiteScores

CROSS_SITE_HEADING = "Cross-site evaluation: every site's model at every site"
_MAX_SITES = 40  # rows and columns of the table


def html_cross_site(scores_by_method: Mapping[str, CrossSiteScores], key: str) -> Markup:
    """Renders, with a menu of methods, the scores of every site's model on every site's test data."""
    return html_dropdown_panels(
        key, "Method", {name: _html_matrix(scores) for name, scores in scores_by_method.items()}
    )


def _html_matrix(scores: CrossSiteScores) -> Markup:
    entry, matrix = scores.metrics[0], scores.matrix()
    names = scores.clients[:_MAX_SITES]
    values = [cell.value for row in matrix for cell in row if cell.value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    rows = [
        {
            "name": name,
            "cells": [
                _describe_cell(cell, entry, low, high, is_own=k == j) for k, cell in enumerate(row[: len(names)])
            ],
        }
        for j, (name, row) in enumerate(zip(names, matrix, strict=False))
    ]
    description = (
        f"{entry['label']}; row: model of, column: patients of; 95 % intervals over test examples (patients where they are "
        "known), one at a time (those of differences, in the sentences below, hold together); framed: the site's own model"
    )
    table = render_template("cross_site", description=description, names=names, rows=rows)
    notes = list(scores.sentences())
    if hidden := len(scores.clients) - len(names):
        notes.append(f"{hidden} more sites are in cross_site.csv of the run directory.")
    others = [_html_other_metric(scores, other) for other in scores.metrics[1:]] if len(names) <= 12 else []
    return html_div(Markup("{}{}{}").format(table, html_bullet_list(notes), Markup("").join(others)))


def _describe_cell(
    cell: CrossSiteCell, entry: Mapping[str, Any], low: float, high: float, *, is_own: bool
) -> dict[str, Any]:
    unit = entry["unit"]
    share = 0.0 if cell.value is None or high == low else (cell.value - low) / (high - low)
    interval = ""
    if cell.low is not None and cell.high is not None:
        lowest, highest = (format_number_without_percent_sign(end, unit) for end in (cell.low, cell.high))
        interval = f"{lowest} to {highest}"
    title = cell.reason or f"{cell.examples} test examples"
    if cell.difference is not None:
        title += f"; {format_number(cell.difference, unit, signed=True)} against the own model"
    return {
        "text": format_number_without_percent_sign(cell.value, unit), "interval": interval, "title": title, "is_own": is_own,
        "percent": round(60 * (share if entry["higher_is_better"] else 1 - share)) if cell.value is not None else 0,
    }  # fmt: skip


def _html_other_metric(scores: CrossSiteScores, entry: Mapping[str, Any]) -> Markup:
    rows = [
        [name, *(format_number(cell.value, entry["unit"]) for cell in row)]
        for name, row in zip(scores.clients, scores.matrix(entry["name"]), strict=True)
    ]
    return html_table(f"{entry['label']}: model of (row), patients of (column)", ["model of", *scores.clients], rows)
