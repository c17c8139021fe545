"""The supernet: a base stack that all clients share and a personal stack that each adapts (FedPNAS, section 3.1, Fig. 2).

The same classes are the network that was found: a supernet whose edges have one candidate each.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.machine.memory_limit import build_within_memory
from polyfed.nas.cells import Cell, CellPlan, EdgeJoin
from polyfed.nas.operations import OPERATION_NAMES, SMALL_OPERATION_NAMES, operations
from polyfed.nas.sampling import (
    ContextAware,
    ContextFree,
    Gradient,
    OperationChoice,
    Sampler,
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
    """The form of a supernet; calling it builds one.

    Args:
        in_channels: of the images.
        outputs: logits.
        channels: C of every feature map; the paper has 32 for CIFAR-10, 16 for MNIST (Table 3).
        base, personal: their cells, in order.
        join: how a node joins its edges.
        context: "free" samplers have learnable logits, "aware" ones compute them from the cell's input and the image.
        per: context-aware training draws an architecture for each "example", or one for the "batch" from the mean of its
            probabilities.
        sampler_width: channels within a context-aware sampler.
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
        """A network of this form, its weights drawn from torch's default generator.

        Raises:
            UserError: no machine like this could hold it.
        """
        cells = f"{len(self.base)} base cells and {len(self.personal)} personal cells"
        description = f"a supernet of {cells} with channels={self.channels} and sampler_width={self.sampler_width}"
        return build_within_memory(description, lambda: Network(self))


def plan_cell_stacks(
    base_cells: int = 3,
    personal_cells: int = 1,
    base_nodes: int = 2,
    personal_nodes: int = 2,
    base_operations: Sequence[str] = OPERATION_NAMES,
    personal_operations: Sequence[str] = SMALL_OPERATION_NAMES,
) -> tuple[tuple[CellPlan, ...], tuple[CellPlan, ...]]:
    """The paper's two stacks. Base cells have two inputs, personal cells one. The cells at a third and at two thirds of the
    base stack halve the image, and so does the last personal cell (which ones is from the authors' code).

    The defaults are section 3.1's form, in which personal cells have no large operations. Table 3 counts another one: 32
    edges of all nine operations, which are 4 base and 4 personal cells of 2 nodes (see `count_edge_parameters`).

    Raises:
        UserError: a size below 1, or too many edges.

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
    return tuple(base), tuple(personal)


def count_edge_parameters(plan: SupernetPlan) -> int:
    """How many parameters the operations of all edges have together, as Table 3 counts its MASTERARCHITECTURE: each edge as
    one of stride 1, without stem, 1×1 convolutions on skip inputs, samplers and classifier. A skip of stride 2, which is a
    convolution here, is not counted either: the table has 0 for it.

    >>> base, personal = plan_cell_stacks(4, 4, 2, 2, OPERATION_NAMES, OPERATION_NAMES)
    >>> [count_edge_parameters(SupernetPlan(1, 10, channels, base, personal)) for channels in (32, 16)]
    [948224, 293888]
    """
    edges = Counter(names for cell in plan.base + plan.personal for names in cell.candidates)
    with torch.device("meta"):  # counted without memory, and without a draw
        return sum(n * p.numel() for names, n in edges.items() for p in operations(plan.channels, names).parameters())


def _num_edges(inputs: int, nodes: int) -> int:
    return nodes * inputs + nodes * (nodes - 1) // 2


@final
class Network(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, outputs).

    In training every cell draws its operations (`draw`); in evaluation it takes the most probable ones, those of each
    example where the sampler is context-aware. Parameters named `base...` are θ_b, `personal...` θ_p, samplers among them
    (θ_b = {W_b, Π_b}, θ_p = {W_p, Π_p}, section 3.2).

    Attributes: `plan`; `temperature`, τ of eq. 2; `gradient`, through which operations it goes (`draw`); `noise`, by a
    cell's number gumbel noise (edges, operations) with which an evaluation samples, None for the most probable; `supernet`
    and `known`, of a network that was found: the form of the supernet, and per cell the probabilities of its operations from
    which this network's were chosen.
    """

    gradient: Gradient = "chosen"
    # Of the class: what a new network itself holds is part of the seed of its first weights.

    def __init__(self, plan: SupernetPlan) -> None:
        super().__init__()
        self.plan = plan
        self.temperature = 1.0
        self.noise: Mapping[int, Tensor] | None = None
        self.supernet: SupernetPlan | None = None
        self.known: Sequence[Tensor | None] = ()
        # The paper feeds x itself to the first cells; operations keep the number of channels, so x needs C of them.
        stem = nn.Conv2d(plan.in_channels, plan.channels, 5, plan.stem_stride, 2)
        self.base = nn.ModuleDict({"stem": stem, **_build_stack(plan, plan.base)})
        classifier = nn.Linear(plan.channels, plan.outputs)
        self.personal = nn.ModuleDict({**_build_stack(plan, plan.personal), "classifier": classifier})

    def forward(self, x: Tensor) -> Tensor:
        """Logits (algorithm 2): sampling and evaluation by turns, cell by cell."""
        previous = skip = self.base["stem"](x)
        image = pool_to_8x8(x) if self.plan.context == "aware" else x
        for number, (cell, sampler) in enumerate(self.cells_with_samplers()):
            choice = None if sampler is None else self._choose_operations(number, sampler(image, previous))
            previous, skip = cell(previous, skip, choice), previous
        logits: Tensor = self.personal["classifier"](previous.mean((2, 3)))
        return logits

    def cells_with_samplers(self) -> Iterator[tuple[Cell, Sampler | None]]:
        """All cells, base first, each with its sampler; None where it has nothing to choose."""
        for stack in (self.base, self.personal):
            samplers = dict(cast(nn.ModuleDict, stack["samplers"]).items())
            for k, cell in enumerate(cast(nn.ModuleList, stack["cells"])):
                yield cast(Cell, cell), cast(Sampler | None, samplers.get(str(k)))

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
            ContextFree(edges, choices)
            if plan.context == "free"
            else ContextAware(edges, choices, plan.in_channels, plan.channels, plan.sampler_width)
        )
    return {
        "cells": nn.ModuleList(Cell(cell, plan.channels, plan.channels, plan.join) for cell in cells),
        "samplers": nn.ModuleDict(samplers),
    }


@final
class Sampled(nn.Module):
    """The mean of several sampled networks: log of the mean of their class probabilities, (batch, outputs).

    The noise of each is drawn once, so that this is a function: the same input gives the same output, whatever else is in
    the batch.

    Args:
        network: the supernet.
        noise: by the number of each cell with a sampler gumbel noise, (networks, edges, operations).
        probabilities: whether outputs are logits of classes; False takes the mean of the outputs themselves.
    """

    def __init__(self, network: Network, noise: Mapping[int, Tensor], probabilities: bool = True) -> None:
        super().__init__()
        self.network, self.probabilities = network, probabilities
        self.names = {k: f"noise_{k}" for k in noise}
        for k, name in self.names.items():
            self.register_buffer(name, noise[k])

    def forward(self, x: Tensor) -> Tensor:
        """Mean of the networks' outputs."""
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
