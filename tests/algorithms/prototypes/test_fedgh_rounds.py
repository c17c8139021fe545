"""FedGH beside its algorithm 1 in plain torch: the server's head learns the clients' class means, and replaces theirs."""

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

from polyfed.algorithms import FedGH
from polyfed.core.seeds import derive_seed


def initial_head():
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(SEED, "head"))
        return nn.Linear(WIDTH, CLASSES).double()


def test_four_rounds_with_two_clients_each_are_those_of_plain_torch():
    clients = {c.id: c for c in unlike_clients()}
    server = {"server_epochs": 5, "server_lr": 0.3, "server_batch_size": 2, "first_head": "architecture"}
    run, rounds = run_in_polyfed(FedGH(**OPTIONS, **server), list(clients.values()))
    nets, head = {i: initial_network(c.model) for i, c in clients.items()}, initial_head()
    for number, members in enumerate(rounds, 1):
        x, y = [], []
        for i in members:
            c = clients[i]
            if number > 1:
                nets[i][-1].load_state_dict(head.state_dict())
            train_locally(nets[i], c, round_seed(number, i))
            means = mean_by_class(nets[i][:-1](c.train.x).detach(), c.train.y)
            x, y = x + list(means.values()), y + list(means)
        x, y = torch.stack(x), torch.tensor(y)
        steps = minibatches(derive_seed(SEED, number, "server"), len(y), 2, 5)
        descend(head.parameters(), lambda rows, x=x, y=y: F.cross_entropy(head(x[rows]), y[rows]), steps, 0.3, 0, 0)
    assert_states_near(run.last.state["head"], head.state_dict(), 1e-6)
    for i, c in clients.items():
        assert_states_near(run.model(i).state_dict(), nets[i].state_dict(), 1e-6)
        nets[i][-1].load_state_dict(head.state_dict())
        right = (nets[i](c.test.x).argmax(1) == c.test.y).double().mean()
        assert abs(run.history[-1]["clients"][i]["global_accuracy"] - float(right)) < 1e-6
