"""The top of the page of a comparison: what each site should do, what that rests on, and what it does not cover."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from polyfed.report.answers import NAMES, Answer, Kind, read_answers, read_mean
from polyfed.report.charts import COLOURS, Curve, line_chart, number
from polyfed.report.curves import NO_VERDICT, area_words, cell, frame, repeated, roc_lines
from polyfed.report.forest import MOST, Mark, Row, forest
from polyfed.report.gathering import Setting
from polyfed.report.html import figure, legend, paragraphs, table
from polyfed.report.predictions import Outcomes
from polyfed.report.records import mean
from polyfed.report.words import many

_COUNTED: Mapping[Kind, str] = {"join": "should join", "stay": "should stay alone", "undecided": "not decided"}
_LISTED = 30  # sites up to which all are listed; of more the others open


def level_of(setting: Setting) -> float:
    """The level of the intervals of a comparison."""
    return float(setting.results.get("level", 0.95))


def has_answers(setting: Setting) -> bool:
    """Whether the comparison answers each site or their mean; those of earlier versions do not."""
    return bool(setting.results) and bool(setting.results.get("answers") or setting.results.get("mean_answer"))


def decision(setting: Setting, outcomes: Outcomes | None, key: str) -> str:
    """What stands above the details: warnings, answers, the mean, what was left out, what is not covered, methods and two
    figures."""
    answers, over_all = read_answers(setting.results), read_mean(setting.results)
    told = setting.results
    level = level_of(setting)
    failed = [f"{label} failed and is not compared: {why}" for label, why in (told.get("failed") or {}).items()]
    parts = [_warnings([*(told.get("warnings") or ()), *failed]), _sites(answers)]
    if over_all is not None:
        words = f"{NAMES[over_all.kind]}{' ' if over_all.kind == 'join' else ': '}{over_all.words()}"
        parts.append(f'<p class="mean"><b>Mean over sites:</b> {escape(words)}</p>')
    parts += [f'<p class="facts">{escape(_sentence(one))}</p>' for one in _simple(told)]
    parts += [
        f'<p class="facts">Left out: {escape(_sentence(why))}</p>' for why in (told.get("skipped") or {}).values()
    ]
    if covers := told.get("covers") or ():
        parts.append(
            f'<div class="covers"><h3>What these answers cover</h3>{paragraphs([str(one) for one in covers])}</div>'
        )
    parts.append(f'<div class="essentials">{_methods(setting, level)}</div><div class="grid2 row">')
    if answers:
        parts.append(_gains(answers, setting, level, f"{key}-forest"))
    parts.append(_second(setting, outcomes, level, f"{key}-top"))
    return "".join([*parts, "</div>"])


def _simple(told: Mapping[str, Any]) -> list[str]:
    """What the comparison says of simple models against training alone."""
    mean = (told.get("mean_answer") or {}).get("sentence")
    return [one for one in told.get("verdicts") or () if one.startswith("mean over clients: ") and one != mean]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _warnings(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    shown = paragraphs([f"{str(one).rstrip('.')}." for one in sentences])
    return f'<div class="warn" role="note"><b>Before you rely on this</b>{shown}</div>'


def _sites(answers: Sequence[Answer]) -> str:
    if not answers:
        return (
            "<h2>Should sites join?</h2><p>Each seed deals other data to the sites, so that there is no answer for a site "
            "by its name. --same-data deals them once.</p>"
        )
    counted = Counter(one.kind for one in answers)
    told = "; ".join(f"{counted[kind]} {words}" for kind, words in _COUNTED.items() if counted[kind])
    shown = [_line(one) for one in answers]
    listed = f'<ul class="answers">{"".join(shown[:_LISTED])}</ul>'
    if len(shown) > _LISTED:
        listed += (
            f"<details><summary>The other {len(shown) - _LISTED} sites</summary>"
            f'<ul class="answers">{"".join(shown[_LISTED:])}</ul></details>'
        )
    total = f'<p class="facts">{many(len(answers), "site")}: {told}.</p>' if len(answers) > 1 else ""
    return f"<h2>Should each site join?</h2>{total}{listed}"


def _line(one: Answer) -> str:
    words = one.words()
    return (
        f'<li class="{one.kind}"><span class="badge">{NAMES[one.kind]}</span> '
        f"<span><b>{escape(one.client or '')}</b> {escape(words)}</span></li>"
    )


def _methods(setting: Setting, level: float) -> str:
    """One row a method and a model that each site has alone, with no tests, the best first; below it what nobody has."""
    scale, percent = setting.scale, f"{100 * level:g} % interval"
    ranked: list[tuple[float, list[str]]] = []
    for line in setting.lines:
        found = line.statistics
        alone = line is setting.local
        gain, ends = found.get("gain"), found.get("gain_interval")
        if gain is None and (gains := [one.mean for one in setting.gains(line)]):
            gain = mean(gains)
        scores = [value for value in setting.scores(line).values() if not math.isnan(value)]
        ranked.append((setting.rank(line), [
            f"{line.label} (alone)" if alone else line.label,
            number(setting.mean(line), scale.unit),
            _ends(found.get("interval"), scale.unit),
            "–" if alone or gain is None else scale.signed(float(gain)),
            "–" if alone or ends is None else f"{_plain(scale.signed(ends[0]))} to {_plain(scale.signed(ends[1]))}",
            number(_worst(scores, setting), scale.unit),
        ]))  # fmt: skip
    references = setting.results.get("references") or {}
    for name, one in references.items():
        known = [float(value) for value in (one.get("scores") or {}).values() if value is not None]
        whole, gain, ends = one.get("mean"), one.get("gain"), one.get("gain_interval")
        apart = name == "pooled" or whole is None
        ranked.append((-math.inf if apart else scale.better(float(whole)), [
            f"{name.replace('_', ' ')} ({'all data in one place, for reference' if name == 'pooled' else 'alone'})",
            "–" if whole is None else number(float(whole), scale.unit),
            _ends(one.get("interval"), scale.unit),
            "–" if gain is None else scale.signed(float(gain)),
            "–" if ends is None else f"{_plain(scale.signed(ends[0]))} to {_plain(scale.signed(ends[1]))}",
            number(_worst(known, setting), scale.unit),
        ]))  # fmt: skip
    rows = [row for _, row in sorted(ranked, key=lambda one: one[0], reverse=True)]
    columns = ["method", f"mean {scale.label}", percent, "gain over training alone", percent, "worst site"]
    better = "" if scale.higher_is_better else f" A lower {scale.label} is better; a positive gain is always better."
    notes = [f"{name.replace('_', ' ')}: {one['sentence']}" for name, one in references.items() if one.get("sentence")]
    caption = f"Best first: mean {scale.label} of methods and simple models on each site's own test examples.{better}"
    return table(caption, columns, rows) + "".join(f'<p class="caption">{escape(note)}</p>' for note in notes)


def _worst(values: Sequence[float], setting: Setting) -> float:
    if not values:
        return math.nan
    return min(values) if setting.scale.higher_is_better else max(values)


def _ends(ends: Sequence[float] | None, unit: str) -> str:
    if ends is None:
        return "–"
    low, high = (number(float(end), "%" if unit == "%" else "") for end in ends)
    return f"{low.removesuffix(' %')} to {high}"


def _plain(text: str) -> str:
    return text.removesuffix(" points")


def _gains(answers: Sequence[Answer], setting: Setting, level: float, key: str) -> str:
    scale = setting.scale
    rows = [
        Row(one.client or "", (Mark(NAMES[one.kind], _or_nan(one.gain), *(one.interval or (math.nan, math.nan)), one.kind),))
        for one in answers
    ]  # fmt: skip
    what = f"points of {scale.label}" if scale.unit == "%" else scale.label
    chart = forest(rows, key=key, title="Gain of each site by joining", x_label=f"gain, {what} (above 0 joining is better)",
                   unit=scale.unit, signed=True, zero=True)  # fmt: skip
    drawn = f" Drawn are {MOST} of {len(rows)} sites, evenly." if len(rows) > MOST else ""
    caption = (
        f"What each site gains by joining over the best that it has alone, with {100 * level:g} % intervals. Full circles: "
        "join; squares: stay alone; "
    )
    caption += f"hollow circles: not decided.{drawn}"
    cells = [
        [one.client or "", NAMES[one.kind], one.method or "–", "–" if one.gain is None else scale.signed(one.gain),
         "–" if one.interval is None else f"{scale.signed(one.interval[0])} to {scale.signed(one.interval[1])}",
         one.over.replace("_", " ") or "–",
         one.basis or ("–" if one.test_examples is None else str(one.test_examples))]
        for one in answers
    ]  # fmt: skip
    columns = ["site", "answer", "method", "gain", f"{100 * level:g} % interval", "over", "rests on"]
    return figure(chart, caption, table("Gain of each site", columns, cells))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _second(setting: Setting, outcomes: Outcomes | None, level: float, key: str) -> str:
    """ROC curves of all sites together where the task is one question of yes or no; else the learning curves."""
    lines = [line for line in (setting.leader, setting.local) if line is not None]
    if outcomes is not None and len(outcomes.problems) == 1:
        named = [x.label for x in lines if x.label in outcomes.methods]
        styles = [2 * COLOURS - 1 if name == outcomes.reference else 0 for name in named]
        (problem,) = outcomes.problems
        cells = [cell(outcomes, name, outcomes.clients, problem, level) for name in named]
        if known := [
            (one, name, style) for one, name, style in zip(cells, named, styles, strict=True) if one is not None
        ]:
            drawn = [roc_lines(one, style, k, None) for k, (one, _, style) in enumerate(known)]
            chart = frame(f"{key}-roc", "ROC curve of all sites", "Sensitivity against the share of false alarms.",
                          "false alarms (1 − specificity)", "sensitivity", drawn)  # fmt: skip
            texts = legend([area_words(name, one) for one, name, _ in known], [style for _, _, style in known])
            caption = f"How well {problem.name} is told from the rest: ROC curve. {repeated(outcomes)} {NO_VERDICT}"
            return figure(chart + texts, caption)
    drawn_lines = [Curve(x.label, x.course["rounds"], x.course["mean"], x.course["low"], x.course["high"],
                         2 * COLOURS - 1 if x is setting.local else 0) for x in lines]  # fmt: skip
    scale = setting.scale
    chart = line_chart(drawn_lines, key=f"{key}-course", title=f"Mean {scale.label} against rounds", x_label="rounds",
                       y_label=f"mean {scale.label}", unit=scale.unit, whole=True)  # fmt: skip
    texts = legend([one.label for one in drawn_lines], [one.style for one in drawn_lines])
    return figure(chart + texts, f"Mean {scale.label} over sites by round: the best method and training alone.")
