"""pFedLA learns who helps whom: two groups of clients whose labels contradict one another, on real handwritten digits.

The rate of the hypernetworks is chosen on validation examples, by benchmarks/groups.py.
"""

import functools

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, HeurPFedLA, Local, PFedLA
from polyfed.data import IID, SOURCES, Split, make_clients
from polyfed.models import ModelSpec

OPTIONS = {"lr": 0.1, "local_epochs": 3, "batch_size": 16}
ROUNDS = 30


@functools.cache
def clients():
    """Eight clients with 40 examples each; every second one has its labels shifted by one."""
    pool = SOURCES["digits"]().load()
    data, _ = make_clients(pool, Split(clients=8, examples_per_client=40, test_fraction=0.6), IID(), seed=0)
    spec = ModelSpec("cnn_small", {}, pool.input_shape, pool.num_outputs)

    def shifted(part, by):
        return pf.Examples(part.x, (part.y + by) % 10, part.index, part.transform)

    return tuple(pf.Client(d.id, spec, shifted(d.train, i % 2), shifted(d.test, i % 2)) for i, d in enumerate(data))


@functools.cache
def run(method):
    return pf.federate(clients(), method, rounds=ROUNDS, evaluate_every=ROUNDS)


def accuracy(method):
    return run(method).table()[-1]["accuracy"]


def inside(method):
    """The share of a client's weights that is in its own group, for each layer the mean over clients."""
    alpha = method.analysis(run(method).last.state, [c.id for c in clients()])["alpha"]
    n = torch.arange(8)
    same = (n[:, None] - n) % 2 == 0
    return (alpha * same[:, None, :]).sum(2).mean(0)


@pytest.mark.slow
@pytest.mark.parametrize("method", [PFedLA, HeurPFedLA])
def test_the_weights_go_to_the_own_group(method):
    learned, fixed = (method(hn_lr=rate, **OPTIONS) for rate in (None, 0.0))
    assert inside(learned).mean() >= 0.8
    assert inside(fixed).mean() < 0.6
    assert accuracy(learned) > accuracy(Local(**OPTIONS)) + 0.03
    assert accuracy(learned) > accuracy(FedAvg(**OPTIONS)) + 0.2
