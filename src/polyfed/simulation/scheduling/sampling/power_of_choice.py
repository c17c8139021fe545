"""Implements power-of-choice: of a few candidates, those with the highest loss take part (Cho et al. 2020)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.simulation.scheduling.sampling.last_losses import update_last_losses
from polyfed.simulation.scheduling.sampling.sampler import Sampler, SamplingRound


@final
@dataclass(frozen=True)
class PowerOfChoice(Sampler):
    """Draws d candidates with probabilities proportional to their numbers of examples, and takes those with the highest
    loss.

    This is π_rpow-d of Cho, Wang and Joshi 2020 ("Client selection in federated learning"): a candidate's loss is the
    training loss that it sent with its last reply, so that no further message is needed. Clients that have not trained yet
    come first. Their π_pow-d, in which each candidate first computes its loss of the present model, is not implemented.

    Args:
        candidates: d, at least the number of clients of a round; None takes twice that number (polyfed's choice).

    Raises:
        UserError: `candidates` is not a whole number of at least 1.
    """

    reads_losses: ClassVar[bool] = True
    candidates: int | None = None

    def __post_init__(self) -> None:
        d = self.candidates
        if d is not None and not is_whole_number(d, 1):
            raise UserError(f"power_of_choice: candidates must be a whole number of at least 1, got {d!r}")

    def draw(
        self, round: SamplingRound, ids: Sequence[str], history: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> Sequence[str]:
        """Returns the candidates with the highest losses; equal losses stay in the order in which they were drawn."""
        losses = update_last_losses(round.state, history)
        wanted_size = 2 * round.size if self.candidates is None else max(self.candidates, round.size)
        weights = np.array([round.num_examples.get(client, 1) for client in ids], dtype=np.float64)
        positions = rng.choice(len(ids), min(wanted_size, len(ids)), replace=False, p=weights / weights.sum())
        candidate_ids = [ids[k] for k in positions]
        return sorted(candidate_ids, key=lambda client: -losses.get(client, math.inf))[: round.size]
