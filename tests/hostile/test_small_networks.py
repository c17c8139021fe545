"""Runs of networks of which a method finds little: one layer, no body, hardly anything to train, nothing but tied weights.
Stopped after two rounds, each goes on bit for bit, or the method has refused it with a sentence before."""

import dataclasses
import warnings

import pytest
import torch
from test_replies import clients_of, method_of
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.seeds import torch_generator
from polyfed.testing import assert_runs_equal
from tests.stopped import Stop

FAST = ("fedpac", "frozen body", "as it is")
OF_LAYERS = ("head_layers", "layers", "k")


def two_layers(trained=lambda name: True, *, norm=False):
    layers = [("a", nn.Linear(6, 4)), *([("norm", nn.BatchNorm1d(4))] if norm else []), ("r", nn.Tanh())]
    net = nn.Sequential()
    for name, layer in (*layers, ("b", nn.Linear(4, 3))):
        net.add_module(name, layer)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(trained(name))
    return net


def tied():
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
    net[3].weight, net[3].bias = net[0].weight, net[0].bias
    return net


NETWORKS = {
    "one layer": lambda: nn.Linear(6, 3),
    "one layer without a bias": lambda: nn.Linear(6, 3, bias=False),
    "norm and head": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "two layers": two_layers,
    "frozen but one": lambda: two_layers(lambda name: name == "a.weight"),
    "frozen body": lambda: two_layers(lambda name: name.startswith("b.")),
    "frozen head": lambda: two_layers(lambda name: not name.startswith("b."), norm=True),
    "tied": tied,
}
NORMED = {"norm and head", "frozen head", "tied"}
"""Networks with buffers: how those are averaged makes no difference to the others."""


def ways_of(name, network):
    """In which ways a method is tried with a network: only with options that it has and that concern the network."""
    fields = REGISTRY[name].__dataclass_fields__.keys()
    yield "as it is"
    if fields & {*OF_LAYERS}:
        yield "all is head"
    if "buffers" in fields and network in NORMED:
        yield "averaged buffers"


METHODS = [n for n, m in REGISTRY.items() if m.requires & MODEL_REQUIREMENTS and "images" not in m.requires]
ALL = [(method, network, way) for method in METHODS for network in NETWORKS for way in ways_of(method, network)]
CASES = [
    pytest.param(*case, marks=() if case == FAST else pytest.mark.slow if position % 3 else pytest.mark.thorough)
    for position, case in enumerate(ALL)
]
"""CI runs a third of them: other networks with each method."""


def test_ci_tries_each_method_and_each_network_in_each_way():
    tried = ALL[::3]
    assert {method for method, _, _ in tried} == {*METHODS}
    assert {case[1:] for case in tried} == {case[1:] for case in ALL}


def varied(name, way):
    """The method with its options for a small test, and those of the way; None where it refuses them."""
    method = method_of(name)
    known = {field.name for field in dataclasses.fields(method) if field.init}
    options = {"all is head": dict.fromkeys(OF_LAYERS, 9), "averaged buffers": {"buffers": "average"}}.get(way, {})
    options = {field: value for field, value in options.items() if field in known}
    try:
        return dataclasses.replace(method, **options)
    except pf.UserError:
        return None


def test_networks_with_buffers_are_named():
    assert {name for name, build in NETWORKS.items() if [*build().buffers()]} == NORMED


@pytest.mark.parametrize(("name", "network", "way"), CASES)
def test_a_run_of_a_small_network_goes_on(name, network, way, tmp_path):
    if (method := varied(name, way)) is None:
        return
    clients = [pf.Client(c.id, NETWORKS[network], c.train, c.test, c.val) for c in clients_of(name)]
    words = {"rounds": 3, "workers": 0, "clients_per_round": 2}
    public = torch.randn(60, 6, generator=torch_generator(8)) if "public_data" in method.requires else None
    with warnings.catch_warnings(action="ignore"):
        try:
            whole = pf.federate(clients, method, public=public, **words)
        except (pf.UserError, pf.ClientError) as refused:
            if not isinstance(refused, pf.UserError) and "UserError" not in str(refused):
                raise
            return
        with pytest.raises(KeyboardInterrupt):
            pf.federate(clients, method, public=public, out=tmp_path / "run", progress=Stop(2), **words)
        assert_runs_equal(whole, pf.resume(tmp_path / "run", clients=clients, public=public, workers=0))
