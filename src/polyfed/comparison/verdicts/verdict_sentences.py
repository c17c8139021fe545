"""Builds the sentences that explain a comparison's results, the same for terminal, report page and Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyfed.comparison.statistics.estimate import CONFIDENCE_LEVEL
from polyfed.comparison.statistics.evidence import GainOverRivals, clip_interval_to_metric_range
from polyfed.comparison.verdicts.answer_basis import (
    AnswerBasis,
    count_examples_behind_answer,
    count_test_examples_by_seed,
)
from polyfed.comparison.verdicts.answer_lines import rank_of_answer
from polyfed.comparison.verdicts.fold_sentences import describe_fold_interval_coverage
from polyfed.comparison.verdicts.rival_gains import (
    describe_best_alternative,
    describe_local_alternative,
    name_of_method_or_reference,
)
from polyfed.comparison.verdicts.site_model import describe_mean_gain_over_similar_sites
from polyfed.core.evaluation.metric import Metric
from polyfed.core.io.text.site_words import name_sites
from polyfed.core.tasks.task_lookup import get_task

_DIGITS = 6  # most digits after the decimal point
_ROUNDED = 12  # digits after the decimal point of a gain; what is beyond is rounding error
_WIDE: Mapping[str, float] = {"%": 0.5, "auc": 0.5, "r2": 1.0}
"""Width of an interval above which it decides nothing, by unit or score: half the range of a share or an AUC."""
_FEW = 100  # test examples of a client below which its R² is too uncertain
_LINES = 40  # clients up to which each undecided one has a sentence of its own


def format_difference(value: float, unit: str) -> str:
    """Formats a difference without its sign, in percentage points if scores are shares.

    >>> format_difference(-0.041, "%"), format_difference(0.041, ""), format_difference(0.0004, "%")
    ('4.1 points', '0.041', '0.04 points')
    """
    return f"{_format_rounded(value, unit)}{' points' if unit == '%' else ''}"


def format_difference_range(low: float, high: float, unit: str) -> str:
    """Formats a range between two differences of the same sign, such as "4.1 to 6.0 points".

    >>> format_difference_range(0.041, 0.06, "%"), format_difference_range(-0.06, -0.041, "")
    ('4.1 to 6.0 points', '0.041 to 0.060')
    """
    least, most = sorted((low, high), key=abs)
    return f"{_format_rounded(least, unit)} to {format_difference(most, unit)}"


def name_score_of_difference(unit: str, label: str) -> str:
    """Returns the words that follow a difference and name its score; points need none.

    >>> name_score_of_difference("", "AUC"), name_score_of_difference("%", "accuracy")
    (' in AUC', '')
    """
    return "" if unit == "%" else f" in {label}"


def _format_rounded(value: float, unit: str) -> str:
    """Rounds a number for display, with more digits where the usual number of digits would show 0."""
    size, digits = (100 * abs(value), 1) if unit == "%" else (abs(value), 3)
    while size and not round(size, digits) and digits < _DIGITS:
        digits += 1
    return f"{size:.{digits}f}"


def _better_or_worse(value: float, unit: str) -> str:
    if not float(_format_rounded(value, unit)):
        return "no difference"
    return f"{format_difference(value, unit)} {'worse' if value < 0 else 'better'}"


def _format_gains(low: float, high: float, unit: str, label: str) -> str:
    """Formats an interval of a gain.

    >>> _format_gains(-0.11, 0.036, "", "C-index"), _format_gains(-0.2, -0.1, "%", "accuracy")
    ('between 0.110 worse and 0.036 better in C-index', 'between 10.0 and 20.0 points worse')
    """
    least, most = sorted((low, high), key=abs) if low * high > 0 else (low, high)
    first = _format_rounded(least, unit) if low * high > 0 else _better_or_worse(least, unit)
    words = f"{first} and {_better_or_worse(most, unit)}"
    return f"between {words}{name_score_of_difference(unit, label)}"


def decide_whether_to_join(gain: float | None, interval: Sequence[float] | None, may_decide: bool) -> str:
    """Returns "join", "stay" or "undecided" from a client's gain and its interval.

    With `may_decide` false the answer is always "undecided".

    >>> (decide_whether_to_join(0.05, [0.04, 0.06], True), decide_whether_to_join(-0.05, [-0.06, -0.04], True),
    ...  decide_whether_to_join(0.05, [-0.01, 0.1], True))
    ('join', 'stay', 'undecided')
    """
    if gain is None or interval is None or not may_decide or interval[0] <= 0 <= interval[1]:
        return "undecided"
    return "join" if interval[0] > 0 else "stay"


def build_join_answers(
    content: Mapping[str, Any], leader: str | None, reason_undecided: str,
    leader_gains: tuple[GainOverRivals | None, Mapping[str, GainOverRivals | None]], metric: Metric, *, by_class: bool,
    widest: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:  # fmt: skip
    """Returns each client's answer (join, stay or undecided), and that for the mean or None.

    To be worth joining, a method must beat the best that a client has alone: its network, trained alone, and the
    simple models.

    Args:
        content: `comparison.json`, with statistics.
        leader: the best of the methods that may be compared with the reference; None without one.
        reason_undecided: why nothing is decided, whatever the intervals; empty if the intervals decide.
        leader_gains: the leader's gain over the best alternative, for the mean and by client.
        metric: the metric that decides.
        by_class: whether the metric is limited by few test examples of a class.
        widest: the client that makes the interval of the mean wide; None without one.

    Returns:
        The answer for each client, and that for the mean; ([], None) without a reference.
    """
    reference = content["reference"]
    if reference is None:
        return [], None
    statistics = {} if leader is None else content["methods"][leader]["statistics"]
    mean_gain, by_client = leader_gains
    sites = []
    for client in content["clients"] if content["same_clients"] else ():
        client_statistics = statistics.get("clients", {}).get(client, {})
        basis = count_examples_behind_answer(content, [client], by_class=by_class)
        gains = client_statistics.get("gain"), by_client.get(client)
        sites.append(_answer_entry(content, client, leader, *gains, metric, basis, reason_undecided))
    clients, too_small = content["clients"], content.get("panel", {}).get("too_small", {})
    for client, count in too_small.items():
        reason = f"{count}, too few for {content['folds']} folds"
        sites.append(_answer_entry(content, client, leader, None, None, metric, AnswerBasis(0, None, count), reason))
    counted = [c for c in clients if by_client.get(c) is not None] if mean_gain is not None else []
    basis = count_examples_behind_answer(content, counted or clients, by_class=by_class and content["same_clients"])
    number, total = len(counted) or len(clients), len(clients) + len(too_small)
    if number < total:  # the others have no interval of their own, and none in the mean
        basis = replace(basis, sentence=f"{number} of {total} clients with {basis.sentence}")
    mean_answer = _answer_entry(
        content, None, leader, statistics.get("gain"), mean_gain, metric, basis, reason_undecided, widest
    )
    return sites, mean_answer | {"clients": [number, total]}


def _answer_entry(
    content: Mapping[str, Any], client: str | None, leader: str | None, gain: float | None,
    rival_gain: GainOverRivals | None, metric: Metric, basis: AnswerBasis, why_not: str,
    widest: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Builds the entry with the answer for a client, or for the mean over clients if `client` is None."""
    interval, over = None, content["reference"]
    if rival_gain is not None:
        gain, over = round(rival_gain.estimate.value, _ROUNDED), name_of_method_or_reference(rival_gain.best_rival)
        interval = clip_interval_to_metric_range(rival_gain.estimate, metric, is_difference=True)
    word = decide_whether_to_join(gain, interval, not why_not)
    row = {"client": client, "answer": word, "method": leader, "gain": gain, "interval": interval, "over": over}
    row |= {"test_examples": basis.num_examples, "rarest": basis.num_rarest, "basis": basis.sentence}
    gains = {} if rival_gain is None else rival_gain.gain_by_rival
    row["gains"] = {
        name_of_method_or_reference(key): {
            "gain": estimate.value,
            "interval": clip_interval_to_metric_range(estimate, metric, is_difference=True),
        }
        for key, estimate in gains.items()
    }
    row["over_words"] = describe_best_alternative(row, content["reference"], content["task"], is_brief=True)
    return row | {"sentence": _answer_sentence(content, row, why_not, widest)}


def _answer_sentence(content: Mapping[str, Any], row: Mapping[str, Any], why_not: str, widest: str | None) -> str:
    """Formats an answer as a sentence."""
    subject = "mean over clients" if row["client"] is None else name_sites([row["client"]])
    unit, label = content["score_unit"], content["score_label"]
    reference, leader, interval, basis = content["reference"], row["method"], row["interval"], row["basis"]
    if leader is None:
        return f"{subject}: not decided: {why_not or f'no method can be compared with {reference}'}"
    rival = describe_best_alternative(row, reference, content["task"])
    if interval is None:
        few = f"too few {get_task(content['task']).limiting_examples} for an interval of {leader}"
        if row["gain"] is None:
            few = f"{leader} has no {label} there"
        elif row["gain"] == 0:
            few = f"{leader} has the same {label} as {rival}, which says nothing of new examples"
        why = why_not or (few if content["predictions"] else "no predictions were kept")
        return f"{subject}: not decided: {why}{'' if why.startswith(basis) else f' ({basis})'}"
    rests = f"(best estimate {_better_or_worse(row['gain'], unit)}; {basis})"
    much, scored = format_difference_range(interval[0], interval[1], unit), name_score_of_difference(unit, label)
    than = f"{rival}," if "," in rival else rival
    if row["answer"] == "join":
        return f"{subject}: join with {leader}: {much} better{scored} than {than} on new examples {rests}"
    if row["answer"] == "stay":
        return f"{subject}: stay alone: {leader} is {much} worse{scored} than {than} on new examples {rests}"
    if _is_too_wide(interval, content) and not why_not:
        splits = "" if content["same_clients"] and not content["resplit"] else f"{len(content['seeds'])} splits of "
        width = f"the interval is {format_difference(interval[1] - interval[0], unit)} wide"
        if widest is not None:
            basis = count_examples_behind_answer(content, [widest], by_class=row["rarest"] is not None).sentence
            basis += f" at {name_sites([widest])}"
            width += ", mostly because of this client"
        return f"{subject}: not decided: {splits}{basis}{',' if ',' in basis else ''} cannot answer: {width}"
    between, because = _format_gains(interval[0], interval[1], unit, label), f"; {why_not}" if why_not else ""
    return f"{subject}: not decided: {leader} is {between} than {rival} {rests}{because}"


def _is_too_wide(interval: Sequence[float], content: Mapping[str, Any]) -> bool:
    """Returns whether an interval of a gain is so wide that its ends say nothing."""
    score = "%" if content["score_unit"] == "%" else content["score"]
    return interval[1] - interval[0] > _WIDE.get(score, math.inf)


def verdict_sentences(
    content: Mapping[str, Any], client_answers: Sequence[Mapping[str, Any]], mean_answer: Mapping[str, Any] | None
) -> list[str]:
    """Returns the conclusions of a comparison as a list of sentences to print.

    First the mean, then simple models against training alone, then the clients from the largest gain to the largest
    loss, then those without a decision; with many clients, the last are listed in one sentence.
    """
    if mean_answer is None:
        return []
    ranked = sorted(client_answers, key=rank_of_answer)
    decided = [row["sentence"] for row in ranked if row["answer"] != "undecided"]
    undecided = [row for row in ranked if row["answer"] == "undecided"]
    first = [
        mean_answer["sentence"],
        *describe_mean_gain_over_similar_sites(content),
        *_simple_model_sentences(content),
    ]
    if len(client_answers) <= _LINES:
        return [*first, *decided, *(row["sentence"] for row in undecided)]
    return [*first, *decided, f"not decided: {name_sites([row['client'] for row in undecided])}"]


def _simple_model_sentences(content: Mapping[str, Any]) -> list[str]:
    """Compares the best simple model with training alone in a sentence; none without a gain."""
    with_gain = {name: entry for name, entry in content["references"].items() if entry.get("gain") is not None}
    if not with_gain:
        return []
    name = max(with_gain, key=lambda name: with_gain[name]["gain"])
    gain, ends = with_gain[name]["gain"], with_gain[name].get("gain_interval")
    unit, label = content["score_unit"], content["score_label"]
    rival, network = describe_local_alternative(name, None, content["task"]), "training alone"
    estimate = f"(best estimate {_better_or_worse(gain, unit)})"
    if ends is None or _is_too_wide(ends, content):
        return [f"mean over clients: whether {rival} is better than {network} is not decided {estimate}"]
    if ends[0] > 0 or ends[1] < 0:
        side = "better" if ends[0] > 0 else "worse"
        return [
            f"mean over clients: {rival} is {format_difference_range(ends[0], ends[1], unit)} {side}"
            f"{name_score_of_difference(unit, label)} than {network} {estimate}"
        ]
    return [f"mean over clients: {rival} is {_format_gains(ends[0], ends[1], unit, label)} than {network} {estimate}"]


def describe_result_scope(content: Mapping[str, Any]) -> list[str]:
    """Says what the results in `comparison.json` estimate, and what they do not cover."""
    return [*_estimation_sentences(content), *_alternatives_sentences(content)]


def _alternatives_sentences(content: Mapping[str, Any]) -> list[str]:
    """Returns sentences that list the alternatives that a client has alone, and the models that could not be fitted."""
    names = [name for name, entry in content["references"].items() if entry.get("alone")]
    if content["reference"] is None:
        return []
    if not names:
        return ["The answers compare with training alone only: no simple models of each site were fitted "
                "(references=False, --no-references)."]  # fmt: skip
    models = ", ".join(describe_local_alternative(name, None, content["task"]) for name in names)
    rule = (
        f"A site is told to join only if the method beats everything it has alone: training alone, {models}. The gain is "
        "over the best of these."
    )
    return [rule, *content["left_out"]]


def _estimation_sentences(content: Mapping[str, Any]) -> list[str]:
    """Returns sentences that explain what a gain estimates, and over what its interval holds."""
    seeds, resplit = len(content["seeds"]), content["resplit"]
    estimated = (
        "A gain is the difference of expected scores on new examples of the same sites, for methods trained on data like "
        "these; better is positive, whatever the score."
    )
    level = (
        f"All intervals of gains together hold in at least {100 * CONFIDENCE_LEVEL:.0f} of 100 comparisons: those of "
        "the means of all methods, and those of all sites and methods."
    )
    if content.get("folds"):
        return [estimated, level, *describe_fold_interval_coverage(content)]
    if resplit:
        return [
            estimated,
            level,
            f"The examples of each site were split {resplit} times into training and test examples, each time with another "
            "seed; the intervals cover other seeds, other training examples and other test examples, and are corrected for "
            "the examples that the splits share (Nadeau and Bengio 2003).",
        ]
    if not content["same_clients"]:
        if seeds == 1:
            return [estimated, "One seed partitions the data once, which gives no interval: give at least three."]
        return [
            estimated,
            level,
            f"Each of {seeds} seeds partitions the data again; the intervals cover other seeds, other partitions and other "
            "examples of these data, and are corrected for the examples that the partitions share (Nadeau and Bengio 2003). "
            "A client's name stands for other data with each seed, and has no answer of its own; --same-data partitions the "
            "data once.",
        ]
    training_examples_note = (
        "The training examples are the same in all runs, so that the intervals do not cover other training examples; "
        "folds=5 (--folds 5) covers them too, as far as folds can show, and is better where data are few."
    )
    if seeds == 1:
        once = (
            "With one seed the intervals hold for these very networks on new test examples. They do not cover other seeds, "
            "so that nothing is decided: give at least three."
        )
        return [estimated, level, once, training_examples_note]
    seeds_note = f"The intervals cover other seeds, from {seeds}, and other test examples."
    return [estimated, level, seeds_note, training_examples_note]


def describe_limits_of_results(
    content: Mapping[str, Any], clients_without_score: Mapping[tuple[str, str], Sequence[str]], unclear: Sequence[str]
) -> list[str]:
    """Returns sentences that warn of limits of the results, such as clients without a score.

    Args:
        content: `comparison.json`, with statistics.
        clients_without_score: (label, seed) -> clients for which other methods have a score but this run has none.
        unclear: clients without an interval, because they have too few test examples.
    """
    sentences = [
        f"{label} has no score for {name_sites(clients)} "
        f"{f'in fold {int(seed) + 1}' if content.get('folds') else f'with seed {seed}'}, and so no mean to compare with the "
        "others"
        for (label, seed), clients in clients_without_score.items()
    ]
    if unclear:
        sentences.append(
            f"{name_sites(unclear)}: too few {get_task(content['task']).limiting_examples} for an interval "
            f"of {content['score_label']}; left out of the interval of the mean"
        )
    few = sorted({c for rows in count_test_examples_by_seed(content) for c, row in rows.items() if row["test"] < _FEW})
    if content["score"] == "r2" and few:
        sentences.append(
            f"{name_sites(few)}: R² of fewer than {_FEW} test examples has a very wide interval; let the "
            "mean absolute error decide (metrics=['mae', 'r2'], --metrics mae,r2)"
        )
    for label, searched in ((content["tuning"] or {}).get("methods") or {}).items():
        if worse := searched.get("diverged"):
            last, client = dict(worse[-1]), worse[-1].get("client")
            last.pop("client", None)
            compared_fields = searched["chosen"] if client is None else searched["by_client"][client]
            whose = label if client is None else f"{label} at {name_sites([client])}"
            sentences.append(f"{whose}: {_format_fields(last)} was better in the search, but diverged with another seed, so "
                         f"{_format_fields(compared_fields)} is compared")  # fmt: skip
    if content["best_by"] == "test" and len(content["methods"]) > 2:
        stopped = any(method["fields"].get("patience") is not None for method in content["methods"].values())
        why = "since patience stops training by the validation examples, " if stopped else ""
        sentences.append(
            f"{why}the best method was chosen by the test examples on which it is reported; the intervals allow for "
            "that choice"
        )
    return sentences


def _format_fields(fields: Mapping[str, Any]) -> str:
    """Formats fields as "NAME VALUE, NAME VALUE"."""
    return ", ".join(f"{name} {value}" for name, value in fields.items())
