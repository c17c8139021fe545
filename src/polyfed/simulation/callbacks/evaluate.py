"""Evaluates the clients after a round, and completes the record of the round."""

from typing import final

from polyfed.simulation.callbacks.callback import Callback
from polyfed.simulation.rounds.run_state import RunState
from polyfed.simulation.rounds.training_round import evaluate_clients


@final
class RoundEvaluator(Callback):
    """Evaluates the clients' personal models every `evaluate_every` rounds, and after the last round (number `rounds`).

    Where the engine overlaps evaluation with training, only the last round is evaluated here; each other round waits for
    the training of the next one, and its record stays incomplete until then.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run

    def on_aggregated(self, round_number: int) -> None:
        """Evaluates the clients, unless the engine does so while it trains the next round."""
        run, after = self._run, self._run.aggregated
        if round_number % run.settings.evaluate_every and round_number != run.settings.rounds:
            run.finish_round(after, None)
            return
        if run.overlaps_evaluation:
            run.checkpoint = after
            if round_number < run.last_round:
                return
        run.finish_round(after, evaluate_clients(run.federation, after, run.engine, run.progress))
