"""Keeps the mean kernel K̄ of all clients' networks in a matrix of fixed size, whatever the number of clients (FedHeNN,
eq. 6; the running mean is polyfed's).

A server that stores every client's representation A_j, as the paper's does, has N·R·d numbers for R public examples. A
`KernelSketch` has R·rank: features F with FFᵀ ≈ K̄, a mean over the replies of all rounds in which those of earlier rounds
count less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from polyfed.alignment.alignment_target import mean_kernel_features, reduce_to_principal_components


@final
@dataclass(frozen=True)
class KernelSketch:
    """Holds a running mean of centred linear kernels, reduced to `rank` components.

    After a round in which m of N clients replied, S ← (1 − m/N)·S + (1/N)·Σ_j c_j·Â_jÂ_jᵀ over the replies, and the weight
    W ← (1 − m/N)·W + (1/N)·Σ_j c_j; then K̄ = S/W. So a reply of s rounds ago weighs (1 − m/N)^s, which is the probability
    that a client has not been drawn since: if clients are drawn uniformly, each round's replies have in expectation the
    weight that they have in the exact K̄ of all clients' latest networks. With all clients in each round, K̄ is exact.

    The components that a round drops are lost. K̄ − FFᵀ has no negative eigenvalue, and `lost` is its trace: so no entry of
    the kernel, no eigenvalue and no norm is wrong by more than `lost`.

    Attributes:
        features: F, with FFᵀ ≈ K̄, shape (R, rank); columns have mean 0, and those that no
            component fills are 0.
        weight: W; 0 before the first reply.
        lost: the trace of K̄ − FFᵀ.

    >>> a = torch.tensor([[1.0, 0.0], [-1.0, 2.0], [0.0, -2.0]])
    >>> sketch = KernelSketch.empty(3, rank=2).add_replies([a], [1.0], num_clients=1)
    >>> torch.allclose(sketch.features @ sketch.features.T, a @ a.T, atol=1e-5), round(sketch.relative_error, 5)
    (True, 0.0)
    """

    features: Tensor
    weight: float
    lost: float

    @classmethod
    def empty(cls, num_examples: int, rank: int) -> "KernelSketch":
        """Returns the sketch of no kernel yet, for R public examples and a number of components."""
        return cls(torch.zeros(num_examples, rank), 0.0, 0.0)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "KernelSketch":
        """Returns the sketch that `to_state` has written into a server state."""
        return cls(state["features"], float(state["weight"]), float(state["lost"]))

    def to_state(self) -> dict[str, Any]:
        """Returns the sketch as an entry of a server state."""
        return {"features": self.features, "weight": self.weight, "lost": self.lost}

    @property
    def relative_error(self) -> float:
        """Returns the share of the trace of K̄ that the sketch has lost, from 0 to 1."""
        trace = float(self.features.double().square().sum()) + self.lost
        return self.lost / trace if trace > 0 else 0.0

    def add_replies(
        self,
        representations: Sequence[Tensor],
        capacities: Sequence[float],
        *,
        num_clients: int,
        normalise: bool = False,
    ) -> "KernelSketch":
        """Returns the sketch after a round.

        Args:
            representations: A_j of the clients that replied, shapes (R, d_j).
            capacities: their weights c_j > 0; 1 for each, or numbers of parameters.
            num_clients: N.
            normalise: divides each A_j by its centred norm.
        """
        stays = max(0.0, 1 - len(representations) / num_clients)
        weight_before = stays * self.weight
        weight = weight_before + sum(capacities) / num_clients
        shares = [capacity / num_clients / weight for capacity in capacities]
        new = mean_kernel_features([a - a.mean(0) for a in representations], shares, normalise)
        old = self.features * (weight_before / weight) ** 0.5
        whole = torch.cat([old, new], dim=1)
        components = reduce_to_principal_components(whole, self.features.shape[1])
        features = torch.zeros_like(self.features)
        features[:, : components.shape[1]] = components
        dropped = float(whole.double().square().sum() - features.double().square().sum())
        lost = weight_before / weight * self.lost + max(0.0, dropped)
        return KernelSketch(features, weight, lost)
