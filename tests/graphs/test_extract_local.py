"""Which parameters stay with the client, and why; with the paper's kinds of layers, these are more."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from polyfed.graphs import LayerType
from tests.graphs.made_networks import Net, X, line

TOKENS = torch.tensor([[1, 2, 0], [3, 4, 5]])
ELSEWHERE = "uses it outside the layers of the catalogue; set kinds=all"


def reasons(graph):
    """One for each module: its parameters' name without the last part -> reason."""
    return {name.rpartition(".")[0]: reason for name, reason in graph.local_reasons.items()}


def test_modules_outside_the_catalogue(extracted, told):
    def forward(net, tokens):
        x = net.recurrent(net.embedding(tokens))[0]
        return net.out(net.act(net.up(x.transpose(1, 2))).sum(2))

    net = Net(
        forward, embedding=nn.Embedding(6, 4), recurrent=nn.LSTM(4, 5, 2, batch_first=True),
        up=nn.ConvTranspose1d(5, 3, 2), act=nn.PReLU(), out=line(3, 2),
    )  # fmt: skip
    graph = extracted(net, TOKENS, kinds="paper")
    assert told(graph) == [
        "embedding: other < ",
        "recurrent: other < embedding",
        "up: other < recurrent",
        "act: other < up",
        "out: linear-3-2-k-s-g1-b1 < act",
    ]
    assert reasons(graph) == {
        "embedding": "Embedding is not a layer of the catalogue; set kinds=all",
        "recurrent": "LSTM is not a layer of the catalogue; set kinds=all",
        "up": "ConvTranspose1d is not a layer of the catalogue; set kinds=all",
        "act": "PReLU is not a layer of the catalogue; set kinds=all",
    }
    assert len(graph.nodes[1].parameters) == 8
    assert graph.coverage == pytest.approx(8 / sum(p.numel() for p in net.parameters()))


def test_norms_without_parameters_are_passed_through(extracted):
    net = nn.Sequential(
        line(), nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4, elementwise_affine=False), nn.GroupNorm(2, 4, affine=False),
        line(),
    )  # fmt: skip
    graph = extracted(net, X)
    assert (graph.edges, graph.coverage) == (((0, 1),), 1.0)


def test_a_norm_over_several_dimensions_is_no_layer_type(extracted):
    graph = extracted(nn.Sequential(nn.LayerNorm((3, 4)), line()), torch.randn(2, 3, 4), kinds="paper")
    assert [getattr(node.type, "kind", node.type) for node in graph.nodes] == ["other", "linear"]
    assert (
        graph.local_reasons["0.weight"]
        == "LayerNorm with weight (3, 4), bias (3, 4) is not a layer of the catalogue; set kinds=all"
    )


def test_frozen_parameters_and_their_layers(extracted):
    net = nn.Sequential(line(), line(), line())
    net[0].requires_grad_(False)
    net[1].weight.requires_grad_(False)
    graph = extracted(net, X)
    assert [node.type for node in graph.nodes[:2]] == ["other", "other"]
    assert graph.edges == ((0, 1), (1, 2))
    frozen = "it is not trained (requires_grad is False); with requires_grad=True it is generated"
    assert graph.local_reasons == {
        "0.weight": frozen,
        "0.bias": frozen,
        "1.weight": frozen,
        "1.bias": f"1.weight of the same layer stays: {frozen}",
    }


@pytest.mark.parametrize("cut", [lambda net, x: net.b(net.a(x).detach()), lambda net, x: net.b(without_grad(net.a, x))])
def test_behind_detach_and_no_grad_nothing_is_generated(extracted, cut):
    graph = extracted(Net(cut, a=line(), b=line()), X)
    assert graph.local_reasons == dict.fromkeys(
        ("a.weight", "a.bias"),
        "no gradient of the output reaches it; take away the detach(), the no_grad(), the operation without a gradient "
        "(such as argmax) or the plain list of tensors that it is behind",
    )
    assert graph.edges == ((0, 1),)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_norm": 1.0}, "forward changes it in place, as the max_norm of an embedding does, .*; take it away"),
        ({"sparse": True}, "its gradients are sparse, .*; give the embedding sparse=False"),
    ],
)
def test_embeddings_that_generated_weights_cannot_replace(extracted, options, reason):
    tokens = torch.tensor([[0, 1], [2, 0]])
    net = Net(lambda net, x: net.b(net.words(x).mean(1)), words=nn.Embedding(3, 4, **options), b=line())
    with torch.no_grad():
        net.words.weight.mul_(0.1)  # below max_norm: it is written to all the same
    ((name, text),) = extracted(net, tokens).local_reasons.items()
    assert name == "words.weight"
    assert re.fullmatch(reason, text)


def without_grad(module, x):
    with torch.no_grad():
        return module(x)


def test_an_output_without_gradient_has_a_graph(extracted):
    graph = extracted(Net(lambda net, x: net.b(net.a(x)).argmax(1), a=line(), b=line()), X)
    assert (graph.edges, graph.coverage) == (((0, 1),), 1.0)


def test_unused_parameters_and_dead_branches(extracted, told):
    def forward(net, x):
        x = net.body(x)
        net.dead(net.deader(x))
        if net.training:
            return net.out(x), net.auxiliary(x)
        return net.out(x)

    net = Net(forward, dead=line(), out=line(4, 2), body=line(), auxiliary=line(), deader=line(), never=line())
    net.train()
    graph = extracted(net, X)
    assert told(graph) == ["body: linear-4-4-k-s-g1-b1 < ", "out: linear-4-2-k-s-g1-b1 < body"]
    assert graph.local_reasons == {
        f"{name}.{part}": "the output does not depend on it; delete it, or leave it, since it has no effect"
        for name in ("dead", "auxiliary", "deader", "never")
        for part in ("weight", "bias")
    }
    assert net.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_of_numbers(extracted, dtype):
    graph = extracted(nn.Sequential(line(), line()).to(dtype), X.to(dtype))
    if dtype is torch.float64:
        assert graph.coverage == 1.0
    else:
        assert set(graph.local_reasons.values()) == {
            "its numbers are bfloat16, not float32 or float64; give it one of these types"
        }
        assert (graph.coverage, graph.edges) == (0.0, ((0, 1),))


def test_a_module_used_twice(extracted):
    graph = extracted(Net(lambda net, x: net.b(net.a(net.b(x))), a=line(), b=line()), X)
    assert [node.name for node in graph.nodes] == ["b", "a", "b"]
    assert [one.nodes for one in graph.generated_weights] == [(0, 2), (1,)]
    assert graph.coverage == 1.0


def test_one_module_under_two_names_and_one_tensor_in_two_layers(extracted):
    one, two = line(bias=False), line(bias=False)
    two.weight = one.weight
    graph = extracted(nn.Sequential(one, nn.ReLU(), two, one), X)
    assert [node.parameters for node in graph.nodes] == [{"weight": "0.weight"}] * 3
    assert [one.nodes for one in graph.generated_weights] == [(0, 1, 2)]
    assert graph.parameter_sizes == {"0.weight": 16}


def test_layers_that_share_a_part_are_not_generated(extracted):
    """c shares its bias with b, which shares its weight with a: none of the three can be generated alone."""
    net = nn.Sequential(line(), line(), line(), line())
    net[1].weight = net[0].weight
    net[2].bias = net[1].bias
    graph = extracted(net, X, kinds="paper")
    assert [isinstance(node.type, LayerType) for node in graph.nodes] == [False, False, False, True]
    assert graph.local_reasons == {
        "0.weight": "0.weight is shared between different layers; give each layer its own, or set kinds=all",
        "0.bias": "0.weight is shared between different layers; give each layer its own, or set kinds=all",
        "1.bias": "1.bias is shared between different layers; give each layer its own, or set kinds=all",
        "2.weight": "1.bias is shared between different layers; give each layer its own, or set kinds=all",
    }


@pytest.mark.parametrize("turned", [False, True])
def test_tied_weights_of_an_embedding_and_of_an_autoencoder(extracted, turned):
    if turned:
        net = Net(lambda net, x: F.linear(net.a(x).relu(), net.a.weight.T), a=line(4, 2, bias=False))
        graph = extracted(net, X, kinds="paper")
        assert [node.type for node in graph.nodes] == ["other", "other"]
        assert graph.local_reasons == {
            "a.weight": "a.weight is shared between different layers; give each layer its own, or set kinds=all"
        }
    else:
        net = Net(lambda net, x: net.out(net.tokens(x).mean(1)), tokens=nn.Embedding(6, 4), out=line(4, 6))
        net.out.weight = net.tokens.weight
        graph = extracted(net, TOKENS, kinds="paper")
        assert [node.type for node in graph.nodes] == ["other", "other"]
        shared = "tokens.weight is shared between different layers; give each layer its own, or set kinds=all"
        assert graph.local_reasons == {"tokens.weight": shared, "out.bias": shared}


@pytest.mark.parametrize("parametrised", [weight_norm, spectral_norm])
def test_computed_weights_are_no_layers(extracted, parametrised):
    graph = extracted(nn.Sequential(line(), nn.ReLU(), parametrised(line())), X, kinds="paper")
    assert [node.name for node in graph.nodes] == ["0", "2"]
    assert (graph.nodes[1].type, graph.edges) == ("other", ((0, 1),))
    assert set(reasons(graph).values()) == {"ParametrizedLinear is not a layer of the catalogue; set kinds=all"}


class Standardised(nn.Conv1d):
    """A convolution that does something with its weight."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2), keepdim=True)
        return F.conv1d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(nn.Linear):
    """A linear layer with a parameter more."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(sizes[1]))

    def forward(self, x):
        return super().forward(x) * self.gain


class Named(nn.BatchNorm1d):
    pass


class Activated(nn.BatchNorm1d):
    def __init__(self, width):
        super().__init__(width)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


def test_derived_layers(extracted, told):
    net = nn.Sequential(Standardised(4, 4, 1), Named(4), Activated(4), nn.Flatten(), Scaled(8, 3), line(3, 2))
    graph = extracted(net, torch.randn(2, 4, 2), kinds="paper")
    assert told(graph) == [
        "0: conv1d-4-4-k1-s1-g1-b1 < ",
        "1: batch_norm-4-4-k-s-g1-b1 < 0",
        "2: batch_norm-4-4-k-s-g1-b1 < 1",
        "4: linear-8-3-k-s-g1-b1 < 2",
        "4.gain: other < 4",
        "5: linear-3-2-k-s-g1-b1 < 4.gain",
    ]
    assert graph.local_reasons == {"4.gain": f"Scaled {ELSEWHERE}"}


class Functional(nn.Module):
    """Parameters of its own, given to torch's functions."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(0.1 * torch.randn(4, 1, 3, 3))
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.weights = nn.ParameterList([nn.Parameter(0.1 * torch.randn(n, 16)) for n in (16, 3)])
        self.gamma, self.last = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        x = F.conv2d(x, self.kernel, stride=(2, 1), groups=2)
        x = F.batch_norm(x, self.mean, self.var, self.scale, bias=self.shift)
        x = F.group_norm(x, 2, weight=self.scale, bias=self.shift).flatten(2).mean(2).repeat(1, 4)
        x = F.layer_norm(x, self.gamma.shape, self.gamma)
        x = F.linear(x, self.weights[0]).relu()
        return F.linear(x, self.weights[1], bias=self.last)


def test_functions_with_the_models_own_parameters(extracted):
    graph = extracted(Functional(), torch.randn(2, 2, 9, 9), kinds="paper")
    types = [getattr(node.type, "key", node.type) for node in graph.nodes]
    assert types == [
        "conv2d-2-4-k3x3-s2x1-g2-b0-d1x1-none",
        "other",
        "other",
        "layer_norm-16-16-k-s-g1-b0-d-none",
        "linear-16-16-k-s-g1-b0-d-relu",
        "linear-16-3-k-s-g1-b1-d-none",
    ]
    assert graph.edges == tuple((i, i + 1) for i in range(5))
    assert graph.nodes[5].parameters == {"weight": "weights.1", "bias": "last"}
    assert graph.local_reasons == dict.fromkeys(
        ("scale", "shift"), "scale is shared between different layers; give each layer its own, or set kinds=all"
    )


def test_parameters_that_are_used_as_they_are(extracted, told):
    """Both tracers' rule: an operation on parameters and other tensors is a node that owns the parameters."""

    def forward(net, x):
        tokens = torch.cat([net.cls.expand(x.shape[0], -1, -1), net.patch(x).unsqueeze(1)], 1) + net.position
        return net.out((tokens * net.gamma) @ net.matrix)

    net = Net(forward, patch=line(), out=line(4, 2))
    net.cls, net.position = nn.Parameter(torch.ones(1, 1, 4)), nn.Parameter(torch.ones(1, 2, 4))
    net.gamma, net.matrix = nn.Parameter(torch.ones(4)), nn.Parameter(torch.eye(4))
    graph = extracted(net, X, kinds="paper")
    assert told(graph) == [
        "cls: other < ",
        "patch: linear-4-4-k-s-g1-b1 < ",
        "concat: concat < cls patch",
        "position: other < ",
        "add: add < concat position",
        "gamma: other < add",
        "matrix: other < gamma",
        "out: linear-4-2-k-s-g1-b1 < matrix",
    ]
    assert graph.local_reasons == dict.fromkeys(("cls", "position", "gamma", "matrix"), f"Net {ELSEWHERE}")


def test_a_list_of_parameters_is_its_owners(extracted, told):
    net = Net(lambda net, x: x * net.gains[0] * net.gains[1], gains=nn.ParameterList([torch.ones(4), torch.ones(4)]))
    graph = extracted(net, X, kinds="paper")
    assert told(graph) == ["gains.0: other < ", "gains.1: other < gains.0"]
    assert set(graph.local_reasons.values()) == {f"Net {ELSEWHERE}"}


def test_a_learnt_query_is_an_input_of_its_layer(extracted, told):
    net = Net(lambda net, x: net.to_query(net.query) * x, to_query=line())
    net.query = nn.Parameter(torch.ones(1, 4))
    assert told(extracted(net, X, kinds="paper")) == ["query: other < ", "to_query: linear-4-4-k-s-g1-b1 < query"]


def test_nothing_to_generate(extracted):
    graph = extracted(nn.Flatten(), X)
    assert (graph.nodes, graph.edges, graph.coverage) == ((), (), 0.0)
    net = Net(lambda net, x: net.query)
    net.query = nn.Parameter(torch.ones(1, 4))
    assert [node.name for node in extracted(net, X).nodes] == ["query"]
