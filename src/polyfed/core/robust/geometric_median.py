"""Combines clients' replies by their geometric median (RFA)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.robust.rule import CombiningRule, cast_like_original, check_same_form_and_sort_ids, names_of_distances
from polyfed.core.state_dict import StateDict

_SMALLEST_DISTANCE = 1e-6  # ν of the paper's experiments
_TOLERANCE = 1e-9  # relative change of the sum of distances, below which nothing more is gained


@final
@dataclass(frozen=True)
class GeometricMedian(CombiningRule):
    """Takes the point with the least weighted sum of distances to the clients' replies.

    Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning" (RFA), IEEE Transactions on Signal
    Processing 2022, equation 6: argmin_v Σ_i α_i ‖v − w_i‖, α_i = n_i/n, by algorithm 2, the smoothed Weiszfeld
    iteration: β_i = α_i / max(ν, ‖v − w_i‖), v ← Σ_i β_i w_i / Σ_i β_i, from the weighted mean, ν = 1e-6. It bears
    liars with less than half of the weight. The norm is over all floating-point tensors together; whole numbers, such as
    counters of BatchNorm, get the same weights.

    Args:
        iterations: at most so many (the paper takes 3); it ends before if the sum of distances falls no more.

    >>> str(GeometricMedian())
    'geometric_median:10'
    """

    iterations: int = 10
    word: ClassVar[str] = "geometric_median"
    is_weighted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not is_whole_number(self.iterations, 1):
            raise UserError(
                f"robust='geometric_median:N' takes a number of iterations N from 1, got {self.iterations!r}"
            )

    def __str__(self) -> str:
        return f"{self.word}:{self.iterations}"

    def combine(self, tensors_by_client: Mapping[str, StateDict], weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns the geometric median of the clients' tensors, weighted by numbers of examples."""
        ids = check_same_form_and_sort_ids(tensors_by_client)
        alpha = torch.tensor([float(weights[i]) for i in ids], dtype=torch.float64)
        beta, before = alpha / alpha.sum(), math.inf
        center = _combine_rows(tensors_by_client, ids, beta)
        for _ in range(self.iterations):
            distances = _distances_to_center(tensors_by_client, ids, center)
            total = float(alpha @ distances)
            if total >= before * (1 - _TOLERANCE):
                break
            before = total
            beta = alpha / distances.clamp(min=_SMALLEST_DISTANCE)
            beta = beta / beta.sum()
            center = _combine_rows(tensors_by_client, ids, beta)
        return {name: cast_like_original(center[name], tensor) for name, tensor in tensors_by_client[ids[0]].items()}


def _combine_rows(tensors_by_client: Mapping[str, StateDict], ids: list[str], beta: Tensor) -> dict[str, Tensor]:
    """Returns Σ_i β_i w_i in float64."""
    center = {
        name: torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
        for name, tensor in tensors_by_client[ids[0]].items()
    }
    for client_id, share in zip(ids, beta.tolist(), strict=True):
        for name, tensor in tensors_by_client[client_id].items():
            center[name].add_(tensor.detach().to(torch.float64), alpha=share)
    return center


def _distances_to_center(tensors_by_client: Mapping[str, StateDict], ids: list[str], center: StateDict) -> Tensor:
    """Returns ‖v − w_i‖ of each client, (clients,)."""
    names = names_of_distances(tensors_by_client[ids[0]])
    squares = [
        math.fsum(float((center[n] - tensors[n].detach().to(torch.float64)).square().sum()) for n in names)
        for tensors in (tensors_by_client[i] for i in ids)
    ]
    return torch.tensor(squares, dtype=torch.float64).sqrt()
