"""What is trained is trained whatever gradient mode the caller is in."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, REGISTRY, Local
from polyfed.core.examples.examples import Examples
from polyfed.core.training.loop import fit
from polyfed.simulation.results.unseen_clients import load_trained_server
from polyfed.testing import example_of, small_clients, without_durations

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
FAST = ("fedavg_ft", "per_fedavg", "flha_ghn")


def run_and_model(name):
    """A run of one round of a method on its small clients, and the model of one of them."""
    example = example_of(name)
    run = pf.federate(example.clients(2), example.build(), rounds=1, workers=0, public=example.public())
    return run, run.model("client-1")


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in REGISTRY]
)
def test_a_run_and_its_models_do_not_depend_on_the_mode_of_the_caller(name, mode):
    with MODES[mode]():
        run, model = run_and_model(name)
        again = run.model("client-1")
        assert torch.is_grad_enabled() is False, "the caller's mode is as before"
    outside, expected = run_and_model(name)
    assert without_durations(run.history) == without_durations(outside.history)
    for found in (model, again):
        assert not any(p.is_inference() for p in found.parameters())
        for key, value in expected.state_dict().items():
            assert torch.equal(found.state_dict()[key], value), key


class Built(nn.Module):
    """An architecture of which no scratch module has been made yet."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 3)

    def forward(self, x):
        return self.line(x)


def test_a_network_first_seen_in_inference_mode_can_be_trained_later():
    clients = [pf.Client(c.id, Built, c.train, c.test) for c in small_clients(2)]
    with torch.inference_mode():
        pf.federate(clients, "local", rounds=1, workers=0)
    assert pf.federate(clients, "per_fedavg", rounds=1, workers=0).model("client-0").line.weight.requires_grad


def test_the_training_loop_by_itself():
    line = nn.Linear(1, 1)
    nn.init.zeros_(line.weight), nn.init.zeros_(line.bias)
    data = Examples(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))
    with torch.no_grad():
        loss = fit(line, data, Local(batch_size=0, local_steps=500), lr=0.1, seed=0, task="regression").loss
    assert loss < 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
def test_a_newcomer(mode, tmp_path):
    run = pf.federate(small_clients(2), FLHAGHN(batch_size=8), rounds=1, workers=0, out=tmp_path / "run")
    data = small_clients(3)[2].train
    expected = run.warmstart(Built, data).model.state_dict()
    with MODES[mode]():
        found = run.warmstart(Built, data)
        loaded = load_trained_server(tmp_path / "run")
    assert torch.equal(found.model.state_dict()["line.weight"], expected["line.weight"])
    assert not any(t.is_inference() for t in loaded.state["ghn"].values())
