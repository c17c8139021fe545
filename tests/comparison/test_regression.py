"""Comparisons of regression: by what they decide."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.comparison.statistics.estimate import Estimate
from polyfed.comparison.statistics.evidence import clip_interval_to_metric_range
from polyfed.core.evaluation.metrics import METRICS
from polyfed.simulation.storage.directory import read_metrics

QUICK = {"rounds": 1, "seeds": [0, 1], "tune": "none", "references": False, "parallel": 1, "quiet": True}


def sites(test):
    """Two sites whose target is a line."""

    def draw(number, seed):
        x = torch.randn(number, 3, generator=torch.Generator().manual_seed(seed))
        return x, x.sum(1)

    return [pf.Client(c, lambda: nn.Linear(3, 1), draw(40, k), draw(test, k + 2), task="regression")
            for k, c in enumerate(("north", "south"))]  # fmt: skip


def test_the_mean_absolute_error_decides_and_r2_is_beside_it(tmp_path):
    found = pf.compare(sites(20), [], out=tmp_path / "c", **QUICK).results
    assert (found["score"], found["higher_is_better"]) == ("mae", False)
    assert "mean absolute error" in found["mean_answer"]["sentence"]
    assert not any("R²" in note for note in found["notes"])
    rows = read_metrics(tmp_path / "c" / "fedavg" / "seed-0" / "metrics.jsonl")[-1]["clients"].values()
    assert all({"mae", "r2"} <= row.keys() for row in rows)


def test_an_error_of_a_tables_target_is_said_to_be_in_its_standard_deviations():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {"age": rng.normal(50, 20, 60), "cost": rng.normal(900, 300, 60), "site": ["north", "south"] * 30}
    )
    clients = pf.data.split_table(rows, "cost", "site").build_clients(lambda: nn.Linear(1, 1))
    for metric, label in (("mae", "mean absolute error (SD of the target)"), ("r2", "R²")):
        results = pf.compare(clients, [], metrics=[metric], **QUICK).results
        assert results["score_label"] == label
    assert pf.compare(sites(20), [], **QUICK).results["score_label"] == "mean absolute error"


@pytest.mark.parametrize(("test", "told"), [(20, True), (100, False)])
def test_r2_that_is_asked_for_of_few_examples_has_a_note(test, told):
    found = pf.compare(sites(test), [], metrics=["r2"], **QUICK).results
    assert found["score"] == "r2"
    assert any("north, south: R² of fewer than 100 test examples" in note for note in found["notes"]) is told


def test_the_interval_of_an_error_ends_at_0_and_that_of_a_difference_does_not():
    wide = Estimate(0.5, -0.2, 1.2, 0.3)
    assert clip_interval_to_metric_range(wide, METRICS["mae"], is_difference=False) == [0.0, 1.2]
    assert clip_interval_to_metric_range(wide, METRICS["mae"], is_difference=True) == [-0.2, 1.2]
    assert clip_interval_to_metric_range(wide, METRICS["r2"], is_difference=False) == [-0.2, 1.2]
    assert clip_interval_to_metric_range(wide, METRICS["dice"], is_difference=True) == [-0.2, 1.0]
    own = pf.Metric("gap", lambda outputs, targets: -1.0, higher_is_better=False)
    assert clip_interval_to_metric_range(wide, own, is_difference=False) == [-0.2, 1.2]
