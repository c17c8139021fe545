"""Computes the gradient of the alignment term once per local epoch, as in FedHeNN's algorithms 1 and 2."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from polyfed.alignment.alignment_term import AlignmentTerm
from polyfed.alignment.representations import representation_batch_size
from polyfed.core.vectorized.deferred_calls import PerClientTerm
from polyfed.core.vectorized.stacked_module import sum_per_client


@final
@dataclass(frozen=True)
class CachedGradientAlignmentTerm:
    """Approximates the alignment term by its gradient at the first step of each local epoch.

    It is called at every step with the network and the client's tensors: those of `term`, the number of steps taken, and g
    for each parameter, which it updates; or with a stack of networks and stacks of these tensors. It returns ⟨g, θ⟩, whose
    gradient is g.

    Attributes:
        term: the term whose gradient is taken.
        steps_per_epoch: number of steps in a local epoch.
        parameter_names: names of the trained parameters.
    """

    term: AlignmentTerm
    steps_per_epoch: int
    parameter_names: tuple[str, ...]

    def __call__(self, network: nn.Module, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the stored gradient times the parameters, shape () or (k,) for a stack of networks.

        The networks of a stack have made equally many steps.
        """
        rows, steps_taken, *gradients = tensors
        by_name = dict(network.named_parameters())
        parameters = [by_name[name] for name in self.parameter_names]
        if int(steps_taken.flatten()[0]) % self.steps_per_epoch == 0:
            value = self.term(network, [rows])
            if value.requires_grad:
                slopes = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
                for gradient, new in zip(gradients, slopes, strict=True):
                    gradient.zero_() if new is None else gradient.copy_(new)
        steps_taken += 1
        products = [
            sum_per_client(network, theta * gradient) for theta, gradient in zip(parameters, gradients, strict=True)
        ]
        return sum(products[1:], products[0])

    @classmethod
    def build_penalty_for_client(
        cls, term: AlignmentTerm, network: nn.Module, steps_per_epoch: int, seed: int
    ) -> PerClientTerm:
        """Returns the penalty for the client with this network, whose local epochs have `steps_per_epoch` steps."""
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        gradients = [torch.zeros_like(p, requires_grad=False) for p in trained.values()]
        tensors = [*term.build_penalty_for_client(seed).tensors, torch.zeros((), dtype=torch.int64), *gradients]
        return PerClientTerm(
            cls(term, steps_per_epoch, tuple(trained)),
            tensors,
            takes_network=True,
            num_rows=representation_batch_size(term.num_rows),
        )
