"""Centred kernel alignment (CKA) of two representations of the same examples (Kornblith et al. 2019; FedHeNN, Makhija et al.
2022, section 3.4).

A representation is a matrix A, shape (L, d): row l is what a network makes of example l. Its kernel matrix K, shape (L, L),
says how alike any two examples are to that network. CKA compares kernels, so the two widths d may differ, and it does not
see rotations, the order of neurons, or scale. All functions are differentiable in their first argument and in the second.

Constant representations have no centred kernel; their CKA is 0, with gradient 0, and so is that of representations which
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

_BLOCK = 256
"""Rows of an RBF kernel that are in memory at one time: of the paper's 5,000 examples, 5 MB for each step of its computation
instead of 95."""

_MEDIAN_ROWS = 1024
"""Examples from which the median distance is taken, evenly spaced, if there are more."""


def linear_kernel(a: Tensor) -> Tensor:
    """K(p, q) = ⟨a_p, a_q⟩, shape (L, L). For checking and drawing: `linear_cka` does not need it.

    >>> linear_kernel(torch.tensor([[1.0], [2.0]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    return a @ a.T


def rbf_kernel(a: Tensor, sigma: float = 0.5) -> Tensor:
    """K(p, q) = exp(−‖a_p − a_q‖²/(2s²)), shape (L, L), s being `sigma` times the median distance between two examples.

    Args:
        a: representation, shape (L, d).
        sigma: s as a fraction of the median distance, above 0. (Of a representation in which more than half of the pairs
            are equal the median is 0; then it is that of the pairs that differ.)

    >>> rbf_kernel(torch.tensor([[0.0], [2.0]]), sigma=1.0)[0, 1].log().item()
    -0.5
    """
    centred = _centred(a)
    return _rbf_rows(centred, centred, _width(centred, sigma))


def hsic(k: Tensor, m: Tensor) -> Tensor:
    """HSIC(K, M) = tr(KHMH)/(L−1)², H = I − 11ᵀ/L, of two kernel matrices, shape (L, L); a scalar.

    >>> k = linear_kernel(torch.tensor([[1.0], [3.0]]))
    >>> hsic(k, k).item()  # the square of the variance
    4.0
    """
    return (_double_centred(k) * _double_centred(m)).sum() / (len(k) - 1) ** 2


def cka(k: Tensor, m: Tensor) -> Tensor:
    """CKA(K, M) = HSIC(K, M)/√(HSIC(K, K)·HSIC(M, M)) of two kernel matrices, shape (L, L); a scalar from 0 to 1.

    Args:
        k, m: kernel matrices of the same L ≥ 2 examples, symmetric.

    Raises:
        UserError: they are not of the same examples, or of fewer than 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(cka(linear_kernel(a), linear_kernel(3 * a.flip(1))).item(), 6)
    1.0
    """
    check_rows(k, m)
    one, other = _double_centred(k), _double_centred(m)
    return _cosine(_unit(one, k), _unit(other, m))


@final
@dataclass(frozen=True)
class CentredFeatures:
    """HB/‖HB‖_F of a representation B, centred and normalised once, to be compared with many others.

    Attributes:
        unit: shape (L, d); 0 if B is constant.

    >>> b = torch.tensor([[1.0], [2.0], [3.0]])
    >>> round(linear_cka(b, CentredFeatures.of(b)).item(), 6)
    1.0
    """

    unit: Tensor

    @classmethod
    def of(cls, b: Tensor) -> "CentredFeatures":
        """Of a representation, shape (L, d)."""
        return cls(_unit(_centred(b), b))

    @cached_property
    def squared_norm(self) -> Tensor:
        """‖BBᵀ‖²_F of the unit form; a scalar."""
        return _squared_norm(self.unit)


@final
@dataclass(frozen=True)
class CentredKernel:
    """HMH/‖HMH‖_F of a kernel matrix M, made a few rows at a time: next to M only L numbers are kept.

    Attributes:
        kernel: M, shape (L, L), symmetric.
        means: of its rows, shape (L,).
        scale: 1/‖HMH‖_F, a constant to the gradient; 0 if M is constant.
        squares: ‖scale·HMH‖²_F, 1 or 0; a scalar.

    >>> m = rbf_kernel(torch.tensor([[1.0], [2.0], [4.0]]))
    >>> bool(CentredKernel.of(m).rows(0, 3).sum(1).abs().max() < 1e-6)
    True
    """

    kernel: Tensor
    means: Tensor
    scale: Tensor
    squares: Tensor

    @classmethod
    def of(cls, kernel: Tensor, block: int = _BLOCK) -> "CentredKernel":
        """Of a kernel matrix, shape (L, L), `block` rows at a time."""
        one, starts = torch.ones((), dtype=kernel.dtype, device=kernel.device), range(0, len(kernel), block)
        plain = cls(kernel, kernel.mean(1), one, one)
        with torch.no_grad():
            norms = torch.stack([torch.linalg.vector_norm(plain.rows(k, k + block)) for k in starts])
            scale = _inverse(_above_rounding(torch.linalg.vector_norm(norms), kernel))
        scaled = cls(kernel, plain.means, scale, (scale > 0).to(torch.float64))
        if not kernel.requires_grad:
            return scaled
        squares = torch.stack([scaled.rows(k, k + block).square().sum(dtype=torch.float64) for k in starts]).sum()
        return cls(kernel, plain.means, scale, squares)

    def rows(self, start: int, stop: int) -> Tensor:
        """Some rows of scale·HMH, shape (stop − start, L); fewer where M ends."""
        means = self.means[start:stop] - self.means.mean()
        return (self.kernel[start:stop] - self.means).sub_(means[:, None]).mul_(self.scale)


def linear_cka(a: Tensor, b: Tensor | CentredFeatures) -> Tensor:
    """CKA with linear kernels of two representations, ‖B̃ᵀÃ‖²_F/(‖ÃᵀÃ‖_F·‖B̃ᵀB̃‖_F) (eq. 4), the columns of Ã = HA and B̃ = HB
    having mean 0; a scalar from 0 to 1.

    Computed in feature space, in O(L·d_a·d_b), without any matrix of shape (L, L). Only of fewer examples than features
    (L < d_a·d_b/(d_a + d_b); for a norm, L < d) is the kernel itself taken, which then is the smaller matrix.

    Args:
        a, b: representations of the same L ≥ 2 examples, shapes (L, d_a) and (L, d_b); b may be centred already.

    Raises:
        UserError: they are not of the same examples, or of fewer than 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> linear_cka(a, torch.ones(3, 5)).item(), round(linear_cka(a, a[:, :1]).item(), 4)
    (0.0, 0.7906)
    """
    check_rows(a, b.unit if isinstance(b, CentredFeatures) else b)
    # CKA does not depend on scale: with norm 1 no product over- or underflows. The norm is a constant to the gradient, whose
    # part through it is 0.
    one, found = _unit(_centred(a), a), b if isinstance(b, CentredFeatures) else CentredFeatures.of(b)
    other = found.unit
    if len(a) * (a.shape[1] + other.shape[1]) < a.shape[1] * other.shape[1]:
        return _cosine(one @ one.T, other @ other.T)
    return quotient((other.T @ one).square().sum(), _squared_norm(one), found.squared_norm)


def rbf_cka(a: Tensor, target: Tensor | CentredKernel, sigma: float = 0.5, block: int = _BLOCK) -> Tensor:
    """CKA of a representation's RBF kernel with a given kernel matrix, a block of rows at a time, in the backward pass too:
    what `cka(rbf_kernel(a), target)` is, in the memory of `block` × L numbers next to the target. A scalar from 0 to 1.

    Args:
        a: representation, shape (L, d), L ≥ 2.
        target: kernel matrix of the same examples, shape (L, L), symmetric; it may be centred already.
        sigma: as in `rbf_kernel`.
        block: rows at a time.

    Raises:
        UserError: they are not of the same examples, or of fewer than 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(rbf_cka(a, rbf_kernel(a)).item(), 6)
    1.0
    """
    check_rows(a, target.kernel if isinstance(target, CentredKernel) else target)
    wanted = target if isinstance(target, CentredKernel) else CentredKernel.of(target, block)
    centred = _centred(a)
    if not bool(spread(centred, a)):
        return (a * 0).sum()
    # Of few examples the squared distances are kept for the backward pass, of many they are found again.
    again = partial(checkpoint, _width, use_reentrant=False, preserve_rng_state=False) if len(a) > block else _width
    given = centred, again(centred, sigma), wanted.kernel, wanted.means.detach(), wanted.scale, block
    inner, own = _RbfSums.apply(*given)  # type: ignore[no-untyped-call]
    return quotient(inner, own.clamp(min=0), wanted.squares).to(a.dtype)


class _RbfSums(torch.autograd.Function):
    """⟨K, s·HMH⟩ and ‖HKH‖²_F, float64, of the RBF kernel K of centred representations and a kernel M.

    By hand, since autograd would keep every block of K, and checkpoints leave small tensors between the blocks, around
    which the heap grows to the size of all blocks together.
    """

    @staticmethod
    def forward(
        ctx: Any, centred: Tensor, s_squared: Tensor, kernel: Tensor, means: Tensor, scale: Tensor, block: int
    ) -> tuple[Tensor, Tensor]:
        number, wanted = len(centred), _fixed(kernel, means, scale)
        inner, squares = centred.new_zeros(2, dtype=torch.float64)
        of_rows = centred.new_empty(number, dtype=torch.float64)
        for start in range(0, number, block):
            rows = slice(start, start + block)
            # K − 1 has the same centred kernel as K, and of a wide kernel the digits in which it differs from 1.
            k = torch.expm1(-_squared_distances(centred[rows], centred) / (2 * s_squared))
            inner += (k * wanted.rows(start, start + block)).sum(dtype=torch.float64)
            squares += k.square().sum(dtype=torch.float64)
            of_rows[rows] = k.sum(1, dtype=torch.float64)
        ctx.save_for_backward(centred, s_squared, kernel, means, scale, of_rows / number)
        ctx.block = block
        # ⟨HKH, M̃⟩ = ⟨K, M̃⟩, M̃ being centred; ‖HKH‖² = ΣK² − 2/L Σr² + (Σr)²/L², r being the sums of K's rows.
        own = squares - 2 / number * of_rows.square().sum() + of_rows.sum().square() / number**2
        return inner, own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_inner: Tensor, of_own: Tensor) -> tuple[Tensor | None, ...]:
        centred, s_squared, kernel, means, scale, own_means = ctx.saved_tensors
        number, block, wanted = len(centred), ctx.block, _fixed(kernel, means, scale)
        of_inner, of_own = of_inner.to(centred.dtype), of_own.to(centred.dtype)
        columns, centre = own_means.to(centred.dtype), own_means.mean()
        to_centred, to_s = torch.empty_like(centred), torch.zeros_like(own_means[0])
        to_kernel = torch.empty_like(kernel) if ctx.needs_input_grad[2] else None
        for start in range(0, number, block):
            rows = slice(start, start + block)
            distances = _squared_distances(centred[rows], centred)
            k = torch.expm1(-distances / (2 * s_squared))
            double = (k - columns).sub_((own_means[rows] - centre).to(centred.dtype)[:, None])  # HKH
            if to_kernel is not None:  # ⟨K, HMH⟩ = ⟨HKH, M⟩
                to_kernel[rows] = double * (of_inner * scale)
            # The gradient to K, times its own to −‖a_p − a_q‖²/(2s²), which is K again.
            slope = wanted.rows(start, start + block).mul_(of_inner).add_(double.mul_(2 * of_own)).mul_(k.add_(1))
            to_s += (slope * distances).sum(dtype=torch.float64)
            slope.masked_fill_(distances == 0, 0).div_(-2 * s_squared)
            # As K and M are symmetric, a row's part as a column is the same once more.
            torch.mul(slope.sum(1, keepdim=True), centred[rows], out=to_centred[rows])
            to_centred[rows].addmm_(slope, centred, alpha=-1).mul_(4)
        return to_centred, (to_s / (2 * s_squared.square())).to(s_squared.dtype), to_kernel, None, None, None


def _fixed(kernel: Tensor, means: Tensor, scale: Tensor) -> CentredKernel:
    return CentredKernel(kernel, means, scale, scale)


def rbf_blocks(a: Tensor, sigma: float = 0.5, block: int = _BLOCK) -> Iterator[tuple[slice, Tensor]]:
    """`rbf_kernel(a, sigma)` by blocks of rows: their places, and the rows, shape (`block`, L), the last maybe fewer.

    >>> [(places.start, rows.shape) for places, rows in rbf_blocks(torch.eye(3), block=2)]
    [(0, torch.Size([2, 3])), (2, torch.Size([1, 3]))]
    """
    centred = _centred(a)
    s_squared = _width(centred, sigma)
    for start in range(0, len(a), block):
        places = slice(start, start + block)
        yield places, _rbf_rows(centred[places], centred, s_squared)


def quotient(inner: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """inner/√(one·other); 0, with gradient 0, where a norm is 0."""
    norm = one * other
    defined = norm > 0
    value = inner / torch.where(defined, norm, torch.ones_like(norm)).sqrt()
    return torch.where(defined, value, inner * 0)


def _cosine(k: Tensor, m: Tensor) -> Tensor:
    return quotient((k * m).sum(), k.square().sum(), m.square().sum())


def _squared_norm(a: Tensor) -> Tensor:
    """‖AAᵀ‖²_F = ‖AᵀA‖²_F, from the smaller of the two."""
    return (a @ a.T if len(a) < a.shape[1] else a.T @ a).square().sum()


def _centred(a: Tensor) -> Tensor:
    """HA."""
    return a - a.mean(0, keepdim=True)


def _double_centred(k: Tensor) -> Tensor:
    """HKH of a symmetric matrix."""
    means = k.mean(1)
    return k - means[:, None] - means[None, :] + means.mean()


def spread(centred: Tensor, raw: Tensor) -> Tensor:
    """‖Ã‖_F, or 0 if that is no more than what rounding leaves of a constant."""
    return _above_rounding(torch.linalg.vector_norm(centred.detach()), raw)


def _above_rounding(norm: Tensor, raw: Tensor) -> Tensor:
    """The norm of a centred matrix, or 0 if rounding alone would leave that much of `raw`."""
    size = torch.linalg.vector_norm(raw.detach())
    return torch.where(norm > 16 * torch.finfo(raw.dtype).eps * size, norm, torch.zeros_like(norm))


def _inverse(norm: Tensor) -> Tensor:
    """1/norm; 0 of 0."""
    return torch.where(norm > 0, 1 / norm.clamp(min=torch.finfo(norm.dtype).tiny), torch.zeros_like(norm))


def _unit(centred: Tensor, raw: Tensor) -> Tensor:
    """The centred matrix with norm 1; 0 if it is constant."""
    return centred * _inverse(spread(centred, raw))


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a_p − b_q‖² for all pairs of rows; a and b have their common mean at 0, which spares digits."""
    sizes = a.square().sum(1)[:, None] + b.square().sum(1)[None, :]
    distances = sizes - 2 * a @ b.T
    equal = distances <= 16 * torch.finfo(a.dtype).eps * sizes  # no more than rounding
    return torch.where(equal, torch.zeros_like(distances), distances)


def _rbf_rows(rows: Tensor, everyone: Tensor, s_squared: Tensor) -> Tensor:
    return torch.exp(-_squared_distances(rows, everyone) / (2 * s_squared))


def _width(centred: Tensor, sigma: float) -> Tensor:
    """s², s = sigma times the median distance. It is part of the function, so that CKA does not depend on scale."""
    if not sigma > 0:
        raise UserError(f"sigma, the fraction of the median distance, must be above 0, got {sigma}")
    number = len(centred)
    if number > _MEDIAN_ROWS:
        places = torch.linspace(0, number - 1, _MEDIAN_ROWS, device=centred.device).long()
        centred = centred[places]
    upper = torch.ones(len(centred), len(centred), dtype=torch.bool, device=centred.device).triu(1)
    distances = _squared_distances(centred, centred)[upper]
    median = distances.median()
    if not bool(median > 0):
        apart = distances[distances > 0]
        median = apart.median() if len(apart) else torch.ones_like(median)
    return sigma**2 * median


def check_rows(a: Tensor, b: Tensor) -> None:
    """Raises a `UserError` unless both have a row for each of the same L ≥ 2 examples."""
    if a.dim() != 2 or b.dim() != 2 or len(a) != len(b):
        raise UserError(
            f"CKA compares representations of the same examples, one row each, got shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    if len(a) < 2:
        raise UserError(f"CKA needs at least 2 examples, got {len(a)}")
