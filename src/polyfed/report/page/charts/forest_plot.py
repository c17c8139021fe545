"""Draws forest plots: one row per label, with one or several values and their confidence intervals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from markupsafe import Markup

from polyfed.core.io.text.number_format import (
    NumberUnit,
    format_number,
    format_number_without_percent_sign,
    shorten_name,
)
from polyfed.report.page.charts.svg_charts import (
    CHART_WIDTH,
    COLOUR_COUNT,
    choose_axis_ticks,
    estimate_text_width,
    format_axis_tick,
    svg_element_with_title,
    svg_empty_chart,
    svg_text,
)

MAX_ROWS = 30  # rows that are drawn


@final
@dataclass(frozen=True)
class IntervalMark:
    """Holds one mark of a forest plot: a value with its confidence interval.

    Args:
        label: what it is of; told on hover.
        value, low, high: low and high may be NaN.
        style: "join", "stay", "undecided", or the number of a style.
    """

    label: str
    value: float
    low: float
    high: float
    style: str | int


@final
@dataclass(frozen=True)
class ForestRow:
    """Holds one row of a forest plot: its label, and one or several marks (values with confidence intervals)."""

    label: str
    marks: tuple[IntervalMark, ...]


def svg_forest_plot(rows: Sequence[ForestRow], *, key: str, title: str, x_label: str, unit: NumberUnit = "") -> Markup:
    """Draws a forest plot as SVG, one row per label; leaves out marks whose value is NaN.

    Args:
        rows: at most `MAX_ROWS` are drawn, evenly.
        key: for ids on the page.
        title, x_label: texts.
        unit: of the values.
    """
    drawn_rows = [rows[k] for k in _evenly_spaced(len(rows), MAX_ROWS)]
    marks = [mark for row in drawn_rows for mark in row.marks if math.isfinite(mark.value)]
    if not marks:
        return svg_empty_chart(key, title, "nothing is known of any of them")
    ends = [v for m in marks for v in (m.value, m.low, m.high) if math.isfinite(v)]
    low, high = min(ends), max(ends)
    margin = (high - low) * 0.04 or (0.01 if unit == "%" else 0.05)
    low, high = low - margin, high + margin
    labels = [shorten_name(row.label, 26) for row in drawn_rows]
    left = round(max(map(estimate_text_width, labels))) + 12
    single = max(len(row.marks) for row in drawn_rows) == 1
    right = 52 if single else 16  # the numbers, or half of a tick's
    step, top, bottom = 22 if single else 26, 6, 44
    height = round(top + step * len(drawn_rows) + bottom)

    def px(x: float) -> float:
        return left + (x - low) / (high - low) * (CHART_WIDTH - left - right)

    parts = []
    for tick in choose_axis_ticks(low, high, max_ticks=4):
        if low <= tick <= high:
            parts.append(f'<path class="grid" d="M{px(tick):.1f} {top}V{height - bottom}"/>')
            parts.append(svg_text(px(tick), height - bottom + 15, format_axis_tick(tick, unit), "middle"))
    parts.append(svg_text((left + CHART_WIDTH - right) / 2, height - 8, x_label, "middle"))
    for k, row in enumerate(drawn_rows):
        middle = top + (k + 0.5) * step
        parts.append(svg_text(left - 8, middle + 4, labels[k], "end"))
        finite_marks = [mark for mark in row.marks if math.isfinite(mark.value)]
        if not finite_marks:
            parts.append(svg_text(left + 6, middle + 4, "not known", "start"))
        for j, mark in enumerate(finite_marks):
            y = middle + (j - (len(finite_marks) - 1) / 2) * 9
            parts.append(_svg_mark(row.label, mark, px, y, unit, step / len(finite_marks)))
            if single:
                parts.append(
                    svg_text(CHART_WIDTH - 2, middle + 4, format_number_without_percent_sign(mark.value, unit), "end")
                )
    description = f"{len(drawn_rows)} rows, each a value with its interval; the values are in the table below."
    return svg_element_with_title(key, title, description, height, parts)


def _svg_mark(
    label: str, mark: IntervalMark, px: Callable[[float], float], y: float, unit: NumberUnit, height: float
) -> str:
    spread = ""
    if math.isfinite(mark.low + mark.high):
        spread = f" ({format_number(mark.low, unit)} to {format_number(mark.high, unit)})"
    name = f"{label}, {mark.label}" if mark.label else label
    tooltip = escape(f"{name}: {format_number(mark.value, unit)}{spread}")
    kind = mark.style if isinstance(mark.style, str) else f"s{mark.style % COLOUR_COUNT}"
    elements = [f'<g class="mark {kind}" data-t="{tooltip}">',
             f'<path class="hit" d="M0 {y - height / 2:.1f}H{CHART_WIDTH}V{y + height / 2:.1f}H0Z"/>']  # fmt: skip
    if spread:
        elements.append(f'<path class="line" d="M{px(mark.low):.1f} {y:.1f}H{px(mark.high):.1f}"/>')
    # Shapes too, for those who do not see the colours.
    x = px(mark.value)
    if mark.style in ("stay", 2 * COLOUR_COUNT - 1):
        elements.append(f'<rect class="dot" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>')
    elif mark.style == "undecided":
        elements.append(f'<circle class="dot hollow" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    else:
        elements.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.4"/>')
    return "".join([*elements, "</g>"])


def _evenly_spaced(size: int, max_count: int) -> list[int]:
    """Returns at most `max_count` evenly spaced positions of `size`, the first and last among them."""
    if size <= max_count:
        return list(range(size))
    return sorted({round(k * (size - 1) / (max_count - 1)) for k in range(max_count)})
