"""Computes the mean kernel matrix K̄ of several clients' representations (FedHeNN, eq. 6), in a form that fits into
memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

import torch
from torch import Tensor

from polyfed.alignment.cka import (
    CentredFeatures,
    CentredKernel,
    linear_cka,
    norm_or_zero_if_only_rounding_error,
    rbf_cka,
    rbf_kernel_blocks,
)
from polyfed.alignment.procrustes import procrustes_distance
from polyfed.core.seeds import torch_generator

Distance = Literal["cka", "procrustes"]
_EXACT_WIDTH = 1024
"""Largest width at which `reduce_to_principal_components` uses the eigenvectors of ÃᵀÃ; above it, a randomised
search."""


@final
@dataclass(frozen=True)
class AlignmentTarget:
    """Holds the mean K̄ of all clients' kernel matrices on a round's public examples, which clients approach.

    Attributes:
        matrix: for a linear kernel, features F with K̄ = FFᵀ, shape (L, width); for an RBF kernel, K̄ itself, shape (L, L).
        sigma: None for a linear kernel; otherwise the RBF kernel's width, see `rbf_kernel`.
        distance_measure: the distance d that `distance` computes; "procrustes" is for linear kernels only.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(AlignmentTarget(a).cka(2 * a, torch.arange(3)).item(), 6)
    1.0
    """

    matrix: Tensor
    sigma: float | None = None
    distance_measure: Distance = "cka"

    def distance(self, representation: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns a client's distance from the mean kernel, a scalar: 1 − CKA, or Procrustes distance.

        Arguments are as in `cka`. The Procrustes distance is that of A_i and F.

        >>> b = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> round(AlignmentTarget(b, distance_measure="procrustes").distance(-2 * b.flip(1)).item(), 5) + 0.0
        0.0
        """
        if self.distance_measure == "cka":
            return 1 - self.cka(representation, rows)
        return procrustes_distance(representation, self._features if rows is None else self.matrix[rows])

    def cka(self, representation: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns a client's CKA with the mean kernel, a scalar, on all public examples or `rows`.

        Args:
            representation: the client's representation of these rows, shape (number, d_i).
            rows: rows of the RAD, int64, shape (number,). None means the whole RAD in its order; then K̄ is centred at the
                first call only, and not copied.
        """
        if self.sigma is None:
            return linear_cka(representation, self._features if rows is None else self.matrix[rows])
        return rbf_cka(representation, self._kernel if rows is None else self.matrix[rows[:, None], rows], self.sigma)

    @cached_property
    def _features(self) -> CentredFeatures:
        return CentredFeatures.from_representation(self.matrix)

    @cached_property
    def _kernel(self) -> CentredKernel:
        return CentredKernel.from_kernel(self.matrix)


def mean_kernel_features(
    representations: Sequence[Tensor], weights: Sequence[float], normalise: bool = False
) -> Tensor:
    """Returns F, (L, Σ_j d_j), whose FFᵀ is the weighted mean K̄ of linear kernels (eq. 6).

    F = [√w_1·A_1, ..., √w_N·A_N], so that FFᵀ = K̄ = Σ_j w_j·A_j·A_jᵀ.

    Args:
        representations: representations A_j of the same L examples, shapes (L, d_j).
        weights: w_j ≥ 0.
        normalise: divides each A_j by ‖HA_j‖_F, so that none dominates by the scale of its features.

    >>> a, b = torch.tensor([[-1.0], [1.0]]), torch.tensor([[2.0, 0.0], [-2.0, 0.0]])
    >>> f = mean_kernel_features([a, b], [0.5, 0.5])
    >>> torch.allclose(f @ f.T, (a @ a.T + b @ b.T) / 2)
    True
    """
    scaled = []
    for a, weight in zip(representations, weights, strict=True):
        size = norm_or_zero_if_only_rounding_error(a - a.mean(0), a) if normalise else torch.ones(())
        scaled.append(a * (weight**0.5 / float(size) if float(size) > 0 else 0.0))
    return torch.cat(scaled, dim=1)


def triangular_kernel_factor(features: Tensor) -> Tensor:
    """Returns a smaller matrix of the same linear kernel: a triangular G, (L, min(L, D)), with GGᵀ = FFᵀ.

    G is F after a rotation of all its columns together. Up to signs it depends on FFᵀ alone and so reveals no more:
    unlike F, it does not show which column belongs to which client. It comes from a QR decomposition of Fᵀ in float64,
    in O(L·D·min(L, D)).

    >>> f = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    >>> g = triangular_kernel_factor(f)
    >>> g.shape, torch.allclose(g @ g.T, f @ f.T)
    (torch.Size([2, 2]), True)
    """
    factor: Tensor = torch.linalg.qr(features.T.double(), mode="r").R
    signs = torch.where(factor.diagonal() < 0, -1.0, 1.0).to(factor)
    return (factor * signs[:, None]).T.to(features.dtype).contiguous()


def mean_rbf_kernel(representations: Sequence[Tensor], weights: Sequence[float], sigma: float = 0.5) -> Tensor:
    """Returns the weighted mean of RBF kernel matrices, K̄ = Σ_j w_j K_j (eq. 6), shape (L, L).

    It adds a few rows at a time, so that no other (L, L) matrix is in memory.

    Args:
        representations: representations A_j of the same L examples, shapes (L, d_j).
        weights: w_j ≥ 0.
        sigma: width, see `rbf_kernel`; each representation has its own median distance.

    >>> mean_rbf_kernel([torch.tensor([[0.0], [1.0]])] * 2, [0.5, 0.5])[0, 0].item()
    1.0
    """
    total = torch.zeros(len(representations[0]), len(representations[0]))
    for a, weight in zip(representations, weights, strict=True):
        for places, rows in rbf_kernel_blocks(a, sigma):
            total[places].add_(rows, alpha=weight)
    return total


def reduce_to_principal_components(representation: Tensor, rank: int) -> Tensor:
    """Returns a representation reduced to its first `rank` principal components.

    Among representations of this rank, its centred linear kernel is nearest to that of `representation`.

    Returns shape (L, rank), or fewer columns if `representation` has fewer. For a wide representation it uses a
    randomised search in O(L·d·rank), always with the same random numbers (Halko, Martinsson and Tropp 2011, algorithm 4.4).

    Args:
        representation: shape (L, d).
        rank: number of columns to keep, at least 1.

    >>> a = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    >>> b = reduce_to_principal_components(a, 1)
    >>> b.shape, torch.allclose(b @ b.T, (a - 2) @ (a - 2).T, atol=1e-5)
    (torch.Size([3, 1]), True)
    """
    centred = representation - representation.mean(0)
    if representation.shape[1] <= rank:
        return centred
    if representation.shape[1] <= _EXACT_WIDTH:
        _, vectors = torch.linalg.eigh((centred.T @ centred).double())
        leading: Tensor = centred @ vectors[:, -rank:].flip(1).to(representation.dtype)
        return leading
    start = torch.randn(representation.shape[1], rank + 16, generator=torch_generator(0), dtype=representation.dtype)
    basis = torch.linalg.qr(centred @ start.to(representation.device)).Q
    for _ in range(2):
        basis = torch.linalg.qr(centred @ (centred.T @ basis)).Q
    small = basis.T @ centred
    _, vectors = torch.linalg.eigh((small @ small.T).double())
    turn = vectors[:, -rank:].flip(1).to(representation.dtype)
    components: Tensor = basis @ (turn * torch.linalg.vector_norm(turn.T @ small, dim=1))
    return components
