"""Draws a caterpillar plot: one thin horizontal line per site with the site's gain and confidence interval, sorted by
gain.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

from markupsafe import Markup

from polyfed.core.io.text.number_format import NumberUnit, format_number
from polyfed.report.page.charts.forest_plot import IntervalMark
from polyfed.report.page.charts.svg_charts import (
    CHART_WIDTH,
    choose_axis_ticks,
    format_axis_tick,
    svg_element_with_title,
    svg_empty_chart,
    svg_text,
)

_HEIGHT = 420  # of the lines of all sites together, if they are many
_MOST = 9.0  # most space between two lines
_TOP, _BOTTOM = 6, 44
_EDGE = 24  # left and right of the values, so that the labels of the axis fit


def svg_caterpillar_plot(
    marks: Sequence[IntervalMark], *, key: str, title: str, x_label: str, unit: NumberUnit = ""
) -> Markup:
    """Draws sites' gains with intervals, the largest first, without sites that have none.

    Args:
        marks: one for each site; the label is shown on hover.
        key: for ids on the page.
        title, x_label: texts.
        unit: of the values.
    """
    ranked = sorted((mark for mark in marks if math.isfinite(mark.value)), key=lambda mark: -mark.value)
    if not ranked:
        return svg_empty_chart(key, title, "no site has a gain with an interval")
    ends = [v for mark in ranked for v in (mark.value, mark.low, mark.high) if math.isfinite(v)]
    low, high = min(*ends, 0.0), max(*ends, 0.0)
    margin = (high - low) * 0.04 or 0.01
    low, high = low - margin, high + margin
    step = min(_MOST, _HEIGHT / len(ranked))
    height = round(_TOP + step * len(ranked) + _BOTTOM)

    def px(value: float) -> float:
        return _EDGE + (value - low) / (high - low) * (CHART_WIDTH - 2 * _EDGE)

    parts = []
    for tick in choose_axis_ticks(low, high, max_ticks=5):
        if low <= tick <= high:
            parts.append(f'<path class="grid" d="M{px(tick):.1f} {_TOP}V{height - _BOTTOM}"/>')
            parts.append(svg_text(px(tick), height - _BOTTOM + 15, format_axis_tick(tick, unit, signed=True), "middle"))
    parts.append(f'<path class="axis" d="M{px(0):.1f} {_TOP}V{height - _BOTTOM}"/>')
    parts.append(svg_text(CHART_WIDTH / 2, height - 8, x_label, "middle"))
    for k, mark in enumerate(ranked):
        parts.append(_svg_line(mark, px, _TOP + (k + 0.5) * step, step, unit))
    description = f"{len(ranked)} sites, sorted by their gain; the values are in the table below."
    return svg_element_with_title(key, title, description, height, parts)


def _svg_line(mark: IntervalMark, px: Callable[[float], float], y: float, step: float, unit: NumberUnit) -> str:
    has_ends = math.isfinite(mark.low + mark.high)
    spread = f" ({format_number(mark.low, unit, True)} to {format_number(mark.high, unit, True)})" if has_ends else ""
    tooltip = escape(f"{mark.label}: {format_number(mark.value, unit, True)}{spread}")
    line = f'<path class="line thin" d="M{px(mark.low):.1f} {y:.1f}H{px(mark.high):.1f}"/>' if has_ends else ""
    size, x = min(3.0, max(step / 2, 1.2)), px(mark.value)
    # A shape of its own for each answer, for those who do not see the colours.
    if mark.style == "stay":
        dot = (
            f'<rect class="dot" x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size:.1f}" height="{2 * size:.1f}"/>'
        )
    else:
        hollow = " hollow" if mark.style == "undecided" else ""
        dot = f'<circle class="dot{hollow}" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    hit = f'<path class="hit" d="M0 {y - step / 2:.1f}H{CHART_WIDTH}V{y + step / 2:.1f}H0Z"/>'
    return f'<g class="mark {mark.style}" data-t="{tooltip}">{hit}{line}{dot}</g>'
