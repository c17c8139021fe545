"""Every method on networks that are built in unusual ways; and none changes the networks that a process keeps."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.seeds import torch_generator
from polyfed.testing import example_of
from tests.few_cases import few

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

METHODS = few(
    [n for n, m in REGISTRY.items() if m.requires & MODEL_REQUIREMENTS and "adapters" not in m.requires],
    {"fedavg", "fedavg_kd", "fedrep", "flha_ghn", "knn_per"},
)
Y = torch.arange(24) % 3


def inputs(seed, number=24):
    return torch.randn(number, 6, generator=torch_generator(seed))


def run(name, factory, **settings):
    clients = [pf.Client(f"c{i}", factory, (inputs(i), Y), (inputs(9 + i), Y)) for i in range(2)]
    method = example_of(name).build(batch_size=32)
    public = inputs(20) if "public_data" in method.requires else None
    return pf.federate(clients, method, public=public, **{"rounds": 2, "workers": 0} | settings)


class Alias(nn.Module):
    """A layer under two names, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        self.a, self.tied, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b, self.tied.weight = self.a, self.a.weight

    def forward(self, x):
        return self.out(self.tied(self.b(self.a(x).relu()).relu()))


class Breaking(nn.Module):
    """Fails in training, after some steps, in the middle of a forward pass."""

    calls: ClassVar = [3]  # of the class: a network whose own list has changed is built anew for the next run

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.again = self.body

    def forward(self, x):
        hidden = self.again(self.body(x))
        if self.training and len(x) > 2:
            self.calls[0] -= 1
            if self.calls[0] <= 0:
                self.calls[0] = 3
                raise RuntimeError("the network broke")
        return self.out(hidden)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.body(x).relu())


def wrapped():
    network = Plain()
    network.out = nn.DataParallel(network.out)
    return nn.DataParallel(torch.compile(network, backend="eager"))


def held(factory):
    """The tensors in each place of the network that the process keeps, and how many hooks its modules have."""
    network = cached_module(factory).module
    parts = dict(network.named_modules(remove_duplicate=False))
    tensors = {(name, key): tensor for name, part in parts.items() for key, tensor in part._parameters.items()}
    return network, tensors, sum(len(p._forward_hooks) + len(p._forward_pre_hooks) for p in parts.values())


def assert_as_before(before, factory):
    network, tensors, hooks = held(factory)
    assert network is before[0]
    assert tensors.keys() == before[1].keys()
    assert all(tensor is before[1][place] for place, tensor in tensors.items())
    assert hooks == before[2]
    assert all(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in tensors.values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_a_layer_with_two_names(name):
    before = held(Alias)
    model = run(name, Alias).model("c0")
    assert_as_before(before, Alias)
    inner = getattr(model, "network", getattr(model, "own", model))  # kNN-Per and FedMRL have more around it
    assert inner.a is inner.b
    assert inner.tied.weight is inner.a.weight


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_a_run_that_fails_leaves_nothing_for_the_next(name):
    before = held(Breaking)
    before[0].calls[0] = 2  # whatever tests before this one left
    with pytest.raises((UserError, ClientError, RoundError)):
        run(name, Breaking)
    assert_as_before(before, Breaking)
    before[0].calls[0] = 9
    run("local", Breaking, rounds=1)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_a_wrapped_network_gives_what_the_network_in_it_gives(name):
    plain, other = (run(name, factory).model("c0").state_dict() for factory in (Plain, wrapped))
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[key], other[key]) for key in plain)


class OneNumber(nn.Module):
    """Has a parameter of one number and an empty one, and such buffers."""

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        return self.out(self.body(x).relu()) * self.scale


@pytest.mark.parametrize("engine", ["inprocess", "cohort"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_case
def test_a_parameter_of_one_number_and_an_empty_one_are_trained(name, engine):
    model = run(name, OneNumber, engine=engine).model("c0")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())


class Scales(nn.Module):
    """Scales its inputs, in place or not; a class attribute decides, so that both networks are drawn alike."""

    in_place = False

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = x.sub_(0.5).mul_(0.5) if self.in_place else (x - 0.5) * 0.5
        return self.out(self.body(x).relu())


@pytest.mark.parametrize("engine", ["inprocess", "cohort"])
@pytest.mark.parametrize(
    "name",
    few(
        ["apfl", "ditto", "fedavg", "fedavg_kd", "fedkd", "fedproto", "fml", "moon", "pfedme"],
        ["apfl", "fedavg", "fedkd", "fedproto"],
    ),
)
@pytest.mark.one_case
def test_a_network_that_scales_its_inputs_in_place_gives_the_same(name, engine, monkeypatch):
    states = []
    for in_place in (False, True):
        monkeypatch.setattr(Scales, "in_place", in_place)
        states.append(run(name, lambda: Scales(), engine=engine).model("c0").state_dict())
    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor, rtol=1e-5, atol=1e-6)


class OfTwoTypes(nn.Module):
    """Has parameters of two types, and a layer without units."""

    def __init__(self):
        super().__init__()
        self.body, self.nothing, self.out = nn.Linear(6, 6).double(), nn.Linear(6, 0), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.cat([self.body(x.double()).relu().float(), self.nothing(x)], 1))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.one_case
def test_parameters_of_two_types_and_a_layer_without_units(name):
    try:
        state = run(name, OfTwoTypes, rounds=1).model("c0").state_dict()
    except UserError:
        return  # which says so before round 1
    assert {tensor.dtype for tensor in state.values()} >= {torch.float32, torch.float64}


class HeadAlone(nn.Module):
    """Has a body that forward leaves out: a parameter without numbers, or a whole layer."""

    def __init__(self, unused):
        super().__init__()
        self.body, self.out = unused(), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(x)


class NoNumbers(nn.Module):
    """Holds a parameter of shape (0,)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))


@pytest.mark.parametrize("name", ["fedrep", "fedbabu", "fedpac", "lg_fedavg", "fedper"])
@pytest.mark.one_case
def test_a_body_that_forward_leaves_out(name):
    assert torch.isfinite(torch.tensor(run(name, lambda: HeadAlone(NoNumbers)).history[-1]["summary"]["loss"]["mean"]))
    if name in ("fedrep", "fedbabu", "fedpac"):  # which train the body alone for a while
        with pytest.raises(
            ClientError, match=r"depends on none of the parameters .* trains \(body.weight, body.bias\)"
        ):
            run(name, lambda: HeadAlone(lambda: nn.Linear(6, 6)))


@pytest.mark.parametrize("name", ["fedgen", "fedrod", "gpfl"])
@pytest.mark.one_case
def test_a_network_in_double_precision_is_trained_beside_tensors_of_the_methods_own(name):
    def double():
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    clients = [pf.Client(f"c{i}", double, (inputs(i).double(), Y), (inputs(9 + i).double(), Y)) for i in range(2)]
    run_in_double = pf.federate(clients, example_of(name).build(), rounds=2, workers=0)
    assert run_in_double.model("c0")(inputs(3).double()).dtype == torch.float64
