"""What every task of polyfed keeps: targets are checked with a sentence, losses have gradients, metrics are numbers."""

import math

import pytest
import torch
from torch import nn

from polyfed import Client, UserError, tasks
from polyfed.core.evaluation.metrics import METRICS, resolve_metrics
from polyfed.core.tasks.task_lookup import has_elementwise_loss

X = torch.zeros(4, 3)
GOOD = {
    "classification": (torch.tensor([0, 2, 1, 0]), (4, 3)),
    "multilabel": (torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]]), (4, 2)),
    "regression": (torch.tensor([1.0, 2.0, -1.0, 0.5]), (4, 1)),
    "survival": (torch.tensor([[3.0, 1], [2.0, 0], [5.0, 1], [2.0, 1]]), (4, 1)),
    "tokens": (torch.tensor([[0, 1, 2], [2, 2, -100], [1, -100, -100], [0, 0, 1]]), (4, 3, 3)),
    "forecasting": (torch.tensor([1.0, 2.0, -1.0, 0.5]), (4, 1)),
    "segmentation": (torch.arange(16).view(4, 2, 2) % 3, (4, 3, 2, 2)),
}
"""Task -> targets of four examples, and the shape of a network's outputs for them."""
BAD = {
    "classification": [
        (torch.tensor([0, -1, 1, 0]), "count from 0"),
        (torch.tensor([0.5, 1, 2, 3]), "fractions"),
        (torch.zeros(4, 2, 2, dtype=torch.int64), "give task='segmentation' if they are the class of each pixel"),
    ],
    "multilabel": [(torch.tensor([[0, 1], [1, 2], [0, 0], [1, 0]]), "other values than 0 and 1")],
    "regression": [(torch.tensor([1.0, math.nan, 2.0, 3.0]), "row 1 is nan")],
    "survival": [
        (
            torch.tensor([[3.0, 1], [2.0, 2], [5.0, 1], [2.0, 1]]),
            r"row 1 \(the first is 0\) has an event other than 1, or 0 for censored; give 1",
        ),
        (
            torch.tensor([[3.0, 1], [2.0, 0], [-5.0, 1], [2.0, 1]]),
            r"row 2 \(the first is 0\) has a time below 0; correct it$",
        ),
        (torch.tensor([[3.0, 1], [2.0, 0], [math.nan, 1], [2.0, 1]]), "row 2, column 0 is nan"),
        (
            torch.tensor([[1.0, 30], [0, 20], [1, 10], [1, 5]]),
            r"row 0 .* has an event other than 1.*swap the two columns",
        ),
        (torch.tensor([3.0, 2.0, 5.0, 2.0]), "the time and the event"),
    ],
    "tokens": [
        (torch.tensor([0, 1, 2, 0]), "one class for each token"),
        (torch.tensor([[0, 1], [1, -3], [0, 0], [1, 0]]), "row 1, position 1 is -3"),
        (torch.tensor([[0, 1], [1, 0], [-100, -100], [1, 0]]), "all tokens of row 2 are ignored"),
    ],
    "forecasting": [(torch.zeros(4, 3), "next 1 values"), (torch.tensor([1.0, math.nan, 2.0, 3.0]), "row 1 is nan")],
    "segmentation": [
        (torch.full((4, 2, 2), 0.5), "row 0 has 0.5"),
        (torch.zeros(4, 2), "segmentation needs"),
        (torch.full((4, 2, 2), -1), "row 0 has the value -1"),
    ],
}
"""Task -> targets that it refuses, and words of the error."""


def test_every_task_is_in_this_table():
    assert GOOD.keys() == BAD.keys() == tasks.REGISTRY.keys()
    assert {name: task.name for name, task in tasks.REGISTRY.items()} == {name: name for name in tasks.REGISTRY}


@pytest.mark.parametrize("name", GOOD)
def test_targets_that_fit_are_taken_and_others_refused_with_client_and_set(name):
    good = GOOD[name][0]
    client = Client("north", None, (X, good), (X, good), task=name)
    assert client.task == name
    assert client.task == tasks.get_task(name) == tasks.REGISTRY[name]()
    assert client.task.spec == str(client.task) == name
    for bad, words in BAD[name]:
        with pytest.raises(UserError, match=f"client 'north': train .*{words}"):
            Client("north", None, (X, bad), (X, good), task=name)


@pytest.mark.parametrize("name", GOOD)
def test_losses_have_finite_gradients_and_metrics_are_numbers(name):
    task, (raw, shape) = tasks.get_task(name), GOOD[name]
    targets = task.prepare_targets(raw)
    task.check_outputs(shape[1:], targets, "client 'north': train")
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = task.loss(outputs, targets)
    loss.backward()
    assert loss.dim() == 0
    loss = loss.detach()
    assert bool(torch.isfinite(outputs.grad).all())
    values = outputs.detach()
    if has_elementwise_loss(task):
        assert float(task.elementwise_loss(values, targets).mean()) == pytest.approx(float(loss))
    assert torch.equal(task.training_loss(targets)(values, targets), loss)
    assert float(task.output_distance(values, values, 1.0)) == pytest.approx(0.0)
    assert all(isinstance(metric(values, targets), float) for metric in task.metrics)
    assert len(task.to_predictions(values)) == len(task.strata(targets)) == 4
    assert all(
        len(column) == 4 for column in task.prediction_columns(values, [str(k) for k in range(shape[1])]).values()
    )
    assert resolve_metrics(None, name) == (task.default_metric,)
    assert {metric.name: METRICS[metric.name] for metric in task.metrics} == {m.name: m for m in task.metrics}


@pytest.mark.parametrize("name", GOOD)
def test_a_network_with_other_outputs_is_refused(name):
    task, (raw, shape) = tasks.get_task(name), GOOD[name]
    with pytest.raises(UserError, match="client 'north': train"):
        task.check_outputs((shape[1] + 1, 7), task.prepare_targets(raw), "client 'north': train")
    assert task.num_outputs(task.prepare_targets(raw)) == shape[1]


def test_names_that_are_no_task_are_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean regression"):
        Client("north", nn.Identity, (X, X), (X, X), task="regresion")
    with pytest.raises(UserError, match="no option 'tie'"):
        tasks.get_task({"name": "regression", "tie": 1})
    with pytest.raises(UserError, match="a task is a name"):
        tasks.get_task(3)
    with pytest.raises(UserError, match="trust"):
        tasks.get_task("elsewhere:Task")
