"""Computes the sum of units' clipped gradients, for differentially private training."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from polyfed.core.examples.pytree import call_network, logits_of, split_into_call_arguments, tree_map
from polyfed.core.nn.functional_call import call_with_tensors

_GRADIENT_NUMBERS = 2**25
"""Most numbers that the gradients of the examples computed together may have: 128 MB."""


def sum_clipped_gradients_of_examples(
    model: nn.Module, x: Any, y: Tensor, criterion: Callable[[Tensor, Tensor], Tensor], max_norm: float
) -> list[Tensor]:
    """Returns Σ_i g_i·min(1, C/‖g_i‖) over the examples of a batch, one tensor for each trained parameter.

    The gradients of many examples are computed at once by `torch.func`.

    Args:
        model: the network, in training mode, without layers that mix examples.
        x, y: the batch.
        criterion: the mean loss of outputs and targets.
        max_norm: C.

    Raises:
        RuntimeError, NotImplementedError, ValueError: a layer has no rule for many examples at once.
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss_of_one(tensors: Mapping[str, Tensor], inputs: Any, target: Tensor) -> Tensor:
        arguments = split_into_call_arguments(tree_map(lambda part: part.unsqueeze(0), inputs))
        output = call_with_tensors(model, tensors, arguments.positional, arguments.named)
        return criterion(logits_of(output), target.unsqueeze(0))

    size = max(1, _GRADIENT_NUMBERS // max(1, sum(tensor.numel() for tensor in trained.values())))
    gradients_of = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    totals = [torch.zeros_like(tensor) for tensor in trained.values()]
    for first in range(0, len(y), size):
        rows = slice(first, first + size)
        inputs = tree_map(lambda part, rows=rows: part[rows], x)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # torch computes one example after another
            gradients = list(gradients_of(trained, inputs, y[rows]).values())
        factors = _clipping_factors([g.flatten(1).norm(dim=1) for g in gradients], max_norm)
        for total, gradient in zip(totals, gradients, strict=True):
            total.add_(torch.tensordot(factors, gradient.nan_to_num(0.0, 0.0, 0.0), dims=1))
    return totals


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
