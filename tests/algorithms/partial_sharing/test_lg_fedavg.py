"""LG-FedAvg: bodies of one's own, heads that are averaged. Equivalences, and what is in the messages."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, LGFedAvg, Local
from polyfed.testing import SmallNet, small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.5}
AS_DRAWN = {"first_head": "architecture"}  # as in the method that it is compared with


class Named(nn.Module):
    """Another architecture, other names, a head of the same form; the last layer but one is normed."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 3)
        self.inner = nn.Linear(10, 8)
        self.first = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU())

    def forward(self, x):
        return self.out(torch.relu(self.inner(self.first(x))))


def deep():
    hidden = [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 8), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(8, 3))


def mixed(*factories):
    return [pf.Client(c.id, m, c.train, c.test, c.val) for c, m in zip(small_clients(), factories, strict=True)]


def run(method, clients, rounds=2, **options):
    return pf.federate(clients, method, rounds=rounds, seed=3, workers=0, **options)


def test_with_the_whole_network_as_the_head_it_is_fedavg_bit_for_bit():
    fedavg = run(FedAvg(**OPTIONS, buffers="local"), small_clients())
    found = run(LGFedAvg(**OPTIONS, **AS_DRAWN, head_layers=99), small_clients())
    for one, other in zip(fedavg.history, found.history, strict=True):
        assert one["train_loss"] == other["train_loss"]
        for i, row in one["clients"].items():
            assert (row["accuracy"], row["loss"]) == (other["clients"][i]["accuracy"], other["clients"][i]["loss"])
    for i in fedavg.federation.clients:
        states = [r.model(i).state_dict() for r in (fedavg, found)]
        assert all(torch.equal(t, states[1][n]) for n, t in states[0].items())


@pytest.mark.parametrize(("layers", "weighted"), [pytest.param(1, True, marks=pytest.mark.slow), (2, False)])
def test_heads_of_different_architectures_are_averaged_by_their_place(layers, weighted):
    """By an explicit loop; bodies are the clients' own, and are not in the replies."""
    clients = mixed(Named, deep, deep)
    found = run(LGFedAvg(**OPTIONS, head_layers=layers, weighted=weighted), clients)
    last = (
        {"client-0": "out", "client-1": "6", "client-2": "6"},
        {"client-0": "inner", "client-1": "4", "client-2": "4"},
    )
    shares = [len(c.train) if weighted else 1 for c in clients]
    for k in range(layers):
        for part in ("weight", "bias"):
            own = [found.last.client_states[c.id]["head"][f"{k}.{part}"].double() for c in clients]
            expected = sum(n * t for n, t in zip(shares, own, strict=True)) / sum(shares)
            torch.testing.assert_close(found.last.state["head"][f"{k}.{part}"].double(), expected)
            for c in clients:
                model = dict(found.model(c.id).named_parameters())
                assert torch.equal(model[f"{last[k][c.id]}.{part}"], found.last.state["head"][f"{k}.{part}"])
    assert found.last.state["head"].keys() == {f"{k}.{part}" for k in range(layers) for part in ("weight", "bias")}
    for c in clients:
        body = found.last.client_states[c.id]["body"]
        assert all(torch.equal(found.model(c.id).state_dict()[n], t) for n, t in body.items())
        assert body.keys().isdisjoint(f"{names[c.id]}.weight" for names in last[:layers])


def test_a_client_trains_from_its_body_and_the_heads_mean():
    """With one client the mean is its own: Local, bit for bit. With two, what is evaluated besides is what was trained."""
    (one,) = mixed(deep, deep, deep)[:1]
    alone, found = run(Local(**OPTIONS), [one]), run(LGFedAvg(**OPTIONS, **AS_DRAWN), [one])
    assert all(torch.equal(t, found.model(one.id).state_dict()[n]) for n, t in alone.model(one.id).state_dict().items())
    clients = mixed(Named, deep, SmallNet)[:2]
    first, local = (run(m, clients, rounds=1) for m in (LGFedAvg(**OPTIONS, **AS_DRAWN), Local(**OPTIONS)))
    for c in clients:  # in round 1 nobody has received anything
        record, alone_record = (r.history[0]["clients"][c.id] for r in (first, local))
        assert record["trained_loss"] == alone_record["loss"] != record["loss"]


def test_heads_that_differ_are_named():
    def wider():
        return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3))

    with pytest.raises(pf.UserError, match=r"heads of 'client-0' and 'client-1' differ.*last 2 layers"):
        run(LGFedAvg(**OPTIONS, head_layers=2), mixed(Named, wider, deep))
    with pytest.raises(pf.UserError, match="last layer of 'client-1' takes 6 numbers"):
        run(LGFedAvg(**OPTIONS), mixed(deep, lambda: nn.Linear(6, 3), deep))
    with pytest.raises(pf.UserError, match="head_layers must be at least 1"):
        LGFedAvg(head_layers=0)
    with pytest.raises(pf.UserError, match="buffers must be 'local'"):
        LGFedAvg(buffers="average")
