"""Conditions representations on a context: a scale and a shift of each number, computed from a vector (Zhang et al. 2023,
GPFL).
"""

from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.state_dict import StateDict


@final
class ScaleAndShift(NamedTuple):
    """Holds the vectors that scale and shift a representation, (width,) each (eq. 3)."""

    scale: Tensor
    shift: Tensor

    def apply(self, z: Tensor) -> Tensor:
        """Returns relu(scale·z + shift) of representations (batch, width)."""
        return (self.scale * z + self.shift).relu()


def condition_of(tensors: StateDict, context: Tensor) -> ScaleAndShift:
    """Returns (1 + γ(c), β(c)) for a context c, (width,): γ and β are a linear layer, ReLU and a layer norm each (eq. 4)."""
    gamma, beta = (
        F.layer_norm(
            F.linear(context.reshape(1, -1), tensors[f"{part}.weight"], tensors[f"{part}.bias"]).relu(),
            tensors[f"{part}.norm.weight"].shape, tensors[f"{part}.norm.weight"], tensors[f"{part}.norm.bias"],
        ).flatten()
        for part in ("gamma", "beta")
    )  # fmt: skip
    return ScaleAndShift(gamma + 1, beta)


def draw_conditioning_tensors(outputs: int, width: int, seed: int) -> dict[str, Tensor]:
    """Returns initial tensors of γ and β, as torch's layers draw them, and embeddings of the classes, (outputs, width)."""
    generator, limit = torch_generator(derive_seed(seed, "conditional")), width**-0.5
    tensors = {"embeddings": torch.randn(outputs, width, generator=generator)}
    for part in ("gamma", "beta"):
        tensors[f"{part}.weight"] = limit * (2 * torch.rand(width, width, generator=generator) - 1)
        tensors[f"{part}.bias"] = limit * (2 * torch.rand(width, generator=generator) - 1)
        tensors |= {f"{part}.norm.weight": torch.ones(width), f"{part}.norm.bias": torch.zeros(width)}
    return tensors
