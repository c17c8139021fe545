"""Contracted graphs: norms as part of the layer before them, and no nodes for joins."""

import pytest
import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.graphs import LayerCatalogue, LayerType, extract
from polyfed.graphs.contraction import Contraction
from polyfed.models import build

EXTRACTED, LAYERS, EDGES = Contraction(), Contraction("layers"), Contraction("layers", joins=False)


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
    forms = [contraction.of(graph) for contraction in (EXTRACTED, LAYERS, EDGES)]
    assert tuple(len(form.nodes) for form in forms) == nodes
    assert tuple(reached(form, 6) for form in forms) == reach
    assert sum(node.type != "add" and node.type.is_conv for node in graph.nodes) == others + 1
    for form in forms:
        assert (form.coverage, form.local, form.head) == (1.0, {}, {"fc.weight", "fc.bias"})
        generated = [name for made in form.generated for name in made.parameters.values()]
        assert sorted(generated) == sorted(form.sizes)


def test_types_with_a_norm_are_read_from_their_keys_and_from_catalogues(tmp_path):
    plain = LayerType("conv2d", 4, 8, (3, 3), (1, 1), bias=False, activation="relu")
    types = [plain] + [
        LayerType("conv2d", 4, 8, (3, 3), (1, 1), bias=False, activation="relu", norm=norm, norm_bias=bias)
        for norm, bias in (("batch_norm", True), ("rms_norm", False))
    ]
    assert types[1].key == f"{plain.key}-batch_norm-b1"
    assert types[1].shapes == {"weight": (8, 4, 3, 3), "scale": (8,), "shift": (8,)}
    assert list(types[2].shapes) == ["weight", "scale"]
    assert [LayerType.from_key(kind.key) for kind in types] == types
    LayerCatalogue(tuple(types)).write(tmp_path / "catalogue.yaml")
    assert LayerCatalogue.read(tmp_path / "catalogue.yaml").types == tuple(sorted(types))
    LayerCatalogue((plain,)).write(tmp_path / "plain.yaml")
    assert "norm" not in (tmp_path / "plain.yaml").read_text()


@pytest.mark.parametrize("wrong", [{"norm": "relu"}, {"norm": "conv2d"}, {"norm_bias": True}])
def test_a_norm_that_is_none_is_refused(wrong):
    with pytest.raises(UserError, match="norm"):
        LayerType("linear", 4, 8, **wrong)
    with pytest.raises(UserError, match="norm"):
        LayerType("batch_norm", 4, 4, norm="batch_norm")


def test_without_norms_their_parameters_stay_with_the_client():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    graph = Contraction("local").of(extract(net, torch.zeros(2, 1, 8, 8)))
    assert [node.name for node in graph.nodes] == ["0", "4"]
    assert graph.edges == ((0, 1),)
    assert list(graph.local) == ["1.weight", "1.bias"]
