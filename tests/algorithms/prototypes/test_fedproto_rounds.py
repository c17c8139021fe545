"""FedProto beside the paper's algorithm 1 in plain torch, with class means of trained networks in evaluation mode."""

import pytest
import torch
from plain_rounds_of_heads import (
    OPTIONS,
    assert_states_near,
    initial_network,
    mean_by_class,
    round_seed,
    run_in_polyfed,
    train_locally,
    unlike_clients,
)
from torch.nn import functional as F

from polyfed.algorithms import FedProto


@pytest.mark.parametrize("weighted", [False, True], ids=["plain-mean", "by-examples"])
@pytest.mark.one_case
def test_four_rounds_with_two_clients_each_are_those_of_plain_torch(weighted):
    clients = {c.id: c for c in unlike_clients()}
    run, rounds = run_in_polyfed(FedProto(**OPTIONS, lam=2.5, weighted=weighted), list(clients.values()))
    nets, prototypes = {i: initial_network(c.model) for i, c in clients.items()}, {}

    def loss_of(net, x, y):
        f = net[:-1](x)
        distance = sum(((f[k] - prototypes[c]) ** 2).mean() for k, c in enumerate(y.tolist()) if c in prototypes)
        return F.cross_entropy(net[-1](f), y) + 2.5 * distance / len(y)

    for number, members in enumerate(rounds, 1):
        means, counts = {}, {}
        for i in members:
            c = clients[i]
            train_locally(nets[i], c, round_seed(number, i), loss_of)
            for k, mean in mean_by_class(nets[i][:-1](c.train.x).detach(), c.train.y).items():
                means.setdefault(k, []).append(mean)
                counts.setdefault(k, []).append(int((c.train.y == k).sum()) if weighted else 1)
        for k, rows in means.items():
            prototypes[k] = sum(n * row for n, row in zip(counts[k], rows, strict=True)) / sum(counts[k])
    expected = torch.stack([prototypes[k] for k in range(3)])
    torch.testing.assert_close(run.last.state["prototypes"]["means"].double(), expected, rtol=1e-6, atol=1e-6)
    for i, c in clients.items():
        assert_states_near(run.last.client_states[i]["model"], nets[i].state_dict(), 1e-6)
        nearest = torch.cdist(nets[i][:-1](c.test.x).detach(), expected).argmin(1)
        row = run.history[-1]["clients"][i]
        assert row["accuracy"] == pytest.approx(float((nearest == c.test.y).double().mean()))
        assert row["head_accuracy"] == pytest.approx(float((nets[i](c.test.x).argmax(1) == c.test.y).double().mean()))
