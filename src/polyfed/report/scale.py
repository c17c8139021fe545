"""How people read a score: its label, its unit, and which way is better."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.metrics import METRICS, metrics_of
from polyfed.report.charts import Unit, number


@final
@dataclass(frozen=True)
class Scale:
    """A score as people read it.

    Args:
        name: of its column.
        label: for people, such as "AUC".
        unit: "%" for shares, whose differences are points; "" for all others.
        higher_is_better: False for errors and losses.

    >>> brier = scale_of("brier")
    >>> brier.label, brier.better(-0.1), brier.best([0.2, 0.1])
    ('Brier score', 0.1, 0.1)
    """

    name: str
    label: str
    unit: Unit = ""
    higher_is_better: bool = True

    def better(self, difference: float) -> float:
        """A difference of two scores, positive where the first is better."""
        return difference if self.higher_is_better else -difference

    def best(self, values: list[float]) -> float:
        """The best of them, at least one."""
        return max(values) if self.higher_is_better else min(values)

    @property
    def extreme(self) -> str:
        """What the best value of several is."""
        return "highest" if self.higher_is_better else "lowest"

    def amount(self, difference: float) -> str:
        """The size of a difference, with no sign.

        >>> scale_of("accuracy").amount(-0.051), scale_of("auc").amount(0.02)
        ('5.1 points', '0.020')
        """
        text = number(abs(difference) + 0.0, self.unit)
        return text.replace(" %", " points")

    def signed(self, difference: float) -> str:
        """A difference with its sign.

        >>> scale_of("accuracy").signed(-0.051)
        '−5.1 points'
        """
        text = number(difference + 0.0, self.unit, signed=True)
        return text.replace(" %", " points")


def scale_of(name: str, told: Mapping[str, Any] | None = None) -> Scale:
    """The scale of a score.

    Args:
        name: of the score.
        told: what a comparison or a run says of it, with the keys `label`, `unit` and `higher_is_better`; a metric of
            polyfed needs none.

    >>> scale_of("auc").label, scale_of("sensitivity_at_95").unit, scale_of("cost", {"higher_is_better": False})
    ('AUC', '%', Scale(name='cost', label='cost', unit='', higher_is_better=False))
    """
    known = _known(name)
    told = told or {}
    unit = told.get("unit")
    higher = told.get("higher_is_better")
    return Scale(
        name,
        str(told.get("label") or known.label),
        known.unit if unit is None else "%" if unit == "%" else "",
        known.higher_is_better if higher is None else bool(higher),
    )


def _known(name: str) -> Scale:
    metric = METRICS.get(name)
    if metric is None:
        try:  # those that are made when they are asked for, such as sensitivity_at_95
            (metric,) = metrics_of([name], "classification")
        except UserError:
            return Scale(name, name)
    return Scale(name, metric.label, metric.unit, metric.higher_is_better)
