"""The option `positive`: a value of two, a condition, or several values that make two classes."""

import json

import pytest

from polyfed.core.errors import UserError
from polyfed.data import split_table
from polyfed.data.sources.table_file import TableFile
from polyfed.data.tabular.table_reader import read_table

ROWS = {"num": [0, 1, 2, 3, 4, 0, 2, 4], "stage": list("abcdabcd"), "cost": [0.5, 1.5, 2.5, 3.5] * 2,
        "age": [50.5, 51, 52, 53, 54, 55, 56, 60]}  # fmt: skip


def pool(target, positive, **options):
    table = read_table(ROWS)
    drop = [name for name in ("num", "stage", "cost") if name != target]
    return TableFile(target=target, positive=positive, drop=drop, **options).build_dataset(table)


@pytest.mark.parametrize(
    ("target", "positive", "labels", "names"),
    [
        ("num", ">0", [0, 1, 1, 1, 1, 0, 1, 1], ("<=0", ">0")),
        ("num", ">=2", [0, 0, 1, 1, 1, 0, 1, 1], ("<2", ">=2")),
        ("num", "< 2", [1, 1, 0, 0, 0, 1, 0, 0], (">=2", "<2")),
        ("num", "1,2,3", [0, 1, 1, 1, 0, 0, 1, 0], ("not 1,2,3", "1,2,3")),
        ("num", "=4", [0, 0, 0, 0, 1, 0, 0, 1], ("not 4", "4")),
        ("num", "!=4", [1, 1, 1, 1, 0, 1, 1, 0], ("4", "not 4")),
        ("stage", "c,d", [0, 0, 1, 1, 0, 0, 1, 1], ("not c,d", "c,d")),
        ("cost", ">2", [0, 0, 1, 1, 0, 0, 1, 1], ("<=2", ">2")),
    ],
)
def test_two_classes(target, positive, labels, names):
    found = pool(target, positive)
    assert found.train.y.tolist() == labels
    assert found.class_names == names
    assert found.task == "classification"


@pytest.mark.parametrize(
    ("target", "positive", "words"),
    [
        ("num", "1", "positive='1' is one of 5 values of target 'num'; for two classes give a condition, such as '>0'"),
        ("num", "7", "positive='7' is not a value of target 'num'"),
        ("num", "1,7", "names '7', which is not a value of target 'num'; its values: 0, 1, 2, 3, 4"),
        ("num", ">9", "positive='>9' holds for no row of target 'num'"),
        ("num", ">=0", "positive='>=0' holds for every row of target 'num'"),
        ("num", ">many", "its bound is not a number"),
        ("stage", ">2", "target 'stage' holds texts"),
    ],
)
def test_refusals(target, positive, words):
    with pytest.raises(UserError) as told:
        pool(target, positive)
    assert words in str(told.value)


def test_sites_agree_on_the_two_classes(tmp_path):
    """Two tables of one federation: the schema has the classes that the condition makes, and each site gives it."""
    north = split_table(ROWS, "num", None, positive=">0", drop="stage,cost")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(north.schema))
    rows = {**ROWS, "num": [0, 0, 1, 1, 0, 0, 1, 1]}
    south = split_table(rows, "num", None, positive=">0", schema=str(schema))
    assert south.class_names == ("<=0", ">0")
    assert south.dataset.train.y.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
