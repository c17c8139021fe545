"""Writes the warnings of a comparison: what may mislead, what was left out or failed, and what could not be judged."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.comparison.planning.budget import Budget
from polyfed.comparison.verdicts.answer_basis import count_classes
from polyfed.comparison.verdicts.omissions import describe_omissions
from polyfed.core.io.text.number_format import capitalize_first, end_with_period, format_number, join_with_and
from polyfed.core.tasks.task_lookup import get_task
from polyfed.simulation.results.display.remarks import failures_by_client

Histories = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
_MOST_FAILURES = 8  # sentences
_SAME_ACCURACY = 0.005
"""Difference of mean accuracies up to which they count as the same."""


def describe_failed_clients(histories: Histories) -> list[str]:
    """Returns a sentence for each client that failed in runs, with its last reason; eight at most.

    Methods in which it failed equally often, for the same reason, share a sentence.

    Args:
        histories: the records of each run, by method label and seed.

    >>> lost = {"client": "north", "phase": "local", "reason": "out of range", "retried": False}
    >>> describe_failed_clients({("fedavg", 0): [{"round": k, "failures": [lost]} for k in (1, 2)]})
    ["In 2 of 2 rounds of fedavg, client 'north' failed, and they went on without it: out of range."]
    """
    failed_rounds, rounds = Counter[tuple[str, str]](), Counter[str]()
    last_reasons: dict[tuple[str, str], str] = {}
    for (label, _), history in histories.items():
        rounds[label] += len(history)
        for client, reasons in failures_by_client(history).items():
            failed_rounds[client, label] += len(reasons)
            last_reasons[client, label] = list(reasons.values())[-1]
    labels_by_failure: dict[tuple[str, int, int, str], list[str]] = {}
    for (client, label), number in failed_rounds.items():
        failure = client, number, rounds[label], last_reasons[client, label]
        labels_by_failure.setdefault(failure, []).append(label)
    sentences = [
        f"In {number} of {total} rounds of {join_with_and(labels)}, client {client!r} failed, and they went on "
        f"without it: {end_with_period(reason)}"
        for (client, number, total, reason), labels in labels_by_failure.items()
    ]
    hidden = len(sentences) - _MOST_FAILURES
    return [*sentences[:_MOST_FAILURES], *([f"And {hidden} more, in the records of the runs."] if hidden > 0 else ())]


def describe_constant_accuracy(content: Mapping[str, Any]) -> list[str]:
    """Warns if accuracy is that of always answering the most frequent class, so that no method can be told from another.

    Args:
        content: the results of a comparison, with the method of its answers and simple models.

    >>> results = {"score": "accuracy", "task": "classification", "leader": "fedavg", "reference": "local",
    ...            "class_names": ["no", "yes"], "data": {}, "references": {"majority": {"mean": 0.863}},
    ...            "methods": {name: {"statistics": {"mean": 0.864}} for name in ("local", "fedavg")}}
    >>> print(*describe_constant_accuracy(results))
    fedavg, training alone and always answering the most frequent class have the same accuracy (86.4 %, or nearly so): \
accuracy cannot tell these methods apart; let another score decide (metrics=['auc'], --metrics auc).
    """
    constant, leader = get_task(content["task"]).constant_model(), content.get("leader")
    if content["score"] != "accuracy" or constant is None or None in (leader, content["reference"]):
        return []
    means = [content["methods"][label]["statistics"]["mean"] for label in (leader, content["reference"])]
    means.append((content["references"].get(constant.name) or {}).get("mean"))
    if None in means or max(means) - min(means) > _SAME_ACCURACY:
        return []
    score = "auc" if count_classes(content) == 2 else "balanced_accuracy"
    return [
        f"{leader}, training alone and {constant.words} have the same accuracy ({format_number(means[0], '%')}, or nearly "
        f"so): accuracy cannot tell these methods apart; let another score decide (metrics=['{score}'], --metrics {score})."
    ]


def warning_sentences(
    content: Mapping[str, Any], histories: Histories, data_warnings: Sequence[str], budget: Budget
) -> list[str]:
    """Returns the warnings of a comparison, the sentences for the top of its page.

    Args:
        content: the results, the content of `comparison.json`.
        histories: the records of each run, by method label and seed.
        data_warnings: texts about the data.
        budget: by which methods are compared.
    """
    sentences = [*describe_failed_clients(histories), *(f"{capitalize_first(text)}." for text in data_warnings)]
    sentences += describe_constant_accuracy(content)
    if content["tuning"] is None:
        sentences.append(
            "The methods were not tuned (tune='none', --tune none): a gain may be that of a learning rate that suits one "
            "method better."
        )
    if len(content["seeds"]) == 2 and not content.get("folds"):
        sentences.append("Two seeds say little of what another seed would give, so that intervals are many times as wide as "
                     "with five: give more (seeds=5, --seeds 5; or folds=5, --folds 5).")  # fmt: skip
    not_converged = [label for label, entry in content["convergence"].items() if entry["converged"] is False]
    if not_converged and not budget.determines_compared_round:
        helps = {label: content["convergence"][label]["advice"] for label in not_converged}
        each = (
            [f"{label}: {words}" for label, words in helps.items()]
            if len(set(helps.values())) > 1
            else [helps[not_converged[0]]]
        )
        sentences.append(
            f"Not converged: {', '.join(not_converged)}. No answer rests on a method that still improved at the end. "
            f"Ways out: {'; '.join(each)}. Or name a budget (budget='steps', --budget steps) if that is the question."
        )
    elif not_converged:
        sentences.append(f"Not converged within this budget: {', '.join(not_converged)}.")
    if content["tuning"] is not None and (edge := content["tuning"].get("edge")):
        sentences.append(
            f"The best value was at the edge of what was tried: {', '.join(edge)}. Try values beyond "
            "(tune={'lr': [...]}, --tune lr=VALUE,VALUE,...)."
        )
    return sentences + describe_omissions(content)
