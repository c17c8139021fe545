"""Describes how the report writes a score: its label, its unit, and whether higher is better."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metrics import metric_by_name
from polyfed.core.io.text.number_format import NumberUnit, format_number, mean_label_of

_MEANINGS = {
    "auc": "in how many of all pairs of a positive and a negative example the positive one has the higher probability; 0.5 "
    "is chance, 1 is perfect",
    "balanced_accuracy": "the mean over classes of the share that is predicted correctly",
    "brier": "the squared error of the predicted probability; 0 is perfect",
    "c_index": "in how many of all pairs of patients who can be ordered the one with the earlier event has the higher risk; "
    "0.5 is chance, 1 is perfect",
    "dice": "the overlap of predicted and true areas; 1 is perfect",
    "mae": "how far predictions are off on average, in standard deviations (SD) where these are named; 0 is perfect",
    "r2": "the share of the targets' variance that is predicted; 1 is perfect, 0 no better than their mean",
}
"""Name of a score -> what it is, for readers who do not work with scores."""


@final
@dataclass(frozen=True)
class ScoreFormat:
    """Holds how the report writes and compares a score: its label, its unit, and whether higher is better.

    Args:
        name: of its column.
        label: for people, such as "AUC".
        unit: "%" for shares, whose differences are points; "" for all others.
        higher_is_better: False for errors and losses.

    >>> brier = score_format_of("brier")
    >>> brier.label, brier.positive_if_better(-0.1), brier.best_value([0.2, 0.1])
    ('Brier score', 0.1, 0.1)
    """

    name: str
    label: str
    unit: NumberUnit = ""
    higher_is_better: bool = True

    @property
    def mean_label(self) -> str:
        """Returns the label of a mean of such scores over clients.

        >>> score_format_of("auc").mean_label, score_format_of("mae").mean_label
        ('mean AUC', 'mean absolute error')
        """
        return mean_label_of(self.label)

    @property
    def explanation(self) -> str:
        """Returns a sentence that says what the score is; empty for scores that their label explains.

        >>> score_format_of("brier").explanation
        'Brier score: the squared error of the predicted probability; 0 is perfect.'
        """
        meaning = _MEANINGS.get(self.name)
        return f"{self.label}: {meaning}." if meaning else ""

    def positive_if_better(self, difference: float) -> float:
        """Returns a difference of scores (first minus second), negated where lower scores are better."""
        return difference if self.higher_is_better else -difference

    def best_value(self, values: list[float]) -> float:
        """Returns the highest of one or more scores, or the lowest where lower is better."""
        return max(values) if self.higher_is_better else min(values)

    @property
    def highest_or_lowest(self) -> str:
        """Returns "highest" if higher scores are better, otherwise "lowest"."""
        return "highest" if self.higher_is_better else "lowest"

    def format_signed(self, difference: float) -> str:
        """Returns a difference of scores as text with its unit, and with its sign unless it is rounded to 0.

        >>> [score_format_of("accuracy").format_signed(difference) for difference in (-0.051, -0.0001)]
        ['−5.1 points', '0.0 points']
        """
        text = format_number(difference, self.unit, signed=True)
        return (text if re.search("[1-9]", text) else text.lstrip("+−")).replace(" %", " points")


def score_format_of(name: str, overrides: Mapping[str, Any] | None = None) -> ScoreFormat:
    """Returns the label, the unit and the direction (whether higher is better) of the score with the given name.

    Args:
        name: of the score.
        overrides: what a comparison or a run says of it, with the keys `label`, `unit` and `higher_is_better`; a metric of
            polyfed needs none.

    >>> (score_format_of("auc").label, score_format_of("sensitivity_at_95").unit,
    ...  score_format_of("cost", {"higher_is_better": False}))
    ('AUC', '%', ScoreFormat(name='cost', label='cost', unit='', higher_is_better=False))
    """
    default_format = _default_format(name)
    overrides = overrides or {}
    unit = overrides.get("unit")
    higher_is_better = overrides.get("higher_is_better")
    return ScoreFormat(
        name,
        str(overrides.get("label") or default_format.label),
        default_format.unit if unit is None else "%" if unit == "%" else "",
        default_format.higher_is_better if higher_is_better is None else bool(higher_is_better),
    )


def _default_format(name: str) -> ScoreFormat:
    try:
        metric = metric_by_name(name)
    except UserError:
        return ScoreFormat(name, name)
    return ScoreFormat(name, metric.label, metric.unit, metric.higher_is_better)
