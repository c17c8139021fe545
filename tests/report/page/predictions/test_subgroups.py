"""Subgroups on the page of a comparison: names of quarters that fit, intervals that a share or an AUC can have."""

import numpy as np
import pytest
import torch

from polyfed.core.evaluation.metrics import METRICS
from polyfed.report.data.predictions import GroupPredictions
from polyfed.report.data.score_format import score_format_of
from polyfed.report.page.predictions.subgroups import example_positions_by_group, html_subgroup_scores, score_subgroups
from polyfed.simulation.storage.predictions.prediction_store import Predictions


def table(logits, targets, columns):
    outputs = torch.stack([torch.zeros(len(logits)), torch.tensor(logits)], dim=1)
    return Predictions(1, outputs, torch.tensor(targets), {name: np.array(values) for name, values in columns.items()})


@pytest.fixture
def outcomes():
    """Two groups of eight: `local` is wrong about one example of each, the only positive but one."""
    targets = [0, 0, 0, 0, 0, 0, 1, 1] * 2
    right = [-3.0, -2.5, -2.0, -1.5, -1.2, -1.0, 1.0, 2.0] * 2
    wrong = [-3.0, -2.5, -2.0, -1.5, -1.2, -1.0, -2.2, 2.0] * 2
    columns = {"sex": ["f"] * 8 + ["m"] * 8}
    tables = {
        ("fedavg", 0, "north"): table(right, targets, columns),
        ("local", 0, "north"): table(wrong, targets, columns),
    }
    return GroupPredictions(
        "classification", ("fedavg", "local"), "local", (0,), ("north",), ("healthy", "sick"), True, tables
    )


def test_quarters_of_numbers_that_are_not_whole():
    values = [0.25 + k for k in range(12)]
    assert list(example_positions_by_group(values)) == ["up to 2.25", "2.25 to 5.25", "5.25 to 8.25", "above 8.25"]
    assert [len(rows) for rows in example_positions_by_group(values).values()] == [3, 3, 3, 3]


def test_no_interval_goes_beyond_what_there_is(outcomes):
    told = score_subgroups(outcomes, "sex", ["north"], METRICS["auc"], 0.95)
    assert [group.name for group in told] == ["all", "f", "m"]
    cut = 0
    for group in told:
        for value, low, high in (*group.scores.values(), *group.gains.values()):
            assert low <= value <= high <= 1.0
            cut += high == 1.0 != value
        assert min(low for _, low, _ in group.scores.values()) >= 0.0
    assert cut, "the interval of an AUC of few examples reaches beyond 1 unless it is cut"
    for group in score_subgroups(outcomes, "sex", ["north"], METRICS["f1"], 0.95):
        ends = [end for ends in (*group.scores.values(), *group.gains.values()) if ends for end in ends]
        assert -1.0 <= min(ends) <= max(ends) <= 1.0


def test_an_interval_has_its_unit_once(outcomes):
    text = html_subgroup_scores(outcomes, "sex", score_format_of("accuracy"), 0.95, "k")
    assert " points to " not in text.split("<table")[1]
    assert " % to " not in text.split("<table")[1]
