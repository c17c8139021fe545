"""Frozen parameters and adapters of different ranks between sites: the bits of a simulation, and what a site refuses."""

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.errors import UserError
from polyfed.deploy.flower.apps import run_deployment
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.testing import small_clients, without_durations

from .conftest import MemoryGrid, configuration

NETS = """
import torch
from torch import nn

class Adapted(nn.Module):
    def __init__(self, r, seed):
        super().__init__()
        weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.lora_A, self.lora_B = nn.Linear(6, r, bias=False), nn.Linear(r, 3, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = 4.0 / r

    def forward(self, x):
        return nn.functional.linear(x, self.weight) + self.scaling * self.lora_B(self.lora_A(x))

class Net(nn.Module):
    def __init__(self, r=4, seed=3):
        super().__init__()
        self.only = Adapted(r, seed)

    def forward(self, x):
        return self.only(x)

model = Net
"""


def networks(tmp_path, monkeypatch):
    (tmp_path / "nets_of_a_test.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    import nets_of_a_test

    return nets_of_a_test


def deployed(tmp_path, nodes, clients, method, **words):
    (tmp_path / "server.py").write_text("from nets_of_a_test import model\n")
    given = {
        "sites": ",".join(c.id for c in clients),
        "file": str(tmp_path / "server.py"),
        "out": str(tmp_path / "run"),
    }
    return run_deployment(MemoryGrid(nodes(clients)), configuration(method, **given, **words), SilentProgress())


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["svd", pytest.param("stack", marks=pytest.mark.slow),
                                  pytest.param("zero_pad", marks=pytest.mark.slow)])  # fmt: skip
def test_sites_of_different_ranks(tmp_path, nodes, monkeypatch, mode):
    nets = networks(tmp_path, monkeypatch)
    factories = [lambda: nets.Net(1), nets.Net, lambda: nets.Net(2)]
    clients = [pf.Client(c.id, f, c.train, c.test, c.val) for c, f in zip(small_clients(), factories, strict=True)]
    method = FedAvg(lr=0.05, adapters=mode, optimizer="adamw", lr_by_name={"*lora_B*": 2.0}, class_weights=(1, 2, 1))
    run = deployed(tmp_path, nodes, clients, method)
    other = pf.federate(clients, method, rounds=3, seed=3, workers=0)
    assert without_durations(run.history) == without_durations(other.history)
    assert run.last.state["model"].keys() == other.last.state["model"].keys()
    for name, tensor in other.last.state["model"].items():
        assert torch.equal(run.last.state["model"][name], tensor)


def test_a_site_with_another_backbone_is_refused(tmp_path, nodes, monkeypatch):
    nets = networks(tmp_path, monkeypatch)
    factories = [nets.Net, lambda: nets.Net(seed=4)]
    clients = [pf.Client(c.id, f, c.train, c.test) for c, f in zip(small_clients(2), factories, strict=True)]
    with pytest.raises(UserError, match="its network's frozen parameters are not the federation's"):
        deployed(tmp_path, nodes, clients, FedAvg(lr=0.05))
