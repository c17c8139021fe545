"""Writes the scores over all folds of a cross-validation into the content of `comparison.json`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyfed.comparison.execution.fold_tests import FoldTestTargets
from polyfed.comparison.statistics.cross_validation.fold_evidence import CrossValidationEvidence

_DIGITS = 12  # digits after the decimal point of a difference; what is beyond is rounding error


def describe_folds(tests: FoldTestTargets | None, description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `comparison.json` on cross-validation; empty if there is none."""
    if tests is None:
        return {}
    return {
        "folds": tests.design.number,
        "fold_repeats": tests.design.repeats,
        "tested": {client: dict(total) for client, total in tests.totals.items()},
        **({"most_repeats": description["most_repeats"]} if "most_repeats" in description else {}),
    }


def replace_run_means_by_fold_scores(content: dict[str, Any], folds: CrossValidationEvidence) -> None:
    """Replaces means over runs in `content` by the scores over all folds together.

    A run tests a fifth of the examples, say, and may have no score at a client: its AUC without a positive example, for
    instance. Over all folds there is one.
    """
    sign, reference = 1 if folds.metric.higher_is_better else -1, content["reference"]
    for name, entry in content["references"].items():
        if entry.get("alone"):
            entry["mean"], entry["scores"] = folds.mean_scores(f"({name})")
    base = {} if reference is None else folds.mean_scores(reference)[1]
    for label, method in content["methods"].items():
        statistics = method["statistics"]
        mean, scores = folds.mean_scores(label)
        if statistics["mean"] is None or mean is None:
            continue
        statistics["mean"] = mean
        statistics |= _worst_and_percentiles(scores, folds.metric.higher_is_better)
        gains = {
            client: round(sign * (score - theirs), _DIGITS)
            for client, score in scores.items()
            if score is not None and (theirs := base.get(client)) is not None and label != reference
        }
        for client, entry in statistics["clients"].items():
            entry |= {"mean": scores.get(client), "test_examples": content["tested"][client]["test"]}
            if client in gains:
                entry["gain"] = gains[client]
        if gains:
            statistics["gain"] = round(float(np.mean(list(gains.values()))), _DIGITS)
            statistics["losers"], statistics["participants"] = sum(gain < 0 for gain in gains.values()), len(gains)


def _worst_and_percentiles(scores: Mapping[str, float | None], higher_is_better: bool) -> dict[str, float]:
    defined = [score for score in scores.values() if score is not None]
    percents = (0, 10, 90) if higher_is_better else (100, 90, 10)
    return {
        name: float(np.percentile(defined, percent))
        for name, percent in zip(("worst", "p10", "p90"), percents, strict=True)
    }
