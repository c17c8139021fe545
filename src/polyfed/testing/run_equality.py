"""Compares the results of two runs bit for bit."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from polyfed.simulation.results.run import Run


def without_durations(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records of all rounds without the measured seconds, which differ between equal runs."""

    def strip(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: strip(item) for key, item in value.items() if not key.startswith("seconds")}
        return value

    return [strip(record) for record in history]


def assert_runs_equal(run_a: Run, run_b: Run) -> None:
    """Raises an `AssertionError` unless metrics, predictions and models of two runs are equal, bit for bit."""
    assert without_durations(run_a.history) == without_durations(run_b.history)
    for client in run_a.federation.clients:
        if "loss" in run_a.history[-1]["clients"].get(client, {}):
            first, second = run_a.predictions(client), run_b.predictions(client)
            assert first.round == second.round
            assert torch.equal(first.outputs, second.outputs), f"client {client!r}: the predictions differ"
            assert torch.equal(first.targets, second.targets), f"client {client!r}: the targets differ"
        state_a, state_b = run_a.model(client).state_dict(), run_b.model(client).state_dict()
        assert state_a.keys() == state_b.keys()
        for name in state_a:
            assert torch.equal(state_a[name], state_b[name]), f"client {client!r}: {name!r} differs"
