"""`Examples(group=..., time=...)`: arrays and names of columns, and what is refused."""

import datetime

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.core.examples.groups import (
    draw_rows_of_whole_groups,
    group_id_of_each_row,
    is_alone,
    number_units,
)
from polyfed.core.examples.times import times_as_numbers
from polyfed.core.training.privacy.private_backend import number_of_units
from polyfed.data.concat import concat_examples, concatenation_obstacle, rows_in_stored_tensors
from polyfed.data.partitioning.group_split import group_numbers
from polyfed.data.partitioning.resplit import resplit_clients
from polyfed.data.partitioning.validation_split import hold_out_missing_validation_sets

X, Y = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
IDS = ["p7", "p7", "p2", "p2", "p9", "p9"]


def test_an_array_is_as_a_column():
    by_array = pf.Examples(X, Y, group=IDS)
    by_name = pf.Examples(X, Y, columns={"patient": IDS}, group="patient")
    for examples in (by_array, by_name):
        assert group_numbers(examples).tolist() == [0, 0, 1, 1, 2, 2]
        assert group_numbers(examples.select(torch.tensor([5, 2]))).tolist() == [0, 1]
        assert examples.columns_for_subgroup_scores == ()
    assert group_numbers(pf.Examples(X, Y)) is None
    assert pf.Examples(X, Y, group=[1, 1, None, None, 2, 2]).group == "group"


@pytest.mark.parametrize("seed", range(5))
def test_examples_that_a_method_holds_out_are_whole_groups(seed):
    group = np.repeat(list("abcde"), [2, 3, 4, 5, 16])
    examples = pf.Examples(torch.zeros(30, 1), torch.zeros(30), group=group)
    rows = draw_rows_of_whole_groups(examples, 8, seed)
    assert not set(group[rows]) & set(np.delete(group, rows))
    assert 0 < len(rows) <= 8
    assert draw_rows_of_whole_groups(examples, 1, seed).tolist() == [0, 1], "the smallest group, if all have more"
    without = pf.Examples(torch.zeros(30, 1), torch.zeros(30))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(draw_rows_of_whole_groups(without, 8, seed), order[:8].sort().values)
    one_patient = pf.Examples(torch.zeros(30, 1), torch.zeros(30), group=["p"] * 30)
    assert len(draw_rows_of_whole_groups(one_patient, 8, seed)) == 8


@pytest.mark.parametrize("missing", [None, "", float("nan")])
def test_a_row_without_a_group_is_a_unit_by_itself(missing):
    group = [1.0, 1.0, np.nan, np.nan, 2.0, 2.0] if missing != missing else ["a", "a", missing, missing, "b", "b"]
    units = number_units(pf.Examples(X, Y, group=group)).tolist()
    assert sorted(set(units)) == [0, 1, 2, 3]
    assert units[0] == units[1] != units[4] == units[5]
    assert units[2] != units[3]


def test_nan_among_texts_is_no_group():
    units = number_units(pf.Examples(X, Y, group=["a", "a", float("nan"), float("nan"), "b", "b"])).tolist()
    assert len(set(units)) == 4
    assert units[2] != units[3]


def test_whole_numbers_are_the_same_groups_in_columns_of_other_types():
    whole = pf.Examples(X, Y, group=np.array([7, 7, 2, 2, 9, 9]))
    floating = pf.Examples(
        X + 20, Y, group=np.array([7.0, 7.0, 2.0, 2.0, np.nan, 9.5])
    )  # as a missing value makes them
    with pytest.warns(UserWarning, match="groups that are also trained on: 4 of 6 of 'a'"):
        pf.federate(
            [pf.Client("a", lambda: torch.nn.Linear(2, 2), whole, floating)], "local", rounds=1, workers=0, quiet=True
        )
    people = [pf.Client(name, None, of, of.select(torch.arange(1))) for name, of in (("a", whole), ("b", floating))]
    held_out = hold_out_missing_validation_sets(people, seed=0)
    trained, held = (
        {id for c in held_out for id in group_id_of_each_row(part(c).column("group")).tolist() if not is_alone(id)}
        for part in (lambda c: c.train, lambda c: c.val)
    )
    assert held
    assert not trained & held


def test_ids_of_several_types_are_units():
    mixed = pf.Examples(X, Y, group=np.array([7, "a", 7.0, None, "a", "7"], dtype=object))
    units = number_units(mixed)
    assert units[0] == units[2] == units[5]
    assert units[1] == units[4]
    assert len(set(units.tolist())) == 3


def test_rows_without_a_group_train_privately_and_are_compared():
    train, test = (
        pf.Examples(
            torch.randn(12, 2, generator=torch.Generator().manual_seed(k)),
            torch.cat([Y, Y]),
            group=[f"a{k}", f"a{k}", None, None, f"b{k}", f"b{k}"] * 2,
        )
        for k in (0, 1)
    )
    clients = [pf.Client(name, lambda: torch.nn.Linear(2, 2), train, test) for name in ("north", "south")]
    method = pf.algorithms.FedAvg(batch_size=2, privacy=pf.Privacy(noise_multiplier=1.0, unit="group"))
    run = pf.federate(clients, method, rounds=1, workers=0)
    assert number_of_units(train, method.privacy) == 6
    assert set(run.history[0]["epsilon"]) == {"north", "south"}
    assert run.cross_site().matrix()[0][0].examples == 12


def test_a_row_without_a_group_decides_no_set_at_another_client():
    def client(name, group):
        n = len(group)
        parts = [pf.Examples(torch.randn(n, 2), torch.arange(n) % 2, group=group[k:] + group[:k]) for k in (0, 1)]
        return pf.Client(name, None, *parts)

    alone = [None] * 40
    tested = []
    for name in ("north", "south"):
        both = resplit_clients([client("first", alone), client(name, alone)], 2, seed=0)
        tested.append([rows_in_stored_tensors(one.test).tolist() for one in both[0]])
    assert tested[0][0] == tested[1][0]
    assert len({str(sorted(rows)) for pair in tested for rows in pair}) == 3, (
        "each client's rows are drawn by themselves"
    )


@pytest.mark.parametrize(
    "times",
    [
        [3, 1, 2, 6, 5, 4], np.array([3.5, 1, 2, 6, 5, 4]), torch.tensor([3, 1, 2, 6, 5, 4]),
        [f"2026-01-0{k}" for k in (3, 1, 2, 6, 5, 4)], [datetime.date(2026, 1, k) for k in (3, 1, 2, 6, 5, 4)],
        np.datetime64("2026-01-01") + np.array([3, 1, 2, 6, 5, 4]),
    ],
)  # fmt: skip
def test_times_are_numbers_and_dates(times):
    examples = pf.Examples(X, Y, time=times)
    assert examples.times.argsort().tolist() == [1, 2, 0, 5, 4, 3]
    assert examples.select(torch.tensor([1])).times.shape == (1,)


def test_times_with_a_zone_are_compared_in_utc():
    texts = ["2026-01-01T10:00:00Z", "2026-01-01T10:30:00+02:00", "2026-01-01 05:00-0600"]
    zoned = [datetime.datetime.fromisoformat(text) for text in texts]
    for times in (texts, zoned, np.array(zoned, dtype=object)):
        assert times_as_numbers(times, "day").argsort().tolist() == [1, 0, 2]
    assert times_as_numbers(["1970-01-01T01:00+01:00"], "day").tolist() == [0]
    with pytest.raises(UserError, match="day has a time zone in 1 of 2 rows"):
        times_as_numbers([texts[0], "2026-01-01T10:00:00"], "day")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group": [1, 2]}, "column 'group' has shape (2,) for 6 examples"),
        ({"group": "patient"}, "group='patient' is not a column of the examples; give an array"),
        ({"group": "patent", "columns": {"patient": IDS}}, "did you mean patient"),
        ({"group": IDS, "columns": {"group": IDS}}, "the examples have a column 'group' too"),
        ({"time": [1, 2]}, "column 'time' has shape (2,) for 6 examples"),
        ({"time": [1, 2, np.nan, 4, 5, np.nan]}, "time has no value in rows 3, 6 (the first is 1)"),
        ({"time": ["2026-01-01", "soon", *IDS[:4]]}, "time must be numbers or dates of the form 2026-01-31"),
        ({"time": "day", "columns": {"day": IDS}}, "time: column 'day' must be numbers or dates"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(UserError) as told:
        pf.Examples(X, Y, **options)
    assert words in str(told.value)
    assert "p7" not in str(told.value)


def test_sets_with_and_without_groups_are_not_split_again():
    with_groups, without = pf.Examples(X, Y, group=IDS), pf.Examples(X + 20, Y)
    assert concatenation_obstacle(with_groups, without) == "groups are column 'group' and missing"
    client = pf.Client("north", None, with_groups, without)
    with pytest.raises(UserError, match="train and test cannot be joined and split again, since their groups are"):
        resplit_clients([client], 2)
    assert group_numbers(concat_examples([with_groups, pf.Examples(X + 20, Y, group=IDS[::-1])])).max() == 2


def test_rows_of_a_table_are_prepared_once_with_the_same_bits():
    sites = pf.data.heart()
    part = sites.client_data[0].train
    rows = torch.tensor([3, 0, 5])
    prepared, _ = part.batch(rows, torch.Generator())
    plain = part.transform(part.x[part.index[rows]])
    assert torch.equal(prepared, plain)
    prepared += 1  # a batch is a copy
    assert torch.equal(part.batch(rows)[0], plain)
    assert torch.equal(part.select(rows).batch(torch.arange(3))[0], plain)
