"""Scratch modules: what makes two architectures one, what is restored, and federations in two threads."""

import copy
import threading

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.errors import UserError
from polyfed.core.nn.module_cache import (
    build_module,
    cached_module,
    fill_module,
    forget_cached_networks,
    initial_state,
)
from polyfed.testing import SmallNet, assert_runs_equal, small_clients


class Signed(nn.Module):
    def __init__(self, sign=1, activation=torch.tanh):
        super().__init__()
        self.sign, self.activation, self.layer = sign, activation, nn.Linear(6, 3)

    def forward(self, x):
        return self.activation(self.layer(self.sign * x))


class Printed(nn.Module):
    """Prints its address."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def extra_repr(self):
        return object.__repr__(self)


def test_attributes_and_functions_tell_architectures_apart():
    kinds = [lambda: Signed(), lambda: Signed(-1), lambda: Signed(activation=torch.relu), lambda: Signed()]
    names = [cached_module(kind).architecture for kind in kinds]
    assert names[0] == names[3]
    assert len(set(names)) == 3
    clients = [pf.Client(c.id, kind, c.train, c.test) for c, kind in zip(small_clients(2), kinds[:2], strict=True)]
    with pytest.raises(UserError, match="needs one architecture"):
        pf.federate(clients, FedAvg(), rounds=1, workers=0)


def test_a_printed_address_is_no_part_of_an_architecture():
    assert cached_module(lambda: Printed()).architecture == cached_module(lambda: Printed()).architecture


def test_the_draw_of_an_architecture_depends_on_the_seed_only():
    state = torch.random.get_rng_state()
    one, same, other = (initial_state(SmallNet, seed) for seed in (1, 1, 2))
    assert torch.equal(one["head.weight"], same["head.weight"])
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert torch.equal(state, torch.random.get_rng_state())


def test_fill_wants_every_tensor_and_no_other():
    module, state = build_module(SmallNet, 0), initial_state(SmallNet, 0)
    fill_module(module, state)
    with pytest.raises(ValueError, match=r"missing \['head.bias'\]"):
        fill_module(module, {n: t for n, t in state.items() if n != "head.bias"})
    with pytest.raises(ValueError, match=r"unknown \['tail'\]"):
        fill_module(module, state, {"tail": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'head.bias' is \(1,\), the model has \(3,\)"):
        fill_module(module, {**state, "head.bias": torch.ones(1)})


def tied():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize("workers", [0, 2])
def test_tied_weights_stay_tied(workers, tmp_path):
    clients = [pf.Client(c.id, tied, c.train, c.test) for c in small_clients()]
    run = pf.federate(clients, FedAvg(lr=0.1), rounds=2, workers=workers, out=tmp_path / "run")
    model = run.model("client-0")
    assert model[0].weight is model[2].weight
    assert_runs_equal(run, pf.federate(clients, FedAvg(lr=0.1), rounds=2, workers=0))


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (lambda: 3, "must return a torch.nn.Module, got int"),
        (lambda: nn.LazyLinear(3), "leaves 'weight' uninitialised"),
        (lambda: nn.Linear(0.5, 1), "failed: TypeError"),
    ],
)
def test_factories_that_give_no_network(factory, sentence):
    with pytest.raises(UserError, match=sentence):
        build_module(factory, 0)


def test_federations_in_two_threads_do_not_disturb_one_another():
    alone = pf.federate(small_clients(), FedAvg(lr=0.1), rounds=3, workers=0)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(pf.federate(small_clients(), FedAvg(lr=0.1), rounds=3, workers=0)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for run in found:
        assert_runs_equal(alone, run)


class Untidy(nn.Module):
    """Leaves things behind as it runs: a buffer of another object, an attribute, a hook, activations in a list."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.count = nn.Linear(2, 2), [], 0
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        out = self.layer(x)
        self.count += 1
        self.seen.append(out)
        self.last = out
        self.hidden = self.hidden + 1
        self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
        self.layer.register_forward_hook(lambda *_: None)
        return out


def test_a_scratch_module_holds_the_same_objects_whatever_was_done_with_it():
    net = cached_module(Untidy).module
    weight, hidden, mean = net.layer.weight, net.hidden, net.mean
    net(torch.ones(2, 2)).sum().backward()
    net.layer._parameters["weight"] = torch.zeros(2, 2)  # a method that put another tensor in, and failed
    net.layer.bias.requires_grad_(False)
    again = cached_module(Untidy).module
    assert again is net
    assert (net.layer.weight is weight, net.hidden is hidden, net.mean is mean) == (True, True, True)
    assert (net.seen, net.count, hasattr(net, "last"), len(net.layer._forward_hooks)) == ([], 0, False, 0)
    assert net.layer.bias.requires_grad
    assert torch.equal(net.hidden, torch.zeros(2))
    copy.deepcopy(net)


def test_hooks_and_attributes_of_the_network_itself_stay():
    def factory():
        layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        layer.register_forward_hook(lambda module, inputs, output: output + 1)
        layer.table = torch.arange(3)
        return layer

    net = cached_module(factory).module
    table, out = net.table, net(torch.ones(1, 2))
    assert torch.equal(cached_module(factory).module(torch.ones(1, 2)), out)
    assert net.table is table


def test_a_network_that_adds_a_layer_as_it_runs():
    class Growing(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)

        def forward(self, x):
            self.more = nn.Linear(2, 2)
            return self.more(super().forward(x))

    cached_module(Growing).module(torch.ones(1, 2))
    with pytest.raises(UserError, match="adds or removes the layer 'more' itself; build all layers in __init__"):
        cached_module(Growing)


WIDTH, RATE, SCALE, FROZEN = 4, 0.0, 1.0, False


class ReadsGlobals(nn.Module):
    """Is what the globals of its file say when it is built, as networks in a notebook are."""

    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(3, WIDTH), nn.Dropout(RATE), nn.Linear(WIDTH, 2)
        self.scales = [SCALE]
        self.register_buffer("shift", torch.full((2,), SCALE), persistent=False)
        self.body.requires_grad_(not FROZEN)

    def forward(self, x):
        return self.head(self.drop(self.body(x))) * self.scales[0] + self.shift


@pytest.mark.parametrize(("name", "value"), [("WIDTH", 6), ("RATE", 0.5), ("SCALE", 9.0), ("FROZEN", True)])
def test_a_factory_that_builds_another_network_than_before_is_noticed_by_the_next_run(monkeypatch, name, value):
    x, y = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2
    client = pf.Client("a", ReadsGlobals, (x[:20], y[:20]), (x[20:], y[20:]))

    def loss():
        return pf.federate([client], "local", rounds=1, workers=0, quiet=True).table()[0]["loss"]

    before, module = loss(), cached_module(ReadsGlobals).module
    assert loss() == before
    assert cached_module(ReadsGlobals).module is module
    monkeypatch.setitem(globals(), name, value)
    changed = loss()
    assert changed != before
    forget_cached_networks()
    assert loss() == changed
