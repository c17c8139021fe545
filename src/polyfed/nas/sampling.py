"""Chooses the operations of cells at random by straight-through Gumbel-softmax, and defines samplers, which compute the
probabilities (FedPNAS, eq. 2 and section 3.3).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Gradient = Literal["chosen", "full"]
_SIZE = 8  # height and width to which a context-aware sampler shrinks its inputs


@final
@dataclass(frozen=True)
class OperationChoice:
    """Holds the operation chosen on each edge of a cell, either one for the whole batch or one for each example.

    Attributes:
        indices: the k with Z[k] = 1, int64, (edges,) or (batch, edges).
        scale: Z[k] itself in the same shape, which is 1 and has the gradient of eq. 2; None if no gradient is needed.
        one_hot: all of Z with the gradient of eq. 2, (edges, operations) or (batch, edges, operations), for which every
            operation has to be evaluated; None if the gradient of Z[k] is enough.
    """

    indices: Tensor
    scale: Tensor | None = None
    one_hot: Tensor | None = None


def gumbel_noise_like(like: Tensor) -> Tensor:
    """Returns independent Gumbel(0, 1) noise in the shape of `like`, drawn from torch's default generator.

    >>> gumbel_noise_like(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    return torch.empty_like(like).exponential_().log_().neg_()


def sample_operations(logits: Tensor, temperature: float, gradient: Gradient = "chosen") -> OperationChoice:
    """Draws an operation per edge by softmax(logits), with gradients (Gumbel-softmax, eq. 2).

    Z[k] = 1 for k = argmax_t (g_t + log π_t), and ∇Z[k] is the gradient of softmax((g + log π)/τ)[k].

    Args:
        logits: log π up to a constant, (..., operations).
        temperature: τ > 0.
        gradient: "chosen" has ∇Z[k] for the chosen k only: the other operations are not computed, so that their ∂L/∂Z[k] is
            unknown (as in DSNAS). "full" has it for every k (eq. 2 as printed).

    >>> choice = sample_operations(torch.tensor([[0.0, 50.0], [50.0, 0.0]]), temperature=1.0)
    >>> choice.indices, choice.scale
    (tensor([1, 0]), tensor([1., 1.]))
    """
    perturbed = logits + gumbel_noise_like(logits)
    index = perturbed.detach().argmax(-1)
    soft = F.softmax(perturbed / temperature, -1)
    if gradient == "full":
        return OperationChoice(index, one_hot=F.one_hot(index, soft.shape[-1]) + (soft - soft.detach()))
    soft = soft.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return OperationChoice(index, 1 + (soft - soft.detach()))


def most_probable_operations(logits: Tensor, noise: Tensor | None = None) -> OperationChoice:
    """Returns the choice, on each edge, of the operation with the largest logit.

    With Gumbel `noise`, (edges, operations), the choice is a sample, and a fixed function of the logits for the same
    noise.

    >>> most_probable_operations(torch.tensor([[0.0, 1.0]])).indices
    tensor([1])
    """
    return OperationChoice((logits if noise is None else logits + noise).argmax(-1))


class OperationSampler(nn.Module, ABC):
    """Computes the logits of a cell's operations, shape (edges, operations), with which operations are drawn."""

    edges: int
    operations: int

    @abstractmethod
    def forward(self, image: Tensor, previous: Tensor) -> Tensor:
        """Returns logits, (edges, operations), or (batch, edges, operations) by example.

        Args:
            image: the network's input x, (batch, channels, height, width), or its `pool_to_8x8`, computed once for all
                cells.
            previous: the cell's input v_1, (batch, channels', height', width').
        """


@final
class ContextFreeSampler(OperationSampler):
    """Holds the logits of a cell's operations as learnable parameters; at first all operations are equally probable.

    The logits are log Π of eq. 2.
    """

    def __init__(self, edges: int, operations: int) -> None:
        super().__init__()
        self.edges, self.operations = edges, operations
        self.logits = nn.Parameter(torch.zeros(edges, operations))

    def forward(self, image: Tensor, previous: Tensor) -> Tensor:
        """Returns the logits of the operations, shape (edges, operations), the same for all examples."""
        return self.logits


@final
class ContextAwareSampler(OperationSampler):
    """Computes operations' logits for each example, φ(v_1, x) of section 3.3.

    Both are shrunk to 8 × 8 and go through two convolutions each; one linear layer gives the logits. This layer starts at
    zero: at first all operations are equally probable. (The paper says only that φ is "a deep classification network".)
    """

    def __init__(self, edges: int, operations: int, image_channels: int, channels: int, width: int = 16) -> None:
        super().__init__()
        self.edges, self.operations = edges, operations
        self.image, self.previous = _build_image_encoder(image_channels, width), _build_image_encoder(channels, width)
        self.logits = nn.Linear(2 * width * (_SIZE // 4) ** 2, edges * operations)
        nn.init.zeros_(self.logits.weight)
        nn.init.zeros_(self.logits.bias)

    def forward(self, image: Tensor, previous: Tensor) -> Tensor:
        """Returns the logits of the operations for each example, shape (batch, edges, operations)."""
        features = torch.cat([self.image(image), self.previous(previous)], 1)
        logits: Tensor = self.logits(features)
        return logits.view(-1, self.edges, self.operations)


def pool_to_8x8(x: Tensor) -> Tensor:
    """Returns images averaged over a grid of 8 × 8 fields, by matrix products, which have a fast gradient.

    The result is that of `F.adaptive_avg_pool2d`.

    >>> pool_to_8x8(torch.arange(256.0).view(1, 1, 16, 16))[0, 0, 0, :3]
    tensor([ 8.5000, 10.5000, 12.5000])
    """
    batch, channels, height, width = x.shape
    if (height, width) == (_SIZE, _SIZE):
        return x
    rows = _pooling_matrix(height, x.device, x.dtype) @ x.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
    fields = _pooling_matrix(width, x.device, x.dtype) @ rows.reshape(batch * _SIZE, width, channels)
    return fields.view(batch, _SIZE, _SIZE, channels).permute(0, 3, 1, 2)


@lru_cache
def _pooling_matrix(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the matrix (8, size) that averages pixels over 8 fields, a row for each.

    It is cached on its device, since a copy at each step would block.
    """
    with torch.inference_mode(False):  # the cached matrix is used in training, too
        shares = torch.zeros(_SIZE, size, dtype=torch.float64)
        for k in range(_SIZE):
            first, end = k * size // _SIZE, -(-(k + 1) * size // _SIZE)
            shares[k, first:end] = 1 / (end - first)
        return shares.to(device, dtype)


@final
class _Shrink(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Returns the images averaged to 8 × 8 pixels by `pool_to_8x8`."""
        return pool_to_8x8(x)


def _build_image_encoder(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        _Shrink(),
        nn.Conv2d(channels, width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
    )
