"""Computes each example's gradient of dense and convolutional layers from their inputs and the gradients of their outputs.

The backward pass then leaves these weights out, and a dense layer's gradients need not be stored one by one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
@dataclass(frozen=True)
class OuterProducts:
    """Holds one matrix u_i·v_iᵀ for each example i by its factors: `left` (examples, rows), `right` (examples, columns)."""

    left: Tensor
    right: Tensor

    def norms(self) -> Tensor:
        """Returns the Frobenius norm of each matrix."""
        return _norm_by_example(self.left) * _norm_by_example(self.right)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Returns Σ_i factor_i·u_i·v_iᵀ."""
        return (factors[:, None] * self.left).T @ self.right

    def select(self, examples: Tensor) -> "OuterProducts":
        """Returns the outer products of the given examples only."""
        return OuterProducts(self.left[examples], self.right[examples])


@final
@dataclass(frozen=True)
class StackedGradients:
    """Holds one tensor for each example, stacked, and how their sum gets the parameter's shape."""

    tensors: Tensor
    rearrange: Callable[[Tensor], Tensor] = lambda total: total

    def norms(self) -> Tensor:
        """Returns the Euclidean norm of each tensor."""
        return _norm_by_example(self.tensors)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Returns Σ_i factor_i·tensor_i."""
        return self.rearrange(torch.tensordot(factors, self.tensors, dims=1))

    def select(self, examples: Tensor) -> "StackedGradients":
        """Returns the gradients of the given examples only."""
        return StackedGradients(self.tensors[examples], self.rearrange)


ExampleGradients = OuterProducts | StackedGradients
"""The gradients of one parameter, of each example."""


@final
class TappedLayers:
    """Runs a network so that the inputs of some layers are recorded, and tensors are added to their outputs.

    With zeros added, the loss's gradient at what is added is that of the output. Meanwhile these layers have no weights but
    inside their own `forward`: a network that uses them elsewhere, as tied weights are, fails, and its gradients are never
    computed without that use.

    Args:
        layers: the layers by name.
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self._layers: Mapping[str, Any] = layers

    @contextmanager
    def record(
        self, additions: Mapping[str, Sequence[Tensor]] | None = None
    ) -> Iterator[tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]]:
        """Yields `({layer: inputs}, {layer: outputs})` of one run of the network inside the block.

        Args:
            additions: what is added to the output of each call of a layer.

        Raises:
            RuntimeError: the network changes an input of a layer in place, or calls a layer more often than there are
                additions.
        """
        inputs: dict[str, list[Tensor]] = {name: [] for name in self._layers}
        versions: list[tuple[Tensor, int]] = []
        outputs: dict[str, list[Tensor]] = {name: [] for name in self._layers}
        parameters = {name: dict(layer._parameters) for name, layer in self._layers.items()}

        def run_layer(name: str, x: Tensor) -> Tensor:
            layer = self._layers[name]
            layer._parameters.update(parameters[name])
            try:
                output: Tensor = type(layer).forward(layer, x)
            finally:
                layer._parameters.update(dict.fromkeys(parameters[name]))
            if additions is not None:
                if len(outputs[name]) == len(additions[name]):
                    raise RuntimeError("the network calls a layer more often for some examples than for others")
                output = output + additions[name][len(outputs[name])]
            inputs[name].append(x)
            versions.append((x, x._version))
            outputs[name].append(output)
            return output

        try:
            for name, layer in self._layers.items():
                layer._parameters.update(dict.fromkeys(parameters[name]))
                layer.forward = lambda x, name=name: run_layer(name, x)
            yield inputs, outputs
            if any(x._version != version for x, version in versions):
                raise RuntimeError("the network changes a layer's input in place after the layer has read it")
        finally:
            for name, layer in self._layers.items():
                layer._parameters.update(parameters[name])
                del layer.forward


def supported_layers(model: nn.Module) -> dict[str, Layer]:
    """Returns by name the dense layers and zero-padded convolutions with a trained weight of their own."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {name: module for name, module in model.named_modules() if _is_supported(module, owners)}


def _is_supported(module: nn.Module, owners: Mapping[int, int]) -> TypeGuard[Layer]:
    weight = module._parameters.get("weight")
    return (
        type(module) in _LAYERS
        and weight is not None
        and weight.requires_grad
        and all(owners[id(p)] == 1 for p in module._parameters.values() if p is not None)
        and "forward" not in vars(module)
        and getattr(module, "padding_mode", "zeros") == "zeros"
        and not isinstance(getattr(module, "padding", 0), str)
    )


def gradients_of_layer(layer: Layer, inputs: Sequence[Tensor], slopes: Sequence[Tensor]) -> dict[str, ExampleGradients]:
    """Returns `{"weight": ..., "bias": ...}`, the gradients of a layer's trained parameters, of each example.

    Args:
        layer: one of `supported_layers`.
        inputs, slopes: of each call the layer's input and the gradient of its output, both with the examples first.
    """
    gradients: dict[str, ExampleGradients] = {}
    if isinstance(layer, nn.Linear):
        rows, row_slopes = (
            torch.cat([part.reshape(len(part), -1, part.shape[-1]) for part in parts], dim=1)
            for parts in (inputs, slopes)
        )
        if rows.shape[1] == 1:
            gradients["weight"] = OuterProducts(row_slopes[:, 0], rows[:, 0])
        else:
            gradients["weight"] = StackedGradients(torch.bmm(row_slopes.mT, rows))
        bias = row_slopes.sum(dim=1)
    else:
        calls = [
            tuple(part if part.dim() == len(layer.kernel_size) + 3 else part.unsqueeze(1) for part in call)
            for call in zip(inputs, slopes, strict=True)
        ]
        weights = _sum_tensors([_convolution_gradients(layer, *call) for call in calls])
        gradients["weight"] = StackedGradients(weights, lambda total: total.movedim(-1, 2).flatten(0, 1))
        bias = _sum_tensors([slope.transpose(1, 2).flatten(2).sum(dim=2) for _, slope in calls])
    if layer.bias is not None and layer.bias.requires_grad:
        gradients["bias"] = StackedGradients(bias)
    return gradients


def numbers_for_each_example(layer: Layer, outputs: Sequence[Tensor]) -> int:
    """Returns about how many numbers `gradients_of_layer` stores for an example, from what the layer puts out for it."""
    rows = sum(output.numel() for output in outputs) // layer.weight.shape[0]
    if isinstance(layer, nn.Linear):
        return layer.weight.shape[0] + layer.weight.shape[1] if rows == 1 else layer.weight.numel()
    return layer.weight.numel() + rows * layer.weight[0].numel() * layer.groups


def _convolution_gradients(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, slope: Tensor) -> Tensor:
    """Returns each example's weight gradient, (examples, groups, outputs, *kernel, inputs).

    The order takes least time with channels last.

    Shapes: x (examples, n, channels, *size), slope (examples, n, channels, *positions).
    """
    widths: Any = layer.padding
    padding = [width for width in reversed(widths) for _ in range(2)]
    windows = F.pad(x, padding) if any(padding) else x
    for axis, (size, step, spread) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        windows = windows.unfold(3 + axis, spread * (size - 1) + 1, step)[..., ::spread]
    windows, slopes = (
        part.view(*part.shape[:2], layer.groups, part.shape[2] // layer.groups, *part.shape[3:])
        for part in (windows, slope)
    )
    positions, kernel = "xyz"[: len(layer.kernel_size)], "uvw"[: len(layer.kernel_size)]
    return torch.einsum(f"bngo{positions},bngc{positions}{kernel}->bgo{kernel}c", slopes, windows)


def _norm_by_example(tensors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensors.reshape(len(tensors), -1), dim=1)
    return norms


def _sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(dim=0)
