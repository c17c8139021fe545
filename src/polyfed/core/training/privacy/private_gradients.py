"""Computes the sum of units' clipped gradients, for differentially private training."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from polyfed.core.examples.pytree import call_network, first_leaf, logits_of, split_into_call_arguments, tree_map
from polyfed.core.nn.functional_call import call_with_tensors
from polyfed.core.seeds import temporary_rng_seed
from polyfed.core.training.privacy.layer_gradients import (
    ExampleGradients,
    Layer,
    StackedGradients,
    TappedLayers,
    gradients_of_layer,
    numbers_for_each_example,
    supported_layers,
)

_GRADIENT_NUMBERS = 2**25
"""Most numbers that the gradients of the examples computed together may have: 128 MB."""


@final
@dataclass(frozen=True)
class LayerOutputs:
    """Holds the layers whose gradients come from their inputs, and zeros of one example's outputs.

    They depend on the shape of the inputs alone, so that the steps of a training share them.
    """

    layers: Mapping[str, Layer]
    zeros: Mapping[str, Sequence[Tensor]]

    @classmethod
    def of(cls, model: nn.Module, x: Any) -> "LayerOutputs":
        """Runs the network on one example, and returns the layers called; none if weights are used otherwise."""
        layers = supported_layers(model)
        zeros = _zeros_for_outputs(model, layers, tree_map(lambda part: part[:1], x))
        return cls({name: layers[name] for name in zeros}, zeros)


def sum_clipped_gradients_of_examples(
    model: nn.Module,
    x: Any,
    y: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor],
    max_norm: float,
    outputs: LayerOutputs | None = None,
) -> list[Tensor]:
    """Returns Σ_i g_i·min(1, C/‖g_i‖) over the examples of a batch, one tensor for each trained parameter.

    The gradients of many examples are computed at once by `torch.func`: those of dense and convolutional layers from their
    inputs and the gradients of their outputs, all others directly.

    Args:
        model: the network, in training mode, without layers that mix examples.
        x, y: the batch.
        criterion: the mean loss of outputs and targets.
        max_norm: C.
        outputs: `LayerOutputs.of(model, x)`, if it is known from a batch whose examples have the same shape.

    Raises:
        RuntimeError, NotImplementedError, ValueError: a layer has no rule for many examples at once.
    """
    outputs = outputs or LayerOutputs.of(model, x)
    layers, additions = outputs.layers, outputs.zeros
    taps = TappedLayers(layers)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    in_layers = {_join_parameter_name(name, role) for name, layer in layers.items() for role in layer._parameters}
    others = {name: tensor for name, tensor in trained.items() if name not in in_layers}

    def loss_of_one(
        tensors: tuple[Mapping[str, Tensor], Mapping[str, Sequence[Tensor]]], inputs: Any, target: Tensor
    ) -> tuple[Tensor, Mapping[str, Sequence[Tensor]]]:
        arguments = split_into_call_arguments(tree_map(lambda part: part.unsqueeze(0), inputs))
        with taps.record(tensors[1]) as (layer_inputs, _):
            output = call_with_tensors(model, tensors[0], arguments.positional, arguments.named)
        return criterion(logits_of(output), target.unsqueeze(0)), layer_inputs

    numbers = sum(tensor.numel() for tensor in others.values())
    numbers += sum(numbers_for_each_example(layers[name], parts) for name, parts in additions.items())
    size = max(1, _GRADIENT_NUMBERS // max(1, numbers))
    gradients_of = vmap(grad(loss_of_one, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    totals: dict[str, Tensor] = {}
    for first in range(0, len(y), size):
        rows = slice(first, first + size)
        inputs = tree_map(lambda part, rows=rows: part[rows], x)
        with torch.no_grad(), warnings.catch_warnings():  # `grad` differentiates all the same; nothing else need
            warnings.filterwarnings("ignore", "There is a performance drop")  # torch computes one example after another
            (of_others, slopes), layer_inputs = gradients_of((others, additions), inputs, y[rows])
        gradients: dict[str, ExampleGradients] = {name: StackedGradients(g) for name, g in of_others.items()}
        for name, layer in layers.items():
            for role, of_examples in gradients_of_layer(layer, layer_inputs[name], slopes[name]).items():
                gradients[_join_parameter_name(name, role)] = of_examples
        factors = _clipping_factors([of_examples.norms() for of_examples in gradients.values()], max_norm)
        if not bool((finite := factors > 0).all()):
            gradients, factors = {name: g.select(finite) for name, g in gradients.items()}, factors[finite]
        for name, of_examples in gradients.items():
            part = of_examples.weighted_sum(factors)
            totals[name] = totals[name].add_(part) if name in totals else part
    return [totals[name] for name in trained]


def _zeros_for_outputs(model: nn.Module, layers: Mapping[str, Layer], x: Any) -> dict[str, list[Tensor]]:
    """Returns `{layer: zeros of its outputs, by call}`; none if weights are used otherwise.

    Args:
        model: the network.
        layers: layers of it, by name.
        x: inputs of one example, as a batch.
    """
    taps = TappedLayers(layers)
    try:
        with torch.no_grad(), temporary_rng_seed(0, first_leaf(x).device), taps.record() as (_, outputs):
            call_network(model, x)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return {}
    return {name: [torch.zeros_like(part) for part in parts] for name, parts in outputs.items() if parts}


def _join_parameter_name(name: str, role: str) -> str:
    """Returns the name of a layer's parameter in the network, which may be the layer itself."""
    return f"{name}.{role}" if name else role


def sum_clipped_gradients_of_groups(
    model: nn.Module,
    x: Any,
    y: Tensor,
    groups: Sequence[Tensor],
    criterion: Callable[[Tensor, Tensor], Tensor],
    max_norm: float,
) -> list[Tensor]:
    """Returns Σ_j g_j·min(1, C/‖g_j‖) over groups of examples, where g_j is the gradient of the group's mean loss.

    Args:
        model, x, y, criterion, max_norm: as for `sum_clipped_gradients_of_examples`.
        groups: for each group the rows of the batch that belong to it.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    totals = [torch.zeros_like(p) for p in trained]
    for rows in groups:
        outputs = logits_of(call_network(model, tree_map(lambda part, rows=rows: part[rows], x)))
        gradients = torch.autograd.grad(criterion(outputs, y[rows]), trained, allow_unused=True)
        present = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, gradients, strict=True)]
        factor = _clipping_factors([g.norm().unsqueeze(0) for g in present], max_norm)[0]
        for total, gradient in zip(totals, present, strict=True):
            total.add_(factor * gradient.nan_to_num(0.0, 0.0, 0.0))
    return totals


def _clipping_factors(norms_by_tensor: Sequence[Tensor], max_norm: float) -> Tensor:
    """Returns min(1, C/‖g‖) for each unit, from the norms of its gradient's tensors; 0 where the gradient is not finite."""
    norms = torch.stack(list(norms_by_tensor)).norm(dim=0)
    factors = (max_norm / norms.clamp(min=1e-12)).clamp(max=1.0)
    return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))
