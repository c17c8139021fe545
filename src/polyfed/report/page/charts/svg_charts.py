"""Draws charts as inline SVG: lines with bands, sorted bars, heat maps.

They are drawn for a phone's width and grow with the page; colours are CSS variables of `page.css`, so that the same
chart suits light, dark and paper.

Each is an image with a title and a description; values are told on hover (`data-t`, which `page.js` shows) and stand in a
table beside the chart. Texts come as plain text and are escaped here.
"""

import base64
import io
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, final

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from polyfed.core.io.text.number_format import (
    NumberUnit,
    format_number,
    format_number_without_percent_sign,
    shorten_name,
)

COLOUR_COUNT = 8  # of `--c0` and so on in page.css; then lines are dashed
CHART_WIDTH = 420  # units of all charts; text has 11
_CELLS = 900  # cells of a heat map that are drawn and told one by one
_WRITTEN = 200  # cells up to which their numbers are written
_LABELLED = 40  # bars with a label and a number of their own


@final
@dataclass(frozen=True)
class ChartLine:
    """Holds one line of a chart: its points (x, y), a band from `low` to `high` around it, and its style.

    All sequences are of one length; NaN leaves a gap.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    style: int


@final
@dataclass(frozen=True)
class ChartBar:
    """Holds one bar of a chart: a mean, and the lowest and the highest of the values that it averages."""

    label: str
    value: float
    low: float
    high: float


def svg_line_chart(
    curves: Sequence[ChartLine],
    *,
    key: str,
    title: str,
    x_label: str,
    y_label: str,
    unit: NumberUnit = "",
    integer_x: bool = False,
    has_dots: bool = True,
) -> Markup:
    """Draws a line chart; a line has a band where its `low` and `high` differ, and dots if it has few points.

    A curve whose x is 0 throughout (what costs nothing) is a dashed level line at its last value. `data-line` of each group
    is the position of its curve, and `data-box` the frame in units and in values, for `page.js`. `integer_x`: x counts.
    """
    right, top, bottom, height = 14, 10, 44, 280
    drawable = [c for c in curves if any(map(math.isfinite, c.y))]
    xs = [x for c in drawable for x in c.x if math.isfinite(x)]
    ys = [v for c in drawable for values in (c.y, c.low, c.high) for v in values if math.isfinite(v)]
    if not ys:
        return svg_empty_chart(key, title, "no score is defined: these trainings diverged")
    x0, x1 = (0.0, max(xs, default=1.0) or 1.0)
    ticks_y = choose_axis_ticks(min(ys), max(ys))
    left = round(max(estimate_text_width(format_axis_tick(tick, unit)) for tick in ticks_y)) + 26
    y0, y1 = min(ticks_y[0], min(ys)), max(ticks_y[-1], max(ys))

    def px(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (CHART_WIDTH - left - right)

    def py(y: float) -> float:
        return height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom)

    parts = []
    for tick in ticks_y:
        parts.append(f'<path class="grid" d="M{left} {py(tick):.1f}H{CHART_WIDTH - right}"/>')
        parts.append(svg_text(left - 6, py(tick) + 4, format_axis_tick(tick, unit), "end"))
    for tick in choose_axis_ticks(x0, x1, integers_only=integer_x):
        if x0 <= tick <= x1:
            parts.append(f'<path class="grid" d="M{px(tick):.1f} {top}V{height - bottom}"/>')
            parts.append(svg_text(px(tick), height - bottom + 16, format_axis_tick(tick, ""), "middle"))
    parts.append(svg_text((left + CHART_WIDTH - right) / 2, height - 6, x_label, "middle"))
    parts.append(svg_text(-(top + height - bottom) / 2, 11, y_label, "middle", rotated=True))
    for position, curve in enumerate(curves):
        parts.append(
            f'<g data-line="{position}" class="s{curve.style % COLOUR_COUNT} d{curve.style // COLOUR_COUNT % 3}">'
        )
        points = [(px(x), py(y), py(a), py(b)) if math.isfinite(x + y) else None
                  for x, y, a, b in zip(curve.x, curve.y, curve.low, curve.high, strict=True)]  # fmt: skip
        if curve in drawable and not any(curve.x) and x1 > 0 and len(drawable) > 1:
            level = next(p for p in reversed(points) if p is not None)[1]
            parts.append(f'<path class="line level" d="M{left} {level:.1f}H{CHART_WIDTH - right}"/>')
        else:
            for piece in _segments_without_gaps(points):
                parts += _line_with_band(piece, has_dots=has_dots and len(points) <= 30)
        parts.append("</g>")
    parts.append(f'<path class="cross" d="M0 {top}V{height - bottom}"/>')
    box = f' data-box="{left} {CHART_WIDTH - right} {top} {height - bottom} {x0} {x1} {y0} {y1}"'
    ends = f"from {format_axis_tick(x0, '')} to {format_axis_tick(x1, '')}"
    description = f"{len(curves)} lines over {x_label}, {ends}; the values are in the table below."
    return svg_element_with_title(key, title, description, height, parts, box)


def _line_with_band(piece: Sequence[tuple[float, float, float, float]], *, has_dots: bool) -> list[str]:
    """Draws a line without gaps, with its band; a single point is a dot."""
    parts = []
    if any(abs(a - b) > 0.5 for _, _, a, b in piece):
        edge = [f"{x:.1f} {a:.1f}" for x, _, a, _ in piece] + [f"{x:.1f} {b:.1f}" for x, _, _, b in reversed(piece)]
        parts.append(f'<path class="band" d="M{"L".join(edge)}Z"/>')
    if len(piece) > 1:
        parts.append(f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in piece)}"/>')
    if has_dots or len(piece) == 1:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y, _, _ in piece]
    return parts


def svg_bar_chart(
    bars: Sequence[ChartBar], *, key: str, title: str, x_label: str, unit: NumberUnit = "", signed: bool = False
) -> Markup:
    """Draws horizontal bars that start at 0, in the given order; if there are many, bars are thin and have no labels."""
    finite_bars = [bar for bar in bars if math.isfinite(bar.value)]
    if not finite_bars:
        return svg_empty_chart(key, title, "nothing is known of any of them")
    labelled = len(finite_bars) <= _LABELLED
    labels = [shorten_name(bar.label, 18) for bar in finite_bars] if labelled else []
    left = round(max(map(estimate_text_width, labels), default=10)) + 10
    step, top, bottom = (20 if labelled else max(2.0, min(6.0, 600 / len(finite_bars)))), 6, 42
    height = round(top + step * len(finite_bars) + bottom)
    low = min(0.0, *(bar.low for bar in finite_bars), *(bar.value for bar in finite_bars))
    high = max(0.0, *(bar.high for bar in finite_bars), *(bar.value for bar in finite_bars))
    if low == high:
        high = 0.01 if unit == "%" else 1.0
    # Room for the numbers beside the bars.
    room_left, room_right = (46 if labelled and low < 0 else 6), (52 if labelled else 10)

    def px(x: float) -> float:
        return left + room_left + (x - low) / (high - low) * (CHART_WIDTH - left - room_left - room_right)

    parts = []
    for tick in choose_axis_ticks(low, high, max_ticks=4):
        if low <= tick <= high:
            parts.append(f'<path class="grid" d="M{px(tick):.1f} {top}V{height - bottom}"/>')
            parts.append(svg_text(px(tick), height - bottom + 15, format_axis_tick(tick, unit, signed), "middle"))
    parts.append(svg_text((left + CHART_WIDTH) / 2, height - 6, x_label, "middle"))
    for k, bar in enumerate(finite_bars):
        y, a, b = top + k * step, *sorted((px(0), px(bar.value)))
        value, lowest, highest = (format_number(number, unit, signed) for number in (bar.value, bar.low, bar.high))
        description = escape(f"{bar.label}: {value}" + (f" ({lowest} to {highest})" if bar.low != bar.high else ""))
        parts.append(f'<g data-t="{description}"><path class="hit" d="M0 {y:.1f}H{CHART_WIDTH}V{y + step:.1f}H0Z"/>')
        kind = "more" if bar.value >= 0 else "less"
        thick = step - (6 if labelled else step * 0.2)
        parts.append(
            f'<rect class="{kind}" x="{a:.1f}" y="{y + (step - thick) / 2:.1f}" width="{max(b - a, 0.8):.1f}" '
            f'height="{thick:.1f}"/>'
        )
        if bar.low != bar.high:
            parts.append(f'<path class="whisker" d="M{px(bar.low):.1f} {y + step / 2:.1f}H{px(bar.high):.1f}"/>')
        if labelled:
            parts.append(svg_text(left - 6, y + step / 2 + 4, labels[k], "end"))
            number = format_number_without_percent_sign(bar.value, unit, signed)
            if bar.value >= 0:
                parts.append(svg_text(max(b, px(bar.high)) + 4, y + step / 2 + 4, number, "start"))
            else:
                parts.append(svg_text(min(a, px(bar.low)) - 4, y + step / 2 + 4, number, "end"))
        parts.append("</g>")
    if not labelled:
        parts.append(svg_text(-(top + height - bottom) / 2, 11, f"{len(finite_bars)} sites", "middle", rotated=True))
    parts.append(f'<path class="axis" d="M{px(0):.1f} {top}V{height - bottom}"/>')
    description = (
        f"{len(finite_bars)} bars, from {format_number(finite_bars[0].value, unit, signed)} to "
        f"{format_number(finite_bars[-1].value, unit, signed)}."
    )
    return svg_element_with_title(key, title, description, height, parts)


def _heat_map_cell(
    value: float, label: str, box: tuple[float, float, float, float], colour: str, shade: str | None, count: str | None
) -> list[str]:
    """Draws a cell at `box` (x, y, width, height), with its number in this shade unless it is None."""
    x, y, width, height = box
    text = f"{value:.2f}" if count is None else count
    description = escape(f"{label}: {f'{value:.3f}' if count is None else count}")
    parts = [
        f'<rect data-t="{description}" x="{x:.1f}" y="{y:.1f}" width="{width + 0.3:.1f}" '
        f'height="{height + 0.3:.1f}" fill="{colour}"/>'
    ]
    if shade is not None:
        small = escape(count) if count is not None else "1" if text == "1.00" else text.removeprefix("0")
        parts.append(
            f'<text class="cell {shade}" x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}">{small}</text>'
        )
    return parts


def svg_heat_map(
    values: NDArray[np.floating],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    key: str,
    title: str,
    x_label: str,
    y_label: str,
    high: float | None = None,
    sqrt_colours: bool = False,
    texts: Sequence[Sequence[str]] | None = None,
) -> Markup:
    """Draws a table of numbers as a heat map, one coloured cell per number.

    Args:
        values: (R, C); NaN stays empty.
        rows, columns: names, R and C of them.
        key: for ids on the page.
        title, x_label, y_label: texts.
        high: end of the scale of colours, which begins at 0; None for the largest value.
        sqrt_colours: colours follow the square root of the share, where few values are much larger than the rest.
        texts: of the values, where these are counts.
    """
    from matplotlib import colormaps

    finite_values = values[np.isfinite(values)]
    if not finite_values.size:
        return svg_empty_chart(key, title, "no value is defined")
    high = max(float(finite_values.max()) if high is None else high, 1e-9)
    share = np.clip(np.nan_to_num(values) / high, 0, 1)
    share = np.sqrt(share) if sqrt_colours else share
    palette = np.rint(colormaps["viridis"](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.uint8)
    pixels = palette[np.rint(share * 255).astype(int)]  # (R, C, 3)
    left = round(max(estimate_text_width(shorten_name(name)) for name in rows)) + 8
    cell_width = (CHART_WIDTH - left - 6) / len(columns)
    longest = max(estimate_text_width(shorten_name(name)) for name in columns)
    upright = longest + 4 > cell_width
    cell_height = min(cell_width, 22.0) if len(rows) <= 60 else max(1.5, 700 / len(rows)) if len(rows) > 100 else 8.0
    cell_height = max(cell_height, 14.0) if len(rows) <= 30 else cell_height
    below = round(longest) + 10 if upright else 18
    top, inside = 20, cell_height * len(rows)
    height = round(top + inside + below + 50)
    parts = [svg_text(2, 12, f"{y_label} ↓", "start")]
    label_step = math.ceil(11 / cell_height)
    parts += [
        svg_text(left - 4, top + (k + 0.5) * cell_height + 4, shorten_name(rows[k]), "end")
        for k in range(0, len(rows), label_step)
    ]
    label_step, y = math.ceil((12 if upright else 1) / cell_width), top + inside + (6 if upright else 14)
    anchor: Literal["end", "middle"] = "end" if upright else "middle"
    for k in range(0, len(columns), label_step):
        x, name = left + (k + 0.5) * cell_width + (4 if upright else 0), shorten_name(columns[k])
        parts.append(svg_text(x, y, name, anchor, rotated=upright, about_position=upright))
    if values.size <= _CELLS:
        has_text = values.size <= _WRITTEN and cell_width >= 19
        for (r, c), value in np.ndenumerate(values):
            if math.isfinite(value):
                box = (left + c * cell_width, top + r * cell_height, cell_width, cell_height)
                shade = ("dark" if share[r, c] > 0.6 else "bright") if has_text else None
                label, colour = f"{rows[r]}, {columns[c]}", "#" + "".join(f"{part:02x}" for part in pixels[r, c])
                parts += _heat_map_cell(value, label, box, colour, shade, None if texts is None else texts[r][c])
    else:
        parts.append(
            f'<image href="{png_data_url(pixels)}" x="{left}" y="{top}" width="{CHART_WIDTH - left - 6}" '
            f'height="{inside:.1f}" preserveAspectRatio="none" class="pixels"/>'
        )
    parts.append(svg_text((left + CHART_WIDTH) / 2, top + inside + below + 14, x_label, "middle"))
    ends = [f"{end:.2g}" if texts is None else f"{end:.0f}" for end in (0.0, high)]
    parts += _colour_scale(palette, ends, left, height - 14)
    description = (
        f"{len(rows)} by {len(columns)}, colours from {ends[0]} to "
        f"{ends[1]}{', by the square root' if sqrt_colours else ''}."
    )
    return svg_element_with_title(key, title, description, height, parts)


def _colour_scale(palette: NDArray[np.uint8], ends: Sequence[str], left: float, y: float) -> list[str]:
    """Draws the colours of a heat map in a row, between the values at their ends."""
    scale = png_data_url(palette[None, ::4])
    return [
        f'<image href="{scale}" x="{left + 60}" y="{y}" width="140" height="9" preserveAspectRatio="none"/>',
        svg_text(left + 55, y + 9, ends[0], "end"),
        svg_text(left + 205, y + 9, ends[1], "start"),
    ]


def png_data_url(pixels: NDArray[np.uint8]) -> str:
    """Encodes an RGB picture of shape (H, W, 3) as PNG, and returns it as a data URL."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, np.ascontiguousarray(pixels), format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def svg_element_with_title(
    key: str, title: str, description: str, height: float, parts: Sequence[str], attributes: str = ""
) -> Markup:
    """Wraps the parts of a drawing in an SVG element with a title and a description, whose ids begin with `key`."""
    return Markup(
        f'<svg viewBox="0 0 {CHART_WIDTH} {height}" role="img" aria-labelledby="{key}-t {key}-d"{attributes}>'
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(description)}</desc>{"".join(parts)}</svg>'
    )


def estimate_text_width(text: str) -> float:
    """Returns an upper estimate of the width of a text in chart units, since fonts differ."""
    wide_letters = sum(12.0 for letter in text if unicodedata.east_asian_width(letter) in "WF")
    return wide_letters + sum(
        9.5 if letter in "mwMW%@" else 6.8 for letter in text if unicodedata.east_asian_width(letter) not in "WF"
    )


def svg_empty_chart(key: str, title: str, reason: str) -> Markup:
    """Draws a chart that contains only a sentence on why there is nothing to draw."""
    return svg_element_with_title(
        key, title, reason, 60, [svg_text(CHART_WIDTH / 2, 34, f"Nothing to draw: {reason}.", "middle")]
    )


def svg_text(
    x: float,
    y: float,
    text: str,
    anchor: Literal["start", "middle", "end"],
    *,
    rotated: bool = False,
    about_position: bool = False,
) -> str:
    """Returns an SVG text element; `rotated` turns it by 90° about the origin, or `about_position` about its own."""
    center = f" {x:.1f} {y:.1f}" if about_position else ""
    turn = f' transform="rotate(-90{center})"' if rotated else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def choose_axis_ticks(low: float, high: float, *, integers_only: bool = False, max_ticks: int = 5) -> list[float]:
    """Returns the tick values of an axis that covers `low` to `high`, as round numbers."""
    from matplotlib.ticker import MaxNLocator

    if low == high:
        margin = abs(low) * 0.1 or 0.05
        low, high = low - margin, high + margin
    ticks = MaxNLocator(max_ticks, integer=integers_only, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(tick) for tick in ticks]


def format_axis_tick(value: float, unit: NumberUnit, signed: bool = False) -> str:
    """Returns the label of one tick of an axis as text, with its unit."""
    value = 0.0 if abs(value) < 1e-12 else value
    text = f"{100 * value if unit == '%' else value:{'+' if signed and value else ''}.4g}".replace("-", "−")
    return f"{text} %" if unit == "%" and not signed else text


def _segments_without_gaps(
    points: Sequence[tuple[float, float, float, float] | None],
) -> list[list[tuple[float, float, float, float]]]:
    """Splits a line's points at its gaps (None), and returns the segments."""
    segments: list[list[tuple[float, float, float, float]]] = [[]]
    for point in points:
        if point is None:
            segments.append([])
        else:
            segments[-1].append(point)
    return [piece for piece in segments if piece]
