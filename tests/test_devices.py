"""Every method keeps to the device that it is given, and lets it work on during a step of training."""

import warnings

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.io.trusted_code import restore_trusted_names_afterwards, trust_code
from polyfed.simulation.engines import cohort
from polyfed.simulation.engines.base import move_clients_to_device
from polyfed.testing import example_of, small_clients
from tests.pretend import WAITS, pretending

pytestmark = pytest.mark.thorough
TOGETHER = (
    "fedavg", "fedprox", "fedrep", "per_fedavg", "pfedme", "ditto", "apfl", "scaffold", "ifca", "fedhenn_homo", "fedhenn",
)  # fmt: skip
MAY_WAIT = {
    "cells.py": "which operations were drawn decides what is computed",
    "buffers.py": "statistics of BatchNorm are gathered once a round, after training",
    "found.py": "what was found is a network of its own, once a round",
}


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def played(name, device, batch_size, model=None):
    """One round: what was waited for, clients' rows, and how many clients' training was carried out together."""
    example, together = example_of(name), []
    more = {"head": ("3",)} if name == "fedrep" and model is not None else {}
    people = example.clients() if model is None else [pf.Client(c.id, model, c.train, c.test) for c in small_clients(4)]
    real = cohort.train_cohort
    cohort.train_cohort = lambda calls: together.extend(calls) or real(calls)
    WAITS.clear()
    try:
        with restore_trusted_names_afterwards(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trust_code("polyfed.testing:SmallNet")
            run = pf.federate(
                people, example.build(batch_size=batch_size, local_epochs=1, **more), rounds=1, seed=3,
                workers=0, device=device,
                engine="inprocess" if model is None else "cohort", public=example.public(20),
            )  # fmt: skip
    finally:
        cohort.train_cohort = real
    rows = {i: {k: v for k, v in row.items() if k != "seconds"} for i, row in run.history[0]["clients"].items()}
    return dict(WAITS), rows, len(together)


def refusals():
    """What operations on two devices, or with a generator of the CPU, say; and what is counted."""
    x = torch.ones(3).to("pretend")
    tried = {
        "add": lambda: x + torch.ones(3),
        "cat": lambda: torch.cat([x, torch.ones(3)]),
        "index": lambda: torch.ones(3)[x.long()],
        "made": lambda: x * torch.arange(3),
        "generator": lambda: torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator()),
    }
    said = {}
    for name, work in tried.items():
        with pytest.raises(RuntimeError) as caught:
            work()
        said[name] = str(caught.value)
    WAITS.clear()
    counted = {}
    waiting = {
        "item": lambda: x.sum().item(), "bool": lambda: bool(x[0] > 0), "list": lambda: x.tolist(), "mask": lambda: x[x > 0],
        "where": lambda: x.nonzero(), "host": lambda: x.cpu(), "here": lambda: torch.ones(2).to("pretend"),
        "equal": lambda: torch.equal(x, x), "nothing": lambda: (2 * x + torch.zeros(3, device="pretend")).mean(),
        "on its way": lambda: torch.ones(2).to("pretend", non_blocking=True),
    }  # fmt: skip
    for name, work in waiting.items():
        work()
        counted[name] = sum(WAITS.values())
        WAITS.clear()
    with torch.enable_grad():
        w = torch.ones(3, device="pretend", requires_grad=True)
        (w * w).sum().backward()
    return said, counted, w.grad.tolist()


@pytest.fixture(scope="module")
def there():
    with pretending() as process:
        yield process


def test_the_device_refuses_others_and_counts_what_waits(there):
    said, counted, slope = there(refusals)
    assert all("two devices" in sentence for name, sentence in said.items() if name != "generator")
    assert "expected a generator of pretend" in said["generator"]
    assert counted == dict.fromkeys(counted, 1) | {"nothing": 0, "on its way": 0}
    assert slope == [2.0, 2.0, 2.0]


def assert_never_waits(more, less):
    """With half as many examples a step, and so twice as many steps, nothing is waited for more often."""
    worse = {place: (n, less.get(place, 0)) for place, n in more.items() if n > less.get(place, 0)}
    assert not {place for place in worse if not any(f" {file}:" in place for file in MAY_WAIT)}, worse


@pytest.mark.parametrize("name", REGISTRY)
def test_a_round_of_every_method(there, name):
    there(played, name, "pretend", 8)  # what is kept for later is made
    waits, rows, _ = there(played, name, "pretend", 8)
    twice, _, _ = there(played, name, "pretend", 4)
    assert waits  # at least examples were moved there
    assert_never_waits(twice, waits)
    assert rows == played(name, "cpu", 8)[1]


@pytest.mark.parametrize("model", [plain, normed])
@pytest.mark.parametrize("name", TOGETHER)
def test_many_clients_at_once(there, name, model):
    """The device draws dropout as the CPU does, so that rows are those of the CPU."""
    there(played, name, "pretend", 8, model)
    waits, rows, together = there(played, name, "pretend", 8, model)
    twice, _, _ = there(played, name, "pretend", 4, model)
    assert together >= (4 if model is plain else 0)
    assert_never_waits(twice, waits)
    assert rows == played(name, "cpu", 8, model)[1]


def made_there():
    """The weights of networks and the inputs of a client that a user made on the device, and rows of a run of it."""

    def network():
        return nn.Sequential(nn.Linear(6, 8, device="pretend"), nn.ReLU(), nn.Linear(8, 3, device="pretend"))

    client = small_clients(1)[0]
    x, y = client.train.batch(torch.arange(len(client.train)))
    there = [pf.Client("a", network, (x.to("pretend"), y.to("pretend")), client.test)]
    here = [pf.Client("a", plain_without_dropout, (x, y), client.test)]
    placed = move_clients_to_device(there, torch.device("pretend"))[0]
    assert {placed.train.x.device.type, placed.test.y.device.type} == {"pretend"}
    devices = {tensor.device.type for tensor in (there[0].train.x, there[0].train.y)}
    runs = [pf.federate(people, "fedavg", rounds=1, seed=3, workers=0, device="cpu") for people in (there, here)]
    return devices, [run.history[0]["train_loss"] for run in runs]


def plain_without_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_networks_and_data_that_are_made_on_the_device_are_brought_to_the_cpu(there):
    devices, losses = there(made_there)
    assert devices == {"cpu"}
    assert losses[0] == losses[1]
