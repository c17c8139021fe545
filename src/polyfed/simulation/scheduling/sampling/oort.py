"""Implements Oort: clients are drawn by the utility of their data and by their speed (Lai et al. 2021)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_number, is_whole_number
from polyfed.simulation.scheduling.sampling.last_losses import update_last_losses
from polyfed.simulation.scheduling.sampling.sampler import Sampler, SamplingRound


@final
@dataclass(frozen=True)
class Oort(Sampler):
    """Draws clients with much loss and short updates more often, and tries clients that have not trained yet.

    Source: Lai, Zhu, Madhyastha and Chowdhury 2021, "Oort: Efficient federated learning via guided participant selection",
    algorithm 1. The parts:

    - statistical utility n_i·L_i. The paper has n_i times the root mean square of the examples' losses; a reply has their
      mean L_i, which takes its place.
    - a bonus for clients that have waited long, sqrt(0.1·ln R/R_i); R is the round, R_i the client's last one.
    - system utility: updates of t_i simulated seconds, longer than T, count (T/t_i)^α times. Without simulated time this
      factor is 1.
    - the pacer: T is a percentile of the durations of the clients that have trained. It rises whenever the sum of utilities
      in the last `pacer_rounds` rounds is below that of as many rounds before.
    - exploration: a share ε of the round are clients that have not trained yet, the fast ones with higher probability.
      ε is multiplied by `exploration_decay` in each round, down to `least_exploration`.
    - exploitation: the others are drawn, with probabilities proportional to utility, among the clients whose utility is at
      least `cutoff` times that of the last one that would be taken by rank.

    Not implemented: the limit on how often a client takes part, fairness, noise on utilities, and the clipping of outliers.

    Args:
        exploration, exploration_decay, least_exploration: ε in round 1, its factor, and its lowest value (the paper's).
        alpha: α, the exponent of the penalty for slow clients (2, the paper's).
        cutoff: c, between 0 and 1 (0.95, the paper's).
        preferred_percentile, pacer_step, pacer_rounds: T's percentile at first (30), by how much it rises (10), and the
            window in rounds (20); polyfed's choices.

    Raises:
        UserError: an option outside its range.
    """

    reads_losses: ClassVar[bool] = True
    exploration: float = 0.9
    exploration_decay: float = 0.98
    least_exploration: float = 0.2
    alpha: float = 2.0
    cutoff: float = 0.95
    preferred_percentile: float = 30.0
    pacer_step: float = 10.0
    pacer_rounds: int = 20

    def __post_init__(self) -> None:
        limits = {
            "exploration": 1.0, "exploration_decay": 1.0, "least_exploration": 1.0, "alpha": 100.0, "cutoff": 1.0,
            "preferred_percentile": 100.0, "pacer_step": 100.0,
        }  # fmt: skip
        for name, highest in limits.items():
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= highest:
                raise UserError(f"oort: {name} must be from 0 to {highest:g}, got {value!r}")
        if not is_whole_number(self.pacer_rounds, 1):
            raise UserError(f"oort: pacer_rounds must be a whole number of at least 1, got {self.pacer_rounds!r}")

    def draw(
        self, round: SamplingRound, ids: Sequence[str], history: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> Sequence[str]:
        """Returns clients of high utility, and some that have not trained yet."""
        state = round.state
        last_rounds: dict[str, int] = state.setdefault("last_rounds", {})
        new_records = history[state.get("records", 0) :]
        for record in new_records:
            last_rounds |= {i: record["round"] for i, row in record["clients"].items() if "train_loss" in row}
        losses = update_last_losses(state, history)
        self._pace(state, new_records, round)
        explored = [client for client in ids if client in losses]
        unexplored = [client for client in ids if client not in losses]
        size = min(round.size, len(ids))
        epsilon = max(self.least_exploration, self.exploration * self.exploration_decay ** (round.number - 1))
        num_exploring = min(len(unexplored), max(math.floor(epsilon * size + 0.5), size - len(explored)))
        utilities = self._utilities(explored, losses, last_rounds, round)
        exploited_ids = self._exploit(utilities, size - num_exploring, rng)
        speeds = [1.0 / (round.seconds_of_update(client) or 1.0) for client in unexplored]
        return [*exploited_ids, *_draw_by_weight(unexplored, speeds, num_exploring, rng)]

    def _pace(self, state: dict[str, Any], new_records: Sequence[Mapping[str, Any]], round: SamplingRound) -> None:
        """Adds the utilities of the last rounds to the sampler's state, and raises T's percentile where they fall."""
        state.setdefault("percentile", self.preferred_percentile)
        sums: list[float] = state.setdefault("utility_sums", [])
        for record in new_records:
            losses = {i: row["train_loss"] for i, row in record["clients"].items() if "train_loss" in row}
            sums.append(math.fsum(_statistical_utility(i, losses, round) for i in sorted(losses)))
            window = self.pacer_rounds
            if len(sums) == 2 * window:
                if math.fsum(sums[:window]) > math.fsum(sums[window:]):
                    state["percentile"] = min(100.0, state["percentile"] + self.pacer_step)
                del sums[:window]

    def _utilities(
        self, explored: Sequence[str], losses: Mapping[str, float], last_rounds: Mapping[str, int], round: SamplingRound
    ) -> dict[str, float]:
        """Returns each client's utility: statistical, with the bonus for waiting, times the penalty for slowness."""
        durations = {client: round.seconds_of_update(client) for client in explored}
        known_durations = [seconds for seconds in durations.values() if seconds is not None]
        preferred = np.percentile(known_durations, round.state["percentile"]) if known_durations else math.inf
        utilities = {}
        for client in explored:
            waiting = math.sqrt(0.1 * math.log(max(round.number, 1)) / last_rounds.get(client, 1))
            utility = _statistical_utility(client, losses, round) + waiting
            seconds = durations[client]
            if seconds is not None and seconds > preferred:
                utility *= float(preferred / seconds) ** self.alpha
            utilities[client] = utility
        return utilities

    def _exploit(self, utilities: Mapping[str, float], size: int, rng: np.random.Generator) -> list[str]:
        """Draws clients by utility among those that are near the best ones."""
        ranked = sorted(utilities, key=lambda client: (-utilities[client], client))
        if size <= 0 or not ranked:
            return []
        lowest = self.cutoff * utilities[ranked[min(size, len(ranked)) - 1]]
        admitted = [client for client in ranked if utilities[client] >= lowest]
        return _draw_by_weight(admitted, [utilities[client] for client in admitted], size, rng)


def _statistical_utility(client: str, losses: Mapping[str, float], round: SamplingRound) -> float:
    return round.num_examples.get(client, 1) * max(0.0, losses[client])


def _draw_by_weight(ids: Sequence[str], weights: Sequence[float], size: int, rng: np.random.Generator) -> list[str]:
    """Draws clients without replacement, with probabilities proportional to weights; uniformly if all are 0."""
    if size <= 0 or not ids:
        return []
    positive = np.maximum(np.asarray(weights, dtype=np.float64), 1e-12 * max(1e-300, max(weights)))
    total = positive.sum()
    shares = positive / total if total > 0 else None
    return [ids[k] for k in rng.choice(len(ids), min(size, len(ids)), replace=False, p=shares)]
