"""Renders the top of a comparison's page: the advice to each site, what it rests on, and what it does not cover."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from polyfed.comparison.verdicts.omissions import describe_omissions
from polyfed.core.io.text.advice import keep_advice_for_python, keep_advice_for_terminal
from polyfed.core.io.text.number_format import (
    NumberUnit,
    count_with_noun,
    format_number,
    format_number_without_percent_sign,
    join_with_and,
)
from polyfed.core.io.text.site_words import say_sites
from polyfed.report.data.answers import (
    ANSWER_LABELS,
    AnswerKind,
    SiteAnswer,
    parse_answer_for_mean_over_sites,
    parse_site_answers,
)
from polyfed.report.data.provenance import read_provenance
from polyfed.report.data.run_groups import RunGroup
from polyfed.report.data.run_records import mean_of_defined
from polyfed.report.data.score_format import ScoreFormat
from polyfed.report.data.small_counts import hide_small_counts
from polyfed.report.page.advice.answer_table import gain_axis, html_answer_table, name_of_rival, short_name_of_rival
from polyfed.report.page.charts.caterpillar_plot import svg_caterpillar_plot
from polyfed.report.page.charts.forest_plot import IntervalMark
from polyfed.report.page.elements import html_figure, render_template
from polyfed.report.page.sentences import describe_methods, explain_choice

_COUNTED: Mapping[AnswerKind, str] = {"join": "should join", "stay": "should stay alone", "undecided": "not decided"}
_CONSTANT_AUC = 0.5  # of a model that gives every example the same probabilities
_LISTED = 30  # sites up to which one table has all; more are grouped by their answer


def confidence_level_of(run_group: RunGroup) -> float:
    """Returns the confidence level of a comparison's intervals, such as 0.95."""
    return float(run_group.comparison_results.get("level", 0.95))


def is_comparison_with_answers(run_group: RunGroup) -> bool:
    """Returns whether the group is a comparison with advice."""
    return bool(run_group.comparison_results) and bool(
        run_group.comparison_results.get("answers") or run_group.comparison_results.get("mean_answer")
    )


def html_advice_section(run_group: RunGroup, key: str, data_warnings: Sequence[str] = ()) -> Markup:
    """Renders the top section: warnings, those about the data first, advice, a table of methods, and limits."""
    results, level = run_group.comparison_results, confidence_level_of(run_group)
    answers, mean_answer = parse_site_answers(results), parse_answer_for_mean_over_sites(results)
    mean_text = ""
    if mean_answer is not None:
        separator = " " if mean_answer.kind == "join" else ": "
        sentence = say_sites(mean_answer.sentence_without_site_and_advice())
        mean_text = f"{ANSWER_LABELS[mean_answer.kind]}{separator}{sentence}"
        if any(answer.compared_with != mean_answer.compared_with for answer in answers):
            mean_text += (
                " This is over what does best alone on average over sites; a site's answer is over the best there."
            )
        if len(run_group.clients) > 1:
            mean_text += " In the mean each site counts the same, however many examples it has."
    answers.sort(key=lambda a: (a.kind == "undecided", math.inf if a.gain is None else -a.gain, a.client or ""))
    is_long, axis = len(answers) > _LISTED, gain_axis(answers)
    # Older results have no omissions among their warnings.
    warnings = [*data_warnings, *(results.get("warnings") or ()), *describe_omissions(results)]
    return render_template(
        "decision",
        warnings=[
            f"{keep_advice_for_reader(str(sentence), run_group).rstrip('.')}." for sentence in dict.fromkeys(warnings)
        ],
        answer_table=html_answer_table(answers, run_group, axis, level) if answers and not is_long else "",
        groups=[
            (heading, members, html_answer_table(members, run_group, axis, level))
            for heading, members in (_group_by_answer(answers) if is_long else [])
        ],
        mean_text=mean_text,
        facts=[_as_sentence(sentence) for sentence in _simple_model_verdicts(results)],
        covers=[say_sites(sentence) for sentence in results.get("covers") or ()],
        methods_table=_html_methods_table(run_group, level),
        figure=_html_caterpillar_figure(answers, run_group, level, f"{key}-forest") if is_long else "",
    )


def keep_advice_for_reader(text: str, run_group: RunGroup) -> str:
    """Returns advice for whoever made the comparison, in Python or by a command; with both where that is not known."""
    origin, text = read_provenance(run_group), say_sites(hide_small_counts(text))
    if origin.configuration:
        return keep_advice_for_terminal(text)
    return keep_advice_for_python(text) if origin.folder_name else text


def _group_by_answer(answers: Sequence[SiteAnswer]) -> list[tuple[str, list[SiteAnswer]]]:
    """Returns the answers of many sites by kind, the largest gain first, with a heading for each kind."""
    groups = []
    for kind, kind_text in _COUNTED.items():
        if members := [answer for answer in answers if answer.kind == kind]:
            members.sort(key=lambda answer: -math.inf if answer.gain is None else answer.gain, reverse=True)
            groups.append((f"{count_with_noun(len(members), 'site')} {kind_text}", members))
    return groups


def _simple_model_verdicts(results: Mapping[str, Any]) -> list[str]:
    """Returns the sentences on sites like these, and on what simple models are worth without joining."""
    mean_sentence = (results.get("mean_answer") or {}).get("sentence")
    return [
        verdict.replace("mean over clients: ", "without joining, on average over sites: ")
        for verdict in results.get("verdicts") or ()
        if verdict.startswith(("mean over clients: ", "sites like these (")) and verdict != mean_sentence
    ]


def _as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _html_methods_table(run_group: RunGroup, level: float) -> Markup:
    """Renders a table with one row per method and per simple model, the best first, and below it what pooled data give."""
    score_format, percent = run_group.score_format, f"{100 * level:g} % interval"
    ranked: list[tuple[float, list[str]]] = []
    for method in run_group.methods:
        statistics, is_local = method.statistics, method is run_group.local_method
        gain = statistics.get("gain")
        if gain is None and (gains := [gain_over_local.mean for gain_over_local in run_group.gains_over_local(method)]):
            gain = mean_of_defined(gains)
        scores = [value for value in run_group.mean_score_by_participant(method).values() if not math.isnan(value)]
        entry = {"mean": run_group.mean_score(method), "interval": statistics.get("interval")}
        if not is_local:
            entry |= {"gain": gain, "gain_interval": statistics.get("gain_interval")}
        label = run_group.name_on_page(method.label)
        ranked.append((run_group.ranking_key(method), [label, *_score_cells(entry, scores, run_group)]))
    references, notes, pooled = run_group.comparison_results.get("references") or {}, [], {}
    for name, reference in references.items():
        if not reference.get("alone", name != "pooled"):
            pooled[name] = reference
            continue
        scores = [float(value) for value in (reference.get("scores") or {}).values() if value is not None]
        if set(scores) == {_CONSTANT_AUC} and score_format.name == "auc":  # of any data, so without an interval
            reference = {**reference, "interval": None}
        label, mean_score = name_of_rival(name, run_group), reference.get("mean")
        rank = -math.inf if mean_score is None else score_format.positive_if_better(float(mean_score))
        ranked.append((rank, [label, *_score_cells(reference, scores, run_group)]))
        notes += [f"{label}: {say_sites(reference['sentence'])}"] if reference.get("sentence") else []
    explanation = (
        ""
        if score_format.higher_is_better
        else f" A lower {score_format.label} is better; a positive gain is always better."
    )
    leader = run_group.best_method_besides_local
    if leader is not None and (why := explain_choice(run_group, leader)):
        explanation += f" The answers are about {leader.label}{why}: so another method can stand above it here."
    if run_group.comparison_results.get("mean_answer") and any(
        reference.get("alone") for reference in references.values()
    ):
        explanation += (
            " Gains in this table are over training alone, one method at a time. The answers above compare with the best "
            "that a site has alone, simple models included, so their intervals can be wider."
        )
    return render_template(
        "best_first",
        caption=f"Best first: {score_format.mean_label} of methods and simple models on each site's own test examples."
        f"{explanation}",
        columns=["method", score_format.mean_label, percent, "gain over training alone", percent, "worst site"],
        rows=[row for _, row in sorted(ranked, key=lambda row: row[0], reverse=True)],
        pooled=_describe_pooled_models(pooled, run_group),
        notes=[*describe_methods(run_group.methods), *notes],
    )


def _describe_pooled_models(references: Mapping[str, Mapping[str, Any]], run_group: RunGroup) -> str:
    """Says what models trained on the data of all sites reach, and methods with the same test examples."""
    score_format, parts = run_group.score_format, []
    for name, reference in references.items():
        scores = [float(value) for value in (reference.get("scores") or {}).values() if value is not None]
        mean_score, _, _, _, worst = _score_cells(reference, scores, run_group)
        is_network = name == "pooled"
        rival = "one network" if is_network else short_name_of_rival(name.removeprefix("pooled_"), run_group)
        worst_text = "" if len(run_group.seeds) > 1 else f" (worst site {worst})"
        parts.append(f"{rival} reaches a {score_format.mean_label} of {mean_score}{worst_text}")
    if not parts:
        return ""
    text = f"For reference, all data in one place, which no site has: {join_with_and(parts)}."
    if len(run_group.seeds) > 1:
        text = text.replace(
            "which no site has:", f"which no site has, in the first {run_group.repeat} only, to save time:"
        )
        same_run = [
            f"{run_group.name_on_page(method.label)} {format_number(mean_score, score_format.unit)}"
            for method in dict.fromkeys((run_group.best_method_besides_local, run_group.local_method))
            if method is not None
            for run, mean_score in zip(method.runs, method.mean_score_by_run, strict=True)
            if run.seed == run_group.comparison_results["seeds"][0]
        ]
        text += (
            f" In the same {run_group.repeat}: {join_with_and(same_run)}. These have fewer test examples than the table, so "
            "do not compare them with it."
        )
    why = " The network is scored after its last round, not its best, so it can do worse than training alone."
    return f"{text}{why if 'pooled' in references else ''}"


def _score_cells(entry: Mapping[str, Any], scores: Sequence[float], run_group: RunGroup) -> list[str]:
    """Returns a method's cells: mean score and its interval, gain and its interval, and worst score."""
    score_format = run_group.score_format
    worst = min if score_format.higher_is_better else max
    return [
        format_number(entry.get("mean"), score_format.unit),
        _format_interval(entry.get("interval"), score_format.unit),
        "–" if entry.get("gain") is None else score_format.format_signed(float(entry["gain"])),
        _format_gain_interval(entry.get("gain_interval"), score_format).replace(" points", ""),
        format_number(worst(scores, default=None), score_format.unit),
    ]


def _format_interval(ends: Sequence[float] | None, unit: NumberUnit) -> str:
    if ends is None:
        return "–"
    return f"{format_number_without_percent_sign(float(ends[0]), unit)} to {format_number(float(ends[1]), unit)}"


def _format_gain_interval(ends: Sequence[float] | None, score_format: ScoreFormat) -> str:
    return "–" if ends is None else " to ".join(map(score_format.format_signed, ends))


def _html_caterpillar_figure(answers: Sequence[SiteAnswer], run_group: RunGroup, level: float, key: str) -> Markup:
    """Draws the gains of many sites, sorted; the tables of the answers hold the numbers."""
    score_format = run_group.score_format
    marks = [
        IntervalMark(
            f"{answer.client}, {ANSWER_LABELS[answer.kind]}",
            math.nan if answer.gain is None else answer.gain,
            *(answer.interval or (math.nan, math.nan)),
            answer.kind,
        )
        for answer in answers
    ]
    axis_unit = f"points of {score_format.label}" if score_format.unit == "%" else score_format.label
    chart = svg_caterpillar_plot(
        marks,
        key=key,
        title="Gain of each site by joining",
        x_label=f"gain, {axis_unit} (above 0 joining is better)",
        unit=score_format.unit,
    )
    caption = (
        f"Gain of each site by joining, over the best that it has alone, with {100 * level:g} % intervals. Full circles: "
        "join; squares: stay alone; hollow circles: not decided. All sites, from the largest gain to the smallest."
    )
    return html_figure(chart, caption)
