"""Contracted graphs: norms as part of the layer before them, and no nodes for joins."""

import pytest
import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.graphs import LayerCatalogue, LayerType, extract
from polyfed.graphs.contraction import ContractionOptions
from polyfed.models import ModelSpec, build
from tests.few_cases import few

SHAPE, CLASSES = (1, 8, 8), 3
EXTRACTED, LAYERS, EDGES = ContractionOptions(), ContractionOptions("layers"), ContractionOptions("layers", joins=False)


def network(name):
    return build(name, (3, 32, 32), 10, width=4, norm="batch")


def reached(graph, steps):
    """How many other convolutions send a message to the last one within so many steps of eq. 2."""
    convolutions = [k for k, node in enumerate(graph.nodes) if isinstance(node.type, LayerType) and node.type.is_conv]
    last = convolutions[-1]
    near = {last}
    for _ in range(steps):
        near |= {start for start, end in graph.edges if end in near}
    return len(near.intersection(convolutions)) - 1


# Shortcuts' convolutions count as convolutions.
SIZES = [
    ("resnet18", (49, 29, 21), (3, 8, 19), 19),
    ("flha_arch1", (19, 10, 10), (3, 6, 6), 8),
    ("flha_arch2", (29, 17, 13), (4, 7, 11), 11),
    ("flha_arch3", (31, 18, 14), (3, 8, 12), 12),
]


@pytest.mark.parametrize(("name", "nodes", "reach", "others"), SIZES)
def test_nodes_and_reach_of_the_papers_networks(name, nodes, reach, others):
    graph = extract(network(name), torch.zeros(2, 3, 32, 32))
    forms = [contraction.apply(graph) for contraction in (EXTRACTED, LAYERS, EDGES)]
    assert tuple(len(form.nodes) for form in forms) == nodes
    assert tuple(reached(form, 6) for form in forms) == reach
    assert sum(node.type != "add" and node.type.is_conv for node in graph.nodes) == others + 1
    for form in forms:
        assert (form.coverage, form.local_reasons, form.head_parameter_names) == (1.0, {}, {"fc.weight", "fc.bias"})
        generated = [name for made in form.generated_weights for name in made.parameters.values()]
        assert sorted(generated) == sorted(form.parameter_sizes)


def test_types_with_a_norm_are_read_from_their_keys_and_from_catalogues(tmp_path):
    plain = LayerType("conv2d", 4, 8, (3, 3), (1, 1), bias=False, activation="relu")
    types = [plain] + [
        LayerType("conv2d", 4, 8, (3, 3), (1, 1), bias=False, activation="relu", norm=norm, norm_bias=bias)
        for norm, bias in (("batch_norm", True), ("rms_norm", False))
    ]
    assert types[1].key == f"{plain.key}-batch_norm-b1"
    assert types[1].parameter_shapes == {"weight": (8, 4, 3, 3), "scale": (8,), "shift": (8,)}
    assert list(types[2].parameter_shapes) == ["weight", "scale"]
    assert [LayerType.from_key(kind.key) for kind in types] == types
    LayerCatalogue(tuple(types)).write_yaml(tmp_path / "catalogue.yaml")
    assert LayerCatalogue.read_yaml(tmp_path / "catalogue.yaml").types == tuple(sorted(types))
    LayerCatalogue((plain,)).write_yaml(tmp_path / "plain.yaml")
    assert "norm" not in (tmp_path / "plain.yaml").read_text()


@pytest.mark.parametrize("wrong", [{"norm": "relu"}, {"norm": "conv2d"}, {"norm_bias": True}])
def test_a_norm_that_is_none_is_refused(wrong):
    with pytest.raises(UserError, match="norm"):
        LayerType("linear", 4, 8, **wrong)
    with pytest.raises(UserError, match="norm"):
        LayerType("batch_norm", 4, 4, norm="batch_norm")


def test_without_norms_their_parameters_stay_with_the_client():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    graph = ContractionOptions("local").apply(extract(net, torch.zeros(2, 1, 8, 8)))
    assert [node.name for node in graph.nodes] == ["0", "4"]
    assert graph.edges == ((0, 1),)
    assert list(graph.local_reasons) == ["1.weight", "1.bias"]


class PreActivation(nn.Module):
    """A norm at the beginning, one after a sum, and one after a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.a = nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3, padding=1)
        self.n1, self.b, self.n2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.fc = nn.Linear(256, CLASSES)

    def forward(self, x):
        x = self.a(self.first(x))
        return self.fc(self.n2(x + self.b(self.n1(x).relu())).flatten(1))


class Dense(nn.Module):
    """A concatenation, then a norm."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(256, CLASSES)

    def forward(self, x):
        x = self.a(x)
        return self.fc(self.n(torch.cat([x, self.b(x)], 1)).flatten(1))


class SharedTwoNorms(nn.Module):
    """One convolution, used twice, each time with a norm of its own, or with one for both."""

    def __init__(self, norms=2):
        super().__init__()
        self.a, self.shared = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.n = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(norms))
        self.fc = nn.Linear(256, CLASSES)

    def forward(self, x):
        x = self.n[0](self.shared(self.a(x))).relu()
        return self.fc(self.n[-1](self.shared(x)).relu().flatten(1))


class TwoNormsBeside(nn.Module):
    """Two norms read one layer, and one norm follows two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.n, self.m = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.b, self.c, self.both = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(256, CLASSES)

    def forward(self, x):
        x = self.a(x)
        return self.fc((self.both(self.b(self.n(x))) + self.both(self.c(self.m(x)))).flatten(1))


def one_layer():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))


def normed(norm):
    return lambda: nn.Sequential(nn.Conv2d(1, 4, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))


def frozen_norm():
    net = normed(lambda: nn.BatchNorm2d(4))()
    net[1].requires_grad_(False)
    return net


def norm_last():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES), nn.BatchNorm1d(CLASSES))


def two_in_a_row():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES)
    )


def other_channels():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, 8), nn.Unflatten(1, (2, 4)),
        nn.LayerNorm(4), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


# By network, the layers with a norm, and how many norms stay nodes.
ODD = {
    "pre-activation": (PreActivation, ["a"], 2),
    "dense": (Dense, [], 1),
    "shared with two norms": (SharedTwoNorms, [], 2),
    "shared with one norm": (lambda: SharedTwoNorms(1), ["shared", "shared"], 0),
    "two norms beside, one norm twice": (TwoNormsBeside, [], 4),
    "one layer": (one_layer, [], 0),
    "group norm": (normed(lambda: nn.GroupNorm(2, 4)), ["0"], 0),
    "instance norm": (normed(lambda: nn.InstanceNorm2d(4, affine=True)), ["0"], 0),
    "layer norm of three dimensions": (normed(lambda: nn.LayerNorm((4, 6, 6))), [], 0),
    "without affine parameters": (normed(lambda: nn.BatchNorm2d(4, affine=False)), [], 0),
    "frozen norm": (frozen_norm, [], 0),
    "norm last": (norm_last, ["1"], 0),
    "two norms in a row": (two_in_a_row, ["0"], 1),
    "other channels": (other_channels, [], 2),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_networks_lose_no_parameter(name, check):
    make, with_norm, nodes = ODD[name]
    net = make()
    extracted = extract(net, torch.zeros(2, *SHAPE))
    graph = ContractionOptions("layers").apply(extracted)
    check(graph, net)
    assert [n.name for n in graph.nodes if not isinstance(n.type, str) and n.type.norm != "none"] == with_norm
    assert sum(not isinstance(n.type, str) and n.type.is_norm for n in graph.nodes) == nodes
    assert (graph.local_reasons, graph.coverage, graph.head_parameter_names) == (
        extracted.local_reasons,
        extracted.coverage,
        extracted.head_parameter_names,
    )
    for contraction in (
        ContractionOptions("layers", joins=False),
        ContractionOptions("local"),
        ContractionOptions("local", joins=False),
    ):
        other = contraction.apply(extracted)
        check(other, net)
        assert other.head_parameter_names == extracted.head_parameter_names
        assert contraction.joins or not {"add", "concat"} & {n.type for n in other.nodes}
        if contraction.norms == "local":
            assert not any(not isinstance(n.type, str) and n.type.is_norm for n in other.nodes)
    private = graph.restrict_to_types(())
    assert (private.local_reasons.keys(), private.coverage) == (dict(net.named_parameters()).keys(), 0)


def test_a_transformer_keeps_the_norms_after_sums_as_nodes(check):
    net = build("vit", SHAPE, CLASSES)
    extracted = extract(net, torch.zeros(2, *SHAPE))
    graph = ContractionOptions("layers").apply(extracted)
    check(graph, net)
    norms = [n.name for n in graph.nodes if not isinstance(n.type, str) and n.type.is_norm]
    assert norms
    assert graph.head_parameter_names == extracted.head_parameter_names


@pytest.mark.parametrize("name", few(["flha_arch2", "flha_arch3"], ["flha_arch3"]))
def test_both_tracers_give_the_same_contracted_graph(name, monkeypatch):
    spec = ModelSpec(name, {"width": 4, "norm": "batch"}, SHAPE, CLASSES)
    graphs, tracers = [], extract.__globals__["_TRACERS"]
    for tracer in ("torch.fx", "torch.export"):
        monkeypatch.setitem(extract.__globals__, "_TRACERS", {tracer: tracers[tracer]})
        graphs.append(extract(spec(), torch.zeros(2, *SHAPE)))
    assert [graph.tracer for graph in graphs] == ["torch.fx", "torch.export"]
    for contraction in (
        ContractionOptions("layers"),
        ContractionOptions("layers", joins=False),
        ContractionOptions("local"),
    ):
        one, other = (contraction.apply(graph) for graph in graphs)
        assert (one.edges, one.local_reasons, one.head_parameter_names) == (
            other.edges,
            other.local_reasons,
            other.head_parameter_names,
        )
        assert [(n.type, n.parameters) for n in one.nodes] == [(n.type, n.parameters) for n in other.nodes]
