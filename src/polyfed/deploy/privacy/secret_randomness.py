"""Draws the samples and the noise of private training from a secret of the site, which no server can know."""

from typing import final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.training.privacy.randomness import PrivateRandomness
from polyfed.deploy.privacy.gaussian_mechanism import GaussianNoise


@final
class SecretRandomness(PrivateRandomness):
    """Draws from ChaCha20, as the site's own noise does.

    Args:
        key: 32 secret bytes; None takes them from the operating system.

    >>> sample = SecretRandomness(bytes(32)).draw_sample(1000, 0.3)
    >>> 250 < len(sample) < 350
    True
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._noise = GaussianNoise(key)

    def draw_sample(self, num_units: int, sampling_rate: float) -> Tensor:
        """Draws each unit with the probability `sampling_rate`, from uniform numbers of 53 bits."""
        uniform = (self._noise.draw_uniform_uint64(num_units) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(np.flatnonzero(uniform < sampling_rate))

    def add_noise(self, total: Tensor, deviation: float) -> Tensor:
        """Returns `total` plus noise, rounded to a grid, so that the last bits do not give `total` away."""
        return self._noise.add_to(total.detach().cpu().double(), deviation).to(total)
