"""Compares several networks by their representations of the same examples, with CKA for each pair of networks."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ROWS = 256
"""Most examples that are compared; if there are more, evenly spaced ones are taken."""


def pairwise_cka(representations: Sequence[Tensor]) -> Tensor:
    """Returns the linear CKA of each pair of N representations of the same examples: shape (N, N), float64.

    The diagonal is 1 (0 for a constant representation).

    Args:
        representations: shapes (L, d_j); if there are more than 256 examples, 256 evenly spaced ones are compared.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> pairwise_cka([a, 2 * a]).round(decimals=6)
    tensor([[1., 1.],
            [1., 1.]], dtype=torch.float64)
    """
    stacked = torch.stack(list(_unit_kernels(representations)))
    return stacked @ stacked.T


def _unit_kernels(representations: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields each representation's centred linear kernel as a vector of norm 1; 0 if constant."""
    number = len(representations[0])
    places = torch.linspace(0, number - 1, _ROWS).long() if number > _ROWS else torch.arange(number)
    for part in representations:
        a = part[places].double()
        centred = a - a.mean(0)
        size = torch.linalg.vector_norm(centred)
        # A constant leaves rounding errors of the type in which it was computed.
        constant = size <= 16 * torch.finfo(part.dtype).eps * torch.linalg.vector_norm(a)
        centred = torch.zeros_like(a) if bool(constant) else centred / size
        kernel = (centred @ centred.T).flatten()
        norm = torch.linalg.vector_norm(kernel)
        yield kernel / norm if bool(norm > 0) else kernel


def mean_pairwise_cka(representations: Sequence[Tensor]) -> float | None:
    """Returns the mean linear CKA of any two networks' representations; None for fewer than two.

    >>> mean_pairwise_cka([torch.eye(3), 2 * torch.eye(3)])
    1.0
    """
    if len(representations) < 2:
        return None
    # Without the table of all pairs: Σ_ij⟨K_i, K_j⟩ = ‖Σ_i K_i‖².
    total, num_nonconstant = torch.zeros(()), 0
    for kernel in _unit_kernels(representations):
        total, num_nonconstant = total + kernel, num_nonconstant + bool(kernel.any())
    number = len(representations)
    return round(float((total.square().sum() - num_nonconstant) / (number * (number - 1))), 9)
