"""FLHA-GHN with the paper's graph: eq. 2 and 3 by loops over nodes, a round in plain torch, odd networks."""

import pytest
import torch
import torch.nn.functional as F

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.core.algorithm import ClientInfo
from polyfed.core.seeds import torch_generator
from polyfed.models import ModelSpec
from polyfed.simulation.rounds import Federation
from polyfed.simulation.settings import Settings

SHAPE, CLASSES = (1, 8, 8), 3
MODELS = [ModelSpec(name, {"width": 4, "norm": "batch"}, SHAPE, CLASSES) for name in ("flha_arch2", "flha_arch3")]
OPTIONS = {"graph": "layers", "lr": 0.05, "batch_size": 8, "momentum": 0.0, "clip_norm": None, "depth": 3, "hidden": 4}


def examples(seed, number=24):
    return torch.randn(number, *SHAPE, generator=torch_generator(seed)), torch.arange(number) % CLASSES


def clients():
    return [pf.Client(f"c{k}", model, examples(k), examples(9 + k, 9)) for k, model in enumerate(MODELS)]


def start(method, everyone):
    federation = Federation({c.id: c for c in everyone}, method, Settings(rounds=3, seed=0))
    return method.server_init(federation.context())


def generated_by_loops(W, graph, normalise):
    """θ by eq. 2 and eq. 3, node by node, from the tensors of a hypernetwork by name."""
    keys = [key for name in W if name.endswith(".hidden.weight") for key in [name.split(".")[1]]]
    columns = ["add", "concat", "other", *sorted(keys, key=lambda key: _type(key))]
    h = [torch.eye(len(columns))[columns.index(getattr(node.type, "key", node.type))] for node in graph.nodes]
    layer = 0
    while f"gnn.{layer}.lin_rel.weight" in W:
        A, B, b = (W[f"gnn.{layer}.{part}"] for part in ("lin_root.weight", "lin_rel.weight", "lin_rel.bias"))
        h = [
            torch.relu(A @ h[v] + B @ sum((h[u] for u, end in graph.edges if end == v), torch.zeros_like(h[v])) + b)
            for v in range(len(h))
        ]
        layer += 1
    theta = {}
    for node, latent in zip(graph.nodes, h, strict=True):
        if node.type in ("add", "concat"):
            continue
        H = {name.split(".", 2)[2]: tensor for name, tensor in W.items() if name.startswith(f"heads.{node.type.key}.")}
        z = F.leaky_relu(H["hidden.weight"] @ latent + H["hidden.bias"])
        if normalise:
            z = z / (z.square().mean() + 1e-12).sqrt()
        makers = {"weight": "out", "bias": "shift", "scale": "norm_scale", "shift": "norm_shift"}
        for role, name in node.parameters.items():
            made = H[f"{makers[role]}.weight"] @ z + H[f"{makers[role]}.bias"]
            if role == "weight":
                made = made.view(node.type.shapes["weight"]) * (H["scale.weight"] @ z + H["scale.bias"])
            theta[name] = made
    return theta


def _type(key):
    from polyfed.graphs import LayerType

    return LayerType.from_key(key)


def disturbed(state):
    """The state with heads that make other scales than 1 and other shifts than 0."""
    generator = torch_generator(3)
    return {"ghn": {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in state["ghn"].items()}}


@pytest.mark.parametrize("joins", [True, False])
def test_generated_weights_are_those_of_loops_over_nodes(joins):
    everyone = clients()
    method = FLHAGHN(**OPTIONS, joins=joins)
    state = disturbed(start(method, everyone))
    for client in everyone:
        down = method.dispatch(state, ClientInfo(client.id, 1, 3))
        network, _, graph = method._assembled(down, method.client_init(client, 0), client)
        assert not any(getattr(node.type, "is_norm", False) for node in graph.nodes)
        assert joins == any(node.type == "add" for node in graph.nodes)
        expected = generated_by_loops(state["ghn"], graph, method.normalise)
        made = network.weights()
        assert made.keys() == expected.keys() == dict(network.model.named_parameters()).keys()
        for name, tensor in made.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
