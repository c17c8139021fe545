"""Centred kernel alignment (CKA) of two representations of the same examples (Kornblith et al. 2019; FedHeNN, Makhija et al.
2022, section 3.4).

A representation is a matrix A, shape (L, d): row l is what a network makes of example l. Its kernel matrix K, shape (L, L),
says how alike any two examples are to that network. CKA compares kernels, so the two widths d may differ, and it does not
see rotations, the order of neurons, or scale. All functions are differentiable in their first argument and in the second.

Constant representations have no centred kernel; their CKA is 0, with gradient 0, and so is that of representations which
are constant up to rounding.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyfed.errors import UserError

_BLOCK = 1024
"""Rows of an RBF kernel that are in memory at one time."""

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
    _check_rows(k, m)
    one, other = _double_centred(k), _double_centred(m)
    return _cosine(_unit(one, k), _unit(other, m))


def linear_cka(a: Tensor, b: Tensor) -> Tensor:
    """CKA with linear kernels of two representations, ‖B̃ᵀÃ‖²_F/(‖ÃᵀÃ‖_F·‖B̃ᵀB̃‖_F) (eq. 4), the columns of Ã = HA and B̃ = HB
    having mean 0; a scalar from 0 to 1.

    Computed in feature space, in O(L·d_a·d_b), without any matrix of shape (L, L). Only of fewer examples than features
    (L < d_a·d_b/(d_a + d_b); for a norm, L < d) is the kernel itself taken, which then is the smaller matrix.

    Args:
        a, b: representations of the same L ≥ 2 examples, shapes (L, d_a) and (L, d_b).

    Raises:
        UserError: they are not of the same examples, or of fewer than 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> linear_cka(a, torch.ones(3, 5)).item(), round(linear_cka(a, a[:, :1]).item(), 4)
    (0.0, 0.7906)
    """
    _check_rows(a, b)
    # CKA does not depend on scale: with norm 1 no product over- or underflows. The norm is a constant to the gradient, whose
    # part through it is 0.
    one, other = _unit(_centred(a), a), _unit(_centred(b), b)
    if len(a) * (a.shape[1] + b.shape[1]) < a.shape[1] * b.shape[1]:
        return _cosine(one @ one.T, other @ other.T)
    return _quotient((other.T @ one).square().sum(), _squared_norm(one), _squared_norm(other))


def rbf_cka(a: Tensor, target: Tensor, sigma: float = 0.5, block: int = _BLOCK) -> Tensor:
    """CKA of a representation's RBF kernel with a given kernel matrix, a block of rows at a time: what
    `cka(rbf_kernel(a), target)` is, in the memory of `block` × L numbers beside the target. A scalar from 0 to 1.

    Args:
        a: representation, shape (L, d), L ≥ 2.
        target: kernel matrix of the same examples, shape (L, L), symmetric.
        sigma: as in `rbf_kernel`.
        block: rows at a time.

    Raises:
        UserError: they are not of the same examples, or of fewer than 2.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> round(rbf_cka(a, rbf_kernel(a)).item(), 6)
    1.0
    """
    _check_rows(a, target)
    centred, wanted = _centred(a), _double_centred(target)
    wanted = _unit(wanted, target)
    if not bool(spread(centred, a)):
        return (a * 0).sum()
    s_squared, number = _width(centred, sigma), len(a)

    def sums(rows: Tensor, everyone: Tensor, s2: Tensor, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # K − 1 has the same centred kernel as K, and of a wide kernel the digits in which it differs from 1.
        kernel = torch.expm1(-_squared_distances(rows, everyone) / (2 * s2))
        inner, squares = (kernel * part).sum(dtype=torch.float64), kernel.square().sum(dtype=torch.float64)
        return inner, squares, kernel.sum(1, dtype=torch.float64)

    parts = []
    for start in range(0, number, block):
        given = centred[start : start + block], centred, s_squared, wanted[start : start + block]
        whole = number <= block
        parts.append(sums(*given) if whole else checkpoint(sums, *given, use_reentrant=False, preserve_rng_state=False))
    # ⟨HKH, M̃⟩ = ⟨K, M̃⟩, M̃ being centred; ‖HKH‖² = ΣK² − 2/L Σr² + (Σr)²/L², r being the sums of K's rows.
    inner, squares = (torch.stack([part[i] for part in parts]).sum() for i in (0, 1))
    of_rows = torch.cat([part[2] for part in parts])
    own = squares - 2 / number * of_rows.square().sum() + of_rows.sum().square() / number**2
    return _quotient(inner, own.clamp(min=0), wanted.square().sum(dtype=torch.float64)).to(a.dtype)


def _quotient(inner: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """inner/√(one·other); 0, with gradient 0, where a norm is 0."""
    norm = one * other
    defined = norm > 0
    value = inner / torch.where(defined, norm, torch.ones_like(norm)).sqrt()
    return torch.where(defined, value, inner * 0)


def _cosine(k: Tensor, m: Tensor) -> Tensor:
    return _quotient((k * m).sum(), k.square().sum(), m.square().sum())


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
    size = torch.linalg.vector_norm(raw.detach())
    norm = torch.linalg.vector_norm(centred.detach())
    return torch.where(norm > 16 * torch.finfo(raw.dtype).eps * size, norm, torch.zeros_like(norm))


def _unit(centred: Tensor, raw: Tensor) -> Tensor:
    """The centred matrix with norm 1; 0 if it is constant."""
    norm = spread(centred, raw)
    return centred * torch.where(norm > 0, 1 / norm.clamp(min=torch.finfo(raw.dtype).tiny), torch.zeros_like(norm))


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


def _check_rows(a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or len(a) != len(b):
        raise UserError(
            f"CKA compares representations of the same examples, one row each, got shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    if len(a) < 2:
        raise UserError(f"CKA needs at least 2 examples, got {len(a)}")
