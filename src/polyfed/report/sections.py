"""The parts of a setting's section: methods, learning curves, gains and scores of clients, and who has what."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, final

import numpy as np

from polyfed.report import words
from polyfed.report.charts import COLOURS, Bar, Curve, bar_chart, heat_map, line_chart, number
from polyfed.report.gathering import Line, Setting
from polyfed.report.html import choice, figure, swatch, switch, table
from polyfed.report.predictions import Outcomes
from polyfed.report.records import mean
from polyfed.report.scale import Scale

_AXES = {
    "rounds": ("rounds", "rounds"),
    "megabytes": ("MB", "MB up and down, all clients (1 MB = 2²⁰ bytes)"),
    "seconds": ("seconds", "seconds of clients and server"),
}
_OPEN = 12  # clients up to which their table is open at once
_SEEDS = 6  # seeds whose classes are shown
_BARS = 400  # gains that are drawn, and told in a table
_CELLS = 5000  # of a table of classes


@final
@dataclass(frozen=True, eq=False)
class Beside:
    """What stands beside the scores of a setting.

    Attributes:
        classes: by seed, the number of training examples per class of each client.
        class_names: one per class.
        no_classes: why there are none, a sentence; where there are, what is to be said of them.
        views: heading -> line -> HTML, what the methods have to show.
        outcomes: predictions of the test examples; None without any.
        no_outcomes: why there are none, a sentence; empty for nothing to say.
        subgroups: columns of the test examples by which scores are told.
    """

    classes: Mapping[int, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    class_names: Sequence[str] = ()
    no_classes: str = ""
    views: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    outcomes: Outcomes | None = None
    no_outcomes: str = ""
    subgroups: Sequence[str] = ()


def methods(setting: Setting) -> str:
    """One row a method."""
    unit, several, compared = setting.scale.unit, len(setting.seeds) > 1, bool(setting.results)
    columns = ["method", f"mean {setting.scale.label}"]
    compared_ends = compared and any(line.statistics.get("interval") for line in setting.lines)
    level = f"{100 * float(setting.results.get('level', 0.95)):g} % interval"
    columns += [level if compared else "lowest to highest seed"] if several or compared_ends else []
    columns += ["worst client", "10th percentile", "90th"]
    columns += [f"gain{', points' if unit else ''}", "gain / lose"] if setting.local else []
    columns += [f"p ({setting.local.label})", "p (best)"] if compared and setting.local else []
    columns += ["MB", "seconds", "rounds"]
    caption = "Methods, best mean first; MB are those of all clients, up and down"
    if setting.local:
        caption += f"; gain over {setting.local.label}"
        caption += "; p, corrected for the number of methods, against it and against the best" if compared else ""
    if set(setting.common) < set(setting.seeds) and not compared:
        caption += f"; scores of the seeds that all have ({words.listed(setting.common)})" if setting.common else (
            "; each method has scores of other seeds")  # fmt: skip
    rows, worst = [], 0 if setting.scale.higher_is_better else 100
    for line in sorted(setting.lines, key=setting.rank, reverse=True):
        scores = [value for value in setting.scores(line).values() if not math.isnan(value)]
        counted = setting.counted(line)
        finals = [known for run in counted if (known := _known(run.final))]
        row = [line.label, number(setting.mean(line), unit)]
        if several or compared_ends:
            seeds = [mean(known) for known in finals]
            ends = line.statistics.get("interval") if compared else (min(seeds), max(seeds)) if seeds else None
            row.append(f"{number(ends[0], unit)} to {number(ends[1], unit)}" if ends and scores else "–")
        row += [number(_said(line, name, mean([float(np.percentile(known, q)) for known in finals])), unit)
                for name, q in (("worst", worst), ("p10", 10), ("p90", 90))]  # fmt: skip
        if setting.local:
            gains = setting.gains(line)
            gain = _said(line, "gain", mean([gain.mean for gain in gains]))
            row.append(number(gain, unit, signed=True).removesuffix(" %"))
            ups, downs = (sum(sign * gain.mean > 0 for gain in gains) for sign in (1, -1))
            row.append(f"{ups} / {downs}" if gains else "–")
            if compared:
                tested = [line.statistics.get(name) for name in ("p_reference", "p_best")]
                row += ["–" if found is None else f"{float(found):.2g}" for found in tested]
        spent = [run.spent for run in line.runs]
        rounds = sorted({run.round for run in line.runs})
        row += [_short(mean([moved for moved, _ in spent])), _short(mean([seconds for _, seconds in spent]))]
        rows.append([*row, str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"])
    return table(caption, columns, rows) + _target(setting)


def _target(setting: Setting) -> str:
    """What it costs to reach a score, of a comparison."""
    target = setting.results.get("target", {})
    if target.get("score") is None:
        return ""
    rows = []
    for label, method in setting.results["methods"].items():
        found = method["statistics"]["to_target"]
        cost = [math.nan if found[n] is None else found[n] for n in ("round", "bytes", "seconds")]
        rows.append([label, f"{found['reached']} of {len(method['runs'])}", _short(cost[0]), _short(cost[1] / 2**20),
                     _short(cost[2])])  # fmt: skip
    reach = f"{number(target['score'], setting.scale.unit)} ({target['sentence']})"
    shown = table(f"To a mean of {reach}", ["method", "seeds that reach it", "rounds", "MB", "seconds"], rows)
    return f"<details><summary>What it costs to reach {escape(reach)}</summary>{shown}</details>"


def course(setting: Setting, key: str, curves: dict[str, Any]) -> str:
    """The mean score against rounds, megabytes and seconds; one legend, which chooses the lines, for all three."""
    unit, name = setting.scale.unit, setting.scale.label
    lines = setting.lines
    panels = {}
    for axis, (short, label) in _AXES.items():
        drawn = [Curve(x.label, x.course[axis], x.course["mean"], x.course["low"], x.course["high"], _style(setting, k))
                 for k, x in enumerate(lines)]  # fmt: skip
        title = f"Mean {name} over clients against {short}"
        chart = line_chart(drawn, key=f"{key}-{axis}", title=title, x_label=label, y_label=f"mean {name}", unit=unit,
                           whole=axis == "rounds")  # fmt: skip
        told = f"{title}; arrow keys tell values"
        panels[short] = (
            f'<div data-chart="{key}" data-axis="{axis}" tabindex="0" role="group" aria-label="{told}">{chart}</div>'
        )
    labels = [
        f'<label><input type="checkbox" id="{key}-{k}" value="{k}" data-lines="{key}" checked>{swatch(_style(setting, k))}'
        f"{escape(line.label)}</label>"
        for k, line in enumerate(lines)
    ]
    legend = f'<fieldset class="control legend"><legend>Methods</legend>{"".join(labels)}</fieldset>'
    curves[key] = {"unit": unit, "up": setting.scale.higher_is_better, "lines": [_plain(line) for line in lines]}
    rows = []
    for line in lines:
        c = line.course
        for k in _some(len(c["rounds"])):
            row = [line.label, f"{c['rounds'][k]:.0f}", _short(c["megabytes"][k]), _short(c["seconds"][k])]
            spread = [f"{number(c['low'][k], unit)} to {number(c['high'][k], unit)}"] if len(setting.seeds) > 1 else []
            rows.append([*row, number(c["mean"][k], unit), *spread])
    columns = [
        "method",
        "round",
        "MB",
        "seconds",
        name,
        *(["lowest to highest seed"] if len(setting.seeds) > 1 else []),
    ]
    caption = f"Mean {name} over clients, after each round that was evaluated."
    if len(setting.seeds) > 1:
        many = {len(line.runs) for line in lines}
        seeds = f"{max(many)} seeds" if len(many) == 1 else "the seeds that a method has"
        caption += f" Lines: means of {seeds}; bands: from the lowest to the highest of them."
    if any(not any(line.course["megabytes"]) for line in lines) and len(lines) > 1:
        caption += " Against MB, what sends nothing is a dotted level at its last value."
    chart = switch(f"{key}-axis", "Against", panels)
    return figure(chart + legend, caption, table("Learning curves", columns, rows))


def gains(setting: Setting, key: str) -> str:
    """What each client gains over training alone, a chart a method."""
    unit, local = setting.scale.unit, setting.local
    if local is None:
        why = "has no score here" if setting.results else "was not run"
        return f"<p>Training alone (local) {why}, so that there is nothing to compare with.</p>"
    panels = {}
    for k, line in enumerate(line for line in setting.lines if line is not local):
        gains = setting.gains(line)
        if not gains:
            panels[line.label] = f"<p>No client of {escape(line.label)} has a score both ways.</p>"
            continue
        drawn = [gains[k] for k in _some(len(gains), _BARS)]
        bars = [Bar(gain.client, gain.mean, gain.low, gain.high) for gain in drawn]
        what = f"points of {setting.scale.label}" if unit == "%" else f"difference in {setting.scale.label}"
        what += "" if setting.scale.higher_is_better else ", positive is better"
        chart = bar_chart(bars, key=f"{key}-g{k}", title=f"Gain of {line.label} over training alone, by client",
                          x_label=what, unit=unit, signed=True)  # fmt: skip
        up, down = sum(g.mean > 0 for g in gains), sum(g.mean < 0 for g in gains)
        caption = f"{line.label} against {local.label}: {up} gain, {down} lose, {len(gains) - up - down} stay; {what}."
        if any(bar.low != bar.high for bar in bars):
            caption += " Thin lines: from the lowest to the highest seed."
        caption += f" Drawn are {len(drawn)} of them, evenly." if len(drawn) < len(gains) else ""
        told = [[number(v, unit, signed=True).removesuffix(" %") for v in (g.mean, g.low, g.high)] for g in drawn]
        rows = [[gain.client, *values] for gain, values in zip(drawn, told, strict=True)]
        behind = table(f"Gain of {line.label}, {what}", ["client", "mean", "lowest seed", "highest seed"], rows)
        panels[line.label] = figure(chart, caption, behind)
    if not panels:
        return "<p>Only training alone was run.</p>"
    best = sorted(panels, key=lambda label: -next(setting.rank(x) for x in setting.lines if x.label == label))
    return choice(f"{key}-gain", "Method", {label: panels[label] for label in best})


def clients(setting: Setting) -> str:
    """The table of each client's scores."""
    unit = setting.scale.unit
    order = sorted(setting.lines, key=lambda line: (line is not setting.local, -setting.rank(line)))
    scores = [setting.scores(line) for line in order]
    names = sorted({name for found in scores for name in found})
    references = setting.results.get("references") or {}
    rows, bold = [], []
    for name in names:
        values = [found.get(name, math.nan) for found in scores]
        shown_values = [*values, *(_or_nan(one.get("scores", {}).get(name)) for one in references.values())]
        rows.append([name, *(number(value, unit) for value in shown_values)])
        bold.append(_best(values, setting.scale))
    means = [setting.mean(line) for line in order]
    rows.append(
        ["mean", *(number(v, unit) for v in (*means, *(_or_nan(one.get("mean")) for one in references.values())))]
    )
    bold.append(_best(means, setting.scale) if setting.common else set())
    shown = table(
        f"{_upper(setting.scale.label)} of each client; the {setting.scale.extreme} of a row is bold",
        ["client", *(x.label for x in order), *(_beside(name) for name in references)],
        rows,
        bold=bold,
    )
    opened = " open" if len(names) <= _OPEN else ""
    return f"<details{opened}><summary>Table of {words.many(len(names), 'client')}</summary>{shown}</details>"


def _beside(name: str) -> str:
    return f"{name} (for reference)" if name == "pooled" else f"{name} (alone)"


def classes(setting: Setting, beside: Beside, key: str) -> str:
    """Training examples by client and class."""
    if not beside.classes:
        return f"<p>{escape(beside.no_classes)}</p>"
    panels = {}
    for seed in sorted(beside.classes)[:_SEEDS]:
        counts = beside.classes[seed]
        clients = sorted(counts)
        values = np.array([counts[client] for client in clients], np.float64)
        chart = heat_map(values, clients, beside.class_names, key=f"{key}-c{seed}", x_label="class", y_label="client",
                         title="Training examples of each class that each client has", whole=True)  # fmt: skip
        sizes = values.sum(axis=1)
        caption = (
            f"Training examples by client and class{f', seed {seed}' if len(beside.classes) > 1 else ''}; a client has "
            f"{sizes.min():.0f}{f' to {sizes.max():.0f}' if sizes.min() < sizes.max() else ''}. {beside.no_classes}"
        )
        shown = [k for k in range(len(clients)) if (k + 1) * values.shape[1] <= _CELLS]
        rows = [[clients[k], *(f"{n:.0f}" for n in values[k]), f"{values[k].sum():.0f}"] for k in shown]
        told = "Training examples" + (f" of the first {len(shown)} clients" if len(shown) < len(clients) else "")
        behind = table(told, ["client", *beside.class_names, "all"], rows)
        panels[f"seed {seed}"] = figure(chart, caption.strip(), behind)
    return choice(f"{key}-class", "Seed", panels)


def _said(line: Line, name: str, otherwise: float) -> float:
    """What a finished comparison says of a method, which may be that it is not defined; else what is computed here."""
    found = line.statistics.get(name, otherwise)
    return math.nan if found is None else float(found)


def _style(setting: Setting, position: int) -> int:
    """The style of a line; training alone has one of its own, grey and dashed."""
    if setting.lines[position] is setting.local:
        return 2 * COLOURS - 1
    return position % (COLOURS - 1) + position // (COLOURS - 1) * COLOURS


def _plain(line: Line) -> dict[str, Any]:
    """The course of a line for the script: short numbers, null for what is not defined."""
    table = {
        name: [None if math.isnan(v) else float(f"{v:.5g}") for v in values] for name, values in line.course.items()
    }
    return {"label": line.label, **table, "rounds": [int(v) for v in line.course["rounds"]]}


def _some(size: int, most: int = 30) -> list[int]:
    """At most so many positions, evenly, with the last."""
    return sorted({round(k) for k in np.linspace(0, size - 1, min(size, most))}) if size else []


def _known(final: Mapping[str, float | None]) -> list[float]:
    return [value for value in final.values() if value is not None]


def _best(values: Sequence[float], scale: Scale) -> set[int]:
    """The columns of the best value in a row with a name before; none where all have it."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2 or max(known) == min(known):
        return set()
    return {k for k, value in enumerate(values, 1) if value == scale.best(known)}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _short(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
