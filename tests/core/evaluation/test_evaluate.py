"""Scores, against their definitions."""

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.core.evaluation.evaluate import evaluate, predict, summarise_clients
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.core.nn.buffers import recompute_norm_statistics
from polyfed.core.seeds import torch_generator


def test_auc_is_the_chance_that_a_positive_ranks_above_a_negative():
    generator = torch_generator(0)
    outputs = torch.randn(60, 3, generator=generator).mul(3).round()  # with ties
    targets = (torch.rand(60, 3, generator=generator) < 0.3).float()
    areas = []
    for k in range(3):
        positive, negative = outputs[targets[:, k] == 1, k], outputs[targets[:, k] == 0, k]
        wins = (positive[:, None] > negative[None]).double() + 0.5 * (positive[:, None] == negative[None]).double()
        areas.append(float(wins.mean()))
    assert METRICS["auc"](outputs, targets) == pytest.approx(np.mean(areas))


def test_labels_with_one_value_do_not_count_and_none_gives_no_score():
    outputs, targets = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert METRICS["auc"](outputs, targets) == 1.0
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
    found = summarise_clients(metrics, {"a": 1, "b": 2, "c": 1})
    assert found["accuracy"] == pytest.approx(
        {"mean": 0.5, "weighted_mean": 0.625, "std": np.std([0, 1, 0.5]), "min": 0.0, "p10": 0.1, "p90": 0.9}
    )
    assert found["loss"]["mean"] == 1.0


def batch_norm_net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


@pytest.mark.parametrize("order", ["sorted", "few large"])
def test_recomputed_statistics_are_those_of_all_examples_whatever_their_order(order):
    if order == "sorted":
        x = torch.arange(300.0).view(300, 1).repeat(1, 2)
    else:
        x = torch.cat([torch.zeros(128, 2), torch.full((2, 2), 10.0)])
    model = batch_norm_net()
    recompute_norm_statistics(model, Examples(x, torch.zeros(len(x), dtype=torch.int64)))
    hidden = model[0](x).detach()
    torch.testing.assert_close(model[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model[1].running_var, hidden.var(0), rtol=1e-4, atol=1e-4)
    assert not model.training


def test_recomputed_statistics_of_convolutions_and_instance_norms():
    x = torch.randn(150, 2, 5, 5, generator=torch_generator(0)) * torch.linspace(1, 9, 150).view(-1, 1, 1, 1)
    data = Examples(x, torch.zeros(150, dtype=torch.int64))
    batch, instance = nn.BatchNorm2d(2, momentum=0.3), nn.InstanceNorm2d(2, track_running_stats=True)
    for norm in (batch, instance):
        recompute_norm_statistics(norm, data)
    torch.testing.assert_close(batch.running_mean, x.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.running_var, x.transpose(0, 1).flatten(1).var(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(instance.running_mean, x.mean((2, 3)).mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(instance.running_var, x.flatten(2).var(2).mean(0), rtol=1e-4, atol=1e-5)
    assert batch.momentum == 0.3
