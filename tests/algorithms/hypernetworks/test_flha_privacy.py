"""What a reply of FLHA-GHN tells a server that looks at it: the protocol sends no graph, and yet one can be read off."""

import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.core.algorithm import ClientInfo, ServerContext
from polyfed.core.seeds import torch_generator
from polyfed.graphs import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client


def network(*order):
    """Layers of six types that occur once each, three of them in the given order."""

    def build():
        middle = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8, bias=False), "c": nn.LayerNorm(8)}
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), *(middle[name] for name in order), nn.Linear(8, 3))

    return build


def test_one_reply_tells_the_edges_of_a_graph_without_repeated_types():
    """In the GNN's first layer ∂/∂A[:, c] is Σ of δ_v over nodes of type c, ∂/∂B[:, c] over the successors of such nodes:
    the columns of B's change are sums of columns of A's, one for each edge (documented in docs/methods.md)."""
    generator = torch_generator(0)
    x, y = torch.randn(40, 4, generator=generator), torch.arange(40) % 3
    method = FLHAGHN(lr=0.01, graph="layers_and_norms", head="mlp")
    for order in ("abc", "cab", "bca"):
        client = pf.Client("c", network(*order), (x, y), (x, y))
        graph = graph_of_client(client)
        catalogue = LayerCatalogue.from_graphs([graph])
        down = method.dispatch(method.server_init(ServerContext(0, 1, (), layer_catalogue=catalogue)), ClientInfo("c"))
        up, _ = method.local_update(down, method.client_init(client, 0), client, seed=1)
        change = {name: up.tensors["ghn"][name] - tensor for name, tensor in down.tensors["ghn"].items()}
        own, following = (change[f"gnn.0.lin_{part}.weight"].double() for part in ("root", "rel"))
        used = [c for c in range(own.shape[1]) if own[:, c].any()]
        found = torch.linalg.lstsq(own[:, used], following).solution.round(decimals=1)
        told = {(c, used[k]) for k in range(len(used)) for c in range(own.shape[1]) if found[k, c] > 0.5}
        types = [catalogue.node_types.index(node.type) for node in graph.nodes]
        assert told == {(types[u], types[v]) for u, v in graph.edges}
