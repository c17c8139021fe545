"""Applies a network to overlapping windows of large images, and averages its outputs where they overlap."""

from collections.abc import Iterator
from itertools import product
from typing import final

import torch
from torch import Tensor, nn

from polyfed.core.examples.pytree import logits_of


@final
class SlidingWindows(nn.Module):
    """Applies a network to windows of its input, and averages the outputs of windows that overlap.

    Windows lie on a grid, and the last of each direction ends at the image's edge, so that all have the same size; an image
    smaller than a window is one window in that direction.

    Args:
        network: takes (n, channels, ...) and returns (n, K, ...) of the same height and width (and depth).
        window: side of a window in pixels.
        overlap: share of a window that it has in common with the next, from 0 to below 1.

    >>> SlidingWindows(nn.Identity(), window=3, overlap=0.5)(torch.arange(10.0).view(1, 1, 2, 5))[0, 0, 1]
    tensor([5., 6., 7., 8., 9.])
    """

    def __init__(self, network: nn.Module, window: int, overlap: float) -> None:
        super().__init__()
        self.network, self.window, self.step = network, window, max(1, round(window * (1 - overlap)))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the averaged outputs for whole images, shape (n, K, ...)."""
        total: Tensor | None = None
        times = torch.zeros(x.shape[2:], device=x.device)
        for place in self._windows(tuple(x.shape[2:])):
            outputs = logits_of(self.network(x[:, :, *place]))
            if total is None:
                total = outputs.new_zeros(outputs.shape[:2] + x.shape[2:])
            total[:, :, *place] += outputs
            times[place] += 1
        assert total is not None  # every image has a window
        return total / times

    def _windows(self, sides: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
        starts = [
            sorted({*range(0, max(1, side - self.window + 1), self.step), max(0, side - self.window)}) for side in sides
        ]
        for corner in product(*starts):
            yield tuple(slice(start, min(start + self.window, side)) for start, side in zip(corner, sides, strict=True))
