"""Defines `Metric`: a name, a function of outputs and targets, and how values are shown."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError, describe_exception
from polyfed.core.io.values.validation import check_field_types

ScoreFunction = Callable[[Tensor, Tensor], float]
Unit = Literal["%", ""]
# Scores that are not shown in per cent.
_FROM_ZERO_TO_ONE = frozenset({"auc", "average_precision", "f1", "c_index", "uno_c_index", "dice", "iou", "entity_f1"})
_ROUNDING = 1e-6  # by which a share may be outside 0 to 1
_RESERVED_PREFIXES = ("val_", "global_", "loss")  # the names of other columns begin with these
_RESERVED_NAMES = frozenset(
    {
        "client", "num_examples", "train_loss", "train_loss_change", "seconds", "bytes_down", "bytes_up", "update_norm",
        "update_cosine", "mean",
    }
)  # fmt: skip


@final
@dataclass(frozen=True)
class Metric:
    """Describes a metric: a named function of outputs and targets, whether higher values are better, and its unit.

    Args:
        name: its column in tables and files; a word of letters, digits, "_", "." and "-".
        function: outputs and targets of n examples -> the value.
        higher_is_better: False for errors and losses.
        unit: "%" for shares, which are shown in per cent and whose differences are points; "" for all others.
        label: the name shown to people; empty for `name`.
        tasks: names of the tasks for which it is defined; empty for all tasks. A metric that a task lists suits it anyway.
        per_example: if the metric is a mean over examples, the function of these values, shape (n,); None otherwise.

    Raises:
        UserError: a field has another type, or the name cannot be that of a column.

    >>> import torch
    >>> cost = Metric("cost", lambda outputs, targets: float((outputs - targets).abs().mean()), higher_is_better=False)
    >>> cost(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
    1.0
    """

    name: str
    function: ScoreFunction
    higher_is_better: bool = True
    unit: Unit = ""
    label: str = ""
    tasks: frozenset[str] = frozenset()
    per_example: Callable[[Tensor, Tensor], NDArray[np.float64]] | None = None

    @property
    def is_from_zero_to_one(self) -> bool:
        """Returns True for a share, and for a built-in score that lies between 0 and 1, such as the AUC or Dice."""
        return self.unit == "%" or self.name in _FROM_ZERO_TO_ONE

    def describe(self) -> dict[str, Any]:
        """Returns what files say of the metric: its name, label and unit, and whether higher is better."""
        return {"name": self.name, "label": self.label, "unit": self.unit, "higher_is_better": self.higher_is_better}

    def __post_init__(self) -> None:
        check_field_types(self)
        is_word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,60}", self.name)
        if not is_word or self.name.startswith(_RESERVED_PREFIXES):
            raise UserError(
                f"a metric's name must be a word of letters, digits, '_', '.' and '-', and not begin with "
                f"{', '.join(_RESERVED_PREFIXES)}, got {self.name!r}; give a Metric with another name"
            )
        if self.name in _RESERVED_NAMES:
            raise UserError(f"a metric cannot be called {self.name!r}, which is another column; give it another name")
        if not self.label:
            object.__setattr__(self, "label", self.name)

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns the metric's value for outputs and targets; NaN if it is undefined for them.

        Raises:
            UserError: the function fails, a share is not between 0 and 1, or there is not one value for each example.
        """
        if not len(targets):
            return float("nan")
        try:
            value = (
                float(self.function(outputs, targets))
                if self.per_example is None
                else self._mean_over_examples(self.per_example(outputs, targets), len(targets))
            )
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"metric {self.name!r} failed on outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}: {describe_exception(error)}. It gets the network's outputs (logits of "
                "classes) first, and then the targets; a function of scikit-learn: lambda outputs, targets: "
                "accuracy_score(targets, outputs.argmax(1))"
            ) from error
        if self.unit == "%" and not (-_ROUNDING <= value <= 1 + _ROUNDING or math.isnan(value)):
            raise UserError(
                f"metric {self.name!r} has the value {value:g}, and unit='%' is for shares from 0 to 1, which are shown in "
                "per cent; divide it by 100, or leave the unit out"
            )
        return value

    def _mean_over_examples(self, values: Any, number: int) -> float:
        if np.shape(values) != (number,):
            raise UserError(
                f"metric {self.name!r}: per_example returned shape {np.shape(values)} for {number} examples; it returns one "
                f"value for each, shape ({number},)"
            )
        return float(values.mean())
