"""Scores take one output for each target, and refuse other shapes."""

import pytest
import torch

from polyfed import UserError
from polyfed.core.evaluation.metrics import METRICS

OUTPUTS, TARGETS = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 3.0, 3.0])


@pytest.mark.parametrize(("name", "value"), [("mae", 2 / 3), ("rmse", (2 / 3) ** 0.5), ("r2", 0.25)])
@pytest.mark.parametrize("outputs", [OUTPUTS, OUTPUTS[:, None]])
@pytest.mark.parametrize("targets", [TARGETS, TARGETS[:, None]])
def test_a_column_and_a_vector_are_compared_row_by_row(name, value, outputs, targets):
    assert METRICS[name](outputs, targets) == pytest.approx(value)


@pytest.mark.parametrize("name", ["mae", "rmse", "r2"])
def test_another_number_of_outputs_than_of_targets_is_refused(name):
    with pytest.raises(UserError, match=r"outputs of shape \(3, 2\) do not suit targets of shape \(3,\)"):
        METRICS[name](torch.zeros(3, 2), TARGETS)


@pytest.mark.parametrize("name", ["accuracy", "auc", "f1", "brier", "log_loss", "ece", "balanced_accuracy"])
def test_a_column_of_classes_is_not_taken_for_one_label(name):
    with pytest.raises(
        UserError, match=r"targets of shape \(3, 1\) do not suit outputs of shape \(3, 2\); give classes"
    ):
        METRICS[name](torch.eye(3)[:, :2], torch.tensor([[0], [1], [1]]))
