"""Computes centred kernel alignment (CKA), a similarity of two representations of the same examples (Kornblith et al.
2019; FedHeNN, Makhija et al. 2022, section 3.4).

A representation is a matrix A, shape (L, d), whose row l is the network's representation of example l. Its kernel matrix K,
shape (L, L), has the similarities of all pairs of examples. CKA compares kernels, so the two widths d may differ, and it is
invariant to rotations, the order of neurons, and scale. All functions are differentiable in both arguments.

Constant representations have no centred kernel; their CKA is 0, with gradient 0, and so is the CKA of representations that
are constant up to rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from polyfed.core.errors import UserError

_BLOCK = 256  # rows of an RBF kernel in memory at one time: 5 MB instead of 95 a step for the paper's 5,000 examples
_MEDIAN_ROWS = 1024  # examples from which the median distance is computed at most; of more, evenly spaced ones


def rbf_kernel(a: Tensor, sigma: float = 0.5) -> Tensor:
    """Returns the RBF kernel matrix, (L, L): a similarity from 0 to 1 for each pair of examples.

    K(p, q) = exp(−‖a_p − a_q‖²/(2s²)), where s is `sigma` times the median distance.

    Args:
        a: representation, shape (L, d).
        sigma: s as a fraction of the median distance between two examples, above 0. (If more than half of the pairs are
            equal, the median is taken over the pairs that differ.)

    >>> rbf_kernel(torch.tensor([[0.0], [2.0]]), sigma=1.0)[0, 1].log().item()
    -0.5
    """
    centred = _centre_columns(a)
    return _rbf_kernel_rows(centred, centred, _squared_bandwidth(centred, sigma))


def cka(k: Tensor, m: Tensor) -> Tensor:
    """Returns the similarity of two kernel matrices by centred kernel alignment (CKA), from 0 to 1.

    CKA(K, M) = HSIC(K, M)/√(HSIC(K, K)·HSIC(M, M)), where HSIC(K, M) = tr(KHMH)/(L−1)² and H = I − 11ᵀ/L.

    Args:
        k, m: symmetric kernel matrices of the same L ≥ 2 examples, such as `a @ a.T` of a representation.

    Raises:
        UserError: the numbers of examples differ, or are below 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(cka(a @ a.T, 9 * a @ a.T).item(), 6)
    1.0
    """
    check_same_number_of_examples(k, m)
    centred_k, centred_m = _double_centre(k), _double_centre(m)
    return _matrix_cosine(_divide_by_norm(centred_k, k), _divide_by_norm(centred_m, m))


@final
@dataclass(frozen=True)
class CentredFeatures:
    """Holds a representation B that is centred and normalised once, HB/‖HB‖_F, for comparison with many others.

    Attributes:
        normalised_features: shape (L, d); 0 if B is constant.

    >>> b = torch.tensor([[1.0], [2.0], [3.0]])
    >>> round(linear_cka(b, CentredFeatures.from_representation(b)).item(), 6)
    1.0
    """

    normalised_features: Tensor

    @classmethod
    def from_representation(cls, b: Tensor) -> "CentredFeatures":
        """Builds the centred and normalised form of a representation of shape (L, d)."""
        return cls(_divide_by_norm(_centre_columns(b), b))

    @cached_property
    def squared_kernel_norm(self) -> Tensor:
        """Returns the squared Frobenius norm of the linear kernel of these features, ‖B̂B̂ᵀ‖²_F, a scalar."""
        return _squared_kernel_norm(self.normalised_features)


@final
@dataclass(frozen=True)
class CentredKernel:
    """Holds a kernel matrix M for use in centred and normalised form, HMH/‖HMH‖_F; besides M it stores only L numbers.

    Attributes:
        kernel: M, shape (L, L), symmetric.
        row_means: means of M's rows, shape (L,).
        inverse_norm: 1/‖HMH‖_F, without gradient; 0 if M is constant.
        squared_norm: ‖inverse_norm·HMH‖²_F, 1 or 0; a scalar.

    >>> m = rbf_kernel(torch.tensor([[1.0], [2.0], [4.0]]))
    >>> bool(CentredKernel.from_kernel(m).centred_normalised_rows(0, 3).sum(1).abs().max() < 1e-6)
    True
    """

    kernel: Tensor
    row_means: Tensor
    inverse_norm: Tensor
    squared_norm: Tensor

    @classmethod
    def from_kernel(cls, kernel: Tensor, block: int = _BLOCK) -> "CentredKernel":
        """Prepares a kernel matrix of shape (L, L) by computing its row means and norms, `block` rows at a time."""
        unit_scale, starts = torch.ones((), dtype=kernel.dtype, device=kernel.device), range(0, len(kernel), block)
        unscaled = cls(kernel, kernel.mean(1), unit_scale, unit_scale)
        with torch.no_grad():
            row_blocks = (unscaled.centred_normalised_rows(k, k + block) for k in starts)
            norms = torch.stack([torch.linalg.vector_norm(rows) for rows in row_blocks])
            scale = _inverse_or_zero(_zero_if_rounding(torch.linalg.vector_norm(norms), kernel))
        scaled = cls(kernel, unscaled.row_means, scale, (scale > 0).to(torch.float64))
        if not kernel.requires_grad:
            return scaled
        squares = [scaled.centred_normalised_rows(k, k + block).square().sum(dtype=torch.float64) for k in starts]
        return cls(kernel, unscaled.row_means, scale, torch.stack(squares).sum())

    def centred_normalised_rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to below `stop` of the centred normalised kernel; fewer at its end."""
        means = self.row_means[start:stop] - self.row_means.mean()
        return (self.kernel[start:stop] - self.row_means).sub_(means[:, None]).mul_(self.inverse_norm)


def linear_cka(a: Tensor, b: Tensor | CentredFeatures) -> Tensor:
    """Returns the similarity of two representations by CKA with linear kernels (eq. 4), from 0 to 1.

    It is ‖B̃ᵀÃ‖²_F/(‖ÃᵀÃ‖_F·‖B̃ᵀB̃‖_F). Ã = HA and B̃ = HB have columns of mean 0. The computation is in feature space,
    in O(L·d_a·d_b), without any matrix of shape (L, L). Only with fewer examples than features (L < d_a·d_b/(d_a +
    d_b); for a norm, L < d) does it use the kernel itself, which then is the smaller matrix.

    Args:
        a, b: representations of the same L ≥ 2 examples, shapes (L, d_a) and (L, d_b); b may be centred already.

    Raises:
        UserError: the numbers of examples differ, or are below 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> linear_cka(a, torch.ones(3, 5)).item(), round(linear_cka(a, a[:, :1]).item(), 4)
    (0.0, 0.7906)
    """
    check_same_number_of_examples(a, b.normalised_features if isinstance(b, CentredFeatures) else b)
    # CKA does not depend on scale: with norm 1 no product over- or underflows. The norm is detached, since the gradient
    # through it is 0.
    features_a, centred_b = (
        _divide_by_norm(_centre_columns(a), a),
        b if isinstance(b, CentredFeatures) else CentredFeatures.from_representation(b),
    )
    features_b = centred_b.normalised_features
    if len(a) * (a.shape[1] + features_b.shape[1]) < a.shape[1] * features_b.shape[1]:
        return _matrix_cosine(features_a @ features_a.T, features_b @ features_b.T)
    return cosine_or_zero_from_norms(
        (features_b.T @ features_a).square().sum(), _squared_kernel_norm(features_a), centred_b.squared_kernel_norm
    )


def rbf_cka(a: Tensor, target: Tensor | CentredKernel, sigma: float = 0.5, block: int = _BLOCK) -> Tensor:
    """Returns the similarity (CKA) of a representation's RBF kernel and a kernel matrix, from 0 to 1.

    The value is that of `cka(rbf_kernel(a), target)`, but both passes go through blocks of rows and take only `block` × L
    numbers of memory besides the target.

    Args:
        a: representation, shape (L, d), L ≥ 2.
        target: kernel matrix of the same examples, shape (L, L), symmetric; it may be centred already.
        sigma: width, as in `rbf_kernel`.
        block: number of rows in memory at one time.

    Raises:
        UserError: the numbers of examples differ, or are below 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(rbf_cka(a, rbf_kernel(a)).item(), 6)
    1.0
    """
    check_same_number_of_examples(a, target.kernel if isinstance(target, CentredKernel) else target)
    target_kernel = target if isinstance(target, CentredKernel) else CentredKernel.from_kernel(target, block)
    centred = _centre_columns(a)
    if not bool(norm_or_zero_if_only_rounding_error(centred, a)):
        return (a * 0).sum()
    # For few examples the squared distances are kept for the backward pass; for many they are recomputed.
    compute_bandwidth = (
        partial(checkpoint, _squared_bandwidth, use_reentrant=False, preserve_rng_state=False)
        if len(a) > block
        else _squared_bandwidth
    )
    arguments = (
        centred,
        compute_bandwidth(centred, sigma),
        target_kernel.kernel,
        target_kernel.row_means.detach(),
        target_kernel.inverse_norm,
        block,
    )
    inner, squared_norm = _RbfSums.apply(*arguments)  # type: ignore[no-untyped-call]
    return cosine_or_zero_from_norms(inner, squared_norm.clamp(min=0), target_kernel.squared_norm).to(a.dtype)


class _RbfSums(torch.autograd.Function):
    """Computes the two sums from which `rbf_cka` follows, with a backward pass that goes through blocks of rows.

    They are ⟨K, s·HMH⟩ and ‖HKH‖²_F in float64, for the RBF kernel K of centred representations and a kernel M. The
    backward pass is written by hand: autograd would keep every block of K, and checkpoints would leave small tensors
    between the blocks, which fragment the heap until it is as large as all blocks together.
    """

    @staticmethod
    def forward(
        ctx: Any, centred: Tensor, s_squared: Tensor, kernel: Tensor, means: Tensor, scale: Tensor, block: int
    ) -> tuple[Tensor, Tensor]:
        number, target_kernel = len(centred), _constant_kernel(kernel, means, scale)
        inner, squares = centred.new_zeros(2, dtype=torch.float64)
        of_rows = centred.new_empty(number, dtype=torch.float64)
        for start in range(0, number, block):
            rows = slice(start, start + block)
            # K − 1 has the same centred kernel as K, and keeps digits where a wide kernel is near 1.
            k = torch.expm1(-_squared_distances(centred[rows], centred) / (2 * s_squared))
            inner += (k * target_kernel.centred_normalised_rows(start, start + block)).sum(dtype=torch.float64)
            squares += k.square().sum(dtype=torch.float64)
            of_rows[rows] = k.sum(1, dtype=torch.float64)
        ctx.save_for_backward(centred, s_squared, kernel, means, scale, of_rows / number)
        ctx.block = block
        # ⟨HKH, M̃⟩ = ⟨K, M̃⟩, M̃ being centred; ‖HKH‖² = ΣK² − 2/L Σr² + (Σr)²/L², r being the sums of K's rows.
        squared_norm = squares - 2 / number * of_rows.square().sum() + of_rows.sum().square() / number**2
        return inner, squared_norm

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_inner: Tensor, grad_squared_norm: Tensor) -> tuple[Tensor | None, ...]:
        centred, s_squared, kernel, means, scale, row_means = ctx.saved_tensors
        number, block, target_kernel = len(centred), ctx.block, _constant_kernel(kernel, means, scale)
        grad_inner, grad_squared_norm = grad_inner.to(centred.dtype), grad_squared_norm.to(centred.dtype)
        columns, centre = row_means.to(centred.dtype), row_means.mean()
        to_centred, to_s = torch.empty_like(centred), torch.zeros_like(row_means[0])
        to_kernel = torch.empty_like(kernel) if ctx.needs_input_grad[2] else None
        for start in range(0, number, block):
            rows = slice(start, start + block)
            distances = _squared_distances(centred[rows], centred)
            k = torch.expm1(-distances / (2 * s_squared))
            double = (k - columns).sub_((row_means[rows] - centre).to(centred.dtype)[:, None])  # HKH
            if to_kernel is not None:  # ⟨K, HMH⟩ = ⟨HKH, M⟩
                to_kernel[rows] = double * (grad_inner * scale)
            # The gradient with respect to K, times the derivative of K by −‖a_p − a_q‖²/(2s²), which is K again.
            slope = (
                target_kernel.centred_normalised_rows(start, start + block)
                .mul_(grad_inner)
                .add_(double.mul_(2 * grad_squared_norm))
                .mul_(k.add_(1))
            )
            to_s += (slope * distances).sum(dtype=torch.float64)
            slope.masked_fill_(distances == 0, 0).div_(-2 * s_squared)
            # K and M are symmetric, so that an example's column contributes the same as its row.
            torch.mul(slope.sum(1, keepdim=True), centred[rows], out=to_centred[rows])
            to_centred[rows].addmm_(slope, centred, alpha=-1).mul_(4)
        return to_centred, (to_s / (2 * s_squared.square())).to(s_squared.dtype), to_kernel, None, None, None


def _constant_kernel(kernel: Tensor, means: Tensor, scale: Tensor) -> CentredKernel:
    return CentredKernel(kernel, means, scale, scale)


def rbf_kernel_blocks(a: Tensor, sigma: float = 0.5, block: int = _BLOCK) -> Iterator[tuple[slice, Tensor]]:
    """Yields (slice of rows, block of at most `block` rows and L columns) of `rbf_kernel`'s matrix.

    >>> [(places.start, rows.shape) for places, rows in rbf_kernel_blocks(torch.eye(3), block=2)]
    [(0, torch.Size([2, 3])), (2, torch.Size([1, 3]))]
    """
    centred = _centre_columns(a)
    s_squared = _squared_bandwidth(centred, sigma)
    for start in range(0, len(a), block):
        places = slice(start, start + block)
        yield places, _rbf_kernel_rows(centred[places], centred, s_squared)


def cosine_or_zero_from_norms(inner: Tensor, squared_norm_a: Tensor, squared_norm_b: Tensor) -> Tensor:
    """Returns two matrices' cosine from inner product and squared norms; 0 with gradient 0 for norm 0."""
    norm = squared_norm_a * squared_norm_b
    defined = norm > 0
    value = inner / torch.where(defined, norm, torch.ones_like(norm)).sqrt()
    return torch.where(defined, value, inner * 0)


def _matrix_cosine(k: Tensor, m: Tensor) -> Tensor:
    return cosine_or_zero_from_norms((k * m).sum(), k.square().sum(), m.square().sum())


def _squared_kernel_norm(a: Tensor) -> Tensor:
    """Returns ‖AAᵀ‖²_F = ‖AᵀA‖²_F of a matrix A, computed from the smaller of the two products."""
    return (a @ a.T if len(a) < a.shape[1] else a.T @ a).square().sum()


def _centre_columns(a: Tensor) -> Tensor:
    """Returns a matrix with the mean of each column subtracted, HA."""
    return a - a.mean(0, keepdim=True)


def _double_centre(k: Tensor) -> Tensor:
    """Returns a symmetric matrix K with the means of its rows and columns subtracted, HKH."""
    means = k.mean(1)
    return k - means[:, None] - means[None, :] + means.mean()


def norm_or_zero_if_only_rounding_error(centred: Tensor, raw: Tensor) -> Tensor:
    """Returns the norm of a centred representation; 0 if it is so small that rounding errors alone could cause it."""
    return _zero_if_rounding(torch.linalg.vector_norm(centred.detach()), raw)


def _zero_if_rounding(norm: Tensor, raw: Tensor) -> Tensor:
    """Returns the norm of a centred matrix; 0 if rounding errors of a constant `raw` explain it."""
    size = torch.linalg.vector_norm(raw.detach())
    return torch.where(norm > 16 * torch.finfo(raw.dtype).eps * size, norm, torch.zeros_like(norm))


def _inverse_or_zero(norm: Tensor) -> Tensor:
    """Returns 1/norm, and 0 where the norm is 0."""
    return torch.where(norm > 0, 1 / norm.clamp(min=torch.finfo(norm.dtype).tiny), torch.zeros_like(norm))


def _divide_by_norm(centred: Tensor, raw: Tensor) -> Tensor:
    """Returns the centred matrix divided by its norm; 0 if `raw` is constant."""
    return centred * _inverse_or_zero(norm_or_zero_if_only_rounding_error(centred, raw))


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Returns ‖a_p − b_q‖² of all pairs of rows; the common mean of `a` and `b` must be 0, which saves digits."""
    sizes = a.square().sum(1)[:, None] + b.square().sum(1)[None, :]
    distances = sizes - 2 * a @ b.T
    equal = distances <= 16 * torch.finfo(a.dtype).eps * sizes  # no more than rounding
    return torch.where(equal, torch.zeros_like(distances), distances)


def _rbf_kernel_rows(rows: Tensor, all_rows: Tensor, s_squared: Tensor) -> Tensor:
    return torch.exp(-_squared_distances(rows, all_rows) / (2 * s_squared))


def _squared_bandwidth(centred: Tensor, sigma: float) -> Tensor:
    """Returns s², where the RBF kernel's width s is `sigma` times the median distance between two examples.

    Gradients flow through it, so that CKA does not depend on scale.
    """
    if not sigma > 0:
        raise UserError(f"sigma, the fraction of the median distance, must be above 0, got {sigma}")
    if len(centred) > _MEDIAN_ROWS:
        centred = centred[torch.linspace(0, len(centred) - 1, _MEDIAN_ROWS, device=centred.device).long()]
    upper = torch.ones(len(centred), len(centred), dtype=torch.bool, device=centred.device).triu(1)
    distances = _squared_distances(centred, centred)[upper]
    median = distances.median()
    if not bool(median > 0):
        positive_distances = distances[distances > 0]
        median = positive_distances.median() if len(positive_distances) else torch.ones_like(median)
    return sigma**2 * median


def check_same_number_of_examples(a: Tensor, b: Tensor) -> None:
    """Raises a `UserError` unless `a` and `b` are matrices with the same number of rows, at least 2: one per example."""
    if a.dim() != 2 or b.dim() != 2 or len(a) != len(b):
        raise UserError(
            f"CKA compares representations of the same examples, one row each, got shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    if len(a) < 2:
        raise UserError(f"CKA needs at least 2 examples, got {len(a)}")
