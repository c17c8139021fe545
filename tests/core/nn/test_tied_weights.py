"""Tensors with several names have one: they are sent, kept and counted once, and filled in under all."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg
from polyfed.core.errors import UserError
from polyfed.core.nn.module_cache import (
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
    initial_state,
    restore_all_but_weights_and_set_eval,
)
from polyfed.core.nn.tied_weights import (
    all_names_by_first_name,
    first_name_by_alias,
    first_name_by_name,
    rename_to_first_names,
    retie_buffers,
)
from polyfed.testing import small_clients


def tied():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


def untied():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


def shared():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.BatchNorm1d(6), layer, nn.Linear(6, 3))


class TwoNorms(nn.Module):
    """A norm layer under two names, a parameter of one name, and a constant that two parts have."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.again = self.norm
        mask = torch.ones(6)
        self.register_buffer("mask", mask)
        self.register_buffer("same_mask", mask)
        self.register_buffer("passing", self.norm.running_mean, persistent=False)

    def forward(self, x):
        return self.head(self.again(self.norm(x) * self.mask) * self.same_mask)


FROM_FIRST = {tied: {"2.weight": "0.weight"}, shared: {"2.weight": "0.weight", "2.bias": "0.bias"}, untied: {}}


@pytest.mark.parametrize("factory", [tied, shared, untied, TwoNorms])
def test_the_first_name_is_that_of_named_parameters(factory):
    module = factory()
    assert list(first_name_by_name(module)) == list(module.state_dict())
    once = {*first_name_by_name(module).values()}
    parameters = {name for name, _ in module.named_parameters()}
    assert parameters <= once
    assert once - parameters <= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    assert first_name_by_alias(module) == FROM_FIRST.get(factory, first_name_by_alias(module))
    assert {name for names in all_names_by_first_name(module).values() for name in names[1:]} == set(
        first_name_by_alias(module)
    )
    assert list(copy_trained_weights_and_buffers(module)) == [
        n for n, first in first_name_by_name(module).items() if n == first
    ]
    assert initial_state(factory, 3).keys() == copy_trained_weights_and_buffers(module).keys()


def test_buffers_of_several_names_are_one_and_are_not_put_back():
    net = cached_module(TwoNorms)
    assert set(net.buffers) == {"mask", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    net.module.norm.running_mean.fill_(5.0)
    assert (
        restore_all_but_weights_and_set_eval(net.module).norm.running_mean.tolist() == [5.0] * 6
    )  # it is persistent under one of its names
    module = TwoNorms()
    module.same_mask = module.same_mask.clone()  # as after a move to another device
    retie_buffers(module, {"same_mask": "mask", "again.weight": "norm.weight"})
    assert module.same_mask is module.mask


def test_a_tree_may_have_any_of_the_names_but_not_two_values():
    module, state = tied(), copy_trained_weights_and_buffers(tied())
    further = {("2.weight" if name == "0.weight" else name): tensor for name, tensor in state.items()}
    both = {**state, **further}
    for tree in (state, further, both, {**both, "2.weight": both["0.weight"].clone()}):
        fill_module(module, tree)
        assert module[2].weight is module[0].weight
        assert torch.equal(module[0].weight, state["0.weight"])
    with pytest.raises(ValueError, match=r"'0.weight' and '2.weight' are one tensor in it, and have two values"):
        fill_module(module, {**both, "2.weight": both["0.weight"] + 1})
    with pytest.raises(ValueError, match=r"missing \['0.weight'\]"):
        fill_module(module, {name: tensor for name, tensor in state.items() if name != "0.weight"})
    gone = dict.fromkeys(["0.weight", "2.weight"], torch.full((6, 6), torch.nan))
    assert set(rename_to_first_names(module, gone)) == {"0.weight"}  # a network that diverged


def test_a_network_to_take_away_has_all_names():
    clients = [pf.Client(c.id, tied, c.train, c.test) for c in small_clients()]
    run = pf.federate(clients, FedAvg(lr=0.1), rounds=1, workers=0)
    assert set(run.last.state["model"]) == set(untied().state_dict()) - {"2.weight"}
    state = run.model("client-0").state_dict()
    tied().load_state_dict(state, strict=True)
    plain = untied()
    plain.load_state_dict(state, strict=True)
    assert torch.equal(plain[2].weight, plain[0].weight)


def test_tied_and_untied_are_two_architectures():
    assert cached_module(tied).architecture != cached_module(untied).architecture
    one, *others = small_clients()
    clients = [pf.Client(c.id, tied if c is one else untied, c.train, c.test) for c in (one, *others)]
    with pytest.raises(UserError, match="needs one architecture"):
        pf.federate(clients, FedAvg(), rounds=1, workers=0)


class Odd(nn.Module):
    """Shares memory in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        getattr(self, way)()

    def data(self):
        self.b.weight.data = self.a.weight.data

    def turned(self):
        self.b.weight = nn.Parameter(self.a.weight.t())

    def part(self):
        self.c = nn.Parameter(self.a.weight.detach()[:2])

    def buffer(self):
        self.register_buffer("kept", self.a.weight.detach()[0])

    def passing(self):
        self.register_buffer("kept", self.a.weight.detach(), persistent=False)

    def parameter_as_buffer(self):
        self.register_buffer("kept", self.a.bias)

    def frozen_part(self):
        self.a.weight.requires_grad_(False)
        self.b.weight = nn.Parameter(self.a.weight.detach())

    def expanded(self):
        self.c = nn.Parameter(torch.zeros(1).expand(6))

    def side_by_side(self):
        flat = torch.randn(2, 72)
        self.a.weight, self.b.weight = (nn.Parameter(half[:36].view(6, 6)) for half in flat)

    def every_other(self):
        flat = torch.randn(6, 12)
        self.a.weight, self.b.weight = nn.Parameter(flat[:, ::2]), nn.Parameter(flat[:, 1::2])

    def constants(self):
        table = torch.randn(6)
        self.register_buffer("table", table)
        self.register_buffer("few", table[:2])

    def both_frozen(self):
        self.requires_grad_(False)
        self.b.weight = nn.Parameter(self.a.weight.detach(), requires_grad=False)
        self.a.bias.requires_grad_(True)

    def forward(self, x):
        return F.linear(self.b(self.a(x)), self.a.weight[:3])


SHARING = ("data", "turned", "part", "buffer", "passing", "frozen_part")


@pytest.mark.parametrize("way", SHARING)
def test_parameters_that_share_memory_and_are_not_one_are_refused(way):
    clients = [pf.Client(c.id, lambda: Odd(way), c.train, c.test) for c in small_clients()]
    with pytest.raises(UserError, match=r"'\S+' and its \w+ '\S+' share memory and are not one parameter. To tie"):
        pf.federate(clients, FedAvg(), rounds=1, workers=0)


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("parameter_as_buffer", "buffer 'kept' is its parameter 'a.bias'"),
        ("expanded", "'c' has several entries in one"),
    ],
)
def test_other_ways_to_share_are_refused(way, sentence):
    with pytest.raises(UserError, match=sentence):
        cached_module(lambda: Odd(way))


@pytest.mark.parametrize("way", ["side_by_side", "every_other", "constants", "both_frozen"])
def test_memory_that_is_not_written_twice_is_no_fault(way):
    clients = [pf.Client(c.id, lambda: Odd(way), c.train, c.test) for c in small_clients()]
    pf.federate(clients, FedAvg(), rounds=1, workers=0)


def test_a_rate_by_any_name_of_a_tied_weight():
    clients = [pf.Client(c.id, tied, c.train, c.test) for c in small_clients()]
    moved = {}
    for pattern in ("0.weight", "2.weight", "3.weight"):
        for engine in ("inprocess", "cohort"):
            method = FedAvg(lr=0.1, lr_by_name={pattern: 1e-9})
            run = pf.federate(clients, method, rounds=1, workers=0, engine=engine)
            before, after = initial_state(tied, 0)["0.weight"], run.model("client-0")[0].weight
            moved[pattern, engine] = not torch.allclose(before, after, atol=1e-6)
    assert moved == {(p, e): p == "3.weight" for p, e in moved}
    assert FedAvg(lr_by_name={"b": 2.0, "a": 3.0}).lr_factor("a", "b") == 2.0


@pytest.mark.parametrize("name", ["fml", "fedkd"])
def test_rates_by_name_reach_a_network_that_is_trained_beside_another(name):
    """A factor that stops a layer of the client's network, by the name that it has in that network."""
    method = REGISTRY[name](lr=0.1, batch_size=8, lr_by_name={"head.*": 1e-30, "body.*": 1.0})
    clients = small_clients(2)
    run = pf.federate(clients, method, rounds=1, workers=0)
    for client in clients:
        drawn = initial_state(client.model, 0)
        state = run.model(client.id).state_dict()
        assert torch.equal(state["head.weight"], drawn["head.weight"])
        assert not torch.equal(state["body.0.weight"], drawn["body.0.weight"])
