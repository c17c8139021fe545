"""A task of the user's own between sites: what is trained and scored is what a simulation trains and scores."""

from dataclasses import dataclass

import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.seeds import torch_generator
from polyfed.testing import without_durations

from .conftest import MemoryGrid


def mean_count_error(outputs, targets):
    return float((outputs.exp() - targets).abs().mean())


@dataclass(frozen=True)
class Counts(pf.tasks.Task):
    """Predicts counts by the logarithms of their rates."""

    largest: float = 20.0

    @property
    def metrics(self):
        return (pf.Metric("count_error", mean_count_error, higher_is_better=False),)

    def loss(self, outputs, targets):
        outputs = outputs.clamp(max=self.largest)
        return (outputs.exp() - targets * outputs).mean()


def one_output():
    return nn.Linear(6, 1)


def clients_with_counts(task):
    generator, clients = torch_generator(7), []
    for name in ("client-0", "client-1", "client-2"):
        x = torch.randn(30, 6, generator=generator)
        y = torch.poisson((x[:, 0] / 2).exp(), generator=generator)
        clients.append(pf.Client(name, one_output, (x[10:], y[10:]), (x[:10], y[:10]), task=task))
    return clients


def test_sites_train_a_task_of_the_users_own_and_its_metric_stays_there(tmp_path, run, nodes):
    """Weights and losses are those of a simulation, bit for bit; a server knows built-in metrics alone."""
    file = tmp_path / "one_output.py"
    file.write_text("from torch import nn\n\n\ndef model():\n    return nn.Linear(6, 1)\n")
    clients = clients_with_counts(Counts(largest=5.0))
    found = run(grid=MemoryGrid(nodes(clients)), file=str(file))
    other = pf.federate(clients, FedAvg(lr=0.05), rounds=3, seed=3, workers=0)
    for ours, theirs in zip(without_durations(found.history), without_durations(other.history), strict=True):
        assert not ours["failures"]
        assert ours["train_loss"] == theirs["train_loss"]
        for name, row in theirs["clients"].items():
            assert ours["clients"][name]["loss"] == row["loss"]
            assert "count_error" in row
            assert "count_error" not in ours["clients"][name]
