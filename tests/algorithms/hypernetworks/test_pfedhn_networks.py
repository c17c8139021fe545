"""Clients' networks under pFedHN: shared and frozen parameters, what is evaluated, and settings that are refused."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms.hypernetworks.pfedhn import PFedHN
from polyfed.core.errors import UserError
from polyfed.core.nn.module_cache import build_module
from polyfed.testing import small_clients

OPTIONS = {"lr": 0.05, "momentum": 0.5, "batch_size": 8}


def test_shared_parameters_are_generated_once_and_frozen_ones_stay():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.two.weight = self.one.weight
            self.out.bias.requires_grad_(False)

        def forward(self, x):
            return self.out(torch.tanh(self.two(torch.tanh(self.one(x)))))

    clients = [pf.Client(c.id, Tied, c.train, c.test) for c in small_clients()]
    run = pf.federate(clients, PFedHN(**OPTIONS, local_steps=5), rounds=2, clients_per_round=2, workers=0)
    down = run.federation.algorithm.dispatch(run.last.state, run.federation.client_info("client-0", 2))
    assert down.tensors["model"].keys() == {"one.weight", "one.bias", "two.bias", "out.weight"}
    for client in clients:
        model = run.model(client.id)
        assert torch.equal(model.two.weight, model.one.weight)
        assert torch.equal(model.out.bias, build_module(Tied, 0).out.bias)


@pytest.mark.parametrize("policy", ["local", "recompute"])
def test_evaluated_is_what_is_generated_with_statistics_of_the_clients_own(policy):
    method = PFedHN(**OPTIONS, local_steps=5, buffers=policy)
    run = pf.federate(small_clients(), method, rounds=1, clients_per_round=1, workers=0)
    for client in small_clients():
        model = run.model(client.id)
        down = method.dispatch(run.last.state, run.federation.client_info(client.id, 1, "evaluate"))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), down.tensors["model"][name])
        if policy == "local" and client.id in run.last.client_states:
            assert torch.equal(
                model.body[1].running_mean, run.last.client_states[client.id]["buffers"]["body.1.running_mean"]
            )
        else:
            torch.testing.assert_close(model.body[1].running_mean, model.body[0](client.train.x).mean(0))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"buffers": "average"}, r"buffers must be 'local' or 'recompute' \(parameters are generated.*got 'average'"),
        ({"embedding_dim": 0}, "embedding_dim must be at least 1, or none, got 0"),
        ({"heads": "clients"}, "unknown heads 'clients'; did you mean client"),
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"hn_depth": -1}, "hn_depth must be at least 0, got -1"),
        ({"hn_lr": 0.0}, "hn_lr must be positive, got 0.0"),
        ({"hn_momentum": 1.0}, "hn_momentum must be at least 0 and below 1, got 1.0"),
        ({"hn_weight_decay": -1.0}, "hn_weight_decay must be at least 0, got -1.0"),
        ({"hn_clip": 0.0}, "hn_clip must be positive, or none, got 0.0"),
    ],
)
def test_refused(wrong, told):
    with pytest.raises(UserError, match=told):
        PFedHN(**wrong)
