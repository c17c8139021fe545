"""Refuses more rounds for a run that would not become the run that had them from its beginning."""

from pathlib import Path
from typing import Any

from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.simulation.settings import Settings


def check_equals_longer_run(folder: Path, algorithm: Algorithm[Any, Any], settings: Settings, rounds: int) -> None:
    """Raises a `UserError` if rounds that are done would have been others in a run of `rounds` rounds.

    Args:
        folder: the run directory.
        algorithm, settings: of the run.
        rounds: the number of all rounds.
    """
    name, schedule, last = type(algorithm).__name__, getattr(algorithm, "schedule", "constant"), settings.rounds
    skipped = (
        f"round {last} was evaluated as the last, which evaluate_every={settings.evaluate_every} does not do later"
    )
    reasons = {
        f"{name} plans by the number of all rounds": "plans_all_rounds" in algorithm.traits,
        f"the learning rate follows schedule={schedule!r} over all rounds": schedule == "cosine",
        "the budget of privacy is spent in the rounds of the run": getattr(algorithm, "privacy", None) is not None,
        skipped: last % settings.evaluate_every != 0,
        f"round {last} was evaluated at all clients, as the last": settings.evaluate_all_at_end,
    }
    for reason, holds in reasons.items():
        if holds and rounds != last:
            raise UserError(
                f"the run in {folder} cannot go on to {rounds} rounds: {reason}; start another run of {rounds} rounds "
                f"(polyfed run {folder} --rounds {rounds})"
            )
