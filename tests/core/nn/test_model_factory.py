"""Networks run as they were written, whatever is put around them to run them faster."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.nn.module_cache import build_module, cached_module
from polyfed.testing import assert_runs_equal
from tests.few_cases import few

X, Y = torch.randn(12, 4), torch.arange(12) % 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.body(x).relu())


def parallel():
    return nn.DataParallel(Net())


def compiled():
    return torch.compile(Net(), backend="eager")


def both():
    return torch.compile(parallel(), backend="eager")


def in_place():
    network = Net()
    network.compile(backend="eager")
    return network


def forward_alone():
    network = Net()
    network.forward = torch.compile(network.forward, backend="eager")
    return network


def parts():
    network = Net()
    network.body, network.out = torch.compile(network.body, backend="eager"), nn.DataParallel(network.out)
    return network


FORMS = [parallel, compiled, both, in_place, forward_alone, parts]


@pytest.mark.parametrize("factory", few(FORMS, [both, in_place, parts]))
def test_the_network_inside_is_the_network(factory):
    network = build_module(factory, seed=0)
    assert type(network) is Net
    assert list(network.state_dict()) == list(Net().state_dict())
    assert cached_module(factory).architecture == cached_module(Net).architecture
    seen = []
    network.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    network(X)
    assert len(seen) == 1


def test_a_forward_that_its_class_compiles():
    class Decorated(Net):
        forward = torch.compile(Net.forward, backend="eager")

    network = build_module(Decorated, seed=0)
    assert not hasattr(network.forward, "_torchdynamo_orig_callable")
    assert torch.equal(network(X), build_module(Net, seed=0)(X))


def test_clients_with_and_without_a_wrapper_have_one_architecture():
    def run(*factories):
        clients = [pf.Client(f"c{i}", factory, (X + i, Y), (2 * X - 7, Y)) for i, factory in enumerate(factories)]
        return pf.federate(clients, FedAvg(), rounds=1, workers=0)

    assert_runs_equal(run(Net, Net, Net), run(compiled, Net, parallel))
