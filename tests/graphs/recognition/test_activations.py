"""The activation and the dilation in a layer's type: found by following the graph, the same by both tracers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.graphs import extract
from polyfed.graphs.architecture import ACTIVATIONS
from polyfed.graphs.tracing import export_tracer, fx_tracer
from polyfed.graphs.tracing.layer_flow import Root, record_layer_flow
from polyfed.models import build
from tests.graphs.made_networks import Net, X, line

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def activations(nodes):
    """Other layers (recurrent ones, single parameters) have none."""
    layers = [node for node in nodes if not isinstance(node.type, str)]
    assert {n.type.activation for n in layers if not (n.type.is_matrix or n.type.is_norm)} <= {"none"}
    return {node.name: node.type.activation for node in layers if node.type.is_matrix or node.type.is_norm}


def found(model, x=X):
    """Name of each layer -> its activation, which both tracers must find."""
    told = []
    for trace in (fx_tracer.trace_with_fx, export_tracer.trace_with_export):
        flow = record_layer_flow(trace(Root(model).eval(), x.clone()), model, x.clone())
        told.append(activations(flow.nodes))
    assert told[0] == told[1]
    assert told[0] == activations(extract(model, x).nodes)
    return told[0]


MODULES = {
    "celu": nn.CELU(), "elu": nn.ELU(), "gelu": nn.GELU(), "glu": nn.GLU(), "hardshrink": nn.Hardshrink(),
    "hardsigmoid": nn.Hardsigmoid(), "hardswish": nn.Hardswish(), "hardtanh": nn.Hardtanh(), "leaky_relu": nn.LeakyReLU(0.1),
    "logsigmoid": nn.LogSigmoid(), "mish": nn.Mish(), "prelu": nn.PReLU(), "relu": nn.ReLU(), "relu6": nn.ReLU6(),
    "rrelu": nn.RReLU(), "selu": nn.SELU(), "sigmoid": nn.Sigmoid(), "silu": nn.SiLU(), "softplus": nn.Softplus(),
    "softshrink": nn.Softshrink(), "tanh": nn.Tanh(), "threshold": nn.Threshold(0.1, 0),
}  # fmt: skip
FUNCTIONS = {
    "celu": F.celu, "elu": F.elu, "erf": torch.erf, "gelu": F.gelu, "glu": F.glu, "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "hardtanh": F.hardtanh, "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid, "mish": F.mish, "relu": torch.relu, "relu6": F.relu6, "rrelu": F.rrelu, "selu": F.selu,
    "sigmoid": torch.sigmoid, "silu": F.silu, "sin": torch.sin, "softplus": F.softplus, "softshrink": F.softshrink,
    "tanh": torch.tanh, "threshold": lambda x: F.threshold(x, 0.1, 0.0),
}  # fmt: skip
ONLY_MODULES = {"softsign", "tanhshrink"}  # which torch.export takes apart


@pytest.mark.slow
def test_every_activation_is_found_by_both_tracers():
    assert {*MODULES, *FUNCTIONS, *ONLY_MODULES} == set(ACTIVATIONS)
    modules = nn.Sequential()
    for name, module in MODULES.items():
        modules.append(line(4, 8 if name == "glu" else 4)).append(module)
    assert list(found(modules).values()) == list(MODULES)

    def forward(net, x):
        for layer, function in zip(net.layers, FUNCTIONS.values(), strict=True):
            x = function(layer(x))
        return x

    layers = nn.ModuleList(line(4, 8 if name == "glu" else 4) for name in FUNCTIONS)
    assert list(found(Net(forward, layers=layers)).values()) == list(FUNCTIONS)
    graph = extract(nn.Sequential(line(), nn.Softsign(), line(), nn.Tanhshrink()), X)
    assert [node.type.activation for node in graph.nodes] == ["softsign", "tanhshrink"]


WAYS = {
    "a method": ("relu", lambda x: x.relu()),
    "in place": ("relu", lambda x: x.relu_()),
    "in place, read again": ("tanh", lambda x: (x.tanh_(), x.sigmoid())[1]),
    "a bound from below": ("relu", lambda x: x.clamp(min=0)),
    "of ATen": ("relu", lambda x: torch.clamp_min(x, 0)),
    "two bounds": ("relu6", lambda x: torch.clamp(x, 0, 6)),
    "hard tanh by keywords": ("relu6", lambda x: F.hardtanh(x, min_val=0.0, max_val=6.0)),
    "others": ("hardtanh", lambda x: x.clip(-2, 2)),
    "a bound from above": ("none", lambda x: x.clamp(max=3)),
    "no bound on values": ("none", lambda x: x.clamp(min=torch.zeros(4))),
    "written out": ("sigmoid", lambda x: x * x.sigmoid()),
    "softmax": ("none", lambda x: x.softmax(1)),
    "dropout and arithmetic": ("gelu", lambda x: F.gelu(F.dropout(2 * x - 1, 0.5))),
    "reshapes": ("tanh", lambda x: x.unsqueeze(1).flatten(1).tanh()),
    "pooling": ("elu", lambda x: F.elu(F.max_pool1d(x[None], 2)).mean(0).repeat(1, 2)),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "way"), WAYS.values(), ids=WAYS)
def test_ways_to_write_an_activation(name, way):
    assert found(Net(lambda net, x: net.b(way(net.a(x))), a=line(), b=line())) == {"a": name, "b": "none"}


def test_it_is_found_through_norms_and_joins():
    """After a sum, the activation is that of the last layers of both branches; a norm has it too."""

    def block(net, x):
        x = torch.tanh(net.first(x))
        branch = net.norm2(net.second(torch.relu(net.norm1(net.inner(x)))))
        return net.out(torch.sigmoid(branch + net.skip(x)))

    names = ("first", "inner", "second", "skip", "out")
    net = Net(block, **{name: line() for name in names}, norm1=nn.LayerNorm(4), norm2=nn.BatchNorm1d(4))
    assert found(net) == {
        "first": "tanh", "inner": "relu", "norm1": "relu", "second": "sigmoid", "norm2": "sigmoid", "skip": "sigmoid",
        "out": "none",
    }  # fmt: skip


def test_before_a_norm_and_on_several_paths():
    """Pre-activation blocks; what two branches do to one layer's output; a layer outside the catalogue ends the search."""

    def forward(net, x):
        x = net.stem(x)
        x = x + net.inner(F.silu(net.norm(x)))
        x = net.outer(x)
        x = torch.tanh(x) * torch.sigmoid(x)
        return net.last(torch.relu(net.lstm(net.before(x))[0]))

    names = ("stem", "inner", "outer", "before", "last")
    net = Net(forward, **{name: line() for name in names}, norm=nn.LayerNorm(4), lstm=nn.LSTM(4, 4))
    assert found(net) == {
        "stem": "silu", "norm": "silu", "inner": "none", "outer": "sigmoid+tanh", "before": "none", "last": "none",
    }  # fmt: skip


def test_shared_weights_have_the_activations_of_all_their_uses():
    net = Net(lambda net, x: net.a(torch.tanh(net.a(torch.relu(net.a(x))))), a=line())
    graph = extract(net, X)
    assert {node.type.activation for node in graph.nodes} == {"relu+tanh"}
    assert (len(graph.generated_weights), graph.coverage) == (1, 1.0)


def chain(activation=nn.ReLU, dilation=1):
    convolution = nn.Conv2d(3, 4, 3, dilation=dilation, padding=dilation)
    return nn.Sequential(convolution, nn.BatchNorm2d(4), activation(), nn.Flatten(), line(256, 2))


def test_networks_that_differ_in_activation_or_dilation_have_different_graphs():
    graphs = [extract(net, IMAGES) for net in (chain(), chain(nn.Tanh), chain(dilation=2), chain())]
    assert graphs[0] == graphs[3]
    assert len({tuple(node.type for node in graph.nodes) for graph in graphs}) == 3
    assert [graph.nodes[0].type.key for graph in graphs[:3]] == [
        "conv2d-3-4-k3x3-s1x1-g1-b1-d1x1-relu",
        "conv2d-3-4-k3x3-s1x1-g1-b1-d1x1-tanh",
        "conv2d-3-4-k3x3-s1x1-g1-b1-d2x2-relu",
    ]
    restricted = graphs[1].restrict_to_types(graphs[0].layer_types)
    assert restricted.coverage == pytest.approx((2 * 256 + 2) / (4 * 27 + 4 + 8 + 2 * 256 + 2))  # the last layer
    assert "lacks its type conv2d-3-4-k3x3-s1x1-g1-b1-d1x1-tanh" in restricted.local_reasons["0.weight"]
    functional = Net(lambda net, x: F.conv2d(x, net.a.weight, None, 1, 2, 2), a=nn.Conv2d(3, 4, 3, bias=False))
    for trace in (fx_tracer.trace_with_fx, export_tracer.trace_with_export):
        flow = record_layer_flow(trace(Root(functional).eval(), IMAGES), functional, IMAGES)
        assert flow.nodes[0].type.dilation == (2, 2)


@pytest.mark.parametrize("name", ["resnet18", "flha_arch1", "flha_arch2", "flha_arch3", "flha_small"])
def test_networks_of_one_activation_have_it_everywhere_but_at_the_end(name):
    """So their types are split no more finely than without activations, and their hypernetwork is the same."""
    graph = extract(build(name, (3, 8, 8), 5, width=2), IMAGES)
    kinds = [node.type for node in graph.nodes if not isinstance(node.type, str)]
    assert [kind.activation for kind in kinds] == ["relu"] * (len(kinds) - 1) + ["none"]
    assert len({kind.key[: kind.key.index("-d")] for kind in kinds}) == len(set(kinds))


def test_concatenation_with_a_convolution_after_it_has_no_activation_before_it():
    """In appendix B's hybrids a 1×1 convolution follows the concatenation, and the ReLU is after that."""
    graph = extract(build("resnet18_hybrid", (3, 8, 8), 5, width=2), IMAGES)
    by_name = {node.name: node.type for node in graph.nodes}
    assert by_name["layer1.1.conv2"].activation == "none"
    assert by_name["layer1.1.fuse.conv"].activation == "relu"
