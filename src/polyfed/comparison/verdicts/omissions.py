"""Says which methods a comparison left out, which failed, and whose convergence could not be judged."""

from collections.abc import Mapping
from typing import Any

from polyfed.core.io.text.number_format import end_with_period, join_with_and
from polyfed.core.methods.declared_words import NEEDS_ONE_ARCHITECTURE


def describe_omissions(content: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each method left out, failed, or not judged; none for a forecast.

    Args:
        content: the results of a comparison, the content of `comparison.json`.

    >>> unjudged = {"converged": None, "sentence": "it was evaluated twice"}
    >>> for sentence in describe_omissions({"skipped": {"fedmd": "fedmd needs public examples"},
    ...                                     "failed": {"wild": "it diverged"}, "convergence": {"fedavg": unjudged}}):
    ...     print(sentence)
    Left out fedmd: fedmd needs public examples.
    wild failed and is not compared: it diverged.
    Convergence not judged for fedavg: it was evaluated twice.
    """
    if "plan" in content:
        return []
    sentences, need_one_architecture = [], []
    for label, reason in content.get("skipped", {}).items():
        if NEEDS_ONE_ARCHITECTURE in reason:
            need_one_architecture.append(label)
        else:
            sentences.append(f"Left out {label}: {end_with_period(reason)}")
    if need_one_architecture:
        sentences.append(f"Left out, since clients have several architectures: {join_with_and(need_one_architecture)}.")
    sentences += [
        f"{label} failed and is not compared: {end_with_period(reason)}"
        for label, reason in content.get("failed", {}).items()
    ]
    labels_by_reason: dict[str, list[str]] = {}
    for label, entry in content.get("convergence", {}).items():
        if entry["converged"] is None:
            labels_by_reason.setdefault(entry["sentence"], []).append(label)
    return sentences + [
        f"Convergence not judged for {join_with_and(labels)}: {end_with_period(reason)}"
        for reason, labels in labels_by_reason.items()
    ]
