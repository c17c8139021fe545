"""`Examples(group=..., time=...)`: arrays and names of columns, and what is refused."""

import datetime

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.data.concat import concat_examples, concatenation_obstacle
from polyfed.data.partitioning.group_split import group_numbers
from polyfed.data.partitioning.resplit import resplit_clients

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group": [1, 2]}, "column 'group' has shape (2,) for 6 examples"),
        ({"group": "patient"}, "group='patient' is no column of the examples; give an array"),
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
