"""Defines the layers of the graph neural network in a graph hypernetwork, and the order in which asynchronous message
passing updates nodes.

FLHA-GHN names three layers (appendix D) and two orders (section 4.3), and gives the equation of the first of each. The
others come from the works that it cites: gated graph sequence networks (Li et al. 2016), GraphSAGE (Hamilton et al. 2017),
and forward-backward propagation (Zhang et al. 2019, graph hypernetworks for architecture search).
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError

Level = tuple[Tensor, Tensor, Tensor]
"""The nodes that are updated together (m,), and the edges that end in them: source nodes (e,), and targets as
positions among the m nodes (e,)."""


@final
class GraphConv(nn.Module):
    """Updates nodes by linear maps of their state and of their predecessors' sum or mean.

    It computes eq. 2 before its ReLU: A h_v + B Σ_{u→v} h_u + b (Morris et al. 2019), where A is `lin_root`, B and b
    are `lin_rel`. With `mean` it is GraphSAGE's layer with the mean aggregator (Hamilton et al. 2017, algorithm 1,
    lines 4 and 5): W·[h_v, mean_{u→v} h_u] + b, where W = [A, B] and a node without predecessors has a mean of 0. The
    paper's line 7, which divides h_v by its norm, is left out, as in PyG.

    Shapes: h (V, d_in) and edges (2, E), each from row 0 to row 1, to (V, d_out).

    >>> layer = GraphConv(3, 2)
    >>> layer(torch.eye(3), torch.tensor([[0, 0], [1, 2]])).shape
    torch.Size([3, 2])
    """

    def __init__(self, inputs: int, outputs: int, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.lin_rel = nn.Linear(inputs, outputs)
        self.lin_root = nn.Linear(inputs, outputs, bias=False)
        # PyG's layer of this name draws its weights twice; the same draws give the same hypernetwork for a seed.
        self.lin_rel.reset_parameters()
        self.lin_root.reset_parameters()

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        """Returns the new states of all nodes, shape (V, d_out), from their states `h` and the edges of the graph."""
        return self.update_nodes(h, aggregate_predecessors(h, edges[0], edges[1], len(h), self.mean))

    def update_nodes(self, node_states: Tensor, messages: Tensor) -> Tensor:
        """Returns new node states from old ones and predecessors' aggregated states, both (m, d_in)."""
        out: Tensor = self.lin_rel(messages) + self.lin_root(node_states)
        return out


@final
class GatedGraphConv(nn.Module):
    """Updates each node's state by a GRU, whose input is the sum of the predecessors' states.

    GRU(Θ Σ_{u→v} h_u, h_v) (Li et al. 2016, in PyG's form), where Θ is this layer's `lin_rel`. All layers share one
    GRU. Messages follow the data flow, as in eq. 2; Li et al. send them in both directions.

    Shapes: h (V, d) and edges (2, E) to (V, d).

    >>> cell = nn.GRUCell(3, 3)
    >>> GatedGraphConv(3)(torch.eye(3), torch.tensor([[0, 0], [1, 2]]), cell).shape
    torch.Size([3, 3])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin_rel = nn.Linear(width, width, bias=False)

    def forward(self, h: Tensor, edges: Tensor, cell: nn.GRUCell) -> Tensor:
        """Returns the new states of all nodes, shape (V, d), from their states `h` and the edges of the graph."""
        return self.update_nodes(h, aggregate_predecessors(h, edges[0], edges[1], len(h)), cell)

    def update_nodes(self, node_states: Tensor, messages: Tensor, cell: nn.GRUCell) -> Tensor:
        """Returns new node states from old ones and predecessors' aggregated states, both (m, d)."""
        out: Tensor = cell(self.lin_rel(messages), node_states)
        return out


def aggregate_predecessors(
    node_states: Tensor, sources: Tensor, targets: Tensor, num_nodes: int, takes_mean: bool = False
) -> Tensor:
    """Returns the sum or mean of each node's predecessors, (num_nodes, d); 0 without any.

    >>> h = torch.tensor([[1.0], [3.0]])
    >>> aggregate_predecessors(h, torch.tensor([0, 1]), torch.tensor([1, 1]), 2, takes_mean=True).tolist()
    [[0.0], [2.0]]
    """
    incoming = node_states.new_zeros(num_nodes, node_states.shape[1]).index_add(0, targets, node_states[sources])
    return incoming / targets.bincount(minlength=num_nodes).clamp(min=1)[:, None] if takes_mean else incoming


def forward_backward_levels(
    edges: Sequence[tuple[int, int]], num_nodes: int, device: torch.device
) -> tuple[Level, ...]:
    """Groups nodes into levels to be updated together, first along the data flow, then against it.

    These are the steps of one round of asynchronous message passing. Forward, a node comes after all its predecessors;
    backward, after all its successors. Nodes of one level are updated together.

    Raises:
        UserError: the edges form a cycle.

    >>> [level[0].tolist() for level in forward_backward_levels([(0, 1), (0, 2), (1, 3), (2, 3)], 4, torch.device("cpu"))]
    [[0], [1, 2], [3], [3], [1, 2], [0]]
    """
    against = [(end, start) for start, end in edges]
    return (*_topological_levels(edges, num_nodes, device), *_topological_levels(against, num_nodes, device))


def _topological_levels(edges: Sequence[tuple[int, int]], nodes: int, device: torch.device) -> list[Level]:
    predecessors: list[list[int]] = [[] for _ in range(nodes)]
    successors: list[list[int]] = [[] for _ in range(nodes)]
    for start, end in edges:
        predecessors[end].append(start)
        successors[start].append(end)
    waits = [len(before) for before in predecessors]
    ready, levels, num_visited = [node for node in range(nodes) if not waits[node]], list[Level](), 0
    while ready:
        messages = [(start, place) for place, node in enumerate(ready) for start in predecessors[node]]
        sources, targets = torch.tensor(messages, dtype=torch.int64, device=device).reshape(-1, 2).T
        levels.append((torch.tensor(ready, device=device), sources, targets))
        num_visited += len(ready)
        freed = [later for node in ready for later in successors[node]]
        for later in freed:
            waits[later] -= 1
        ready = sorted({later for later in freed if not waits[later]})
    if num_visited < nodes:
        raise UserError("asynchronous passing needs a graph without cycles; use passing='synchronous'")
    return levels
