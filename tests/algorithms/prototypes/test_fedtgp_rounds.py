"""FedTGP beside the paper's equations 9 to 11 in plain torch: the server trains prototypes that lie apart by a margin."""

import pytest
import torch
from plain_rounds_of_heads import (
    CLASSES,
    OPTIONS,
    SEED,
    WIDTH,
    assert_states_near,
    descend,
    initial_network,
    mean_by_class,
    minibatches,
    round_seed,
    run_in_polyfed,
    train_locally,
    unlike_clients,
)
from torch import nn
from torch.nn import functional as F

from polyfed.algorithms import FedTGP
from polyfed.core.seeds import derive_seed


def initial_prototypes(hidden):
    """The vectors, and the two layers F."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(SEED, "prototypes"))
        vectors = torch.randn(CLASSES, WIDTH).double().requires_grad_()
        return vectors, nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH)).double()


@pytest.mark.parametrize("tau", [100.0, 0.3])
@pytest.mark.one_case
def test_four_rounds_with_two_clients_each_are_those_of_plain_torch(tau):
    clients = {c.id: c for c in unlike_clients()}
    server = {"server_epochs": 6, "server_lr": 0.2, "server_batch_size": 2, "hidden": 5, "margin": tau}
    run, rounds = run_in_polyfed(FedTGP(**OPTIONS, **server, lam=2.5), list(clients.values()))
    nets, seen = {i: initial_network(c.model) for i, c in clients.items()}, set()
    vectors, layers = initial_prototypes(5)

    def loss_of(net, x, y):
        """Eq. 11, with the squared distance of the authors' code."""
        f, prototypes = net[:-1](x), layers(vectors).detach()
        distance = sum(((f[k] - prototypes[c]) ** 2).mean() for k, c in enumerate(y.tolist()) if c in seen)
        return F.cross_entropy(net[-1](f), y) + 2.5 * distance / len(y)

    for number, members in enumerate(rounds, 1):
        x, y = [], []
        for i in members:
            c = clients[i]
            train_locally(nets[i], c, round_seed(number, i), loss_of)
            means = mean_by_class(nets[i][:-1](c.train.x).detach(), c.train.y)
            x, y = x + list(means.values()), y + list(means)
        x, y = torch.stack(x), torch.tensor(y)
        centres = list(mean_by_class(x, y).values())
        delta = min(tau, max(float((a - b).norm()) for a in centres for b in centres))

        def contrast(rows, x=x, y=y, delta=delta):
            """Eq. 10: with the margin, the own prototype is still the nearest."""
            prototypes, total = layers(vectors), 0.0
            for k in rows.tolist():
                own, distances = int(y[k]), [(x[k] - p).square().sum().sqrt() for p in prototypes]
                closeness = [torch.exp(-d - delta * (c == own)) for c, d in enumerate(distances)]
                total = total - torch.log(closeness[own] / sum(closeness))
            return total / len(rows)

        steps = minibatches(derive_seed(SEED, number, "server"), len(y), 2, 6)
        descend([vectors, *layers.parameters()], contrast, steps, 0.2, 0, 0)
        seen |= set(y.tolist())
    expected = layers(vectors).detach()
    torch.testing.assert_close(run.last.state["prototypes"]["means"].double(), expected, rtol=1e-5, atol=1e-5)
    for i, c in clients.items():
        assert_states_near(run.last.client_states[i]["model"], nets[i].state_dict(), 1e-5)
        nearest = torch.cdist(nets[i][:-1](c.test.x).detach(), expected).argmin(1)
        accuracy = float((nearest == c.test.y).double().mean())
        assert run.history[-1]["clients"][i]["accuracy"] == pytest.approx(accuracy)
