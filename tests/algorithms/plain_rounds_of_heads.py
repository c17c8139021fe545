"""Whole runs of a method beside the same rounds in plain torch. From polyfed these take the initial weights, the clients of
each round and the order of minibatches, and nothing else.

The networks are in double precision; two architectures, of which one has batch norm, have representations of one width.
"""

import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.testing import small_clients

SEED, LR, EPOCHS, MOMENTUM, DECAY, BATCH, CLASSES, WIDTH = 3, 0.1, 2, 0.6, 0.02, 7, 3, 4
OPTIONS = {"lr": LR, "local_epochs": EPOCHS, "momentum": MOMENTUM, "weight_decay": DECAY, "batch_size": BATCH}


def narrow():
    hidden = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, WIDTH), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES)).double()


def wide():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)).double()


def unlike_clients(factories=(narrow, wide, narrow), classes=((0, 1), (1, 2), (0, 1, 2))):
    """Clients of unlike sizes, of which two lack a class, with inputs in double precision."""
    clients = []
    for c, factory, present in zip(small_clients(len(factories)), factories, classes, strict=True):
        rows = torch.isin(c.train.y, torch.tensor(present))
        train, test = (c.train.x[rows].double(), c.train.y[rows]), (c.test.x.double(), c.test.y)
        clients.append(pf.Client(c.id, factory, train, test))
    return clients


def public_inputs(number=30):
    return torch.randn(number, 6, generator=torch_generator(8)).double()


def run_in_polyfed(method, clients, rounds=4, **settings):
    """A run with two clients in each round, and who they were."""
    wanted = {"clients_per_round": 2, "seed": SEED, "workers": 0, "progress": False} | settings
    run = pf.federate(clients, method, rounds=rounds, **wanted)
    return run, [sorted(i for i, row in h["clients"].items() if "bytes_up" in row) for h in run.history]


def initial_network(factory):
    net = factory()
    net.load_state_dict(initial_state(factory, SEED))
    return net


def round_seed(number, client):
    return derive_seed(SEED, number, client, "local")


def minibatches(seed, examples, size=BATCH, epochs=EPOCHS):
    """The rows of each step; an epoch is a new permutation."""
    generator = torch_generator(derive_seed(seed, "batches"))
    for _ in range(epochs):
        yield from torch.randperm(examples, generator=generator).split(size or examples)


def descend(parameters, loss_of_rows, batches, lr=LR, momentum=MOMENTUM, decay=DECAY, plain=()):
    """Stochastic gradient descent with momentum and weight decay, and without either on the `plain` tensors."""
    parameters = [*parameters, *plain]
    velocities = [torch.zeros_like(p) for p in parameters]
    for rows in batches:
        gradients = torch.autograd.grad(loss_of_rows(rows), parameters)
        for k, (p, v, gradient) in enumerate(zip(parameters, velocities, gradients, strict=True)):
            if k >= len(parameters) - len(plain):
                p.data -= lr * gradient
            else:
                p.data -= lr * v.mul_(momentum).add_(gradient + decay * p.detach())


def train_locally(net, client, seed, loss_of=lambda net, x, y: F.cross_entropy(net(x), y)):
    """Trains a client's network on minibatches of its examples, by a loss of (network, inputs, labels)."""
    x, y = client.train.x, client.train.y
    net.train()
    descend(net.parameters(), lambda rows: loss_of(net, x[rows], y[rows]), minibatches(seed, len(y)))
    return net.eval()


def mean_by_class(rows, labels):
    """The mean row of each class that there is, as {class: row}."""
    return {k: rows[labels == k].mean(0) for k in sorted(set(labels.tolist()))}


def mean_state(states, weights):
    """The weighted mean of state dicts; of counters it is rounded."""
    rows = list(zip(weights, states, strict=True))
    mean = {name: sum(w * state[name] for w, state in rows) / sum(weights) for name in states[0]}
    return {name: tensor if states[0][name].is_floating_point() else tensor.round() for name, tensor in mean.items()}


def assert_networks_equal(run, nets, small=1e-9):
    """The networks that polyfed evaluates are those of plain torch."""
    for i, net in nets.items():
        assert_states_near(run.model(i).state_dict(), net.state_dict(), small)


def assert_states_near(state, expected, small=1e-9):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name].to(tensor.dtype), tensor.detach(), rtol=small, atol=small)
