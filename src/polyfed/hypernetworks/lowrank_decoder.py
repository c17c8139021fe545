"""Generates the weights of layers of any type and width with one decoder, of which each layer takes as much as it needs.

LoGAH (arXiv 2405.16287) generates low-rank factors of a largest width in this way; this is another form. A generated weight
is a draw that all clients make themselves, plus a generated change of low rank. So weights have full rank, start at the
right size, and only the change costs parameters.

Dimensions: O, I and K, the largest number of rows, columns and kernel positions; R, the rank; H hidden units; n layers.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.graphs.architecture import (
    ACTIVATIONS,
    LAYER_KINDS,
    NODE_MARKS,
    NONE,
    PAPER_KINDS,
    LayerType,
    NodeMark,
    ParameterRole,
)

Sizes = tuple[int, int, int]
"""O, I and K."""
_TINY = 1e-12  # added to mean squares before a division
_VECTORS: tuple[ParameterRole, ...] = ("bias", "scale", "shift")


@final
class LowRankDecoder(nn.Module):
    """Generates the parameters of layers of any type from the states of their nodes in the graph.

    W[o, i, κ] = mean + σ·draw[o, i, κ] + s·Σ_r U[o, r]·V[i, r]·core[κ, r] / √rows, where U, V, core and s are linear in the
    hidden activations z, and σ is the deviation with which the layer's type starts. A layer of fewer rows, columns or
    kernel positions takes the first ones. At the start V is 0 and U is random, so that the weight is the draw alone.

    Parameters: (H+1)·(R·(O + I + K) + 3·O + 1) + H·d + H, whatever the number of layer types.

    Args:
        inputs: d, entries of a node's state.
        hidden: H.
        rank: R.
        sizes: O, I and K.
        normalise: divides z by its root mean square.
        own_start: convolutions and linear layers, too, start with the deviation of the client's own network.

    >>> decoder = LowRankDecoder(5, hidden=4, rank=2, sizes=(8, 8, 9))
    >>> tensors_by_role = decoder(LayerType("conv2d", 2, 3, (3, 3), (1, 1)), torch.ones(2, 5))
    >>> {role: [tuple(tensor.shape) for tensor in tensors] for role, tensors in tensors_by_role.items()}
    {'weight': [(3, 2, 3, 3), (3, 2, 3, 3)], 'bias': [(3,), (3,)]}
    """

    def __init__(
        self, inputs: int, hidden: int, rank: int, sizes: Sizes, normalise: bool = True, own_start: bool = False
    ) -> None:
        super().__init__()
        self.sizes, self.normalise, self.own_start = sizes, normalise, own_start
        self.hidden = nn.Linear(inputs, hidden)
        self.scale = nn.Linear(hidden, 1)
        self.rows = nn.Parameter(torch.empty(sizes[0], rank, hidden + 1))
        self.columns = nn.Parameter(torch.empty(sizes[1], rank, hidden + 1))
        self.core = nn.Parameter(torch.empty(sizes[2], rank, hidden + 1))
        self.vectors = nn.Parameter(torch.empty(len(_VECTORS), sizes[0], hidden + 1))

    @torch.no_grad()
    def reset(self) -> None:
        """Initialises all but the hidden layer, so that generated weights start as their draw."""
        nn.init.zeros_(self.scale.weight)
        nn.init.ones_(self.scale.bias)
        for factor, first in ((self.rows, None), (self.columns, 0.0), (self.core, 1.0), (self.vectors, 0.0)):
            nn.init.zeros_(factor)
            if first is None:
                nn.init.normal_(factor[..., -1])
            else:
                nn.init.constant_(factor[..., -1], first)
        nn.init.ones_(self.vectors[_VECTORS.index("scale"), :, -1])

    def forward(self, kind: LayerType, h: Tensor) -> dict[ParameterRole, Sequence[Tensor]]:
        """Returns `{parameter's role: one tensor per node}` for nodes of this type with the states `h`, shape (n, d)."""
        z = F.leaky_relu(self.hidden(h))
        z = z * torch.rsqrt(z.square().mean(1, keepdim=True) + _TINY) if self.normalise else z
        constant = torch.cat([z, z.new_ones(len(z), 1)], 1)
        shape = kind.parameter_shapes["weight"]
        rows, columns, positions = matrix_sizes(kind)
        u, v, core = (
            torch.einsum("ark,nk->nar", factor[:size], constant)
            for factor, size in ((self.rows, rows), (self.columns, columns), (self.core, positions))
        )
        s = self.scale(z)[:, :, None, None] / math.sqrt(rows)
        # (n, rows, kernel positions, R) is small, since the rank is
        change = torch.einsum("nokr,nir->noik", (s * u[:, :, None]) * core[:, None], v)
        mean, spread = self._start_of(kind)
        draws = [common_draw(rows, columns, positions, self.sizes, k) for k in range(len(h))] if spread else []
        weights = [
            (mean + change[k] + (spread * draws[k].to(h) if draws else 0.0)).reshape(shape) for k in range(len(h))
        ]
        vectors = torch.einsum("vok,nk->vno", self.vectors[:, : kind.c_out], constant)
        return {
            "weight": weights,
            **{r: vectors[k].unbind(0) for k, r in enumerate(_VECTORS) if r in kind.parameter_shapes},
        }

    def _start_of(self, kind: LayerType) -> tuple[float, float]:
        if kind.is_norm:
            return 1.0, 0.0
        if kind.kind in PAPER_KINDS:
            spread = kind.start_or_default[1] if self.own_start else math.sqrt(2 / kind.fan_in)
            return 0.0, spread
        return kind.start_or_default


def matrix_sizes(kind: LayerType) -> Sizes:
    """Returns rows, columns and kernel positions of a layer's weight.

    >>> matrix_sizes(LayerType("conv2d", 2, 3, (3, 3), (1, 1))), matrix_sizes(LayerType("batch_norm", 4, 4))
    ((3, 2, 9), (4, 1, 1))
    """
    rows, columns, *kernel = (*kind.parameter_shapes["weight"], 1, 1)[: max(2, len(kind.parameter_shapes["weight"]))]
    return rows, columns, math.prod(kernel)


def largest_sizes(types: Iterable[LayerType]) -> Sizes:
    """Returns the sizes that a decoder needs for all of these types."""
    sizes = [(max(matrix_sizes(t)[0], t.c_out), *matrix_sizes(t)[1:]) for t in types]
    rows, columns, positions = (max(each) for each in zip(*sizes, strict=True))
    return rows, columns, positions


def fits(kind: LayerType, sizes: Sizes) -> bool:
    """Returns whether a decoder of these sizes can generate a layer of this type."""
    return all(size <= largest for size, largest in zip(largest_sizes([kind]), sizes, strict=True))


@lru_cache(maxsize=256)
def common_draw(rows: int, columns: int, positions: int, sizes: Sizes, number: int) -> Tensor:
    """Returns the standard normal draw of a type's layer of this number, equal at all clients.

    It is the first rows and columns of a larger table, which layers of other widths share.

    Returns:
        A tensor of shape (rows, columns, positions).
    """
    tables = []
    for position in range(positions):
        generator = torch_generator(derive_seed(0, "low-rank decoder", str(number), str(position)))
        tables.append(torch.randn(sizes[0], sizes[1], generator=generator)[:rows, :columns])
    return torch.stack(tables, 2)


_FLAGS = 3  # columns for whether there is a bias, a norm and a shift
_SIZES = 4
DESCRIPTION_COLUMNS = len(NODE_MARKS) + len(LAYER_KINDS) + len(ACTIVATIONS) + _FLAGS + _SIZES


def describe_node(kind: LayerType | NodeMark) -> list[float]:
    """Returns a node's features, equally many for every type.

    They encode the kind and activations one-hot, then bias, norm and shift, and the logarithms of the sizes.

    >>> len(describe_node("add")) == len(describe_node(LayerType("linear", 8, 2))) == DESCRIPTION_COLUMNS
    True
    """
    if not isinstance(kind, LayerType):
        return [float(kind == mark) for mark in NODE_MARKS] + [0.0] * (DESCRIPTION_COLUMNS - len(NODE_MARKS))
    activations = set(kind.activation.split("+")) - {NONE}
    sizes = (kind.c_in, kind.c_out, math.prod(kind.kernel), kind.groups)
    return [
        *[0.0] * len(NODE_MARKS),
        *[float(kind.kind == name) for name in LAYER_KINDS],
        *[float(name in activations) for name in ACTIVATIONS],
        *[float(flag) for flag in (kind.bias, kind.norm != NONE, kind.norm_bias)],
        *[math.log2(size) / 8 for size in sizes],
    ]
