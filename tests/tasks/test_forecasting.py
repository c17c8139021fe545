"""Forecasting: identities of the scores, windows and their splits, bad input, learning, and comparisons."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed import Client, UserError
from polyfed.comparison.statistics.score_intervals import mean_gain_with_interval
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.data import split_windows, windows, windows_by_series
from polyfed.data.partitioning.group_split import group_numbers
from polyfed.data.partitioning.validation_split import hold_out_missing_validation_sets
from polyfed.simulation.checks.requirements import check_networks_run

TASK = pf.tasks.Forecasting(horizons=3, season=4)


def load(site, hours=160):
    rng = np.random.default_rng(site)
    t = np.arange(hours)
    return 2 + np.sin(2 * np.pi * (t + site) / 4) + 0.3 * np.sin(t / 11) + 0.4 * rng.standard_normal(hours)


def clients_of(number=4, task=TASK):
    clients = []
    for site in range(number):
        sets = split_windows(windows(load(site), past=8, horizons=3), test=0.3)
        clients.append(Client(f"site-{site}", Net, sets.train, sets.test, task=task))
    return clients


class Net(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)


# -- scores -----------------------------------------------------------------------------------------------------------


def test_the_naive_forecast_has_a_mase_of_one():
    client = clients_of(1)[0]
    naive = client.test.labels[:, 3:]
    inputs = client.test.raw_inputs
    assert torch.equal(naive, inputs[:, 4:7])  # one season before
    assert TASK.default_metric(naive, client.test.labels) == pytest.approx(1.0)
    assert TASK.default_metric(client.test.labels[:, :3], client.test.labels) == 0
    last = pf.tasks.Forecasting(horizons=3).complete_targets(inputs, client.test.labels[:, :3])
    assert torch.equal(last[:, 3:], inputs[:, 7:].expand(-1, 3))
    several = torch.stack([inputs, inputs * 0], dim=2)  # the series is the first feature
    assert torch.equal(TASK.complete_targets(several, client.test.labels[:, :3])[:, 3:], naive)
    longer = pf.tasks.Forecasting(horizons=3, season=2).complete_targets(inputs, client.test.labels[:, :3])
    assert torch.equal(longer[:, 3:], inputs[:, [6, 7, 6]])


def test_errors_are_by_horizon():
    outputs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    targets = torch.tensor([[2.0, 2.0, 0.0, 0.0], [5.0, 4.0, 4.0, 8.0]])
    task = pf.tasks.Forecasting(horizons=2)
    values = {m.name: m(outputs, targets) for m in resolve_metrics(
        ["mase", "forecast_mae", "forecast_rmse", "mae_at_1", "mae_at_2", "rmse_at_1", "mase_at_1"], task)}  # fmt: skip
    assert values == pytest.approx({
        "mase": 3 / 9, "forecast_mae": 0.75, "forecast_rmse": math.sqrt(5 / 4), "mae_at_1": 1.5, "mae_at_2": 0.0,
        "rmse_at_1": math.sqrt(2.5), "mase_at_1": 3 / 3,
    })  # fmt: skip
    assert float(task.loss(outputs, targets)) == pytest.approx(5 / 8)
    with pytest.raises(UserError, match="mae_at_3: forecasts have the horizons 1 to 2"):
        task.find_metric("mae_at_3")(outputs, targets)
    assert math.isnan(task.default_metric(outputs, outputs.repeat(1, 2)))  # the naive forecast is right
    assert task.find_metric("mae_at_0") is None


# -- windows ----------------------------------------------------------------------------------------------------------


def test_windows_leave_out_gaps_and_missing_values():
    values = np.arange(12.0)
    whole = windows(values, past=3, horizons=2, step=2)
    assert whole.x.tolist() == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]]
    assert whole.y[0].tolist() == [3, 4]
    values[5] = np.nan
    assert windows(values, past=3, horizons=2).x[:, 0].tolist() == [0, 6, 7]
    days = np.datetime64("2026-01-01") + np.array([0, 1, 2, 3, 4, 9, 10, 11, 12, 13])
    gap = windows(np.arange(10.0), past=2, horizons=2, time=days)
    assert gap.x[:, 0].tolist() == [0, 1, 5, 6]
    assert gap.column("time")[1] - gap.column("time")[0] == 24 * 3600 * 1e6
    two = windows(np.stack([np.arange(6.0), -np.arange(6.0)], axis=1), past=2, horizons=1)
    assert (two.x.shape, two.y[:, 0].tolist()) == ((4, 2, 2), [2, 3, 4, 5])


def test_a_long_table_gives_a_set_for_each_series():
    table = {
        "site": np.array(list("abab" * 4)), "hour": np.arange(16)[::-1].copy(), "load": np.arange(16.0)[::-1].copy(),
        "heat": np.ones(16),
    }  # fmt: skip
    found = windows_by_series(table, series="site", value="load", time="hour", past=2, horizons=1)
    assert {name: one.x[0].tolist() for name, one in found.items()} == {"a": [1, 3], "b": [0, 2]}
    both = windows_by_series(table, series="site", value="load", time="hour", past=2, horizons=1, features=["heat"])
    assert both["a"].x.shape == (6, 2, 2)
    with pytest.raises(UserError, match="series 'a': windows need a series"):
        windows_by_series(table, series="site", value="load", time="hour", past=9, horizons=1)


def test_neighbouring_windows_are_a_group_of_one_set_and_series():
    sets = split_windows(windows(load(0), past=5, horizons=3), test=0.3, val=0.2)
    groups = [part.column("group").tolist() for part in sets if part is not None]
    assert [group_numbers(part).tolist() for part in sets] == [[k // 8 for k in range(len(part))] for part in sets]
    assert not set(groups[0]) & {*groups[1], *groups[2]}
    assert not set(groups[1]) & set(groups[2])
    other = split_windows(windows(load(1), past=5, horizons=3), test=0.3)
    assert not {name for names in groups for name in names} & set(other.train.column("group").tolist())
    weeks = replace(windows(load(0), past=5, horizons=3), group=np.arange(153) // 50)
    assert split_windows(weeks, test=0.3).test.column("group").tolist() == [2] * 43 + [3] * 3
    later = hold_out_missing_validation_sets([Client("a", None, sets.train, sets.test, task=TASK)], seed=0)[0]
    assert later.train.times.max() < later.val.times.min()
    assert not set(later.train.column("group").tolist()) & set(later.val.column("group").tolist())


@pytest.mark.thorough
def test_errors_that_last_as_long_as_a_window_are_seldom_told_apart():
    """Two forecasts whose errors have one distribution; over single windows an interval would tell one in four apart."""
    rng, claims = np.random.default_rng(0), {"windows": 0, "groups": 0}
    metric, lasting = pf.tasks.Forecasting(horizons=3).default_metric, np.ones(12) / np.sqrt(12)
    for _ in range(60):
        sets = split_windows(windows(rng.standard_normal(1000), past=12, horizons=3), test=0.4)
        test = Client("a", None, sets.train, sets.test, task=pf.tasks.Forecasting(horizons=3)).test
        errors = [np.convolve(rng.standard_normal(len(test) + 11), lasting, "valid")[:, None] for _ in range(2)]
        outputs = [[test.labels[:, :3] + torch.from_numpy(error).float()] for error in errors]
        for kind, groups in (("windows", None), ("groups", group_numbers(test))):
            gain = mean_gain_with_interval(metric, *outputs, test.labels, groups=groups)
            claims[kind] += gain.low * gain.high > 0
    assert claims["groups"] <= 6 < claims["windows"]


@pytest.mark.parametrize(("test", "val"), [(0.3, 0.0), (0.25, 0.2)])
def test_no_target_of_an_earlier_set_is_one_of_a_later_set(test, val):
    sets = split_windows(windows(np.arange(40.0), past=4, horizons=3), test=test, val=val)
    targets = [set(part.labels.flatten().tolist()) for part in sets if part is not None]
    assert len(targets) == 2 + (val > 0)
    assert all(max(a) < min(b) for a, b in pairwise(targets))
    assert max(targets[0]) + 1 == min(targets[1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: windows([1, 2], past=2, horizons=1), "T of at least past"),
        (lambda: windows([1, 2, 3], past=1, horizons=1, time=[1, 3, 2]), "time of row 2 is not after that of row 1"),
        (lambda: windows([1, 2, 3], past=1, horizons=1, time=[1, 3]), "2 times for 3 values"),
        (lambda: windows([1, np.nan, 3], past=1, horizons=1), "no 2 values in a row"),
        (lambda: split_windows(windows(range(6), past=2, horizons=2), test=0.9), "cannot be split"),
        (lambda: pf.tasks.Forecasting(horizons=0), "at least 1"),
    ],
)
def test_what_makes_no_windows_is_a_sentence(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_what_does_not_fit_is_a_sentence_with_the_client():
    x = torch.randn(5, 8)
    with pytest.raises(UserError, match=r"client 'north': train targets must be the next 3 values .* got \(5, 2\)"):
        Client("north", Net, (x, x[:, :2]), (x, x[:, :2]), task=TASK)
    with pytest.raises(UserError, match=r"client 'north': train inputs must be past values .* at least season=4"):
        Client("north", Net, (x[:, :3], x[:, :3]), (x, x[:, :3]), task=TASK)
    with pytest.raises(UserError, match=r"client 'north': train: the network's output is \(batch, 2\)"):
        check_networks_run([Client("north", lambda: nn.Linear(8, 2), (x, x[:, :3]), (x, x[:, :3]), task=TASK)])


# -- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_linear_network_is_better_than_the_naive_forecast_and_clients_train_together(tmp_path):
    method = pf.algorithms.FedAvg(lr=0.02, optimizer="adam", batch_size=16, local_epochs=2)
    options = {"rounds": 30, "evaluate_every": 30, "workers": 0, "progress": False}
    runs = [pf.federate(clients_of(), method, engine=engine, **options) for engine in ("inprocess", "cohort")]
    scores = [[row["mase"] for row in run.table()] for run in runs]
    assert max(scores[0]) < 0.97
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.thorough
def test_the_example_of_the_docs_is_better_than_the_naive_forecast():
    text = (Path(__file__).parents[2] / "docs/tasks/forecasting.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "hourly_load" in b)
    namespace = {}
    shorter = block.replace("seeds=[0, 1, 2], rounds=20", "seeds=[0], rounds=2").replace("days=40", "days=12")
    exec(compile(shorter.replace("print(", "found = ("), "docs/tasks/forecasting.md", "exec"), namespace)  # noqa: S102  # the page's own
    assert namespace["found"].results["score"] == "mase"


@pytest.mark.thorough
def test_it_is_compared_with_simple_models_and_trained_by_other_methods():
    comparison = pf.compare(
        clients_of(3), ["local", "fedavg", "fedavg_ft"], seeds=[0], rounds=2, tune="none", progress=False
    )
    assert comparison.results["score"] == "mase"
    assert {"mean", "ridge"} <= comparison.results["references"].keys()
    for name in ("pfedla", "flha_ghn", "ditto"):
        run = pf.federate(clients_of(3), name, rounds=1, progress=False)
        assert all(row["mase"] is not None for row in run.table())
