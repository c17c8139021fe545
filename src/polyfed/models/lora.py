"""Adds low-rank adapters (LoRA) to a network: few parameters are trained beside frozen layers (Hu et al., ICLR 2022)."""

import fnmatch
import math
from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.number_checks import is_whole_number


@final
class LoRALinear(nn.Module):
    """Computes W₀x + b + (α/r)·BAx with a frozen linear layer W₀, b and trained factors A, shape (r, inputs), and B, shape
    (outputs, r).

    Names and form are those of `peft`. A is drawn as the weights of a linear layer, and B is zero, so that the layer begins
    with the outputs of the frozen one.

    Args:
        base_layer: the linear layer, which is frozen in place.
        rank: r ≥ 1.
        alpha: α, of the scale α/r.
    """

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        to = {"device": base_layer.weight.device, "dtype": base_layer.weight.dtype}
        first = nn.Linear(base_layer.in_features, rank, bias=False, **to)
        second = nn.Linear(rank, base_layer.out_features, bias=False, **to)
        nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
        nn.init.zeros_(second.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": first}), nn.ModuleDict({"default": second})
        self.scaling = {"default": alpha / rank}

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's outputs, shape (..., outputs), for inputs of shape (..., inputs)."""
        update: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        outputs: Tensor = self.base_layer(x) + self.scaling["default"] * update
        return outputs

    def extra_repr(self) -> str:
        """Returns the adapter's scale for printing, which is part of the architecture."""
        return f"scale={self.scaling['default']:g}"


def add_lora(
    network: nn.Module, rank: int, *, alpha: float = 16.0, layers: Sequence[str] = ("*",), train: Sequence[str] = ()
) -> nn.Module:
    """Puts low-rank adapters into the linear layers of a network and freezes all else; changes the network in place and
    returns it.

    Args:
        network: it may be pretrained. Layers of other types than `nn.Linear` are left alone.
        rank: r of each adapter.
        alpha: α of the scale α/r of each adapter (16, authors' code of FedSA-LoRA, with rank 8).
        layers: patterns of the names of the layers that get adapters, such as "*.query".
        train: patterns of the names of parameters that are trained as before, such as "classifier.*".

    Raises:
        UserError: a rank that is not a positive whole number, a scale that is not positive, or a pattern that fits nothing.

    >>> network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> network = add_lora(network, rank=2, layers=["0"], train=["2.*"])
    >>> [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    ['0.lora_A.default.weight', '0.lora_B.default.weight', '2.weight', '2.bias']
    """
    if not is_whole_number(rank, 1):
        raise UserError(f"add_lora: rank must be a whole number from 1, got {rank!r}")
    if not 0 < alpha < math.inf:
        raise UserError(f"add_lora: alpha must be above 0, got {alpha!r}")
    trained = _names_like("train", train, [name for name, _ in network.named_parameters()])
    whole = [parameter for name, parameter in network.named_parameters() if name in trained]
    linear = {name: part for name, part in network.named_modules() if type(part) is nn.Linear}
    adapted = _names_like("layers", layers, list(linear)) - {name.rpartition(".")[0] for name in trained}
    if not adapted:
        raise UserError(
            f"add_lora: no linear layer is named like {list(layers)} besides those that are trained as a whole "
            f"(train={list(train)}); the network's linear layers are {list(linear)}"
        )
    network.requires_grad_(False)
    for name in sorted(adapted):
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, LoRALinear(linear[name], rank, alpha))
    for parameter in whole:
        parameter.requires_grad_(True)
    return network


def _names_like(argument: str, patterns: Sequence[str], names: list[str]) -> set[str]:
    """Returns the names that fit one of the patterns; raises a `UserError` if a pattern fits none."""
    if isinstance(patterns, str):
        raise UserError(f"add_lora: {argument} must be a list of patterns, got {patterns!r}; write [{patterns!r}]")
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"add_lora: {argument} has {pattern!r}, and nothing is named so; {did_you_mean(pattern, names)}"
            )
    return {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
