"""Defines the task of predicting when an event will happen, for patients who may be censored: observed only until a
time before the event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.simple_model import Floats, SimpleModel, SimpleModelInputs
from polyfed.core.io.text.number_format import count_with_noun, format_batch_shape, format_row_numbers
from polyfed.core.tasks.task import Task
from polyfed.tasks.scores.survival_scores import (
    c_index,
    integrated_brier,
    risk_of_outputs,
    survival_of_logits,
    uno_c_index,
)
from polyfed.tasks.simple_models.survival_models import fit_cross_validated_cox_coefficients, hazard_logits_of_cox
from polyfed.tasks.survival_losses import cox_loss, hazard_loss

_TASKS = frozenset({"survival"})
_CONCORDANCES = (
    Metric("c_index", c_index, label="C-index", tasks=_TASKS),
    Metric("uno_c_index", uno_c_index, label="Uno's C-index", tasks=_TASKS),
)
_NO_CURVES = (
    "integrated_brier needs survival curves, and Cox networks give risks alone; give "
    "pf.tasks.Survival(model='hazard', cuts=(...))"
)


@final
@dataclass(frozen=True)
class Survival(Task):
    """Defines the task of predicting when an event happens: targets are (time, event), shape (n, 2), with event 1, or 0
    for a patient censored at that time.

    Args:
        model: "cox" for one output, the logarithm of a patient's risk, by Cox's partial likelihood; "hazard" for the logits
            of hazards in intervals of time, one output each.
        ties: treatment of events at the same time by Cox's likelihood.
        cuts: ends of the intervals of "hazard" in the unit of the times, ascending; the same at all clients.

    Raises:
        UserError: hazards without cuts, cuts without hazards, or cuts that are not positive and ascending.

    >>> import torch
    >>> Survival(model="hazard", cuts=(365, 730)).num_outputs(torch.ones(4, 2))
    2
    """

    ties: Literal["efron", "breslow"] = "efron"
    model: Literal["cox", "hazard"] = "cox"
    cuts: tuple[float, ...] = ()

    name: ClassVar[str] = "survival"
    rarest_limits_score: ClassVar[bool] = True
    limiting_examples: ClassVar[str] = "events among the test examples"
    counts_each_example_once: ClassVar[bool] = True
    loss_may_vanish: ClassVar[bool] = True
    counts_title: ClassVar[str] = "and events"
    target_columns: ClassVar[tuple[str, ...]] = ("time", "event")
    outputs_meaning: ClassVar[str] = (
        "risks: with one output the logarithm of a patient's risk relative to others, by Cox's model; with several the "
        "logits of hazards in intervals of time."
    )
    no_curves_reason: ClassVar[str] = "ROC curves and counts are of classes; these networks predict risks over time."
    page_sections: ClassVar[tuple[str, ...]] = ("kaplan_meier",)

    def __post_init__(self) -> None:
        ends: object = self.cuts
        if isinstance(ends, list | tuple):  # JSON and YAML have lists, and whole numbers where no fraction is needed
            cuts = tuple(float(cut) if type(cut) is int else cut for cut in ends)
            object.__setattr__(self, "cuts", cuts)
        super().__post_init__()
        if (self.model == "hazard") != bool(self.cuts):
            raise UserError(
                f"survival with model={self.model!r} and cuts={self.cuts}: hazards need the ends of their intervals, the "
                "same at all clients, such as cuts=(365, 730, 1095) days, and cox takes none"
            )
        if any(after <= before for before, after in zip((0.0, *self.cuts), self.cuts, strict=False)):
            raise UserError(f"cuts={self.cuts}: the ends of intervals must be positive and ascending")

    # -- targets --------------------------------------------------------------------------------------------------

    def check_targets(self, targets: Tensor, name: str, num_outputs: int | None = None) -> None:
        """Raises a `UserError` unless targets are times of at least 0 and events of 0 or 1, of shape (n, 2)."""
        if targets.dim() != 2 or targets.shape[1] != 2:
            raise UserError(
                f"{name} targets of survival are the time and the event (1, or 0 for censored) of each patient, of shape "
                f"(n, 2), got {tuple(targets.shape)}"
            )
        time, event = targets[:, 0], targets[:, 1]
        if bool((odd := (event != 0) & (event != 1)).any()):
            row = int(odd.nonzero()[0, 0])
            are_swapped = bool(((time == 0) | (time == 1)).all())
            cure = (
                "the event comes after the time: swap the two columns"
                if are_swapped
                else "give 1 for the event (in a table, positive=... (--data.positive) says which value is the event)"
            )
            raise UserError(
                f"{name} targets: row {row} (the first is 0) has an event other than 1, or 0 for censored; {cure}"
            )
        if bool((time < 0).any()):
            row = int((time < 0).nonzero()[0, 0])
            raise UserError(f"{name} targets: row {row} (the first is 0) has a time below 0; correct it")

    def check_table_column(self, values: NDArray[np.float64], name: str) -> None:
        """Raises a `UserError` if a column of times or events has a value below 0."""
        if len(odd := np.flatnonzero(values < 0)):
            raise UserError(
                f"target {name!r} is below 0 in {format_row_numbers(odd)} (the first row below the names is 1), and a time "
                "is at least 0, an event 1 or 0; correct the table"
            )

    def num_outputs(self, targets: Tensor, names: Sequence[str] = ()) -> int:
        """Returns 1 for Cox's model, or the number of intervals for hazards."""
        return len(self.cuts) or 1

    def check_outputs(self, shape: tuple[int, ...], targets: Tensor, name: str) -> None:
        """Raises a `UserError` unless the network has one output (Cox's model), or one for each interval (hazards)."""
        needed = self.num_outputs(targets)
        if shape != (needed,):
            needed_text = (
                f"{count_with_noun(needed, 'interval')} of hazards" if self.cuts else "the risk of Cox's model"
            )
            raise UserError(
                f"{name}: the network's output is {format_batch_shape(shape)}, and {needed_text} needs "
                f"{format_batch_shape((needed,))}, whatever the two columns of the targets"
            )

    def target_warning(self, train: Tensor, test: Tensor) -> str | None:
        """Returns half a sentence if a client has no event among its training or test examples; None if it has both."""
        missing = []
        if not bool((train[:, 1] > 0.5).any()):
            text = "add nothing to Cox's loss" if self.model == "cox" else "say only that hazards are low"
            missing.append(f"no event among its {count_with_noun(len(train), 'training example')}, which {text}")
        if len(test) > 1 and not bool((test[:, 1] > 0.5).any()):  # one patient has no C-index in any case
            missing.append(f"no event among its {len(test)} test examples, which therefore have no C-index")
        return ", and ".join(missing) or None

    # -- loss -----------------------------------------------------------------------------------------------------

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns minus the partial log-likelihood per event (Cox), or minus that per patient (hazards)."""
        if self.model == "hazard":
            return hazard_loss(outputs, targets, self.cuts)
        return cox_loss(outputs, targets, efron=self.ties == "efron")

    # -- what outputs mean ----------------------------------------------------------------------------------------

    def to_predictions(self, outputs: Tensor) -> NDArray[np.float64]:
        """Returns log-risks, (n, 1), or for hazards survival at the end of each interval, (n, cuts)."""
        return survival_of_logits(outputs) if self.cuts else super().to_predictions(outputs)

    def prediction_columns(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns `{column: values}` with each patient's risk and, for hazards, survival by interval."""
        columns = {"risk": risk_of_outputs(outputs).tolist()}
        for cut, share in zip(self.cuts, self.to_predictions(outputs).T, strict=False):
            columns[f"survival at {cut:g}"] = share.tolist()
        return columns

    def output_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns "log-risk", or the intervals of the hazards."""
        return tuple(f"hazard until {cut:g}" for cut in self.cuts) or ("log-risk",)

    # -- scores ---------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Returns the C-indices of Harrell (the default) and of Uno and, for hazards, the integrated Brier score."""
        return (*_CONCORDANCES, _brier_metric(self.cuts)) if self.cuts else _CONCORDANCES

    def find_metric(self, name: str) -> Metric | None:
        """Returns the metric with this name; also the integrated Brier score of a Cox model, for its label alone."""
        return _brier_metric(self.cuts) if name == "integrated_brier" else super().find_metric(name)

    @property
    def unavailable_metrics(self) -> Mapping[str, str]:
        """Returns `{"integrated_brier": reason}` for Cox's model, which has no baseline hazard; empty for hazards."""
        return {} if self.cuts else {"integrated_brier": _NO_CURVES}

    # -- splits and counts ----------------------------------------------------------------------------------------

    def strata(self, targets: Tensor) -> NDArray[Any]:
        """Returns whether each patient had the event, by which splits are stratified and partitions divide."""
        return np.asarray((targets[:, 1] > 0.5).long().cpu().numpy())

    def class_counts(self, targets: Tensor, num_classes: int) -> tuple[int, ...]:
        """Returns (number of censored patients, number of events)."""
        events = int((targets[:, 1] > 0.5).sum())
        return len(targets) - events, events

    def count_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns ("censored", "events"), the names of the two numbers in `class_counts`."""
        return ("censored", "events")

    def rarest_class(self, targets: Tensor) -> tuple[int, int]:
        """Returns (events, 1), though fewer may be censored: pairs are compared by events only."""
        return int((targets[:, 1] > 0.5).sum()), 1

    def describe_rarest(self, number: int, class_name: str, num_classes: int) -> str:
        """Returns words for the number of events, such as "12 events"."""
        return f"{number or 'no'} event{'' if number == 1 else 's'}"

    # -- models without a network ---------------------------------------------------------------------------------

    def simple_models(self) -> tuple[SimpleModel, ...]:
        """Returns the model without a network: Cox regression with a ridge penalty."""
        fit = partial(_cox_ridge_outputs, cuts=self.cuts, efron=self.ties == "efron")
        return (SimpleModel("cox_ridge", "Cox regression with a ridge penalty", fit, is_pooled_too=True),)


@cache
def _brier_metric(cuts: tuple[float, ...]) -> Metric:
    return Metric(
        "integrated_brier", partial(integrated_brier, cuts=cuts), higher_is_better=False, label="integrated Brier score",
        tasks=_TASKS,
    )  # fmt: skip


def _cox_ridge_outputs(
    table: SimpleModelInputs, num_outputs: int, seed: int, *, cuts: tuple[float, ...], efron: bool
) -> Floats:
    """Fits Cox regression and returns outputs in the form of a network's: log-risks, or the logits of hazards."""
    beta = fit_cross_validated_cox_coefficients(table, seed, efron=efron)
    return hazard_logits_of_cox(table, beta, np.asarray(cuts)) if cuts else (table.test @ beta)[:, None]
