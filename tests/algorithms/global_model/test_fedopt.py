"""FedOpt: server optimisers against their formulas, and against FedAvg."""

import dataclasses

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, FedOpt
from polyfed.core.algorithm import Message, ServerContext
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import SmallNet, small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8}


def run(method, rounds=3, **more):
    return pf.federate(small_clients(), method, rounds=rounds, workers=0, evaluate_every=9, **more).last.state


def test_momentum_0_and_rate_1_is_fedavg_bit_for_bit():
    theirs = run(FedAvg(**OPTIONS))["model"]
    ours = run(FedOpt(server="avgm", beta1=0.0, server_lr=1.0, **OPTIONS))
    assert theirs.keys() == ours["model"].keys() | ours["buffers"].keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, {**ours["model"], **ours["buffers"]}[name]), name


def by_hand(server, rounds, eta, beta1, beta2, tau):
    """Algorithm 2 in numpy, for changes that do not depend on θ."""
    rng = np.random.default_rng(0)
    x, m, v = np.array([0.5, -1.0, 2.0]), np.zeros(3), np.full(3, tau**2)
    changes = []
    for _ in range(rounds):
        each = rng.normal(size=(2, 3))
        changes.append(each)
        delta = 0.25 * each[0] + 0.75 * each[1]
        m = beta1 * m + (1 if server == "avgm" else 1 - beta1) * delta
        v = {
            "avgm": v,
            "adagrad": v + delta**2,
            "adam": beta2 * v + (1 - beta2) * delta**2,
            "yogi": v - (1 - beta2) * delta**2 * np.sign(v - delta**2),
        }[server]
        x = x + eta * (m if server == "avgm" else m / (np.sqrt(v) + tau))
    return changes, x


class Three(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))

    def forward(self, x):
        return self.w * x


@pytest.mark.parametrize("server", ["avgm", "adagrad", "adam", "yogi"])
def test_the_server_is_algorithm_2_step_by_step(server):
    fields = {"eta": 0.3, "beta1": 0.6, "beta2": 0.8, "tau": 0.05}
    changes, x = by_hand(server, 6, **fields)
    method = FedOpt(server=server, server_lr=0.3, beta1=0.6, beta2=0.8, tau=0.05)
    state = method.server_init(ServerContext(0, 6, (), Three))
    assert torch.equal(state["model"]["w"], Three().w)
    for each in changes:
        w = state["model"]["w"]
        replies = {
            name: Message({"model": {"w": w + torch.from_numpy(change)}}, {"num_examples": number})
            for name, change, number in (("a", each[0], 1.0), ("b", each[1], 3.0))
        }
        state = method.aggregate(state, replies, None)
    np.testing.assert_allclose(state["model"]["w"].numpy(), x, rtol=1e-12)


def test_statistics_of_batch_norm_are_averaged_and_no_more():
    """An optimiser that moves a running variance along its change makes it negative."""
    plain = run(FedAvg(**OPTIONS), rounds=1)["model"]
    ours = run(FedOpt(server="adam", server_lr=5.0, **OPTIONS), rounds=1)
    assert {"body.1.running_var", "body.1.num_batches_tracked"} <= ours["buffers"].keys()
    for name, tensor in ours["buffers"].items():
        assert torch.equal(tensor, plain[name])
    start = initial_state(SmallNet, 0)["body.1.running_var"]
    delta = plain["body.1.running_var"] - start
    assert bool((start + 5.0 * 0.1 * delta / ((0.99e-6 + 0.01 * delta**2).sqrt() + 1e-3) < 0).any())


def test_each_server_has_its_own_rate_and_momentum():
    found = {
        s: (FedOpt(server=s).effective_server_lr, FedOpt(server=s).effective_beta1)
        for s in ("avgm", "adagrad", "adam", "yogi")
    }
    assert found == {"avgm": (1.0, 0.9), "adagrad": (0.01, 0.0), "adam": (0.01, 0.9), "yogi": (0.01, 0.9)}
    assert dataclasses.replace(FedOpt(), server_lr=0.5, beta1=0.2).effective_server_lr == 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [("server_lr", 0.0), ("beta1", 1.0), ("beta2", -0.1), ("tau", 0.0), ("adapters", "svd")],
)
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value!r}"):
        FedOpt(**{field: value})
    with pytest.raises(pf.UserError, match="unknown server 'sgd'"):
        FedOpt(server="sgd")
