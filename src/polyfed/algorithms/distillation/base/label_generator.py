"""Builds and samples a generator of representations: a small network that makes up, for a class and noise, what a body
might compute for an example of this class (Zhu, Hong and Zhou, ICML 2021).
"""

from functools import partial
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.nn.module_cache import build_module, fill_module
from polyfed.core.state_dict import StateDict


def build_generator(head_weight: Tensor, noise_dim: int, hidden_dim: int, weights: StateDict, seed: int) -> nn.Module:
    """Builds a generator of representations for a linear head, with the given weights, or with weights drawn from a seed.

    It is a linear layer, BatchNorm, ReLU and a linear layer, from (batch, noise + classes) to (batch, width).

    Args:
        head_weight: the weight of the head, (classes, width).
        noise_dim: length of the noise.
        hidden_dim: width of the hidden layer.
        weights: the generator's weights and buffers; empty for new ones.
        seed: of new ones.

    >>> build_generator(torch.zeros(3, 5), 2, 4, {}, 0)(torch.zeros(6, 2 + 3)).shape
    torch.Size([6, 5])
    """
    classes, width = head_weight.shape
    generator = build_module(partial(_build_layers, noise_dim + classes, hidden_dim, width), seed)
    return fill_module(generator, weights or generator.state_dict())


def _build_layers(inputs: int, hidden: int, width: int) -> nn.Module:
    norm = nn.BatchNorm1d(hidden)
    norm.num_batches_tracked = None  # nothing reads this counter
    return nn.Sequential(nn.Linear(inputs, hidden), norm, nn.ReLU(), nn.Linear(hidden, width))


@final
class GeneratorInputs(NamedTuple):
    """Holds classes, (number,), and inputs of a generator for them, (number, noise + classes)."""

    labels: Tensor
    inputs: Tensor


def draw_generator_inputs(shares: Tensor, noise_dim: int, number: int, random: torch.Generator) -> GeneratorInputs:
    """Draws classes by their shares, and inputs of the generator: normal noise, one-hot class.

    >>> inputs = draw_generator_inputs(torch.tensor([0.0, 1.0]), 3, 2, torch.Generator())
    >>> inputs.labels, inputs.inputs[:, 3:]
    (tensor([1, 1]), tensor([[0., 1.],
            [0., 1.]]))
    """
    labels = torch.multinomial(shares, number, replacement=True, generator=random)
    noise = torch.randn(number, noise_dim, generator=random)
    return GeneratorInputs(labels, torch.cat([noise, F.one_hot(labels, len(shares)).to(noise)], 1))


def diversity_loss(noise: Tensor, generated: Tensor) -> Tensor:
    """Returns a loss from 0 to 1 (all generated are equal), as in FedGen's authors' code.

    L_div = exp(−mean over pairs i, j of ‖ε_i − ε_j‖²/k · ‖z_i − z_j‖₁/d), with k and d the lengths of ε and z.

    >>> noise = torch.tensor([[0.0], [1.0]])
    >>> diversity_loss(noise, 0 * noise).item(), round(diversity_loss(noise, 2 * noise).log().item(), 5)
    (1.0, -1.0)
    """
    noise_distances = (noise[:, None] - noise[None]).square().mean(2)
    return torch.exp(-(noise_distances * (generated[:, None] - generated[None]).abs().mean(2)).mean())
