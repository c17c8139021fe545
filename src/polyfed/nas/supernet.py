"""Defines the supernet, a network with all candidate operations: a base stack of cells that all clients share, and a
personal stack that each client adapts (FedPNAS, section 3.1, Fig. 2).

A derived network is an object of the same classes: a supernet whose edges have one candidate each.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.machine.memory_limit import build_after_memory_check
from polyfed.nas.cells import Cell, CellPlan, EdgeJoin
from polyfed.nas.operations import OPERATION_NAMES, SMALL_OPERATION_NAMES, build_operations
from polyfed.nas.sampling import (
    ContextAwareSampler,
    ContextFreeSampler,
    Gradient,
    OperationChoice,
    OperationSampler,
    most_probable_operations,
    pool_to_8x8,
    sample_operations,
)

SamplerContext = Literal["free", "aware"]
SamplingUnit = Literal["example", "batch"]

_MOST_EDGES = 10_000  # Table 3 of the paper counts 32, the authors' code has 48


@final
@dataclass(frozen=True)
class SupernetPlan:
    """Describes a supernet by its sizes and cells; calling the object builds the supernet.

    Args:
        in_channels: channels of the images.
        outputs: number of logits.
        channels: C, channels of every feature map (paper: 32 for CIFAR-10, 16 for MNIST, Table 3).
        base, personal: cells of the two stacks, in order.
        join: "sum" or "mean" of a node's edges.
        context: "free" samplers have learnable logits; "aware" ones compute logits from the cell's input and the image.
        per: context-aware training draws an architecture for each "example", or one for the "batch" from the mean of its
            probabilities.
        sampler_width: channels inside a context-aware sampler.
        stem_stride: 2 halves the image before the first cell.
    """

    in_channels: int
    outputs: int
    channels: int
    base: tuple[CellPlan, ...]
    personal: tuple[CellPlan, ...]
    join: EdgeJoin = "sum"
    context: SamplerContext = "free"
    per: SamplingUnit = "example"
    sampler_width: int = 16
    stem_stride: int = 1

    def __call__(self) -> "Network":
        """Builds the supernet that this plan describes, with weights drawn from torch's default generator.

        Raises:
            UserError: the network does not fit into this machine's memory.
        """
        cells = f"{len(self.base)} base cells and {len(self.personal)} personal cells"
        description = f"a supernet of {cells} with channels={self.channels} and sampler_width={self.sampler_width}"
        return build_after_memory_check(description, lambda: Network(self))


class CellStacks(NamedTuple):
    """Holds the plans of a supernet's cells, for the base stack and for the personal stack."""

    base: tuple[CellPlan, ...]
    personal: tuple[CellPlan, ...]


def plan_cell_stacks(
    base_cells: int = 3,
    personal_cells: int = 1,
    base_nodes: int = 2,
    personal_nodes: int = 2,
    base_operations: Sequence[str] = OPERATION_NAMES,
    personal_operations: Sequence[str] = SMALL_OPERATION_NAMES,
) -> CellStacks:
    """Returns the plans of the cells in the base stack (two inputs each) and the personal stack (one input each).

    The cells at one third and two thirds of the base stack halve the image, and so does the last personal cell (these
    positions are from the authors' code). The defaults follow section 3.1, in which personal cells have no large operations.
    Table 3 counts another supernet: 32 edges of all nine operations, which are 4 base and 4 personal cells of 2 nodes (see
    `count_edge_operation_parameters`).

    Raises:
        UserError: a size is below 1, or there are too many edges.

    >>> base, personal = plan_cell_stacks()
    >>> [cell.reduces for cell in base + personal], sum(len(cell.edges) for cell in base + personal)
    ([False, True, True, True], 18)
    >>> SupernetPlan(in_channels=1, outputs=10, channels=16, base=base, personal=personal)()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    if min(base_cells, personal_cells, base_nodes, personal_nodes) < 1:
        raise UserError(
            "a supernet has at least 1 base cell, 1 personal cell and 1 node in each, got "
            f"{base_cells}, {personal_cells}, {base_nodes} and {personal_nodes}"
        )
    edges = base_cells * _num_edges(2, base_nodes) + personal_cells * _num_edges(1, personal_nodes)
    if edges > _MOST_EDGES:
        raise UserError(
            f"a supernet of {base_cells} base cells with {base_nodes} nodes and {personal_cells} personal cells with "
            f"{personal_nodes} would have {edges} edges; at most {_MOST_EDGES} are built"
        )
    reducing = {base_cells // 3, 2 * base_cells // 3}
    base = (
        CellPlan(
            2, base_nodes, (tuple(base_operations),) * _num_edges(2, base_nodes), k in reducing, 1 + (k - 1 in reducing)
        )
        for k in range(base_cells)
    )
    personal = (
        CellPlan(
            1, personal_nodes, (tuple(personal_operations),) * _num_edges(1, personal_nodes), k == personal_cells - 1
        )
        for k in range(personal_cells)
    )
    return CellStacks(tuple(base), tuple(personal))


def count_edge_operation_parameters(plan: SupernetPlan) -> int:
    """Counts parameters on all edges as Table 3 does for its MASTERARCHITECTURE.

    Every edge counts as one of stride 1; stem, 1×1 convolutions on skip inputs, samplers and classifier do not count.
    A skip of stride 2, which is a convolution here, does not count either: the table has 0 for it.

    >>> base, personal = plan_cell_stacks(4, 4, 2, 2, OPERATION_NAMES, OPERATION_NAMES)
    >>> [count_edge_operation_parameters(SupernetPlan(1, 10, channels, base, personal)) for channels in (32, 16)]
    [948224, 293888]
    """
    edges = Counter(names for cell in plan.base + plan.personal for names in cell.candidates)
    with torch.device("meta"):  # no memory, no random draw
        return sum(
            n * p.numel() for names, n in edges.items() for p in build_operations(plan.channels, names).parameters()
        )


def _num_edges(inputs: int, nodes: int) -> int:
    return nodes * inputs + nodes * (nodes - 1) // 2


@final
class Network(nn.Module):
    """Classifies images by a supernet with random operations, or a derived network with fixed ones.

    In training every cell draws its operations (`sample_operations`); in evaluation it takes the most probable ones,
    for each example if the sampler is context-aware. Parameters named `base...` are θ_b, `personal...` are θ_p,
    samplers included (θ_b = {W_b, Π_b}, θ_p = {W_p, Π_p}, section 3.2).

    Attributes:
        plan: the plan of this network.
        temperature: τ of eq. 2.
        gradient: the operations through which the samplers' gradient flows, see `sample_operations`.
        noise: cell's number -> Gumbel noise (edges, operations) with which evaluation samples; None takes the most probable.
        supernet: for a derived network, the plan of the supernet.
        known: for a derived network, the probabilities per cell from which its operations were chosen.
    """

    plan: SupernetPlan
    temperature: float
    noise: Mapping[int, Tensor] | None
    supernet: SupernetPlan | None
    known: Sequence[Tensor | None]
    gradient: Gradient = "chosen"
    # An attribute of the class, since a new network's own attributes are part of the seed of its first weights.

    def __init__(self, plan: SupernetPlan) -> None:
        super().__init__()
        self.plan = plan
        self.temperature = 1.0
        self.noise = None
        self.supernet = None
        self.known = ()
        # The paper feeds x itself to the first cells; but operations keep the number of channels, so x needs C channels.
        stem = nn.Conv2d(plan.in_channels, plan.channels, 5, plan.stem_stride, 2)
        self.base = nn.ModuleDict({"stem": stem, **_build_stack(plan, plan.base)})
        classifier = nn.Linear(plan.channels, plan.outputs)
        self.personal = nn.ModuleDict({**_build_stack(plan, plan.personal), "classifier": classifier})

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of images; each cell applies the operations that its sampler chose (algorithm 2)."""
        previous = skip = self.base["stem"](x)
        image = pool_to_8x8(x) if self.plan.context == "aware" else x
        for number, (cell, sampler) in enumerate(self.cells_with_samplers()):
            choice = None if sampler is None else self._choose_operations(number, sampler(image, previous))
            previous, skip = cell(previous, skip, choice), previous
        logits: Tensor = self.personal["classifier"](previous.mean((2, 3)))
        return logits

    def cells_with_samplers(self) -> Iterator[tuple[Cell, OperationSampler | None]]:
        """Yields (cell, sampler) for each cell, the base stack first; the sampler is None for a cell without a choice."""
        for stack in (self.base, self.personal):
            samplers = dict(cast(nn.ModuleDict, stack["samplers"]).items())
            for k, cell in enumerate(cast(nn.ModuleList, stack["cells"])):
                yield cast(Cell, cell), cast(OperationSampler | None, samplers.get(str(k)))

    def _choose_operations(self, number: int, logits: Tensor) -> OperationChoice:
        if not self.training:
            return most_probable_operations(logits, None if self.noise is None else self.noise[number])
        if logits.dim() == 3 and self.plan.per == "batch":
            logits = torch.logsumexp(F.log_softmax(logits, -1), 0) - math.log(len(logits))
        return sample_operations(logits, self.temperature, self.gradient)


def _build_stack(plan: SupernetPlan, cells: Sequence[CellPlan]) -> dict[str, nn.Module]:
    samplers: dict[str, nn.Module] = {}
    for k, cell in enumerate(cells):
        sizes = {len(names) for names in cell.candidates}
        if sizes == {1}:
            continue
        if len(sizes) > 1:
            raise UserError(f"the edges of a cell choose from equally many operations, got {sorted(sizes)}")
        edges, choices = len(cell.edges), max(sizes)
        samplers[str(k)] = (
            ContextFreeSampler(edges, choices)
            if plan.context == "free"
            else ContextAwareSampler(edges, choices, plan.in_channels, plan.channels, plan.sampler_width)
        )
    return {
        "cells": nn.ModuleList(Cell(cell, plan.channels, plan.channels, plan.join) for cell in cells),
        "samplers": nn.ModuleDict(samplers),
    }


@final
class SampledNetwork(nn.Module):
    """Predicts the log of the mean class probabilities of several drawn networks, (batch, outputs).

    Each network's noise is drawn once, so that an input always has the same output, whatever else is in the batch.

    Args:
        network: the supernet.
        noise: number of each cell with a sampler -> Gumbel noise, (networks, edges, operations).
        probabilities: whether outputs are logits of classes; False averages the outputs themselves.
    """

    def __init__(self, network: Network, noise: Mapping[int, Tensor], probabilities: bool = True) -> None:
        super().__init__()
        self.network, self.probabilities = network, probabilities
        self.names = {k: f"noise_{k}" for k in noise}
        for k, name in self.names.items():
            self.register_buffer(name, noise[k])

    def forward(self, x: Tensor) -> Tensor:
        """Returns the log of the sampled networks' mean class probabilities, shape (batch, outputs)."""
        noise = {k: self.get_buffer(name) for k, name in self.names.items()}
        outs: list[Tensor] = []
        try:
            for network in range(len(next(iter(noise.values()), [0]))):
                self.network.noise = {k: tensor[network] for k, tensor in noise.items()}
                outs.append(self.network(x))
        finally:
            self.network.noise = None
        stacked = torch.stack(outs)
        if not self.probabilities:
            return stacked.mean(0)
        return F.log_softmax(stacked, -1).logsumexp(0) - math.log(len(outs))
