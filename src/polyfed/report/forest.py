"""Points with their intervals, one below the other: what is called a forest plot."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from polyfed.report.charts import (
    COLOURS,
    WIDTH,
    Unit,
    bare,
    empty,
    image,
    number,
    shortened,
    text_at,
    tick_text,
    ticks_of,
    width_of,
)

MOST = 30  # rows that are drawn


@final
@dataclass(frozen=True)
class Mark:
    """A value with its interval; `kind` is a class of `page.css`, or a style of lines as a number.

    Args:
        label: what it is of; told on hover.
        value, low, high: low and high may be NaN.
        kind: "join", "stay", "undecided", or the number of a style.
    """

    label: str
    value: float
    low: float
    high: float
    kind: str | int


@final
@dataclass(frozen=True)
class Row:
    """A line of the chart: its label at the left, and one or a few marks."""

    label: str
    marks: tuple[Mark, ...]


def forest(
    rows: Sequence[Row],
    *,
    key: str,
    title: str,
    x_label: str,
    unit: Unit = "",
    signed: bool = False,
    zero: bool = False,
) -> str:
    """Rows of marks; marks without a value are left out.

    Args:
        rows: at most `MOST` are drawn, evenly.
        key: for ids on the page.
        title, x_label: texts.
        unit: of the values.
        signed: whether they are differences.
        zero: whether 0 has a line and lies in the chart.
    """
    shown = [rows[k] for k in _evenly(len(rows), MOST)]
    marks = [mark for row in shown for mark in row.marks if math.isfinite(mark.value)]
    if not marks:
        return empty(key, title, "nothing is known of any of them")
    ends = [v for m in marks for v in (m.value, m.low, m.high) if math.isfinite(v)] + ([0.0] if zero else [])
    low, high = min(ends), max(ends)
    margin = (high - low) * 0.04 or (0.01 if unit == "%" else 0.05)
    low, high = low - margin, high + margin
    labels = [shortened(row.label, 20) for row in shown]
    left = round(max(map(width_of, labels))) + 12
    single = max(len(row.marks) for row in shown) == 1
    right = 52 if single else 10  # the numbers
    step, top, bottom = 22 if single else 26, 6, 44
    height = round(top + step * len(shown) + bottom)

    def px(x: float) -> float:
        return left + (x - low) / (high - low) * (WIDTH - left - right)

    parts = []
    for tick in ticks_of(low, high, most=4):
        if low <= tick <= high:
            parts.append(f'<path class="grid" d="M{px(tick):.1f} {top}V{height - bottom}"/>')
            parts.append(text_at(px(tick), height - bottom + 15, tick_text(tick, unit, signed), "middle"))
    parts.append(text_at((left + WIDTH - right) / 2, height - 8, x_label, "middle"))
    if zero:
        parts.append(f'<path class="axis" d="M{px(0):.1f} {top}V{height - bottom}"/>')
    for k, row in enumerate(shown):
        middle = top + (k + 0.5) * step
        parts.append(text_at(left - 8, middle + 4, labels[k], "end"))
        known = [mark for mark in row.marks if math.isfinite(mark.value)]
        if not known:
            parts.append(text_at(left + 6, middle + 4, "not known", "start"))
        for j, mark in enumerate(known):
            y = middle + (j - (len(known) - 1) / 2) * 9
            parts.append(_drawn(row.label, mark, px, y, unit, signed, step / len(known)))
            if single:
                parts.append(text_at(WIDTH - 2, middle + 4, bare(mark.value, unit, signed), "end"))
    told = f"{len(shown)} rows, each a value with its interval; the values are in the table below."
    return image(key, title, told, height, parts)


def _drawn(
    label: str, mark: Mark, px: Callable[[float], float], y: float, unit: Unit, signed: bool, tall: float
) -> str:
    spread = ""
    if math.isfinite(mark.low + mark.high):
        spread = f" ({number(mark.low, unit, signed)} to {number(mark.high, unit, signed)})"
    of = f"{label}, {mark.label}" if mark.label else label
    told = escape(f"{of}: {number(mark.value, unit, signed)}{spread}")
    kind = mark.kind if isinstance(mark.kind, str) else f"s{mark.kind % COLOURS}"
    drawn = [f'<g class="mark {kind}" data-t="{told}">',
             f'<path class="hit" d="M0 {y - tall / 2:.1f}H{WIDTH}V{y + tall / 2:.1f}H0Z"/>']  # fmt: skip
    if spread:
        drawn.append(f'<path class="line" d="M{px(mark.low):.1f} {y:.1f}H{px(mark.high):.1f}"/>')
    # Shapes too, for those who do not see the colours.
    x = px(mark.value)
    if mark.kind in ("stay", 2 * COLOURS - 1):
        drawn.append(f'<rect class="dot" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>')
    elif mark.kind == "undecided":
        drawn.append(f'<circle class="dot hollow" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    else:
        drawn.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.4"/>')
    return "".join([*drawn, "</g>"])


def _evenly(size: int, most: int) -> list[int]:
    """At most so many positions, evenly, with the first and the last."""
    if size <= most:
        return list(range(size))
    return sorted({round(k * (size - 1) / (most - 1)) for k in range(most)})
