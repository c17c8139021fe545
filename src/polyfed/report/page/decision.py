"""The top of the page of a comparison: what each site should do, what that rests on, and what it does not cover."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from polyfed.core.io.number_format import count_with_noun, format_number
from polyfed.report.data.answers import ANSWER_LABELS, AnswerKind, SiteAnswer, parse_mean_answer, parse_site_answers
from polyfed.report.data.predictions import GroupPredictions
from polyfed.report.data.run_groups import RunGroup
from polyfed.report.data.run_records import mean_of_defined
from polyfed.report.page.elements import html_figure, html_legend, html_list, html_table
from polyfed.report.page.forest_plot import MAX_ROWS, ForestRow, IntervalMark, svg_forest_plot
from polyfed.report.page.performance import (
    NO_VERDICT,
    binary_performance,
    describe_auc,
    describe_averaging,
    svg_roc_curve,
    svg_unit_square,
)
from polyfed.report.page.svg_charts import COLOUR_COUNT, ChartLine, svg_line_chart

_COUNTED: Mapping[AnswerKind, str] = {"join": "should join", "stay": "should stay alone", "undecided": "not decided"}
_LISTED = 30  # sites up to which all are listed; of more the others open


def interval_level_of(run_group: RunGroup) -> float:
    """The level of the intervals of a comparison."""
    return float(run_group.comparison_results.get("level", 0.95))


def has_answers(run_group: RunGroup) -> bool:
    """Whether the comparison answers each site or their mean; those of earlier versions do not."""
    return bool(run_group.comparison_results) and bool(
        run_group.comparison_results.get("answers") or run_group.comparison_results.get("mean_answer")
    )


def html_decision(run_group: RunGroup, predictions: GroupPredictions | None, key: str) -> str:
    """What stands above the details: warnings, answers, the mean, what was left out, what is not covered, methods and two
    figures."""
    answers, mean_answer = (
        parse_site_answers(run_group.comparison_results),
        parse_mean_answer(run_group.comparison_results),
    )
    results = run_group.comparison_results
    level = interval_level_of(run_group)
    failed = [f"{label} failed and is not compared: {why}" for label, why in (results.get("failed") or {}).items()]
    parts = [_html_warnings([*(results.get("warnings") or ()), *failed]), _html_answers(answers)]
    if mean_answer is not None:
        mean_text = (
            f"{ANSWER_LABELS[mean_answer.kind]}{' ' if mean_answer.kind == 'join' else ': '}{mean_answer.explanation()}"
        )
        parts.append(f'<p class="mean"><b>Mean over sites:</b> {escape(mean_text)}</p>')
    parts += [f'<p class="facts">{escape(_as_sentence(sentence))}</p>' for sentence in _simple_model_verdicts(results)]
    parts += [
        f'<p class="facts">Left out: {escape(_as_sentence(why))}</p>' for why in (results.get("skipped") or {}).values()
    ]
    if covers := results.get("covers") or ():
        parts.append(
            f'<div class="covers"><h3>What these answers cover</h3>{html_list([str(sentence) for sentence in covers])}</div>'
        )
    parts.append(f'<div class="essentials">{_html_methods_table(run_group, level)}</div><div class="grid2 row">')
    if answers:
        parts.append(_html_gains_figure(answers, run_group, level, f"{key}-forest"))
    parts.append(_html_roc_or_learning_curves(run_group, predictions, level, f"{key}-top"))
    return "".join([*parts, "</div>"])


def _simple_model_verdicts(results: Mapping[str, Any]) -> list[str]:
    """What the comparison says of simple models against training alone."""
    mean_sentence = (results.get("mean_answer") or {}).get("sentence")
    return [
        verdict
        for verdict in results.get("verdicts") or ()
        if verdict.startswith("mean over clients: ") and verdict != mean_sentence
    ]


def _as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _html_warnings(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    shown = html_list([f"{str(sentence).rstrip('.')}." for sentence in sentences])
    return f'<div class="warn" role="note"><b>Before you rely on this</b>{shown}</div>'


def _html_answers(answers: Sequence[SiteAnswer]) -> str:
    if not answers:
        return (
            "<h2>Should sites join?</h2><p>Each seed deals other data to the sites, so that there is no answer for a site "
            "by its name. --same-data deals them once.</p>"
        )
    counted = Counter(answer.kind for answer in answers)
    counts_text = "; ".join(f"{counted[kind]} {kind_text}" for kind, kind_text in _COUNTED.items() if counted[kind])
    shown = [_html_answer(answer) for answer in answers]
    listed = f'<ul class="answers">{"".join(shown[:_LISTED])}</ul>'
    if len(shown) > _LISTED:
        listed += (
            f"<details><summary>The other {len(shown) - _LISTED} sites</summary>"
            f'<ul class="answers">{"".join(shown[_LISTED:])}</ul></details>'
        )
    total = f'<p class="facts">{count_with_noun(len(answers), "site")}: {counts_text}.</p>' if len(answers) > 1 else ""
    return f"<h2>Should each site join?</h2>{total}{listed}"


def _html_answer(answer: SiteAnswer) -> str:
    explanation = answer.explanation()
    return (
        f'<li class="{answer.kind}"><span class="badge">{ANSWER_LABELS[answer.kind]}</span> '
        f"<span><b>{escape(answer.client or '')}</b> {escape(explanation)}</span></li>"
    )


def _html_methods_table(run_group: RunGroup, level: float) -> str:
    """One row a method and a model that each site has alone, with no tests, the best first; below it what nobody has."""
    score_format, percent = run_group.score_format, f"{100 * level:g} % interval"
    ranked: list[tuple[float, list[str]]] = []
    for method in run_group.methods:
        statistics = method.statistics
        is_local = method is run_group.local_method
        gain, ends = statistics.get("gain"), statistics.get("gain_interval")
        if gain is None and (gains := [gain_over_local.mean for gain_over_local in run_group.gains_over_local(method)]):
            gain = mean_of_defined(gains)
        scores = [value for value in run_group.score_by_participant(method).values() if not math.isnan(value)]
        ranked.append(
            (
                run_group.ranking_key(method),
                [
                    f"{method.label} (alone)" if is_local else method.label,
                    format_number(run_group.mean_score(method), score_format.unit),
                    _format_interval(statistics.get("interval"), score_format.unit),
                    "–" if is_local or gain is None else score_format.format_signed(float(gain)),
                    "–"
                    if is_local or ends is None
                    else f"{_without_points(score_format.format_signed(ends[0]))} to "
                    f"{_without_points(score_format.format_signed(ends[1]))}",
                    format_number(_worst_score(scores, run_group), score_format.unit),
                ],
            )
        )
    references = run_group.comparison_results.get("references") or {}
    for name, reference in references.items():
        defined_scores = [float(value) for value in (reference.get("scores") or {}).values() if value is not None]
        mean_score, gain, ends = reference.get("mean"), reference.get("gain"), reference.get("gain_interval")
        is_last = name == "pooled" or mean_score is None
        ranked.append(
            (
                -math.inf if is_last else score_format.positive_if_better(float(mean_score)),
                [
                    f"{name.replace('_', ' ')} ({'all data in one place, for reference' if name == 'pooled' else 'alone'})",
                    "–" if mean_score is None else format_number(float(mean_score), score_format.unit),
                    _format_interval(reference.get("interval"), score_format.unit),
                    "–" if gain is None else score_format.format_signed(float(gain)),
                    "–"
                    if ends is None
                    else f"{_without_points(score_format.format_signed(ends[0]))} to "
                    f"{_without_points(score_format.format_signed(ends[1]))}",
                    format_number(_worst_score(defined_scores, run_group), score_format.unit),
                ],
            )
        )
    rows = [row for _, row in sorted(ranked, key=lambda row: row[0], reverse=True)]
    columns = ["method", f"mean {score_format.label}", percent, "gain over training alone", percent, "worst site"]
    better = (
        ""
        if score_format.higher_is_better
        else f" A lower {score_format.label} is better; a positive gain is always better."
    )
    notes = [
        f"{name.replace('_', ' ')}: {reference['sentence']}"
        for name, reference in references.items()
        if reference.get("sentence")
    ]
    caption = (
        f"Best first: mean {score_format.label} of methods and simple models on each site's own test examples.{better}"
    )
    return html_table(caption, columns, rows) + "".join(f'<p class="caption">{escape(note)}</p>' for note in notes)


def _worst_score(values: Sequence[float], run_group: RunGroup) -> float:
    if not values:
        return math.nan
    return min(values) if run_group.score_format.higher_is_better else max(values)


def _format_interval(ends: Sequence[float] | None, unit: str) -> str:
    if ends is None:
        return "–"
    low, high = (format_number(float(end), "%" if unit == "%" else "") for end in ends)
    return f"{low.removesuffix(' %')} to {high}"


def _without_points(text: str) -> str:
    return text.removesuffix(" points")


def _html_gains_figure(answers: Sequence[SiteAnswer], run_group: RunGroup, level: float, key: str) -> str:
    score_format = run_group.score_format
    rows = [
        ForestRow(
            answer.client or "",
            (
                IntervalMark(
                    ANSWER_LABELS[answer.kind],
                    math.nan if answer.gain is None else answer.gain,
                    *(answer.interval or (math.nan, math.nan)),
                    answer.kind,
                ),
            ),
        )
        for answer in answers
    ]
    axis_unit = f"points of {score_format.label}" if score_format.unit == "%" else score_format.label
    chart = svg_forest_plot(
        rows,
        key=key,
        title="Gain of each site by joining",
        x_label=f"gain, {axis_unit} (above 0 joining is better)",
        unit=score_format.unit,
        signed=True,
        show_zero=True,
    )
    drawn = f" Drawn are {MAX_ROWS} of {len(rows)} sites, evenly." if len(rows) > MAX_ROWS else ""
    caption = (
        f"What each site gains by joining over the best that it has alone, with {100 * level:g} % intervals. Full circles: "
        "join; squares: stay alone; "
    )
    caption += f"hollow circles: not decided.{drawn}"
    cells = [
        [
            answer.client or "",
            ANSWER_LABELS[answer.kind],
            answer.method or "–",
            "–" if answer.gain is None else score_format.format_signed(answer.gain),
            "–"
            if answer.interval is None
            else f"{score_format.format_signed(answer.interval[0])} to {score_format.format_signed(answer.interval[1])}",
            answer.compared_with.replace("_", " ") or "–",
            answer.basis or ("–" if answer.test_examples is None else str(answer.test_examples)),
        ]
        for answer in answers
    ]
    columns = ["site", "answer", "method", "gain", f"{100 * level:g} % interval", "over", "rests on"]
    return html_figure(chart, caption, html_table("Gain of each site", columns, cells))


def _html_roc_or_learning_curves(
    run_group: RunGroup, predictions: GroupPredictions | None, level: float, key: str
) -> str:
    """ROC curves of all sites together where the task is one question of yes or no; else the learning curves."""
    methods = [method for method in (run_group.best_method, run_group.local_method) if method is not None]
    if predictions is not None and len(predictions.binary_questions) == 1:
        method_names = [x.label for x in methods if x.label in predictions.methods]
        styles = [2 * COLOUR_COUNT - 1 if name == predictions.local_label else 0 for name in method_names]
        (question,) = predictions.binary_questions
        performances = [
            binary_performance(predictions, name, predictions.clients, question, level) for name in method_names
        ]
        if drawable := [
            (performance, name, style)
            for performance, name, style in zip(performances, method_names, styles, strict=True)
            if performance is not None
        ]:
            drawn = [svg_roc_curve(performance, style, k, None) for k, (performance, _, style) in enumerate(drawable)]
            chart = svg_unit_square(f"{key}-roc", "ROC curve of all sites", "Sensitivity against the share of false alarms.",
                          "false alarms (1 − specificity)", "sensitivity", drawn)  # fmt: skip
            texts = html_legend(
                [describe_auc(name, performance) for performance, name, _ in drawable],
                [style for _, _, style in drawable],
            )
            caption = (
                f"How well {question.name} is told from the rest: ROC curve. {describe_averaging(predictions)} "
                f"{NO_VERDICT}"
            )
            return html_figure(chart + texts, caption)
    drawn_lines = [
        ChartLine(
            x.label,
            x.mean_learning_curve["rounds"],
            x.mean_learning_curve["mean"],
            x.mean_learning_curve["low"],
            x.mean_learning_curve["high"],
            2 * COLOUR_COUNT - 1 if x is run_group.local_method else 0,
        )
        for x in methods
    ]
    score_format = run_group.score_format
    chart = svg_line_chart(
        drawn_lines,
        key=f"{key}-course",
        title=f"Mean {score_format.label} against rounds",
        x_label="rounds",
        y_label=f"mean {score_format.label}",
        unit=score_format.unit,
        integer_x=True,
    )
    texts = html_legend(
        [drawn_line.label for drawn_line in drawn_lines], [drawn_line.style for drawn_line in drawn_lines]
    )
    return html_figure(
        chart + texts, f"Mean {score_format.label} over sites by round: the best method and training alone."
    )
