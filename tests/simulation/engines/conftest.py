"""The helpers of this folder can be imported by its tests."""

import sys
from pathlib import Path

import pytest

from polyfed.simulation.engines import cohort

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def computed(monkeypatch):
    """Which clients' training was carried out together, and whose outputs."""
    found = {"train": 0, "outputs_of": 0}
    functions = {"train": "train_cohort", "outputs_of": "predict_cohort"}
    for name, function, real in [(name, function, getattr(cohort, function)) for name, function in functions.items()]:

        def counted(calls, name=name, real=real):
            result = real(calls)
            found[name] += len(calls)
            return result

        monkeypatch.setattr(cohort, function, counted)
    return found
