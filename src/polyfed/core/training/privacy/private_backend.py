"""Implements the steps of the training loop `fit` for differentially private training of one network."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.groups import number_units
from polyfed.core.examples.pytree import named_leaves
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.optimizers import Optimizer
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.tasks.task import Loss, Task
from polyfed.core.training.backends import OneNetworkBackend
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.losses import build_loss
from polyfed.core.training.privacy.options import Privacy
from polyfed.core.training.privacy.private_gradients import (
    LayerOutputs,
    sum_clipped_gradients_of_examples,
    sum_clipped_gradients_of_groups,
)
from polyfed.core.training.privacy.randomness import (
    PrivateRandomness,
    PrivateSteps,
    SeededRandomness,
    begin_private_training,
)
from polyfed.core.vectorized.cohort_batches import Minibatch

WITHHELD_LOSS = -math.inf
"""The training loss that private training reports: none, since the loss itself would tell of the examples."""


def number_of_units(examples: Examples, privacy: Privacy) -> int:
    """Returns how many units (examples, or groups of them) training protects."""
    return len(examples) if privacy.unit == "example" else int(number_units(examples).max()) + 1


@final
class PrivateBackend(OneNetworkBackend):
    """Trains one network by DP-SGD (Abadi et al. 2016, algorithm 1).

    Each step takes a Poisson sample of the units, sums their clipped gradients, adds Gaussian noise, and divides by the
    expected number of units.
    """

    def __init__(
        self, model: nn.Module, examples: Examples, client_loss: Loss | None, options: LocalTraining, seed: int
    ) -> None:
        assert options.privacy is not None
        if not options.privacy.run_epochs + options.privacy.run_steps:
            raise UserError(
                "privacy: the noise depends on the steps of the whole run; give privacy.run_epochs or run_steps"
            )
        self.device, self._model, self._examples, self._options = examples.device, model, examples, options
        self._client_loss, self._privacy = client_loss, options.privacy
        units = number_of_units(examples, options.privacy)
        self._rate = options.sampling_rate(units)
        self._noise_multiplier = options.privacy.noise_for(self._rate)
        self._expected_units, self._units = self._rate * units, units
        self._generator = torch_generator(derive_seed(seed, "private training"))
        self._randomness: PrivateRandomness = SeededRandomness(self._generator)
        self._rows_of_units = None if options.privacy.unit == "example" else _rows_by_group(examples)
        self._drawn: list[Tensor] = []
        self._computes_at_once = True
        self._outputs_by_shape: dict[tuple[torch.Size, ...], LayerOutputs] = {}

    def criterion(self, task: Task) -> Loss:
        """Returns the client's loss function (outputs, targets) -> mean loss, if it has one; else that of the task."""
        options = self._options
        return build_loss(self._examples, task, self._client_loss, options.label_smoothing, options.class_weights)

    def iter_minibatches(self, optimizer: Optimizer) -> Iterator[Sequence[Sequence[Minibatch]]]:
        """Yields a Poisson sample of the units for each step; of an empty sample one example, whose gradient is not used."""
        number_of_steps = self._options.steps_of_fit(self._units)
        steps = PrivateSteps(self._privacy.unit, self._rate, self._noise_multiplier, number_of_steps)
        self._randomness = begin_private_training(steps, self._generator)
        for _ in range(number_of_steps):
            sample = self._randomness.draw_sample(self._units, self._rate)
            self._drawn = [unit.unsqueeze(0) for unit in sample] if self._rows_of_units is None else [
                self._rows_of_units[int(unit)] for unit in sample
            ]  # fmt: skip
            rows = torch.cat(self._drawn) if self._drawn else torch.zeros(1, dtype=torch.int64)
            # Texts are not cut to the longest of the minibatch: that would tell each gradient of the other examples.
            x, y = self._examples.batch(rows.to(self.device), self._generator)
            yield [[Minibatch(to_preferred_memory_format(self._model, x), y)]]

    def write_private_gradient(self, batch: Minibatch, criterion: Loss, penalty: Callable[[], Tensor] | None) -> Tensor:
        """Writes the sample's noisy mean gradient plus the penalty's to `grad`; returns a loss of 0.

        A penalty depends on weights and public examples alone, and is neither clipped nor noised.
        """
        trained = [p for p in self._model.parameters() if p.requires_grad]
        sums = self._sum_clipped_gradients(batch, criterion) if self._drawn else [torch.zeros_like(p) for p in trained]
        scale = self._noise_multiplier * self._privacy.max_grad_norm
        for parameter, total in zip(trained, sums, strict=True):
            parameter.grad = self._randomness.add_noise(total, scale).div_(self._expected_units)
        if penalty is not None:
            torch.autograd.backward(penalty())
        return torch.zeros((), device=self.device)

    def _sum_clipped_gradients(self, batch: Minibatch, criterion: Loss) -> list[Tensor]:
        max_norm = self._privacy.max_grad_norm
        if self._rows_of_units is None and self._computes_at_once:
            shape = tuple(part.shape[1:] for _, part in named_leaves(batch.x, "x"))
            try:
                if shape not in self._outputs_by_shape:
                    self._outputs_by_shape[shape] = LayerOutputs.of(self._model, batch.x)
                outputs = self._outputs_by_shape[shape]
                return sum_clipped_gradients_of_examples(self._model, batch.x, batch.y, criterion, max_norm, outputs)
            except (RuntimeError, NotImplementedError, ValueError):  # no rule for a layer; other errors return below
                self._computes_at_once = False
        places = torch.split(torch.arange(len(batch.y), device=self.device), [len(rows) for rows in self._drawn])
        return sum_clipped_gradients_of_groups(self._model, batch.x, batch.y, places, criterion, max_norm)

    def write_direction_to_grad(self, gradient: Any, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Raises a `UserError`: a method's own direction may depend on examples in ways that noise does not cover."""
        raise UserError(f"{type(self._options).__name__}: its own direction of a step cannot be trained privately")

    def record_loss(self, loss: Tensor) -> None:
        """Does nothing, since private training reports no loss."""

    def mean_loss(self) -> float:
        """Returns `WITHHELD_LOSS`."""
        return WITHHELD_LOSS


def _rows_by_group(examples: Examples) -> list[Tensor]:
    """Returns for each group the rows that belong to it."""
    units = number_units(examples)
    return [torch.from_numpy(np.flatnonzero(units == unit)) for unit in range(int(units.max()) + 1)]
