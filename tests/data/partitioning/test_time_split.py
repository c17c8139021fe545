"""Splits by time: every test row is later than every training row, overall, by group, and in validation sets."""

import numpy as np
import pytest
import torch

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.data import Split, split_table
from polyfed.data.partitioning.folds import Folds, split_into_folds
from polyfed.data.partitioning.resplit import resplit_clients
from polyfed.data.partitioning.time_split import split_by_time, split_within_groups_by_time
from polyfed.data.partitioning.validation_split import hold_out_missing_validation_sets

RNG = np.random.default_rng(0)
N = 120
ROWS = {
    "x": RNG.normal(size=N), "ill": RNG.integers(0, 2, N), "hospital": ["north", "south"] * (N // 2),
    "patient": [f"p{k}" for k in RNG.integers(0, 12, N)], "day": RNG.permutation(N),
}  # fmt: skip


def sets_of(part, name):
    return {kind: ROWS[name] if rows is None else np.asarray(ROWS[name])[rows]
            for kind, rows in (("train", part.rows.train), ("val", part.rows.val), ("test", part.rows.test))}  # fmt: skip


def test_train_before_and_test_after():
    sites = split_table(ROWS, "ill", "hospital", time="day", drop="patient", val_fraction=0.1)
    for part in sites.client_data:
        days = sets_of(part, "day")
        assert days["train"].max() < days["val"].min()
        assert days["val"].max() < days["test"].min()
        assert [len(days[name]) for name in ("train", "val", "test")] == [36, 6, 18]
        assert part.train.time == "day"
    assert sites.feature_names == ("x",)


def test_dates_are_times():
    days = np.datetime64("2026-01-01") + np.asarray(ROWS["day"])
    by_date = split_table({**ROWS, "day": days.astype(str).tolist()}, "ill", "hospital", time="day", drop="patient")
    by_number = split_table(ROWS, "ill", "hospital", time="day", drop="patient")
    for one, other in zip(by_date.client_data, by_number.client_data, strict=True):
        assert one.rows.test.tolist() == other.rows.test.tolist()


def test_groups_that_began_later_are_tested():
    sites = split_table(ROWS, "ill", "hospital", time="day", group="patient")
    north, south = ({name: set(ids) for name, ids in sets_of(part, "patient").items()} for part in sites.client_data)
    assert not (north["train"] | south["train"]) & (north["test"] | south["test"])
    days, ids = sets_of(sites.client_data[0], "day"), sets_of(sites.client_data[0], "patient")
    began = {name: [days[name][ids[name] == patient].min() for patient in north[name]] for name in ("train", "test")}
    assert max(began["train"]) < min(began["test"])


def test_within_each_group():
    sites = split_table(ROWS, "ill", "hospital", time="day", group="patient", split="time_within_group")
    for part in sites.client_data:
        patients, days = sets_of(part, "patient"), sets_of(part, "day")
        for patient in set(patients["test"]):
            assert days["train"][patients["train"] == patient].max() < days["test"][patients["test"] == patient].min()
        assert set(patients["test"]) <= set(patients["train"])


def test_equal_times_stay_together():
    times = np.array([1.0, 1, 1, 1, 2, 2, 2, 2, 3, 3])
    rows = split_by_time(times, {"test": 0.3, "val": 0.1})
    assert {name: sorted(set(times[part])) for name, part in rows.items()} == {"train": [1], "val": [2], "test": [3]}
    assert len(split_by_time(np.ones(4), {"test": 0.5})["test"]) == 0
    two = split_by_time(np.array([1.0, 2.0]), {"test": 0.3, "val": 0.0})
    assert {name: part.tolist() for name, part in two.items()} == {"train": [0], "val": [], "test": [1]}
    few = split_within_groups_by_time(np.array([1.0, 2.0, 1.0]), np.array(list("aab")), {"test": 0.3, "val": 0.1})
    assert few["train"].tolist() == [0, 1, 2], "a group of two rows cannot have three sets"


def test_the_last_rows_validate():
    x, y = torch.randn(20, 2), torch.arange(20) % 2
    train = Examples(x, y, time=np.arange(20)[::-1].copy())
    (client,) = hold_out_missing_validation_sets([Client("a", None, train, (x, y))], seed=0)
    assert client.val.times.tolist() == [3, 2, 1, 0] or client.val.times.min() > client.train.times.max()


def test_resplit_and_folds_refuse_times():
    sites = split_table(ROWS, "ill", "hospital", time="day", drop="patient")
    clients = sites.build_clients(lambda: torch.nn.Linear(1, 2))
    with pytest.raises(UserError, match="client 'north' was split by time, and resplit would draw sets at random"):
        resplit_clients(clients, 3)
    with pytest.raises(UserError, match="client 'north' was split by time, and folds would draw sets at random"):
        split_into_folds(clients, Folds(3))
    random = split_table(ROWS, "ill", "hospital", time="day", drop="patient", split="random")
    assert len(resplit_clients(random.build_clients(lambda: torch.nn.Linear(1, 2)), 2)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "time"}, "split=time needs a column of times; give time='COLUMN'"),
        ({"split": "time_within_group", "time": "day"}, "needs a column of groups; give group='COLUMN'"),
        ({"split": "before"}, "unknown split 'before'"),
        ({"time": "dya"}, "time: the table has no column 'dya'; did you mean day"),
        ({"time": "hospital", "site": None}, "time: column 'hospital' must be numbers or dates"),
        ({"time": "holes"}, "time: column 'holes' has no value in row 3"),
        ({"time": "same"}, "north: its 60 rows have too few different times"),
        ({"time": "day", "public_fraction": 0.2}, "public_fraction=0.2 draws single examples, which a split by time"),
    ],
)
def test_refusals(options, words):
    rows = {**ROWS, "holes": [1.0, 2.0, None, *range(3, N)], "same": [1.0] * N}
    site = options.pop("site", "hospital")
    drop = [c for c in ("patient", "holes", "same", "day", "hospital") if c not in (site, options.get("time"))]
    with pytest.raises(UserError) as told:
        split_table(rows, "ill", site, drop=drop, **options)
    assert words in str(told.value)


def test_the_order_is_one_of_the_choices():
    assert Split(split="time").split == "time"
    with pytest.raises(UserError, match="unknown split"):
        Split(split="never")
