"""The layers of appendix D and both orders of section 4.3, each against explicit loops over nodes and numbers."""

import math

import pytest
import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.core.seeds import torch_generator
from polyfed.graphs import ArchitectureGraph, LayerCatalogue, LayerType, Node
from polyfed.hypernetworks.ghn import GHN, GHNConfig, graph_to_tensors
from polyfed.hypernetworks.ghn_layers import GatedGraphConv, GraphConv, aggregate_predecessors, forward_backward_levels
from polyfed.hypernetworks.ghn_start import init_ghn_params

CPU = torch.device("cpu")
A, B = LayerType("linear", 4, 4), LayerType("linear", 4, 4, bias=False)
EDGES = ((0, 1), (0, 2), (1, 2), (2, 3), (0, 3))  # a node with none before it, with one, two, and a join
FORMS = [(gnn, passing) for gnn in ("graphconv", "gated", "sage") for passing in ("synchronous", "asynchronous")]


def graph(order=(0, 1, 2, 3)):
    """Four nodes with these edges; node k of the plain order is at place order[k]."""
    types = (A, B, "add", A)
    nodes = [None] * 4
    for old, place in enumerate(order):
        own = {} if types[old] == "add" else {role: f"{old}.{role}" for role in types[old].parameter_shapes}
        nodes[place] = Node(f"n{old}", types[old], own)
    return ArchitectureGraph(tuple(nodes), tuple(sorted((order[u], order[v]) for u, v in EDGES)), {}, {})


def ghn_of(**form):
    form = GHNConfig(LayerCatalogue((A, B)), latent=5, depth=2, **form)
    ghn = GHN(form).double()
    ghn.load_state_dict(init_ghn_params(form, "kaiming", seed=3))
    with torch.no_grad():  # biases that are not 0
        for parameter in ghn.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch_generator(1)), alpha=0.2)
    return ghn, form


def times(matrix, vector):
    return [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def plus(*vectors):
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gru(cell, message, own):
    """r = σ(W_r m + U_r h + b), z likewise, n = tanh(W_n m + b_n + r(U_n h + c_n)), (1 − z) n + z h."""
    d = len(own)
    given = plus(times(cell.weight_ih.tolist(), message), cell.bias_ih.tolist())
    kept = plus(times(cell.weight_hh.tolist(), own), cell.bias_hh.tolist())
    new = []
    for k in range(d):
        r, z = (sigmoid(given[j] + kept[j]) for j in (k, d + k))
        n = math.tanh(given[2 * d + k] + r * kept[2 * d + k])
        new.append((1 - z) * n + z * own[k])
    return new


def updated(ghn, layer, own, messages):
    """A node's new entries from its own and those that reach it, by the equations of the three works."""
    total = plus(*messages) if messages else [0.0] * len(own)
    if ghn.config.gnn == "gated":
        return gru(ghn.cell, times(layer.lin_rel.weight.tolist(), total), own)
    if ghn.config.gnn == "sage":
        total = [t / max(len(messages), 1) for t in total]
    rel, root, bias = (p.tolist() for p in (layer.lin_rel.weight, layer.lin_root.weight, layer.lin_rel.bias))
    return [max(x, 0.0) for x in plus(times(root, own), times(rel, total), bias)]


def by_loops(ghn, h):
    """h^T, with nodes in the order of the data flow."""
    if hasattr(ghn, "embed"):
        h = [times(ghn.embed.weight.tolist(), row) for row in h]
    for layer in ghn.gnn:
        if ghn.config.passing == "synchronous":
            h = [updated(ghn, layer, h[v], [h[u] for u, w in EDGES if w == v]) for v in range(len(h))]
            continue
        for v in range(len(h)):  # forward: a node after all before it
            h[v] = updated(ghn, layer, h[v], [h[u] for u, w in EDGES if w == v])
        for v in reversed(range(len(h))):
            h[v] = updated(ghn, layer, h[v], [h[w] for u, w in EDGES if u == v])
    return h


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("gnn", "passing"), FORMS)
@pytest.mark.one_case
def test_latents_are_those_of_loops(gnn, passing, normalise):
    ghn, form = ghn_of(gnn=gnn, passing=passing, normalise=normalise)
    tensors = graph_to_tensors(graph(), form.catalogue, CPU, form.passing)
    found = ghn.encode_nodes(tensors.features.double(), tensors.edges, tensors.levels)
    wanted = torch.tensor(by_loops(ghn, tensors.features.tolist()), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert len({tuple(row) for row in wanted.tolist()}) == 4


@pytest.mark.parametrize(("gnn", "passing"), FORMS)
@pytest.mark.one_case
def test_the_order_of_the_nodes_does_not_matter_and_all_is_trained(gnn, passing):
    ghn, form = ghn_of(gnn=gnn, passing=passing)
    made = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        tensors = graph_to_tensors(graph(order), form.catalogue, CPU, form.passing)
        tensors.features.data = tensors.features.double()
        made.append(ghn(tensors))
    for name, tensor in made[0].items():
        torch.testing.assert_close(made[1][name], tensor)
    sum(tensor.square().sum() for tensor in made[0].values()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in ghn.parameters())


def test_messages_go_back_in_asynchronous_passing_only():
    """What comes after a node reaches it by the backward sweep."""
    for passing, differs in (("synchronous", False), ("asynchronous", True)):
        form = GHNConfig(LayerCatalogue((A, B)), depth=2, passing=passing)
        ghn = GHN(form)
        ghn.load_state_dict(init_ghn_params(form, "kaiming", seed=0))
        first = []
        for last in (A, B):
            nodes = tuple(Node(f"n{k}", kind, {"weight": f"{k}"}) for k, kind in enumerate((B, B, last)))
            tensors = graph_to_tensors(
                ArchitectureGraph(nodes, ((0, 1), (1, 2)), {}, {}), form.catalogue, CPU, form.passing
            )
            first.append(ghn.encode_nodes(tensors.features, tensors.edges, tensors.levels)[0])
        assert torch.allclose(*first) != differs


@pytest.mark.parametrize("init", ["kaiming", "paper", "last_layer"])
@pytest.mark.parametrize(("gnn", "passing"), FORMS)
@pytest.mark.one_case
def test_generated_weights_start_with_kaimings_variance_in_each_form(gnn, passing, init):
    kinds = [LayerType("linear", 64, 64, activation="relu"), LayerType("linear", 64, 64)]
    form = GHNConfig(LayerCatalogue(tuple(kinds)), depth=2, gnn=gnn, passing=passing)
    ghn = GHN(form)
    ghn.load_state_dict(init_ghn_params(form, init, seed=0))
    nodes = tuple(Node(f"n{k}", kinds[k == 3], {"weight": f"{k}.w", "bias": f"{k}.b"}) for k in range(4))
    with torch.no_grad():
        made = ghn(graph_to_tensors(ArchitectureGraph(nodes, EDGES, {}, {}), form.catalogue, CPU, form.passing))
    wanted = math.sqrt(2 / (16 + 64**2) * 2 * 64 if init == "last_layer" else 2 / 64)  # fan_in and fan_out are both 64
    for k in range(4):
        assert float(made[f"{k}.w"].std()) == pytest.approx(wanted, rel=0.1)
        assert not made[f"{k}.b"].any()


def test_means_and_sums():
    h = torch.tensor([[1.0, 2.0], [3.0, 5.0], [10.0, 20.0]])
    edges = torch.tensor([[0, 1, 1], [2, 2, 0]])
    assert aggregate_predecessors(h, *edges, 3).tolist() == [[3, 5], [0, 0], [4, 7]]
    assert aggregate_predecessors(h, *edges, 3, takes_mean=True).tolist() == [[3, 5], [0, 0], [2, 3.5]]
    layer = GraphConv(2, 2, mean=True)
    torch.testing.assert_close(
        layer(h, edges), layer.update_nodes(h, aggregate_predecessors(h, *edges, 3, takes_mean=True))
    )
    gated, cell = GatedGraphConv(2), nn.GRUCell(2, 2)
    torch.testing.assert_close(
        gated(h, edges, cell), cell(aggregate_predecessors(h, *edges, 3) @ gated.lin_rel.weight.T, h)
    )


def test_an_order_needs_a_graph_without_circles():
    with pytest.raises(UserError, match="without cycles; use passing='synchronous'"):
        forward_backward_levels([(0, 1), (1, 2), (2, 1)], 3, CPU)
    assert forward_backward_levels([], 0, CPU) == ()


def test_the_default_has_the_tensors_of_equation_2_and_no_more():
    form = GHNConfig(LayerCatalogue((A,)), depth=2)
    assert {name.split(".")[0] for name in init_ghn_params(form, "kaiming", 0)} == {"gnn", "heads"}
    flat = GHNConfig(LayerCatalogue((A,)), depth=0, gnn="gated", passing="asynchronous")
    assert {name.split(".")[0] for name in init_ghn_params(flat, "kaiming", 0)} == {"heads"}
