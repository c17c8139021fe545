"""Infers how many of a client's training examples have each label, from what it sends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyfed.core.algorithm import Message
from polyfed.core.seeds import torch_generator
from polyfed.report.audit.messages.recorded_reply import WeightChange

IN_MESSAGE, LAST_LAYER, CLASSES = "in the message", "last layer", "which classes occur"
_NUM_NOISE = 64


@final
@dataclass(frozen=True, eq=False)
class InferredLabels:
    """Holds inferred shares of the labels, float64 of shape (classes,), and `source`, what they were inferred from."""

    shares: Tensor
    source: str


def class_shares_overlap(shares: Tensor, counts: Tensor) -> float:
    """Returns the share of examples whose labels are counted rightly: 1 minus the total variation distance.

    Args:
        shares: inferred, sum 1, shape (classes,).
        counts: the client's own numbers of examples by class, shape (classes,).

    >>> class_shares_overlap(torch.tensor([0.5, 0.5]), torch.tensor([9, 1]))
    0.6
    """
    return round(float(torch.minimum(shares.double(), counts.double() / counts.sum()).sum()), 12)


def find_counts_in_message(reply: Message, counts: Tensor) -> InferredLabels | None:
    """Returns the counts if rows of the reply are in proportion to them, or zero for absent classes; else None."""
    shares, occurs, classes_only = counts.double() / counts.sum(), counts > 0, None
    is_even = int(counts.min()) == int(counts.max())  # every row of equal numbers would fit
    for tensors in reply.tensors.values():
        for tensor in tensors.values():
            for dim in range(tensor.dim()):
                if tensor.shape[dim] != len(counts):
                    continue
                rows = tensor.double().movedim(dim, -1).reshape(-1, len(counts))
                totals = rows.sum(1, keepdim=True)
                if not is_even and bool(((rows / totals - shares).abs().amax(1) < 1e-4).any()):
                    return InferredLabels(shares, IN_MESSAGE)
                if not occurs.all() and bool(((rows != 0).any(0) == occurs).all()):
                    classes_only = InferredLabels(occurs.double() / occurs.sum(), CLASSES)
    return classes_only


def infer_shares_from_last_layer(
    weights: WeightChange, num_classes: int, example: Tensor, low: float, high: float, step_sizes: float | None
) -> InferredLabels | None:
    """Returns the shares of the labels from the change of the last layer's bias; None if no such bias travels.

    Its gradient is the mean predicted probability of each class minus the share of the class (Zhao et al. 2020, iDLG, for
    one example; Wainakh et al. 2022, LLG, for several). The predicted ones are those for random inputs, before and after
    the training; where no network is known, all classes count as equally probable.

    Args:
        weights: the network and its change.
        num_classes: C.
        example: zeros in the form of one input; only its form is used.
        low, high: range of the random inputs.
        step_sizes: the sum of the learning rates of all steps; None if it is not known: then the rarest class is taken
            not to occur.
    """
    names = [n for n, t in weights.change.items() if t.shape == (num_classes,) and n.endswith("bias")]
    if not names:
        return None
    predicted = torch.full((num_classes,), 1 / num_classes, dtype=torch.float64)
    if (network := weights.network) is not None:
        noise = torch.rand(_NUM_NOISE, *example.shape, generator=torch_generator(0)) * (high - low) + low
        before, after = (_mean_probabilities(network, w, noise) for w in ({}, weights.after))
        predicted = (before + after) / 2
    if len(predicted) != num_classes:
        return None
    change = weights.change[names[-1]].double()
    if step_sizes is None or not step_sizes > 0 or not math.isfinite(step_sizes):
        rarest = predicted / change.clamp(min=1e-12)
        scale = float(rarest[change > 1e-12].min()) if bool((change > 1e-12).any()) else 0.0
    else:
        scale = 1 / step_sizes
    shares = (predicted - scale * change).clamp(min=0)
    return InferredLabels(shares / shares.sum(), LAST_LAYER) if bool(shares.sum() > 0) else None


@torch.no_grad()
def _mean_probabilities(network: nn.Module, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    network.eval()
    outputs: Tensor = functional_call(network, dict(weights), (inputs,))
    return outputs.double().softmax(1).mean(0)
