"""Renders the card on top of a group's section: the decision, the mean gain, what it costs, and what the server learns."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from markupsafe import Markup

from polyfed.comparison.planning.method_selection import DEFAULT_METHODS
from polyfed.comparison.statistics.power import factor_of_examples_to_decide
from polyfed.core.io.text.number_format import (
    count_with_noun,
    end_with_period,
    format_number,
    format_number_without_percent_sign,
    format_three_significant_digits,
    join_with_and,
)
from polyfed.core.io.text.site_words import say_sites
from polyfed.core.methods.declared_words import DISCLOSURES
from polyfed.report.data.answers import (
    ANSWER_LABELS,
    AnswerKind,
    SiteAnswer,
    parse_answer_for_mean_over_sites,
    parse_site_answers,
)
from polyfed.report.data.costs import MethodCost, cost_of_method, describe_protection, disclosures_of_method
from polyfed.report.data.run_groups import MethodRuns, RunGroup
from polyfed.report.data.run_records import mean_of_defined
from polyfed.report.page.advice.answer_table import name_of_rival
from polyfed.report.page.elements import render_template
from polyfed.report.page.sentences import describe_methods, explain_choice

_MEANINGS: Mapping[AnswerKind, str] = {
    "join": "Together with the others, such a site can expect better predictions for its new examples than with the best "
    "that it has alone.",
    "stay": "Something that such a site has alone predicts better.",
    "undecided": "This comparison cannot tell a gain from chance. Staying alone sends and discloses nothing.",
}
_TRAINING_TOO_SHORT: Mapping[str, str] = {
    "too few evaluated rounds (": "after so few rounds nobody can tell whether networks were still learning",
    " had not converged": "networks were still learning (had not converged)",
}
"""What an answer's sentence says where training was too short, and what that means."""
_MANY_TIMES = 100  # as many examples, beyond which nobody collects them
_LONGEST_UNIT = 12  # characters of a unit that stand beside the number, in its size
_MOST_GAINS = 5  # methods whose gains the card has
_CHOSEN_BY_TEST = (
    " Which method the answers are about was chosen by the test examples; the intervals allow for that choice."
)


@final
class KeyFact(NamedTuple):
    """Holds one fact of the card: its heading, its value, and a note in small letters."""

    heading: str
    value: str
    note: str = ""


def html_header_card(run_group: RunGroup) -> Markup:
    """Renders the card of a comparison or of runs; empty if no method has a score."""
    method = run_group.best_method_besides_local or run_group.local_method
    if method is None or math.isnan(run_group.mean_score(method)):
        return Markup()
    results = run_group.comparison_results
    answers, mean_answer = parse_site_answers(results), parse_answer_for_mean_over_sites(results)
    cost = cost_of_method(method)
    kinds: set[AnswerKind] = {answer.kind for answer in answers}
    if answers or mean_answer is not None:
        kind, decision = _decide_in_words(answers, mean_answer)
        kinds = kinds or {kind} & {"undecided"}
        facts = [_mean_gain_of_answer(run_group, mean_answer)]
    else:
        kind, decision = "undecided", _summary_of_runs(run_group, method)
        facts = [KeyFact("Mean score", format_number(run_group.mean_score(method), run_group.score_format.unit),
                         f"{run_group.score_format.label}, over {_describe_evaluated(run_group, method, cost)}"),
                 _mean_gain_of_runs(run_group, method)]  # fmt: skip
    return render_template(
        "header_card",
        kind=kind,
        decision=decision,
        meanings=[
            (ANSWER_LABELS[k] if len(kinds) > 1 else "", meaning)
            for k, meaning in {**_MEANINGS, **_meaning_of_undecided(run_group, answers, mean_answer)}.items()
            if k in kinds
        ],
        facts=[fact for fact in (*facts, *_cost_facts(cost), _disclosure_fact(run_group, method)) if fact.value],
        method=method.label,
        why_method=explain_choice(run_group, method),
        gains=_gains_over_local(run_group, method),
        gloss=_describe_method(method),
        why_round=why_this_round(run_group, method, cost),
        protection=_protection_sentence(run_group, method),
    )


def _meaning_of_undecided(
    run_group: RunGroup, answers: Sequence[SiteAnswer], mean_answer: SiteAnswer | None
) -> dict[AnswerKind, str]:
    """Returns what "undecided" means: where networks were still learning to train on, else how many examples decide."""
    of_mean = [] if mean_answer is None or mean_answer.kind != "undecided" else [mean_answer]
    undecided = [answer for answer in answers if answer.kind == "undecided"] if answers else of_mean
    for sign, reason in _TRAINING_TOO_SHORT.items():
        if undecided and all(sign in answer.sentence for answer in undecided):
            return {
                "undecided": f"Training ended too early for an answer: {reason}. Train on, as the box below says, before "
                "you collect more examples. Staying alone sends and discloses nothing."
            }
    is_named = bool(of_mean) and "mostly because of this" in of_mean[0].sentence
    if of_mean and (widest := find_site_that_widens_mean(answers, least_share=0 if is_named else 0.5)):
        return {
            "undecided": f"{_MEANINGS['undecided']} It is mostly {widest} that makes the mean's interval wide: each site "
            "counts the same there. More test examples at this site, or a comparison without it, would tell more."
        }
    factors = [
        (factor_of_examples_to_decide(answer.gain, answer.interval), answer.client or "")
        for answer in of_mean or undecided
        if answer.gain and answer.interval is not None
    ]
    more = ""
    if factors:
        factor, site = min(factors)
        times = f"about {factor:.2g} times" if factor < _MANY_TIMES else f"more than {_MANY_TIMES} times"
        whose = f"the difference at {site}" if site else "the mean difference"
        more = f"To decide {whose}, if it is as small as estimated, takes {times} as many examples. "
    plan = "Before it trains, a comparison can say how small a gain it can decide."
    return {"undecided": f"{_MEANINGS['undecided']} {more}{plan}"}


def find_site_that_widens_mean(answers: Sequence[SiteAnswer], least_share: float = 0.5) -> str:
    """Returns the site with the widest interval if without it the mean's variance would fall by a share; else "".

    >>> north, south = (SiteAnswer(name, "undecided", interval=(-0.05, 0.05)) for name in ("north", "south"))
    >>> find_site_that_widens_mean([north, south, SiteAnswer("tiny", "undecided", interval=(-0.4, 0.2))])
    'tiny'
    >>> find_site_that_widens_mean([north, south])
    ''
    """
    squares = {a.client or "": (a.interval[1] - a.interval[0]) ** 2 for a in answers if a.interval is not None}
    number, total = len(squares), sum(squares.values())
    if number < 2 or not total:
        return ""
    widest = max(squares, key=squares.__getitem__)
    rest = (total - squares[widest]) / (number - 1) ** 2
    return widest if not least_share or rest < (1 - least_share) * total / number**2 else ""


def _gains_over_local(run_group: RunGroup, method: MethodRuns) -> str:
    """Says what each method gains over training alone, the card's and those that somebody asked for first."""
    others = [other for other in run_group.methods if other not in (method, run_group.local_method)]
    others.sort(key=lambda other: (other.label in DEFAULT_METHODS, -run_group.ranking_key(other)))
    gains = [(other.label, other.statistics) for other in (method, *others) if other.statistics.get("gain") is not None]
    if len(gains) < 2:
        return ""
    form, level = run_group.score_format, run_group.comparison_results.get("level", 0.95)
    parts = []
    for label, statistics in gains[:_MOST_GAINS]:
        part, ends = f"{label} {form.format_signed(statistics['gain'])}", statistics.get("gain_interval")
        if ends is not None:
            part += f" ({' to '.join(form.format_signed(end).removesuffix(' points') for end in ends)})"
        parts.append(part)
    more = f"; {len(gains) - _MOST_GAINS} more in the table below" if len(gains) > _MOST_GAINS else ""
    return (
        f"Mean gain of each method over training alone ({100 * float(level):g} % interval): {'; '.join(parts)}{more}."
    )


def _describe_method(method: MethodRuns) -> str:
    """Says in a few words what the card's method does, and what FedAvg is where these words name it."""
    text = next((f"The method {words}" for words in describe_methods([method])), "")
    return f"{text} (FedAvg: one network for all, the average of what the sites train)" if "FedAvg" in text else text


def _describe_evaluated(run_group: RunGroup, method: MethodRuns, cost: MethodCost) -> str:
    """Names the sites of a mean; where a run evaluated some of many, with the interval of the mean over all."""
    sample = method.runs[0].evaluated
    if not sample:
        return count_with_noun(cost.clients, "site")
    text, form = f"{sample['clients']} of {count_with_noun(sample['of'], 'site')}", run_group.score_format
    ends = sample["mean_interval"].get(form.name) if len(method.runs) == 1 else None
    if ends is None:
        return text
    low, high = format_number_without_percent_sign(ends[0], form.unit), format_number(ends[1], form.unit)
    return f"{text}, drawn at random; 95 % interval of the mean over all {low} to {high}"


def _decide_in_words(answers: Sequence[SiteAnswer], mean_answer: SiteAnswer | None) -> tuple[AnswerKind, str]:
    """Returns the kind of decision and its sentence, from the sites' answers or else that for the mean."""
    if not answers:
        assert mean_answer is not None
        with_method = f" with {mean_answer.method}" if mean_answer.method else ""
        texts: dict[AnswerKind, str] = {
            "join": f"On average, sites should join{with_method}",
            "stay": "On average, sites should stay alone",
            "undecided": "Not decided whether sites should join",
        }
        return mean_answer.kind, texts[mean_answer.kind] + "."
    counted, total = Counter(answer.kind for answer in answers), len(answers)
    kind: AnswerKind = "join" if counted["join"] else "stay" if counted["stay"] == total else "undecided"
    if total == 1:
        (answer,) = answers
        how = {"join": f"should join with {answer.method}", "stay": "should stay alone", "undecided": "is not decided"}
        return kind, f"{answer.client} {how[answer.kind]}."
    methods = dict.fromkeys(a.method for a in answers if a.kind == "join" and a.method)
    parts = []
    if counted["join"]:
        with_methods = f" with {join_with_and(list(methods))}" if methods else ""
        parts.append(f"{_format_share(counted['join'], total)} should join{with_methods}")
    if counted["stay"]:
        parts.append(f"{_format_share(counted['stay'], total) if not parts else counted['stay']} should stay alone")
    if counted["undecided"] == total:
        parts = ["Not decided for any site"]
    elif counted["undecided"]:
        parts.append(f"{counted['undecided']} {'is' if counted['undecided'] == 1 else 'are'} not decided")
    return kind, "; ".join(parts) + "."


def _format_share(number: int, total: int) -> str:
    return f"All {total} sites" if number == total else f"{number} of {total} sites"


def _mean_gain_of_answer(run_group: RunGroup, answer: SiteAnswer | None) -> KeyFact:
    if answer is None or answer.gain is None:
        return KeyFact("Mean gain", "–" if answer is not None else "")
    form, level = run_group.score_format, run_group.comparison_results.get("level", 0.95)
    words = run_group.comparison_results["mean_answer"].get("over_words")
    over = f"over {words or name_of_rival(answer.compared_with or 'local', run_group)}"
    label = "" if form.unit == "%" else form.label
    value, parts = form.format_signed(answer.gain), [over]
    if answer.interval is not None:
        low, high = map(form.format_signed, answer.interval)
        parts = [f"{100 * float(level):g} % interval {low.removesuffix(' points')} to {high}", over]
    if len(label) > _LONGEST_UNIT:
        return KeyFact("Mean gain", value, "; ".join([label, *parts]))
    return KeyFact("Mean gain", f"{value} {label}".rstrip(), "; ".join(parts))


def _summary_of_runs(run_group: RunGroup, method: MethodRuns) -> str:
    score, local = run_group.score_format, run_group.local_method
    if run_group.progress:
        return f"Not finished: {run_group.progress} are done, and there are no answers yet."
    text = f"{method.label}: {score.mean_label} {format_number(run_group.mean_score(method), score.unit)}"
    if local is not None and local is not method and not math.isnan(run_group.mean_score(local)):
        text += f"; training alone: {format_number(run_group.mean_score(local), score.unit)}"
    return f"{text}."


def _mean_gain_of_runs(run_group: RunGroup, method: MethodRuns) -> KeyFact:
    gains = [gain.mean for gain in run_group.gains_over_local(method)]
    if not gains:
        return KeyFact("Mean gain", "")
    ups = sum(gain > 0 for gain in gains)
    note = f"over training alone, without an interval; {ups} of {count_with_noun(len(gains), 'site')} gain"
    return KeyFact("Mean gain", run_group.score_format.format_signed(mean_of_defined(gains)), note)


def _cost_facts(cost: MethodCost) -> list[KeyFact]:
    traffic = f"{format_three_significant_digits(cost.megabytes)} MB" if cost.megabytes else "nothing"
    note = "all sites, up and down"
    if cost.megabytes and cost.clients > 1:
        note += f"; {format_three_significant_digits(cost.megabytes / cost.clients)} MB for each"
    low, high = cost.scored_rounds
    counted = f"{low}" if low == high else f"{low} to {high}"
    rounds = KeyFact("Rounds", counted, f"of {cost.planned_rounds}; in each, sites train and send once")
    seconds = KeyFact("Computing time", format_duration(cost.seconds), "sites and server added up, one run")
    facts = [KeyFact("Sent", traffic, note), rounds, seconds]
    if cost.simulated_seconds is not None:
        meaning = "until the last of these rounds, at the sites' stated speeds; one run"
        facts.append(KeyFact("Simulated time", format_duration(cost.simulated_seconds), meaning))
    return facts


def format_duration(seconds: float) -> str:
    """Returns a duration as text in seconds, minutes or hours.

    >>> format_duration(0.43), format_duration(90), format_duration(9000)
    ('0.43 s', '1.5 min', '2.5 h')
    """
    for length, unit in ((3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.2g} s"


def _disclosure_fact(run_group: RunGroup, method: MethodRuns) -> KeyFact:
    words = disclosures_of_method(method, run_group.comparison_results)
    if words is None:
        return KeyFact("The server learns", "not known", "the method is not one of polyfed's")
    if not words:
        return KeyFact("The server learns", "nothing")
    meanings = say_sites("; ".join(words.values()))
    return KeyFact("The server learns", join_with_and([word.replace("_", " ") for word in words]), meanings)


def _protection_sentence(run_group: RunGroup, method: MethodRuns) -> str:
    """Says what protects the sites' data; empty if nothing is sent, or for a method that is not of polyfed."""
    words = disclosures_of_method(method, run_group.comparison_results)
    if not words or not words.keys() <= DISCLOSURES.keys():
        return ""
    return f"No row of a site's data is sent. {describe_protection(method, run_group.comparison_results)}"


def why_this_round(run_group: RunGroup, method: MethodRuns, cost: MethodCost) -> str:
    """Returns a sentence that says after which round the scores are; the notes below the details say it in full."""
    if budget := (run_group.comparison_results.get("budget") or {}).get("sentence"):
        text = f"Scores: {end_with_period(say_sites(budget))}"
        if budget.startswith("each method at its best round"):
            text = f"Each method is scored after the round that did best on {_describe_validation(run_group)}."
        is_by_test = run_group.comparison_results.get("best_by") == "test" and len(run_group.methods) > 2
        return f"{text}{_CHOSEN_BY_TEST if is_by_test else ''}"
    low, high = cost.scored_rounds
    after = f"after round {low}" if low == high else f"after rounds {low} to {high}, one for each {run_group.repeat},"
    return f"Scores of {method.label} are those {after} of {cost.planned_rounds}, the last that was evaluated."


def _describe_validation(run_group: RunGroup) -> str:
    """Says on which examples rounds were chosen: sites' validation examples, or those that the search held out."""
    sites = [site for by_site in (run_group.comparison_results.get("data") or {}).values() for site in by_site.values()]
    if run_group.comparison_results.get("tuning") and any(site.get("val") == 0 for site in sites):
        return "a fifth of a site's training examples that the search held out, where a site has no validation examples"
    return "validation examples (those of each site that are set aside for such choices)"
