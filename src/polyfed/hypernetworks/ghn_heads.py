"""Defines the heads of FLHA-GHN's hypernetwork: one MLP per layer type, which generates a layer's weights from the
state of its node (section 4.2).

To save memory, no tensor the size of the weights is kept for the backward pass or computed twice: both kinds of last layer
compute s·W from s·z, since s·(A z + b) = A (s z) + s b.

Dimensions: H hidden units of a head, n sets of weights of one layer type, P entries of a weight tensor.
"""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from polyfed.graphs.architecture import NONE, LayerType, ParameterRole

_VECTORS: dict[ParameterRole, str] = {"bias": "shift", "scale": "norm_scale", "shift": "norm_shift"}
_TINY = 1e-12  # added to mean squares before a division


@final
class TypeHead(nn.Module):
    """Generates the parameters of all layers of one type from the states of their nodes in the graph.

    H_l is a hidden layer with LeakyReLU, then linear layers in its activations z. The linear layers give the weight W,
    its scale s (Littwin & Wolf 2019), the bias, and the scale and shift of the norm that is part of the layer. The
    layer uses s·W.

    Args:
        kind: the layer type.
        inputs: d, entries of a node's state.
        hidden: H.
        rank: rank of a `Factored` last layer, which is used where it has fewer parameters; None uses the paper's.
        normalise: divides z by its root mean square, so that the initial variance is Kaiming's for every node of every
            graph.

    Shapes: (n, d) to {"weight": n tensors of the weight's shape, "bias": n of (c_out,)}; "scale" and "shift" as "bias".

    >>> head = TypeHead(LayerType("linear", 3, 2), inputs=5, hidden=4)
    >>> {role: [tuple(tensor.shape) for tensor in tensors] for role, tensors in head(torch.ones(2, 5)).items()}
    {'weight': [(2, 3), (2, 3)], 'bias': [(2,), (2,)]}
    """

    def __init__(
        self, kind: LayerType, inputs: int, hidden: int, rank: int | None = None, normalise: bool = True
    ) -> None:
        super().__init__()
        self.shape, self.normalise = kind.parameter_shapes["weight"], normalise
        self.hidden = nn.Linear(inputs, hidden)
        self.scale = nn.Linear(hidden, 1)
        dense = nn.Linear(hidden, math.prod(self.shape))
        self.out: nn.Linear | Factored = dense
        if rank is not None and len(self.shape) > 1:
            factored = Factored(kind, hidden, rank)
            if _num_parameters(factored) < _num_parameters(dense):  # small layers have nothing to save
                self.out = factored
        if kind.bias:
            self.shift = nn.Linear(hidden, kind.c_out)
        if kind.norm != NONE:
            self.norm_scale = nn.Linear(hidden, kind.c_out)
        if kind.norm_bias:
            self.norm_shift = nn.Linear(hidden, kind.c_out)

    def forward(self, h: Tensor) -> dict[ParameterRole, Sequence[Tensor]]:
        """Returns `{parameter's role: one tensor per node}` for the nodes with the states `h`.

        They are split here, since the gradient of n separate rows would be n tensors of the size of all rows.
        """
        z = self.hidden_activations(h)
        s = self.scale(z)
        weights = self.out(z, s) if isinstance(self.out, Factored) else self._dense_weights(self.out, z, s)
        return {
            "weight": weights,
            **{
                role: getattr(self, name)(z).unbind(0)
                for role, name in self.linear_layer_name_by_role_except_weight.items()
            },
        }

    @property
    def linear_layer_name_by_role_except_weight(self) -> dict[ParameterRole, str]:
        """Returns `{role: name of the head's linear layer}` for all parameter roles except the weight."""
        return {role: name for role, name in _VECTORS.items() if hasattr(self, name)}

    def _dense_weights(self, out: nn.Linear, z: Tensor, s: Tensor) -> Sequence[Tensor]:
        weights = F.linear(s * z, out.weight).addmm_(s, out.bias[None])
        return weights.view(len(z), *self.shape).unbind(0)

    def hidden_activations(self, h: Tensor) -> Tensor:
        """Returns the head's hidden activations z for each node, shape (n, H)."""
        z = F.leaky_relu(self.hidden(h))
        return z * torch.rsqrt(z.square().mean(1, keepdim=True) + _TINY) if self.normalise else z


@final
class Factored(nn.Module):
    """Generates weights as low-rank products over channels, polyfed's smaller choice than dense layers.

    W[o, i, κ] = Σ_r rows[o, r]·columns[i, r]·(core[r, κ]·z) + √H·bias[o, i, κ], where κ runs over the kernel's
    positions. The bias, which the paper's head has too, keeps W at full rank; with normalised z, the factor √H makes
    it learn as fast as the H parameters for each weight in the paper's head do together.

    Parameters: P + R·(c_out + c_in/groups + H·|κ|), instead of 17·P. Shapes: z (n, H) and s (n, 1) to n tensors of the
    weight's shape, with the input channels last in memory, which is the order of the product and suits convolutions.
    """

    def __init__(self, kind: LayerType, hidden: int, rank: int) -> None:
        super().__init__()
        self.shape = kind.parameter_shapes["weight"]
        c_out, c_in, *kernel = self.shape
        self.rows = nn.Parameter(torch.empty(c_out, rank))
        self.columns = nn.Parameter(torch.empty(c_in, rank))
        self.core = nn.Parameter(torch.empty(rank, math.prod(kernel), hidden))
        self.bias = nn.Parameter(torch.empty(c_out * c_in * math.prod(kernel)))

    def forward(self, z: Tensor, s: Tensor) -> Sequence[Tensor]:
        """Returns the scaled weight s·W for each row of the hidden activations `z`."""
        mixed = torch.einsum("rkj,nj->nkr", self.core, s * z)
        row_factors = self.rows[:, None] * mixed[:, None]  # (n, c_out, |κ|, R): small, since the rank is
        weights = _FactoredWeights.apply(row_factors, self.columns, math.sqrt(z.shape[1]) * s, self.bias)  # type: ignore[no-untyped-call]
        c_out, c_in, *kernel = self.shape
        if math.prod(kernel) == 1:  # contiguous strides: convolutions would take the others for channels-last
            return [weight.view(self.shape) for weight in weights]
        return [weight.view(c_out, *kernel, c_in).movedim(-1, 1) for weight in weights]


class _FactoredWeights(torch.autograd.Function):
    """Computes n weight tensors as low-rank products plus a bias, with a hand-written backward pass.

    Tensor n is left_n · columnsᵀ + s_n·bias, shape (c_out, |κ|, c_in). The backward pass is written by hand, so that it
    takes the gradients one by one: autograd would concatenate them, and keep a copy of the bias in this order. Both passes
    copy the bias into this order once for all n tensors, since each of these would read it across memory.
    """

    generate_vmap_rule = True  # private training needs the gradient of each example

    @staticmethod
    def forward(row_factors: Tensor, columns: Tensor, s: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ordered_bias = _order_bias(bias, row_factors, columns)
        return tuple(
            (row_factor @ columns.T).addcmul_(ordered_bias, of_set)
            for row_factor, of_set in zip(row_factors, s, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        row_factors, columns, s, bias = ctx.saved_tensors
        flat_bias = _order_bias(bias, row_factors, columns).flatten()
        to_left = torch.stack([slope @ columns for slope in slopes])
        to_s = torch.stack([slope.flatten().dot(flat_bias) for slope in slopes])[:, None]
        del flat_bias
        to_columns = row_factors[0].flatten(0, 1).T @ slopes[0].flatten(0, 1)
        to_ordered_bias = slopes[0] * s[0]
        for slope, row_factor, of_set in zip(slopes[1:], row_factors[1:], s[1:], strict=True):
            to_columns = torch.addmm(to_columns, row_factor.flatten(0, 1).T, slope.flatten(0, 1))
            to_ordered_bias = torch.addcmul(to_ordered_bias, slope, of_set)
        return to_left, to_columns.T, to_s, to_ordered_bias.transpose(1, 2).reshape(bias.shape)


def _order_bias(bias: Tensor, row_factors: Tensor, columns: Tensor) -> Tensor:
    """Returns the bias with its entries in the order of `row_factors`, shape (c_out, |κ|, c_in), contiguous."""
    return bias.view(row_factors.shape[1], len(columns), row_factors.shape[2]).transpose(1, 2).contiguous()


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
