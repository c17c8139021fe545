"""FedDBE beside the authors' algorithm in plain torch: a client's own vector, and mean representations near all clients'."""

import pytest
import torch
from plain_rounds_of_heads import (
    OPTIONS,
    WIDTH,
    descend,
    initial_network,
    mean_state,
    minibatches,
    narrow,
    round_seed,
    run_in_polyfed,
    train_locally,
    unlike_clients,
)
from torch.nn import functional as F

from polyfed.algorithms import FedDBE


def train_with_vector(net, vector, client, seed, target, mu, kappa, memory):
    x, y, running = client.train.x, client.train.y, torch.zeros(WIDTH).double()

    def loss_of(rows):
        nonlocal running
        z = net[:-1](x[rows])
        mean = (1 - mu) * running + mu * z.mean(0)
        running = mean.detach()
        task = F.cross_entropy(net[-1](z + vector if memory else z), y[rows])
        return task + kappa * ((mean - target) ** 2 / 2).mean()

    steps = minibatches(seed, len(y))
    descend(net.train().parameters(), loss_of, steps, plain=[vector] if memory else [])
    net.eval()


@pytest.mark.parametrize(("mu", "kappa", "memory"), [(1.0, 5.0, True), (0.3, 9.0, True), (0.3, 9.0, False)])
@pytest.mark.one_case
def test_four_rounds_with_two_clients_each_are_those_of_plain_torch(mu, kappa, memory):
    clients = {c.id: c for c in unlike_clients((narrow,) * 3)}
    method = FedDBE(**OPTIONS, mean_momentum=mu, kappa=kappa, memory=memory)
    run, rounds = run_in_polyfed(method, list(clients.values()))
    nets, shared, target = {i: initial_network(narrow) for i in clients}, {}, None
    vectors = {i: torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True) for i in clients}
    for number, members in enumerate(rounds, 1):
        for i in members:
            nets[i].load_state_dict(nets[i].state_dict() | shared)
            if target is None:
                train_locally(nets[i], clients[i], round_seed(number, i))
            else:
                seed = round_seed(number, i)
                train_with_vector(nets[i], vectors[i], clients[i], seed, target, mu, kappa, memory)
        n = [len(clients[i].train) for i in members]
        shared = mean_state([dict(nets[i].named_parameters()) for i in members], n)
        shared = {name: tensor.detach() for name, tensor in shared.items()}
        if target is None:
            means = [nets[i][:-1](clients[i].train.x).mean(0).detach() for i in members]
            target = sum(k * mean for k, mean in zip(n, means, strict=True)) / sum(n)
    torch.testing.assert_close(run.last.state["consensus"]["mean"].double(), target, rtol=1e-6, atol=1e-6)
    for i, c in clients.items():
        nets[i].load_state_dict(nets[i].state_dict() | shared)
        expected = nets[i][-1](nets[i][:-1](c.test.x) + vectors[i])
        torch.testing.assert_close(run.model(i)(c.test.x), expected, rtol=1e-5, atol=1e-5)
        assert bool(vectors[i].detach().abs().max() > 0.01) == memory
