"""Scores, against their definitions."""

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.data.examples import Examples, Normalise
from polyfed.evaluation import evaluate, mean_auc, predict, summarise
from polyfed.seeds import torch_generator


def test_auc_is_the_chance_that_a_positive_ranks_above_a_negative():
    generator = torch_generator(0)
    outputs = torch.randn(60, 3, generator=generator).mul(3).round()  # with ties
    targets = (torch.rand(60, 3, generator=generator) < 0.3).float()
    areas = []
    for k in range(3):
        positive, negative = outputs[targets[:, k] == 1, k], outputs[targets[:, k] == 0, k]
        wins = (positive[:, None] > negative[None]).double() + 0.5 * (positive[:, None] == negative[None]).double()
        areas.append(float(wins.mean()))
    assert mean_auc(outputs, targets) == pytest.approx(np.mean(areas))


def test_labels_with_one_value_do_not_count_and_none_gives_no_score():
    outputs, targets = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert mean_auc(outputs, targets) == 1.0
    single = Examples(outputs, torch.ones(2, 2))
    assert evaluate(nn.Identity(), single, "multilabel")["auc"] is None


def test_regression_score():
    y = torch.tensor([[1.0], [2.0], [3.0]])
    assert evaluate(nn.Identity(), Examples(y, y), "regression") == {"r2": 1.0, "loss": 0.0}
    mean = Examples(torch.full((3, 1), 2.0), y)
    assert evaluate(nn.Identity(), mean, "regression")["r2"] == 0.0
    assert evaluate(nn.Identity(), Examples(y[:1], y[:1]), "regression")["r2"] is None


def test_a_diverged_model_gives_none_not_nan():
    broken = Examples(torch.full((2, 2), float("nan")), torch.tensor([0, 1]))
    assert evaluate(nn.Identity(), broken, "classification")["loss"] is None


def test_predictions_keep_the_order_and_use_evaluation_mode():
    x = torch.arange(250, dtype=torch.uint8).view(250, 1, 1, 1)
    examples = Examples(x, torch.zeros(250, dtype=torch.int64), index=torch.arange(249, -1, -1),
                        transform=Normalise((0.0,), (1.0,)))  # fmt: skip
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9))
    torch.testing.assert_close(predict(model, examples).flatten() * 255, x.flip(0).flatten().float())


def test_summary_is_over_clients_that_have_the_metric():
    metrics = {"a": {"accuracy": 0.0, "loss": 1.0}, "b": {"accuracy": 1.0, "loss": None}, "c": {"accuracy": 0.5}}
    found = summarise(metrics, {"a": 1, "b": 2, "c": 1})
    assert found["accuracy"] == pytest.approx(
        {"mean": 0.5, "weighted_mean": 0.625, "std": np.std([0, 1, 0.5]), "min": 0.0, "p10": 0.1, "p90": 0.9}
    )
    assert found["loss"]["mean"] == 1.0
