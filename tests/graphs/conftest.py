"""Extraction with the checks that hold for every network."""

import random

import numpy as np
import pytest
import torch

from polyfed.graphs import ArchitectureGraph, LayerType, extract
from polyfed.graphs.architecture import TRANSPOSED


def everything_in(model):
    """Whatever extraction could change: tensors, gradients, modes, hooks, plain attributes."""
    tensors = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    parts = [
        (name, part.training, len(part._forward_hooks), sorted(key for key in part.__dict__))
        for name, part in model.named_modules()
    ]
    flags = [(name, parameter.requires_grad, parameter.grad is None) for name, parameter in model.named_parameters()]
    return tensors, parts, flags


def random_states():
    return torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def check(graph: ArchitectureGraph, model) -> None:
    """Every parameter is generated or local, and no more; the graph is acyclic and leads to parameters that exist."""
    parameters = dict(model.named_parameters())
    assert graph.parameter_sizes == {name: parameter.numel() for name, parameter in parameters.items()}
    generated = [name for one in graph.generated_weights for name in one.parameters.values()]
    assert len(generated) == len(set(generated))
    assert set(generated) | set(graph.local_reasons) == set(parameters)
    assert set(generated).isdisjoint(graph.local_reasons)
    assert all(graph.local_reasons.values())
    assert list(graph.local_reasons) == [name for name in parameters if name in graph.local_reasons]
    for node in graph.nodes:
        if isinstance(node.type, LayerType):
            shapes = {
                role: tuple(parameters[name].shape) for role, name in node.parameters.items() if role != TRANSPOSED
            }
            if TRANSPOSED in node.parameters:
                shapes["weight"] = tuple(reversed(parameters[node.parameters[TRANSPOSED]].shape))
            assert shapes == node.type.parameter_shapes
        else:
            assert all(role == name for role, name in node.parameters.items())
            assert set(node.parameters) <= set(graph.local_reasons)
            assert bool(node.parameters) == (node.type == "other")
    for one in graph.generated_weights:
        assert all(graph.nodes[k].type == one.type for k in one.nodes)
        assert all(graph.nodes[k].parameters == one.parameters for k in one.nodes)
    assert list(graph.edges) == sorted(set(graph.edges))
    assert all(0 <= a < b < len(graph.nodes) for a, b in graph.edges)
    for position, node in enumerate(graph.nodes):
        if node.type in ("add", "concat"):
            assert any(b == position for _, b in graph.edges), node


@pytest.fixture(name="check")
def checked():
    """What must hold for every graph, of contracted ones too."""
    return check


@pytest.fixture
def extracted():
    """Extracts a graph, twice, checks what must hold for all, and that the model is as it was."""

    def extracted(model, x, **kinds):
        before, states, x_before = everything_in(model), random_states(), x.clone()
        graph = extract(model, x, **kinds)
        after = everything_in(model)
        assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
        assert before[1:] == after[1:]
        assert random_states() == states
        assert torch.equal(x, x_before)
        check(graph, model)
        assert extract(model, x, **kinds) == graph
        return graph

    return extracted


@pytest.fixture
def told():
    """A graph as text: a line a node, with its predecessors; of types without dilation and activation, which
    recognition/test_activations.py has."""

    def short(kind):
        return kind if isinstance(kind, str) else kind.key[: kind.key.index("-d")]

    def told(graph):
        return [
            f"{node.name}: {short(node.type)} < "
            + " ".join(graph.nodes[a].name for a, b in graph.edges if b == position)
            for position, node in enumerate(graph.nodes)
        ]

    return told


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks are faster so, the more where other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
