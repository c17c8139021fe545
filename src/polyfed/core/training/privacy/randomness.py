"""Supplies differentially private training with its secret random numbers: which units a step takes, and the noise."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class PrivateSteps:
    """Describes the optimiser steps of one private training, from which its privacy loss follows.

    Args:
        unit: what is protected, "example" or "group".
        sampling_rate: q, the probability with which a step takes a unit.
        noise_multiplier: σ, the noise's standard deviation over the largest norm of a unit's gradient.
        number: number of steps.
    """

    unit: str
    sampling_rate: float
    noise_multiplier: float
    number: int


class PrivateRandomness(ABC):
    """Draws the samples and the noise of one private training."""

    @abstractmethod
    def draw_sample(self, num_units: int, sampling_rate: float) -> Tensor:
        """Draws each unit of one step with the probability `sampling_rate`; returns numbers, int64, (drawn,)."""

    @abstractmethod
    def add_noise(self, total: Tensor, deviation: float) -> Tensor:
        """Returns `total` plus Gaussian noise of this standard deviation, of the shape, type and device of `total`."""


@final
class SeededRandomness(PrivateRandomness):
    """Draws from a generator with a known seed, for simulations: who knows the seed can take the noise off."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def draw_sample(self, num_units: int, sampling_rate: float) -> Tensor:
        """Draws each unit of one step with the probability `sampling_rate`; returns numbers, int64, (drawn,)."""
        return (torch.rand(num_units, generator=self._generator) < sampling_rate).nonzero().flatten()

    def add_noise(self, total: Tensor, deviation: float) -> Tensor:
        """Returns `total` plus noise of torch's generator."""
        return torch.randn(total.shape, generator=self._generator).to(total).mul_(deviation).add_(total)


RandomnessSource = Callable[[PrivateSteps], PrivateRandomness]
"""Supplies the randomness of one private training, before its first step; raises an error if the training may not begin."""

_SOURCE: ContextVar[RandomnessSource | None] = ContextVar("source of private training's randomness", default=None)


@contextmanager
def use_randomness_source(source: RandomnessSource) -> Iterator[None]:
    """Lets every private training within a `with` block get its randomness from `source`, in place of the run's seed.

    A real site does so, since the server knows the seed.
    """
    token = _SOURCE.set(source)
    try:
        yield
    finally:
        _SOURCE.reset(token)


def begin_private_training(steps: PrivateSteps, generator: torch.Generator) -> PrivateRandomness:
    """Returns the randomness of a new private training, from `use_randomness_source` or else `generator`."""
    source = _SOURCE.get()
    return SeededRandomness(generator) if source is None else source(steps)
