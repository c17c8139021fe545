"""How well predictions separate and how far they can be believed: ROC curves, counts at a threshold and calibration, of all
sites together and of each. What is drawn first is drawn here; `curves.js` draws the rest from the same numbers."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from polyfed.report.charts import COLOURS, WIDTH, image, text_at
from polyfed.report.confusion import matrix_table, threshold_tables
from polyfed.report.html import data, swatch, table
from polyfed.report.predictions import Outcomes, Problem
from polyfed.report.roc import GRID, area_interval, calibration, counts, normal, roc
from polyfed.report.words import listed, many

ALL = "All sites"
_SITES = 40  # that a reader can choose among
_CELLS = 600  # sites x methods x classes
_CLASSES = 10
_MATRIX = 20  # classes up to which all counts are shown
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 50, 22, 10, 44, 384  # of the frame, in units of all charts
ALONE = 2 * COLOURS - 1  # the style of training alone, here as in all charts
_BETWEEN = 3  # digits after the point of a share
NO_VERDICT = (
    "An area of all sites' test examples together is no answer: whether a method is better for a site only the answers say, "
    "whatever these curves look like."
)


def content(outcomes: Outcomes, level: float) -> dict[str, Any]:
    """Everything that can be chosen, as numbers for the script.

    Returns:
        `sites`, `methods`, `classes` (names), `reference` (a position, or -1), `cells` by site, class and method (null where
        there is nothing to say), and `matrices` by site and method (of more than two classes; else null).
    """
    problems = outcomes.problems[:_CLASSES]
    sites = [(ALL, outcomes.clients), *((client, (client,)) for client in _offered(outcomes, len(problems)))]
    cells = [
        [[cell(outcomes, m, clients, p, level) for m in outcomes.methods] for p in problems] for _, clients in sites
    ]
    matrices = None
    if outcomes.task == "classification" and not outcomes.binary and len(outcomes.class_names) <= _MATRIX:
        matrices = [[_matrix(outcomes, m, clients) for m in outcomes.methods] for _, clients in sites]
    named = outcomes.methods.index(outcomes.reference) if outcomes.reference else -1
    return {
        "sites": [name for name, _ in sites], "methods": list(outcomes.methods), "reference": named,
        "classes": [problem.name for problem in problems], "names": list(outcomes.class_names), "cells": cells,
        "matrices": matrices, "level": level, "z": round(normal(level), 6), "seeds": len(outcomes.seeds),
        "others": outcomes.class_names[0] if outcomes.binary else "",
        "styles": [ALONE if k == named else k for k in range(len(outcomes.methods))],
    }  # fmt: skip


def cell(
    outcomes: Outcomes, method: str, clients: Sequence[str], problem: Problem, level: float
) -> dict[str, Any] | None:
    """What is told of a method, a question of yes or no and some clients' test examples; None without examples.

    Returns:
        `n`, `yes`: examples, mean over seeds. `area`: AUC with its interval, or null; `seeds`: its lowest and highest.
        `roc`: sensitivity by `GRID`, and where seeds differ `low` and `high`. `groups`: calibration. `hits`, `alarms`:
        counts by threshold, means over seeds; missing where the most probable of several classes decides.
    """
    parts = [part for seed in outcomes.seeds if len((part := outcomes.part(method, seed, clients, problem))[0])]
    if not parts:
        return None
    size = float(np.mean([len(p) for _, p in parts]))
    yes = float(np.mean([p.sum() for _, p in parts]))
    found: dict[str, Any] = {"n": round(size, 1), "yes": round(yes, 1), "area": None, "roc": None}
    if known := [one for part in parts if (one := roc(part)) is not None]:
        heights = np.array([curve for curve, _ in known])
        areas = [area for _, area in known]
        found["roc"] = _rounded(heights.mean(axis=0))
        if len(known) > 1 and np.ptp(heights, axis=0).max() > 0.0005:
            found |= {"low": _rounded(heights.min(axis=0)), "high": _rounded(heights.max(axis=0))}
        area = float(np.mean(areas))
        found["area"] = _rounded([area, *area_interval(area, yes, size - yes, level)])
        found["seeds"] = _rounded([min(areas), max(areas)])
    found["groups"] = [
        _rounded([g.predicted, g.observed, g.low, g.high, g.examples]) for g in calibration(parts, level)
    ]
    if outcomes.binary or outcomes.task == "multilabel":
        counted = [counts(part) for part in parts]
        found |= {name: [_short(v) for v in np.mean([one[k] for one in counted], axis=0)]
                  for k, name in enumerate(("hits", "alarms"))}  # fmt: skip
    return found


def _matrix(outcomes: Outcomes, method: str, clients: Sequence[str]) -> list[list[float]]:
    found = np.mean([outcomes.confusion(method, seed, clients) for seed in outcomes.seeds], axis=0)
    return [[_short(v, _BETWEEN) for v in row] for row in found]


def _offered(outcomes: Outcomes, problems: int) -> list[str]:
    """The sites with the most test examples, by name; none where a name is another site in each seed."""
    if not outcomes.same_clients or len(outcomes.clients) == 1:
        return []
    most = min(_SITES, max(1, _CELLS // (len(outcomes.methods) * max(problems, 1)) - 1))
    method, seed = outcomes.methods[0], outcomes.seeds[0]
    return sorted(sorted(outcomes.clients, key=lambda c: -len(outcomes.tables[method, seed, c].targets))[:most])


def section(outcomes: Outcomes, level: float, key: str) -> str:
    """The whole section, with its numbers for the script; for predictions of numbers a sentence."""
    if not outcomes.problems:
        return "<p>ROC curves and counts are of classes; these networks predict numbers.</p>"
    told = content(outcomes, level)
    chosen = [0, *([told["reference"]] if told["reference"] > 0 else [])]
    first = [told["cells"][0][0][m] for m in chosen]
    names, styles = [told["methods"][m] for m in chosen], [told["styles"][m] for m in chosen]
    slots = [(one, name, style) for one, name, style in zip(first, names, styles, strict=True) if one is not None]
    picks = [_menu(key, "site", "Site", told["sites"]), _menu(key, "method", "Method", told["methods"])]
    picks.append(_menu(key, "class", "Label" if outcomes.task == "multilabel" else "Class", told["classes"]))
    return "".join(
        [
            f'<div class="curves" data-curves="{key}-curves">',
            f'<div class="control">{"".join(picks)}</div>',
            f'<p class="basis" aria-live="polite">{escape(_basis(told, first[0]))}</p>',
            '<div class="grid2">',
            _roc(slots, key, told, outcomes),
            _calibration(slots, key, told, outcomes),
            "</div>",
            _counts(slots, key, told, outcomes, chosen),
            f"</div>{_limits(outcomes, told)}{data(f'{key}-curves', told)}",
        ]
    )


def _menu(key: str, of: str, label: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return ""
    options = "".join(f'<option value="{k}">{escape(name)}</option>' for k, name in enumerate(names))
    name = f"{key}-curves-{of}"
    menu = f'<select id="{name}" data-pick="{of}">{options}</select>'
    return f'<span class="pick"><label for="{name}">{label}</label> {menu}</span>'


def _basis(told: dict[str, Any], one: dict[str, Any] | None) -> str:
    if one is None:
        return f"{told['sites'][0]}: no test examples."
    return f"{told['sites'][0]}: {_whole(one['n'])} test examples, {_whole(one['yes'])} of them {told['classes'][0]}."


def _limits(outcomes: Outcomes, told: dict[str, Any]) -> str:
    """What is not offered, and why."""
    found = [f"<p class=caption>{escape(note)}</p>" for note in (NO_VERDICT, *outcomes.notes)]
    if not outcomes.same_clients and len(outcomes.clients) > 1:
        found.append("<p class=caption>Each seed deals other data, so that a site cannot be chosen.</p>")
    elif 1 < len(told["sites"]) <= len(outcomes.clients):
        number = len(told["sites"]) - 1
        found.append(f"<p class=caption>The menu has the {number} of {len(outcomes.clients)} sites with the most test "
                     "examples.</p>")  # fmt: skip
    if len(outcomes.problems) > len(told["classes"]):
        found.append(f"<p class=caption>The menu has the first {len(told['classes'])} of {len(outcomes.problems)} "
                     "classes.</p>")  # fmt: skip
    return "".join(found)


# -- drawing ----------------------------------------------------------------------------------------------------------


def place(x: float, y: float) -> str:
    """Two shares as a point of the frame.

    >>> place(0, 0), place(1, 1)
    ('50.0 340.0', '398.0 10.0')
    """
    return f"{LEFT + x * (WIDTH - LEFT - RIGHT):.1f} {HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM):.1f}"


def frame(key: str, title: str, told: str, x_label: str, y_label: str, inside: Sequence[str], of: str = "") -> str:
    """A square of shares from 0 to 100 % with its diagonal; `of` names it for the script."""
    parts = []
    for k in range(6):
        share = k / 5
        x, y = (float(v) for v in place(share, share).split())
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}M{x} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts += [
            text_at(LEFT - 6, y + 4, f"{20 * k} %", "end"),
            text_at(x, HEIGHT - BOTTOM + 16, f"{20 * k} %", "middle"),
        ]
    parts.append(f'<path class="diagonal" d="M{place(0, 0)}L{place(1, 1)}"/>')
    parts.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle"))
    parts.append(text_at(-(TOP + HEIGHT - BOTTOM) / 2, 11, y_label, "middle", turned=True))
    more = f' data-frame="{of}"' if of else ""
    return image(key, title, told, HEIGHT, [*parts, *inside], more)


def roc_lines(one: dict[str, Any], style: int, slot: int, point: int | None = 49) -> str:
    """The curve of a cell, its band over seeds and its point at a threshold (a position; None for no point)."""
    group = [f'<g data-slot="{slot}" class="s{style % COLOURS} d{style // COLOURS % 3}">']
    if one["roc"] is not None:
        if "low" in one:
            edge = [place(x, y) for x, y in zip(GRID, one["high"], strict=True)]
            edge += [place(x, y) for x, y in zip(GRID[::-1], one["low"][::-1], strict=True)]
            group.append(f'<path class="band" d="M{"L".join(edge)}Z"/>')
        line = [place(0, 0), *(place(x, y) for x, y in zip(GRID, one["roc"], strict=True))]
        group.append(f'<path class="line" d="M{"L".join(line)}"/>')
        if point is not None and "hits" in one:
            x, y = place(one["alarms"][point] / (one["n"] - one["yes"]), one["hits"][point] / one["yes"]).split()
            group.append(f'<circle cx="{x}" cy="{y}" r="4.5"/>')
    return "".join([*group, "</g>"])


def area_words(name: str, one: dict[str, Any], level: float | None = None) -> str:
    """The area under a curve in words; its interval, of the curve by itself, with a level alone."""
    if one["area"] is None:
        return f"{name}: no curve, since the test examples are all of one kind"
    area, low, high = one["area"]
    if level is None:
        return f"{name}: AUC {area:.3f}"
    return f"{name}: AUC {area:.3f} ({100 * level:g} % interval {low:.3f} to {high:.3f})"


Slots = Sequence[tuple[dict[str, Any], str, int]]


def _legend(slots: Slots, texts: Sequence[str], of: str) -> str:
    spans = [f"<span>{swatch(style)}{escape(text)}</span>" for (_, _, style), text in zip(slots, texts, strict=True)]
    return f'<p class="legend stacked" data-legend="{of}">{"".join(spans)}</p>'


def _roc(slots: Slots, key: str, told: dict[str, Any], outcomes: Outcomes) -> str:
    lines = [roc_lines(one, style, k) for k, (one, _, style) in enumerate(slots)]
    chart = frame(f"{key}-roc", "ROC curve", "Sensitivity against the share of false alarms; numbers are below.",
                  "false alarms (1 − specificity)", "sensitivity", lines, "roc")  # fmt: skip
    caption = (
        "ROC curve: what share of those with it is found, against the share of false alarms, at every threshold. The "
    )
    caption += "diagonal is chance. " + repeated(outcomes)
    caption += " The dot is the threshold chosen below." if any("hits" in one for one, _, _ in slots) else ""
    caption += f" Intervals of AUC: {100 * told['level']:g} %, by the number of test examples (Hanley and McNeil)."
    rows = [[name, *(_at(one, k) for k in (3, 6, 12))] for one, name, _ in slots]
    columns = ["method", *(f"sensitivity at {p} % specificity" for p in (95, 90, 80))]
    texts = [area_words(name, one, told["level"]) for one, name, _ in slots]
    behind = f'<details data-numbers="roc"><summary>The numbers</summary>{table("ROC curve", columns, rows)}</details>'
    return f"<figure>{chart}{_legend(slots, texts, 'roc')}<figcaption>{escape(caption)}</figcaption>{behind}</figure>"


def repeated(outcomes: Outcomes) -> str:
    """What several seeds and sites mean for a curve."""
    told = "All sites: their test examples together, each with its own site's network."
    if len(outcomes.seeds) == 1:
        return f"{told} One training (seed {outcomes.seeds[0]})."
    trainings = f"{many(len(outcomes.seeds), 'training')} (seeds {listed(outcomes.seeds)})"
    return f"{told} Lines: means over {trainings}; bands: lowest to highest."


def _at(one: dict[str, Any], k: int) -> str:
    return "–" if one["roc"] is None else f"{100 * one['roc'][k]:.1f} %"


def _calibration(slots: Slots, key: str, told: dict[str, Any], outcomes: Outcomes) -> str:
    groups = []
    for k, (one, name, style) in enumerate(slots):
        inside = [f'<g data-slot="{k}" class="mark s{style % COLOURS} d{style // COLOURS % 3}">']
        if one["groups"]:
            inside.append(f'<path class="line" d="M{"L".join(place(g[0], g[1]) for g in one["groups"])}"/>')
        for predicted, observed, low, high, examples in one["groups"]:
            x, y = place(predicted, observed).split()
            told_here = (
                f"{name}: predicted {100 * predicted:.1f} %, observed {100 * observed:.1f} % of {_whole(examples)}"
            )
            ends = f"M{place(predicted, low)}L{place(predicted, high)}"
            inside.append(f'<g data-t="{escape(told_here)}"><path class="line thin" d="{ends}"/>'
                          f'<circle cx="{x}" cy="{y}" r="4"/></g>')  # fmt: skip
        groups.append("".join([*inside, "</g>"]))
    chart = frame(f"{key}-cal", "Calibration", "Observed share against predicted probability; numbers are below.",
                  "predicted probability", "observed share", groups, "cal")  # fmt: skip
    caption = (
        "Calibration: test examples in groups of equal size by predicted probability; on the diagonal a predicted 30 % "
    )
    caption += f"happens in 30 % of cases. Vertical lines: {100 * told['level']:g} % intervals (Wilson). "
    caption += "Fewer than 20 test examples have no curve."
    rows = [[name, *(f"{100 * v:.1f} %" for v in g[:2]), f"{100 * g[2]:.1f} to {100 * g[3]:.1f} %", _whole(g[4])]
            for one, name, _ in slots for g in one["groups"]]  # fmt: skip
    columns = ["method", "predicted", "observed", "interval", "test examples"]
    shown = table("Calibration", columns, rows)
    behind = f'<details data-numbers="cal"><summary>The numbers</summary>{shown}</details>'
    texts = [name for _, name, _ in slots]
    return f"<figure>{chart}{_legend(slots, texts, 'cal')}<figcaption>{escape(caption)}</figcaption>{behind}</figure>"


def _counts(slots: Slots, key: str, told: dict[str, Any], outcomes: Outcomes, chosen: Sequence[int]) -> str:
    seeds = (
        f" Counts are means over {len(outcomes.seeds)} trainings and need not be whole."
        if len(outcomes.seeds) > 1
        else ""
    )
    if slots and "hits" in slots[0][0]:
        named = f"<span data-named>{escape(told['classes'][0])}</span>"
        slider = (
            f'<p class="control"><label for="{key}-curves-at">Called {named} from a predicted '
            f'probability of <output for="{key}-curves-at">50 %</output></label> '
            f'<input type="range" id="{key}-curves-at" data-pick="at" min="1" max="99" value="50"></p>'
        )
        shown = threshold_tables(
            [(one, name) for one, name, _ in slots], told["classes"][0], told["others"], told["level"]
        )
        note = (
            f"The threshold applies to both methods.{seeds} In brackets {100 * told['level']:g} % intervals (Wilson)."
        )
        heading = "<h4>Who is called what, at a threshold</h4>"
        return f'{heading}{slider}<div data-counts>{shown}</div><p class="caption">{note}</p>'
    if told["matrices"] is None:
        return f"<p>A table of all mistakes is shown for up to {_MATRIX} classes.</p>"
    shown = "".join(matrix_table(told["matrices"][0][m], told["methods"][m], told["names"]) for m in chosen)
    note = f"Each example is called what is most probable.{seeds}"
    return f'<h4>Who is called what</h4><div data-counts>{shown}</div><p class="caption">{note}</p>'


def _rounded(values: Any) -> list[float | None]:
    return [None if math.isnan(v) else round(float(v), _BETWEEN) + 0.0 for v in values]


def _short(value: float, digits: int = 1) -> float:
    found = round(float(value), digits)
    return int(found) if found == int(found) else found


def _whole(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"
