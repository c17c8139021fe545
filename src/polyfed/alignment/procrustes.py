"""Orthogonal Procrustes distance of two representations of the same examples (Ding, Denain and Steinhardt, NeurIPS 2021;
FedHeNN, section 3.4, names it as the other distance).

d(A, B) = ‖Â‖² + ‖B̂‖² − 2‖B̂ᵀÂ‖_* = min over orthogonal Q of ‖Â − B̂Q‖², Â and B̂ being centred and of norm 1, ‖·‖_* the sum
of the singular values. FedHeNN's authors take it for networks of one width only. But it depends on kernels alone: ‖B̂ᵀÂ‖_*
is tr (√K M √K)^½ of K = ÂÂᵀ and M = B̂B̂ᵀ (d is the squared Bures distance of K and M), and B̂ may be any matrix with
B̂B̂ᵀ = M. So widths may differ, and the mean kernel K̄ = FFᵀ of eq. 6 has such a distance, that of F.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyfed.alignment.cka import CentredFeatures, check_same_examples, cosine_from_norms


def procrustes_distance(a: Tensor, b: Tensor | CentredFeatures) -> Tensor:
    """The orthogonal Procrustes distance of two representations, a scalar from 0 (equal up to a rotation, reflection, shift
    and scale of the features) to 2 (nothing in common). Differentiable in both arguments.

    Computed in feature space, from the singular values of a matrix of shape (min(L, d_b), min(L, d_a)). A constant
    representation has the distance 2, with gradient 0.

    Args:
        a, b: representations of the same L ≥ 2 examples, shapes (L, d_a) and (L, d_b); b may be centred already.

    Raises:
        UserError: they are not of the same examples, or of fewer than 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(abs(procrustes_distance(a, 3 * a.flip(1)).item()), 5), procrustes_distance(torch.ones(3, 5), a).item()
    (0.0, 2.0)
    """
    check_same_examples(a, b.normalised_features if isinstance(b, CentredFeatures) else b)
    features_a, features_b = (
        CentredFeatures.from_representation(a).normalised_features,
        (b if isinstance(b, CentredFeatures) else CentredFeatures.from_representation(b)).normalised_features,
    )
    inner: Tensor = _NuclearNorm.apply(features_a, features_b)  # type: ignore[no-untyped-call]
    return 2 - 2 * cosine_from_norms(inner, features_a.square().sum(), features_b.square().sum())


class _NuclearNorm(torch.autograd.Function):
    """‖BᵀA‖_* of (L, d_a) and (L, d_b).

    By hand, for two reasons. Where a singular value is 0 the norm has many subgradients, of which an SVD takes any, and
    would pull a dead feature anywhere; here it is the one of least norm, UVᵀ over the other singular values. And of fewer
    examples than features the singular values are those of a smaller matrix.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        left, of_a = _compress_columns(a)
        right, of_b = _compress_columns(b)
        # In float64: near the optimum the norm is 1 up to squares of what is left.
        product = (right.T @ left).double()
        if not bool(
            product.isfinite().all()
        ):  # where an SVD raises, a training that diverged is to be told by its loss
            ctx.save_for_backward(torch.full_like(a, float("nan")), torch.full_like(b, float("nan")))
            return a.new_full((), float("nan"))
        u, values, v = torch.linalg.svd(product, full_matrices=False)
        nonzero = values > values.max().clamp(min=0) * max(right.shape[1], left.shape[1]) * torch.finfo(a.dtype).eps
        polar = ((u * nonzero) @ v).to(a.dtype)
        # ∂/∂A = B·UVᵀ, ∂/∂B = A·VUᵀ, with the full singular vectors.
        to_a, to_b = right @ polar, left @ polar.T
        ctx.save_for_backward(to_a if of_a is None else to_a @ of_a.T, to_b if of_b is None else to_b @ of_b.T)
        norm: Tensor = values.sum().to(a.dtype)
        return norm

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        to_a, to_b = ctx.saved_tensors
        return slope * to_a, slope * to_b


def _compress_columns(a: Tensor) -> tuple[Tensor, Tensor | None]:
    """A = CQᵀ with orthonormal columns of Q, shape (d, L): C, shape (L, L), and Q; of no more features than examples, A."""
    if a.shape[1] <= len(a):
        return a, None
    q, r = torch.linalg.qr(a.T)
    return r.T, q
