"""What tests share that write whole rounds of a method in plain torch, from its paper, and compare them with polyfed's.

From polyfed such a test takes the initial weights and what was drawn: who took part, and the minibatches in their order.
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients

SEED = 3
LOCAL = {"lr": 0.1, "momentum": 0.6, "weight_decay": 0.02, "batch_size": 8, "local_epochs": 2}
NEAR = 1e-10
SIZES = (11, 26, 32)


def normed():
    """Has BatchNorm, whose statistics tell training from evaluation."""
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def deep():
    """Is another architecture, with a last layer of the same form."""
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
    ).double()


def meme():
    """Is a small network that clients share beside their own."""
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()


def unequal_clients(*factories, lacks=(None, None, None), turns=(0, 0, 0)):
    """Three clients with 11, 26 and 32 examples in double precision, each with its network. A client may lack a class, and
    its labels may be turned by so many classes."""

    def chosen(examples, lack, turn, number=None):
        x, y = examples.x[:number].double(), examples.y[:number]
        rows = y != (-1 if lack is None else lack)
        return x[rows], (y[rows] + turn) % 3

    return [
        pf.Client(c.id, factory, chosen(c.train, lack, turn, number), chosen(c.test, lack, turn))
        for c, number, factory, lack, turn in zip(small_clients(), SIZES, factories, lacks, turns, strict=True)
    ]


def draw_network(factory):
    """The network with the run's initial weights, in training mode."""
    return load(factory(), initial_state(factory, SEED))


def load(network, tensors):
    network.load_state_dict(tensors, strict=False)
    return network.train()


def copy_of(network):
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def sgd(parameters, momentum=LOCAL["momentum"], lr=LOCAL["lr"]):
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=LOCAL["weight_decay"])


def train(network, optimizer, minibatches):
    for x, y in minibatches:
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()


def mean_of(trees, weights):
    """The weighted mean."""
    return {n: sum(w * t[n] for t, w in zip(trees, weights, strict=True)) / sum(weights) for n in trees[0]}


def parameters_of(network):
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


class Recorded(NamedTuple):
    """A run of polyfed, and for each of its rounds: who took part, and by client its minibatches (inputs, labels)."""

    run: pf.Run
    rounds: list[tuple[list[str], dict[str, list[tuple[Tensor, Tensor]]]]]


def record_run(monkeypatch, method, clients, rounds=3, **settings):
    """Runs polyfed, and writes down what it draws."""
    drawn, by_round, take = defaultdict(list), [], Examples.batch

    def recorded_batch(examples, rows, generator=None):
        x, y = take(examples, rows, generator)
        if generator is not None:  # a minibatch to train on
            (owner,) = [c.id for c in clients if (c.train.x == x[0]).all(1).any()]
            drawn[owner].append((x.clone(), y.clone()))
        return x, y

    def end_round(record):
        cohort = sorted(i for i, row in record["clients"].items() if "bytes_up" in row)
        by_round.append((cohort, dict(drawn)))
        drawn.clear()

    settings |= {"rounds": rounds, "seed": SEED, "workers": 0, "progress": False, "callbacks": [end_round]}
    with monkeypatch.context() as patch:
        patch.setattr(Examples, "batch", recorded_batch)
        return Recorded(pf.federate(clients, method, **settings), by_round)


def assert_tensors_near(found, expected, small=NEAR):
    """Tensors of these names are equal up to rounding in double precision; whole numbers (counters) are left out."""
    assert set(found) == set(expected)
    for name, tensor in found.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(
                tensor, expected[name], rtol=0, atol=small, msg=lambda text, n=name: f"{n}: {text}"
            )


def assert_networks_equal(recorded, networks):
    """These are the networks that polyfed evaluates, with their statistics."""
    for client, network in networks.items():
        assert_tensors_near(recorded.run.model(client).state_dict(), network.state_dict())
