"""Computes scores of whole rounds: the mean training loss, and the best round by validation score."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import default_metric_names


def mean_train_loss(scalars_by_client: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the mean of the clients' training losses, weighted by numbers of examples; None if no client's reply has
    a loss.
    """
    reported = [scalars for _, scalars in sorted(scalars_by_client.items()) if "train_loss" in scalars]
    if not reported:
        return None
    weights = [scalars.get("num_examples", 1.0) for scalars in reported]
    return sum(w * s["train_loss"] for w, s in zip(weights, reported, strict=True)) / sum(weights)


def round_of_best_score(history: Sequence[Mapping[str, Any]], metric: Metric | None = None) -> int | None:
    """Returns the round with the best mean validation score over clients, the first of several equally good; None if
    there are no validation scores.

    Args:
        history: records of rounds.
        metric: the score that decides; None takes the task's own.

    Returns:
        The number of the round; None if there are no validation scores.

    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> records = [{"round": n, "summary": {"val_brier": {"mean": value}}} for n, value in enumerate((0.3, 0.2, 0.2), 1)]
    >>> round_of_best_score(records, METRICS["brier"])
    2
    """
    names = {f"val_{name}" for name in ([metric.name] if metric else default_metric_names())}
    sign = 1 if metric is None or metric.higher_is_better else -1
    scores = {
        record["round"]: sign * statistics["mean"]
        for record in history
        for name, statistics in record.get("summary", {}).items()
        if name in names
    }
    return max(scores, key=lambda r: (scores[r], -r)) if scores else None
