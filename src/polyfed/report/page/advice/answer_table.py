"""Renders the advice to each site as a table with a row per site: answer, site, interval as a drawing, and numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from markupsafe import Markup

from polyfed.comparison.verdicts.rival_gains import describe_local_alternative
from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import NumberUnit
from polyfed.core.tasks.task import DEFAULT_TASK
from polyfed.report.data.answers import ANSWER_LABELS, SiteAnswer
from polyfed.report.data.run_groups import RunGroup
from polyfed.report.data.score_format import ScoreFormat
from polyfed.report.data.small_counts import format_count_of_rows
from polyfed.report.page.charts.svg_charts import choose_axis_ticks, format_axis_tick, svg_text
from polyfed.report.page.elements import html_table, render_template

WIDTH, _HEIGHT = 240, 30  # of a drawing, in pixels
_EDGE = 16  # left and right of the values, so that the labels of the axis fit


@final
@dataclass(frozen=True)
class GainAxis:
    """Holds the ends of the axis that the drawings of all sites share; 0 lies between them."""

    low: float
    high: float

    def x(self, gain: float) -> float:
        """Returns the horizontal position of a gain in a drawing."""
        return _EDGE + (gain - self.low) / (self.high - self.low) * (WIDTH - 2 * _EDGE)


def gain_axis(answers: Sequence[SiteAnswer]) -> GainAxis:
    """Returns the axis that holds the gains and intervals of all sites, and 0.

    >>> gain_axis([SiteAnswer("north", "join", gain=0.5, interval=(0.25, 1.0))])
    GainAxis(low=0.0, high=1.0)
    """
    ends = [0.0, *(v for a in answers for v in (a.gain, *(a.interval or ())) if v is not None and math.isfinite(v))]
    low, high = min(ends), max(ends)
    return GainAxis(low, high if high > low else low + 0.01)


def html_answer_table(answers: Sequence[SiteAnswer], run_group: RunGroup, axis: GainAxis, level: float) -> Markup:
    """Renders the answers of some sites as a table; the sentence of each is for screen readers and shown on hover.

    Args:
        answers: of the sites in the table.
        run_group: their comparison.
        axis: of the drawings; the same for all tables of a page.
        level: confidence level of the intervals.
    """
    form = run_group.score_format
    rivals = {short_name_of_rival(answer.compared_with, run_group) for answer in answers}
    is_over_best = any(answer.has_several_rivals for answer in answers)
    heading = "best alone" if is_over_best else "compared with"
    columns = ["gain", f"{100 * level:g} % interval", *([heading] if len(rivals) > 1 else []), "test examples"]
    if name_of_rarest := next((name for answer in answers if (name := answer.name_of_rarest())), ""):
        columns.append(name_of_rarest)
    rows = []
    for answer in answers:
        has_gain = answer.gain is not None and not answer.is_unanswerable
        cells = [
            form.format_signed(answer.gain or 0.0).removesuffix(" points") if has_gain else "–",
            _format_interval(answer.interval, form),
            *([short_name_of_rival(answer.compared_with, run_group)] if len(rivals) > 1 else []),
            "–" if answer.test_examples is None else format_count_of_rows(answer.test_examples),
            *(["–" if answer.rarest is None else format_count_of_rows(answer.rarest)] if name_of_rarest else []),
        ]
        rows.append(
            {
                "answer": answer,
                "label": ANSWER_LABELS[answer.kind],
                "drawing": _svg_interval(answer, axis),
                "cells": cells,
            }
        )
    rival = next(iter(rivals - {"–"}), "") if len(rivals) == 1 else ""
    over = f" over {rival}" if rival else ""
    if is_over_best:
        over = f" over the best alone{f' ({rival})' if rival else ''}"
    return render_template(
        "answer_table",
        rows=rows,
        columns=columns,
        why_wide=_explain_width(answers),
        axis=_svg_axis(axis, form.unit),
        axis_label=f"gain{over}, {'points of ' if form.unit == '%' else ''}{form.label}",
    )


def _explain_width(answers: Sequence[SiteAnswer]) -> str:
    """Says why intervals can be wide without a difference, or of many test examples; empty without such a row."""
    parts = []
    if any(answer.gain == 0 and answer.interval is not None for answer in answers):
        parts.append(
            "A gain of 0 says that both sides did equally well on these test examples; its interval says how far they can "
            "differ on new ones, so it is wide where examples are few."
        )
    if any(answer.is_unanswerable and answer.interval is not None and answer.rarest is not None for answer in answers):
        parts.append("What counts for the width are the examples of the rarer class, or the events, not all examples.")
    return " ".join(parts)


def html_pooled_gains(run_group: RunGroup, level: float) -> Markup:
    """Renders each site's interval by partial pooling as a table; empty without a model over sites."""
    pooled = run_group.comparison_results.get("site_model")
    if not pooled:
        return Markup()
    rival = short_name_of_rival(str(pooled["over"]), run_group)
    caption = (
        f"Gain over {rival}, shrunk towards the mean over sites, most where a site has few examples. Such intervals hold on "
        "average over sites, and give no answer"
    )
    form = run_group.score_format
    rows = [[client, _format_interval(entry.get("interval"), form)] for client, entry in pooled["clients"].items()]
    return html_table(caption, ["site", f"{100 * level:g} % interval"], rows)


def name_of_rival(compared_with: str, run_group: RunGroup) -> str:
    """Returns what a site has alone, which a gain is over, in the words of the comparison's sentences."""
    task = run_group.comparison_results.get("task", DEFAULT_TASK)
    try:
        return describe_local_alternative(compared_with, "local", task)
    except UserError:  # a task that this process does not trust
        return f"{compared_with.replace('_', ' ')} alone"


def short_name_of_rival(compared_with: str, run_group: RunGroup) -> str:
    """Returns the name of what a site has alone without the word "alone", for a table of such names."""
    name = name_of_rival(compared_with, run_group) if compared_with else "–"
    return name if compared_with == "local" else name.removesuffix(" alone")


def _format_interval(ends: Sequence[float] | None, form: ScoreFormat) -> str:
    return "–" if ends is None else " to ".join(form.format_signed(end).removesuffix(" points") for end in ends)


def _svg_interval(answer: SiteAnswer, axis: GainAxis) -> Markup:
    """Draws the gain of one site with its interval, and the line at 0; the row's sentence says the same."""
    parts = [_svg_text_line("axis", axis.x(0), 0, f"V{_HEIGHT}")]
    middle = _HEIGHT / 2
    if answer.interval is not None and all(map(math.isfinite, answer.interval)):
        low, high = map(axis.x, answer.interval)
        parts.append(_svg_text_line("line", low, middle, f"H{high:.1f}"))
    if answer.gain is not None and math.isfinite(answer.gain) and not answer.is_unanswerable:
        x = axis.x(answer.gain)
        # A shape of its own for each answer, for those who do not see the colours.
        if answer.kind == "stay":
            parts.append(f'<rect class="dot" x="{x - 4:.1f}" y="{middle - 4:.0f}" width="8" height="8"/>')
        else:
            hollow = " hollow" if answer.kind == "undecided" else ""
            parts.append(f'<circle class="dot{hollow}" cx="{x:.1f}" cy="{middle:.0f}" r="4.4"/>')
    return _svg_image("".join(parts), _HEIGHT, f"iv mark {answer.kind}")


def _svg_axis(axis: GainAxis, unit: NumberUnit) -> Markup:
    """Draws the labels of the axis: 0, and a value on each side of it where there is room."""
    ticks = [t for t in choose_axis_ticks(axis.low, axis.high, max_ticks=5) if axis.low <= t <= axis.high]
    labels = [svg_text(axis.x(tick), 12, format_axis_tick(tick, unit, signed=True), "middle") for tick in ticks]
    return _svg_image("".join(labels), 16, "iv")


def _svg_text_line(name: str, x: float, y: float, rest: str) -> str:
    return f'<path class="{name}" d="M{x:.1f} {y:.0f}{rest}"/>'


def _svg_image(content: str, height: int, names: str) -> Markup:
    return Markup(f'<svg class="{names}" viewBox="0 0 {WIDTH} {height}" aria-hidden="true">{content}</svg>')
