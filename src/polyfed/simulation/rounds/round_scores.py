"""Computes scores of whole rounds: the mean training loss, and the best round by validation score."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import default_metric_names


def mean_train_loss(scalars_by_client: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the mean training loss weighted by examples; None if no reply has a loss."""
    reported = [scalars for _, scalars in sorted(scalars_by_client.items()) if "train_loss" in scalars]
    if not reported:
        return None
    weights = [scalars.get("num_examples", 1.0) for scalars in reported]
    return sum(w * s["train_loss"] for w, s in zip(weights, reported, strict=True)) / sum(weights)


def round_of_best_score(history: Sequence[Mapping[str, Any]], metric: Metric | None = None) -> int | None:
    """Returns the first round of the best mean validation score; None without any.

    A round in which a client has lost the score that it had before, since its network's outputs are NaN, is never better:
    the mean is then over the other clients alone.

    Args:
        history: records of rounds.
        metric: the score that decides; None takes the task's own.

    Returns:
        The number of the round; None if there are no validation scores.

    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> records = [{"round": n, "summary": {"val_brier": {"mean": value}}} for n, value in enumerate((0.3, 0.2, 0.2), 1)]
    >>> round_of_best_score(records, METRICS["brier"])
    2
    >>> lost = {"round": 4, "summary": {"val_brier": {"mean": 0.1}}, "clients": {"a": {"val_brier": None}}}
    >>> round_of_best_score([{**records[0], "clients": {"a": {"val_brier": 0.5}}}, lost], METRICS["brier"])
    1
    """
    names = {f"val_{name}" for name in ([metric.name] if metric else default_metric_names())}
    sign = 1 if metric is None or metric.higher_is_better else -1
    best: tuple[float, Mapping[str, Any]] | None = None
    for record in history:
        means = [values["mean"] for name, values in record.get("summary", {}).items() if name in names]
        if not means:
            continue
        score = sign * means[-1]
        if best is not None:
            lacks, best_lacks = _has_lost_score(best[1], record, names), _has_lost_score(record, best[1], names)
            if lacks > best_lacks or (lacks == best_lacks and score <= best[0]):
                continue
        best = score, record
    return None if best is None else int(best[1]["round"])


def _has_lost_score(with_score: Mapping[str, Any], record: Mapping[str, Any], names: AbstractSet[str]) -> bool:
    """Returns whether a client has a score in the first record and none in the second, in which it was evaluated."""
    before = with_score.get("clients", {})
    return any(
        row[name] is None and before.get(client, {}).get(name) is not None
        for client, row in record.get("clients", {}).items()
        for name in names & row.keys()
    )
