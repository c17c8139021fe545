"""Compares reconstructed images with a client's own."""

import torch
from torch import Tensor

HIGHEST_PSNR = 100.0
"""PSNR of equal images; rounding makes larger values meaningless."""


def best_psnr_per_image(reconstructions: Tensor, images: Tensor, value_range: float) -> Tensor:
    """Returns for each image the peak signal-to-noise ratio, in dB, of the reconstruction that is closest to it.

    Args:
        reconstructions: shape (k, ...).
        images: shape (n, ...), of the same form.
        value_range: difference between the largest and the smallest value that a pixel can have.

    Returns:
        10·log₁₀(range² / mean squared error), at most 100; shape (n,), float64.

    >>> best_psnr_per_image(torch.tensor([[0.0, 0.0], [0.5, 0.9]]), torch.tensor([[0.5, 1.0]]), 1.0).round().tolist()
    [23.0]
    """
    candidates, targets = reconstructions.flatten(1).double(), images.flatten(1).double()
    best = torch.full((len(targets),), torch.inf, dtype=torch.float64)
    for candidate in candidates:
        best = torch.minimum(best, (targets - candidate).square().mean(1))
    least = value_range**2 * 10 ** (-HIGHEST_PSNR / 10)
    return 10 * torch.log10(value_range**2 / best.clamp(min=least))
