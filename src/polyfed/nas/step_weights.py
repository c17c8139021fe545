"""Measures how well each client's gradient agrees with the federated gradient: the weights α_i of FedPNAS's third step
(eq. 5), and Proposition 1 (Hoang and Kingsford, appendix D).
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from polyfed.core.errors import UserError


@final
@dataclass(frozen=True, eq=False)
class StepWeights:
    """Holds M clients' inner products α_i and cosines of Proposition 1 at the same θ, float64, (M,).

    Attributes:
        alpha: α_i = g_iᵀg̃_i, where g_i = ∇_{θ_p}L_i(θ_b, θ_p) and g̃_i = ∇L_i(θ_b, θ̃_{p,i}) (eq. 5).
        cosine: α_i of normalised gradients, which is the cosine of g_i and g̃_i.
        federated_cosine: ĝ_iᵀL of normalised gradients, where L = (1/M) Σ_j g̃_j/‖g̃_j‖ (eq. 8). It is negative if the
            client's own gradient contradicts the federated one.
    """

    alpha: Tensor
    cosine: Tensor
    federated_cosine: Tensor

    @property
    def cosine_gap(self) -> Tensor:
        """Returns |α_i − ĝ_iᵀL| for each client, which Proposition 1 bounds by O(‖θ_b − θ_b*‖/δ)."""
        return (self.cosine - self.federated_cosine).abs()


def compute_lookahead_step_weights(local_gradients: Tensor, lookahead_gradients: Tensor) -> StepWeights:
    """Returns clients' inner products α_i of gradient and look-ahead, and Proposition 1's cosines.

    A gradient of length 0 has cosine 0 with every other.

    Args:
        local_gradients: g_i, one row per client, (M, size of θ_p).
        lookahead_gradients: g̃_i, the same shape.

    Raises:
        UserError: the arguments are not matrices of one shape.

    >>> local, federated = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 0.0], [-4.0, 0.0]])
    >>> weights = compute_lookahead_step_weights(local, federated)
    >>> weights.alpha.tolist(), weights.cosine.tolist(), weights.federated_cosine.tolist()
    ([6.0, 0.0], [1.0, 0.0], [0.0, 0.0])
    """
    if local_gradients.dim() != 2 or local_gradients.shape != lookahead_gradients.shape or not len(local_gradients):
        raise UserError(
            f"gradients must be two matrices of one shape, a row per client, got {tuple(local_gradients.shape)} and "
            f"{tuple(lookahead_gradients.shape)}"
        )
    local_gradients, lookahead_gradients = local_gradients.detach().double(), lookahead_gradients.detach().double()
    unit, unit_ahead = (
        torch.nn.functional.normalize(rows, dim=1, eps=1e-300) for rows in (local_gradients, lookahead_gradients)
    )
    return StepWeights(
        (local_gradients * lookahead_gradients).sum(1), (unit * unit_ahead).sum(1), unit @ unit_ahead.mean(0)
    )
