"""Computes the orthogonal Procrustes distance of two representations of the same examples (Ding, Denain and
Steinhardt, NeurIPS 2021), which FedHeNN's section 3.4 names as the alternative to CKA.

d(A, B) = ‖Â‖² + ‖B̂‖² − 2‖B̂ᵀÂ‖_* = min over orthogonal Q of ‖Â − B̂Q‖², where Â and B̂ are centred and have norm 1, and ‖·‖_*
is the sum of the singular values. FedHeNN's authors use it for networks of one width only. But it depends on kernels alone:
‖B̂ᵀÂ‖_* is tr (√K M √K)^½ of K = ÂÂᵀ and M = B̂B̂ᵀ (d is the squared Bures distance of K and M), and B̂ may be any matrix with
B̂B̂ᵀ = M. So widths may differ, and the distance to the mean kernel K̄ = FFᵀ of eq. 6 is that to F.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyfed.alignment.cka import CentredFeatures, check_same_number_of_examples, cosine_or_zero_from_norms


def procrustes_distance(a: Tensor, b: Tensor | CentredFeatures) -> Tensor:
    """Returns the orthogonal Procrustes distance, from 0 (equal up to rotation and scale) to 2.

    Representations are equal up to a rotation, reflection, shift and scale of the features. The distance is
    differentiable in both arguments.

    The computation is in feature space, from the singular values of a matrix of shape (min(L, d_b), min(L, d_a)). A constant
    representation has distance 2, with gradient 0.

    Args:
        a, b: representations of the same L ≥ 2 examples, shapes (L, d_a) and (L, d_b); b may be centred already.

    Raises:
        UserError: the numbers of examples differ, or are below 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(abs(procrustes_distance(a, 3 * a.flip(1)).item()), 5), procrustes_distance(torch.ones(3, 5), a).item()
    (0.0, 2.0)
    """
    check_same_number_of_examples(a, b.normalised_features if isinstance(b, CentredFeatures) else b)
    features_a, features_b = (
        CentredFeatures.from_representation(a).normalised_features,
        (b if isinstance(b, CentredFeatures) else CentredFeatures.from_representation(b)).normalised_features,
    )
    inner: Tensor = _NuclearNorm.apply(features_a, features_b)  # type: ignore[no-untyped-call]
    return 2 - 2 * cosine_or_zero_from_norms(inner, features_a.square().sum(), features_b.square().sum())


class _NuclearNorm(torch.autograd.Function):
    """Computes the nuclear norm (the sum of singular values) of BᵀA, for matrices (L, d_a) and (L, d_b).

    The backward pass is written by hand for two reasons. Where a singular value is 0 the norm has many subgradients; an SVD
    would take an arbitrary one and pull a dead feature anywhere, while this takes the one of least norm, UVᵀ over the other
    singular values. And with fewer examples than features, the singular values are those of a smaller matrix.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        left, of_a = _compress_columns(a)
        right, of_b = _compress_columns(b)
        # In float64: near the optimum the norm is 1 up to squares of what is left.
        product = (right.T @ left).double()
        if not bool(product.isfinite().all()):  # an SVD would raise; a NaN loss shows that training diverged
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
    """Factors a wide A, (L, d), into C, (L, L), and Qᵀ, with orthonormal columns of Q, (d, L).

    Returns (A, None) if A has no more features than examples.
    """
    if a.shape[1] <= len(a):
        return a, None
    q, r = torch.linalg.qr(a.T)
    return r.T, q
