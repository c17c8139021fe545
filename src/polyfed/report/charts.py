"""Charts as inline SVG: lines with bands, sorted bars, heat maps. They are drawn for a phone's width and grow with the page;
colours are CSS variables of `page.css`, so that the same chart suits light, dark and paper.

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
from numpy.typing import NDArray

Unit = Literal["%", "", "count"]
"""How numbers are told: shares in per cent, as they are, or whole."""

COLOURS = 8  # of `--c0` and so on in page.css; then lines are dashed
WIDTH = 420  # units of all charts; text has 11
_CELLS = 900  # cells of a heat map that are drawn and told one by one
_WRITTEN = 200  # cells up to which their numbers are written
_LABELLED = 40  # bars with a label and a number of their own


@final
@dataclass(frozen=True)
class Curve:
    """A line: label, x, y with their lowest and highest values (NaN leaves a gap), all of one length, and its style."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    style: int


@final
@dataclass(frozen=True)
class Bar:
    """A bar: label, value, and the lowest and highest of the values whose mean it is."""

    label: str
    value: float
    low: float
    high: float


def number(value: float, unit: Unit = "", signed: bool = False) -> str:
    """A number for people.

    >>> number(0.1234, "%"), number(-0.05, "%", signed=True), number(12.0, "count"), number(math.nan)
    ('12.3 %', '−5.0 %', '12', '–')
    """
    if not math.isfinite(value):
        return "–"
    sign = "+" if signed else "-"
    text = (
        f"{100 * value:{sign}.1f} %"
        if unit == "%"
        else f"{value:{sign}.0f}"
        if unit == "count"
        else f"{value:{sign}.3f}"
    )
    return text.replace("-", "−")


def shortened(name: str, most: int = 16) -> str:
    """A name that is not longer than `most` letters.

    >>> shortened("a-very-long-name-of-a-client", 9)
    'a-ve…ient'
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[len(name) - (most - most // 2 - 1) :]}"


def line_chart(
    curves: Sequence[Curve], *, key: str, title: str, x_label: str, y_label: str, unit: Unit = "", whole: bool = False
) -> str:
    """Lines, with a band from `low` to `high` where these differ.

    A curve whose x is 0 throughout (what costs nothing) is a dashed level line at its last value. `data-line` of each group
    is the position of its curve, and `data-box` the frame in units and in values, for `page.js`. `whole`: x counts.
    """
    right, top, bottom, height = 14, 10, 44, 280
    known = [c for c in curves if any(map(math.isfinite, c.y))]
    xs = [x for c in known for x in c.x if math.isfinite(x)]
    ys = [v for c in known for values in (c.y, c.low, c.high) for v in values if math.isfinite(v)]
    if not ys:
        return empty(key, title, "no score is defined: these trainings diverged")
    x0, x1 = (0.0, max(xs, default=1.0) or 1.0)
    ticks_y = ticks_of(min(ys), max(ys))
    left = round(max(width_of(tick_text(tick, unit)) for tick in ticks_y)) + 26
    y0, y1 = min(ticks_y[0], min(ys)), max(ticks_y[-1], max(ys))

    def px(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (WIDTH - left - right)

    def py(y: float) -> float:
        return height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom)

    parts = []
    for tick in ticks_y:
        parts.append(f'<path class="grid" d="M{left} {py(tick):.1f}H{WIDTH - right}"/>')
        parts.append(text_at(left - 6, py(tick) + 4, tick_text(tick, unit), "end"))
    for tick in ticks_of(x0, x1, whole=whole):
        if x0 <= tick <= x1:
            parts.append(f'<path class="grid" d="M{px(tick):.1f} {top}V{height - bottom}"/>')
            parts.append(text_at(px(tick), height - bottom + 16, tick_text(tick, ""), "middle"))
    parts.append(text_at((left + WIDTH - right) / 2, height - 6, x_label, "middle"))
    parts.append(text_at(-(top + height - bottom) / 2, 11, y_label, "middle", turned=True))
    for position, curve in enumerate(curves):
        parts.append(f'<g data-line="{position}" class="s{curve.style % COLOURS} d{curve.style // COLOURS % 3}">')
        points = [(px(x), py(y), py(a), py(b)) if math.isfinite(x + y) else None
                  for x, y, a, b in zip(curve.x, curve.y, curve.low, curve.high, strict=True)]  # fmt: skip
        if curve in known and not any(curve.x) and x1 > 0 and len(known) > 1:
            level = next(p for p in reversed(points) if p is not None)[1]
            parts.append(f'<path class="line level" d="M{left} {level:.1f}H{WIDTH - right}"/>')
        else:
            for piece in _pieces(points):
                if any(abs(a - b) > 0.5 for _, _, a, b in piece):
                    edge = [f"{x:.1f} {a:.1f}" for x, _, a, _ in piece] + [
                        f"{x:.1f} {b:.1f}" for x, _, _, b in reversed(piece)
                    ]
                    parts.append(f'<path class="band" d="M{"L".join(edge)}Z"/>')
                if len(piece) > 1:
                    parts.append(f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in piece)}"/>')
                if len(points) <= 30 or len(piece) == 1:
                    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y, _, _ in piece]
        parts.append("</g>")
    parts.append(f'<path class="cross" d="M0 {top}V{height - bottom}"/>')
    box = f' data-box="{left} {WIDTH - right} {top} {height - bottom} {x0} {x1} {y0} {y1}"'
    ends = f"from {tick_text(x0, '')} to {tick_text(x1, '')}"
    told = f"{len(curves)} lines over {x_label}, {ends}; the values are in the table below."
    return image(key, title, told, height, parts, box)


def bar_chart(bars: Sequence[Bar], *, key: str, title: str, x_label: str, unit: Unit = "", signed: bool = False) -> str:
    """Bars from 0, one below the other in the order given; thin and without labels where they are many."""
    shown = [bar for bar in bars if math.isfinite(bar.value)]
    if not shown:
        return empty(key, title, "nothing is known of any of them")
    labelled = len(shown) <= _LABELLED
    labels = [shortened(bar.label, 18) for bar in shown] if labelled else []
    left = round(max(map(width_of, labels), default=10)) + 10
    step, top, bottom = (20 if labelled else max(2.0, min(6.0, 600 / len(shown)))), 6, 42
    height = round(top + step * len(shown) + bottom)
    low = min(0.0, *(bar.low for bar in shown), *(bar.value for bar in shown))
    high = max(0.0, *(bar.high for bar in shown), *(bar.value for bar in shown))
    if low == high:
        high = 0.01 if unit == "%" else 1.0
    # Room for the numbers beside the bars.
    room_left, room_right = (46 if labelled and low < 0 else 6), (52 if labelled else 10)

    def px(x: float) -> float:
        return left + room_left + (x - low) / (high - low) * (WIDTH - left - room_left - room_right)

    parts = []
    for tick in ticks_of(low, high, most=4):
        if low <= tick <= high:
            parts.append(f'<path class="grid" d="M{px(tick):.1f} {top}V{height - bottom}"/>')
            parts.append(text_at(px(tick), height - bottom + 15, tick_text(tick, unit, signed), "middle"))
    parts.append(text_at((left + WIDTH) / 2, height - 6, x_label, "middle"))
    for k, bar in enumerate(shown):
        y, a, b = top + k * step, *sorted((px(0), px(bar.value)))
        spread = (
            "" if bar.low == bar.high else f" ({number(bar.low, unit, signed)} to {number(bar.high, unit, signed)})"
        )
        told = escape(f"{bar.label}: {number(bar.value, unit, signed)}{spread}")
        parts.append(f'<g data-t="{told}"><path class="hit" d="M0 {y:.1f}H{WIDTH}V{y + step:.1f}H0Z"/>')
        kind = "more" if bar.value >= 0 else "less"
        thick = step - (6 if labelled else step * 0.2)
        parts.append(
            f'<rect class="{kind}" x="{a:.1f}" y="{y + (step - thick) / 2:.1f}" width="{max(b - a, 0.8):.1f}" '
            f'height="{thick:.1f}"/>'
        )
        if bar.low != bar.high:
            parts.append(f'<path class="whisker" d="M{px(bar.low):.1f} {y + step / 2:.1f}H{px(bar.high):.1f}"/>')
        if labelled:
            parts.append(text_at(left - 6, y + step / 2 + 4, labels[k], "end"))
            end = max(b, px(bar.high)) + 4 if bar.value >= 0 else min(a, px(bar.low)) - 4
            parts.append(
                text_at(end, y + step / 2 + 4, bare(bar.value, unit, signed), "start" if bar.value >= 0 else "end")
            )
        parts.append("</g>")
    if not labelled:
        parts.append(text_at(-(top + height - bottom) / 2, 11, f"{len(shown)} clients", "middle", turned=True))
    parts.append(f'<path class="axis" d="M{px(0):.1f} {top}V{height - bottom}"/>')
    told = f"{len(shown)} bars, from {number(shown[0].value, unit, signed)} to {number(shown[-1].value, unit, signed)}."
    return image(key, title, told, height, parts)


def heat_map(
    values: NDArray[np.floating],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    key: str,
    title: str,
    x_label: str,
    y_label: str,
    low: float = 0.0,
    high: float | None = None,
    root: bool = False,
    whole: bool = False,
) -> str:
    """A table as colours.

    Args:
        values: (R, C); NaN stays empty.
        rows, columns: names, R and C of them.
        key: for ids on the page.
        title, x_label, y_label: texts.
        low, high: ends of the scale of colours; None for the largest value.
        root: colours follow the square root of the share, where few values are much larger than the rest.
        whole: the values are counts.
    """
    from matplotlib import colormaps

    known = values[np.isfinite(values)]
    if not known.size:
        return empty(key, title, "no value is defined")
    high = max(float(known.max()) if high is None else high, low + 1e-9)
    share = np.clip((np.nan_to_num(values, nan=low) - low) / (high - low), 0, 1)
    share = np.sqrt(share) if root else share
    palette = np.rint(colormaps["viridis"](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.uint8)
    pixels = palette[np.rint(share * 255).astype(int)]  # (R, C, 3)
    left = round(max(width_of(shortened(name)) for name in rows)) + 8
    wide = (WIDTH - left - 6) / len(columns)
    longest = max(width_of(shortened(name)) for name in columns)
    upright = longest + 4 > wide
    tall = min(wide, 22.0) if len(rows) <= 60 else max(1.5, 700 / len(rows)) if len(rows) > 100 else 8.0
    tall = max(tall, 14.0) if len(rows) <= 30 else tall
    below = round(longest) + 10 if upright else 18
    top, inside = 20, tall * len(rows)
    height = round(top + inside + below + 50)
    parts = [text_at(2, 12, f"{y_label} ↓", "start")]
    every = math.ceil(11 / tall)
    parts += [
        text_at(left - 4, top + (k + 0.5) * tall + 4, shortened(rows[k]), "end") for k in range(0, len(rows), every)
    ]
    every = math.ceil((12 if upright else 1) / wide)
    for k in range(0, len(columns), every):
        x, y = left + (k + 0.5) * wide, top + inside + (6 if upright else 14)
        anchor: Literal["end", "middle"] = "end" if upright else "middle"
        parts.append(
            text_at(x + (4 if upright else 0), y, shortened(columns[k]), anchor, turned=upright, pivot=upright)
        )
    if values.size <= _CELLS:
        write = values.size <= _WRITTEN and wide >= 19
        for (r, c), value in np.ndenumerate(values):
            if not math.isfinite(value):
                continue
            text = f"{value:.0f}" if whole else f"{value:.2f}"
            told = escape(f"{rows[r]}, {columns[c]}: {text if whole else f'{value:.3f}'}")
            colour = "#" + "".join(f"{part:02x}" for part in pixels[r, c])
            x, y = left + c * wide, top + r * tall
            parts.append(
                f'<rect data-t="{told}" x="{x:.1f}" y="{y:.1f}" width="{wide + 0.3:.1f}" height="{tall + 0.3:.1f}" '
                f'fill="{colour}"/>'
            )
            if write:
                shade = "dark" if share[r, c] > 0.6 else "bright"
                small = text if whole else "1" if text == "1.00" else text.removeprefix("0")
                parts.append(
                    f'<text class="cell {shade}" x="{x + wide / 2:.1f}" y="{y + tall / 2 + 3.5:.1f}">{small}</text>'
                )
    else:
        parts.append(
            f'<image href="{picture(pixels)}" x="{left}" y="{top}" width="{WIDTH - left - 6}" height="{inside:.1f}" '
            'preserveAspectRatio="none" class="pixels"/>'
        )
    parts.append(text_at((left + WIDTH) / 2, top + inside + below + 14, x_label, "middle"))
    scale = picture(palette[None, ::4])
    base = height - 14
    parts.append(
        f'<image href="{scale}" x="{left + 60}" y="{base}" width="140" height="9" preserveAspectRatio="none"/>'
    )
    ends = [f"{end:.0f}" if whole else f"{end:.2g}" for end in (low, high)]
    parts += [text_at(left + 55, base + 9, ends[0], "end"), text_at(left + 205, base + 9, ends[1], "start")]
    told = (
        f"{len(rows)} by {len(columns)}, colours from {ends[0]} to {ends[1]}{', by the square root' if root else ''}."
    )
    return image(key, title, told, height, parts)


def picture(pixels: NDArray[np.uint8]) -> str:
    """An RGB picture, (H, W, 3), as a data address."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, np.ascontiguousarray(pixels), format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def image(key: str, title: str, told: str, height: float, parts: Sequence[str], more: str = "") -> str:
    """Parts of a drawing as an SVG element with a title and a description, whose ids begin with `key`."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{key}-t {key}-d"{more}>'
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(told)}</desc>{"".join(parts)}</svg>'
    )


def width_of(text: str) -> float:
    """Units that a text takes, rather too many than too few: fonts differ."""
    wide = sum(12.0 for letter in text if unicodedata.east_asian_width(letter) in "WF")
    return wide + sum(
        9.5 if letter in "mwMW%@" else 6.8 for letter in text if unicodedata.east_asian_width(letter) not in "WF"
    )


def empty(key: str, title: str, why: str) -> str:
    """A drawing that says why there is none."""
    return image(key, title, why, 60, [text_at(WIDTH / 2, 34, f"Nothing to draw: {why}.", "middle")])


def text_at(
    x: float,
    y: float,
    text: str,
    anchor: Literal["start", "middle", "end"],
    *,
    turned: bool = False,
    pivot: bool = False,
) -> str:
    """A text; turned by 90° about the origin, or about its own point."""
    turn = "" if not turned else f' transform="rotate(-90 {x:.1f} {y:.1f})"' if pivot else ' transform="rotate(-90)"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def ticks_of(low: float, high: float, *, whole: bool = False, most: int = 5) -> list[float]:
    """Round numbers that span an interval."""
    from matplotlib.ticker import MaxNLocator

    if low == high:
        margin = abs(low) * 0.1 or 0.05
        low, high = low - margin, high + margin
    found = MaxNLocator(most, integer=whole, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(tick) for tick in found]


def tick_text(value: float, unit: Unit, signed: bool = False) -> str:
    """A round number of an axis."""
    value = 0.0 if abs(value) < 1e-12 else value
    text = f"{100 * value if unit == '%' else value:{'+' if signed and value else ''}.4g}".replace("-", "−")
    return f"{text} %" if unit == "%" and not signed else text


def bare(value: float, unit: Unit, signed: bool) -> str:
    """As `number`, without the sign for per cent."""
    return number(value, unit, signed).removesuffix(" %")


def _pieces(
    points: Sequence[tuple[float, float, float, float] | None],
) -> list[list[tuple[float, float, float, float]]]:
    """Runs of points without a gap."""
    found: list[list[tuple[float, float, float, float]]] = [[]]
    for point in points:
        if point is None:
            found.append([])
        else:
            found[-1].append(point)
    return [piece for piece in found if piece]
