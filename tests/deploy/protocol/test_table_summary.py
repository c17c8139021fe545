"""Tables at sites: other columns, categories or classes are found before round 1 and said with names; values never."""

import json
from dataclasses import replace

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FD, FML, FedAvg, Local
from polyfed.core.errors import UserError
from polyfed.data.tabular.schema import merge_schemas, read_schema
from polyfed.deploy.protocol.table_summary import build_table_hashes_for_header, describe_table_difference

from ..conftest import ALL, MemoryGrid

ROWS = {"age": [40.0, 51, 63, 70] * 5, "sex": list("fmfm") * 5, "ill": ["no", "yes", "no", "yes"] * 5}
SMOKER = {"smoker": ["never", "daily"] * 10}


class Net(torch.nn.Linear):
    """For two numbers of features: the server's idea of the table, and another."""

    def __init__(self, features=3):
        super().__init__(features, 2)


def client(name, rows, features=None, **options):
    sites = pf.data.split_table(rows, "ill", None, name=name, **options)
    width = features or sites.num_features
    return sites.build_clients(lambda: Net(width))[0]


@pytest.fixture
def play(nodes, run, tmp_path):
    (tmp_path / "server.py").write_text("from torch import nn\ndef model():\n    return nn.Linear(3, 2)\n")

    def start(*clients, method=None, **words):
        (tmp_path / "server.py").write_text("from tests.deploy.protocol.test_table_summary import Net as model\n")
        return run(grid=MemoryGrid(nodes(list(clients), **words)), method=method, sites=",".join(c.id for c in clients))

    return start


def test_sites_with_one_schema_train_together(play):
    found = play(client("a", ROWS), client("b", ROWS))
    assert found.last.round == 3
    assert all("accuracy" in row for row in found.history[-1]["clients"].values())


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        ({**ROWS, **SMOKER}, {"drop": "age"}, r"it has no column 'age', and 'smoker' more"),
        ({**ROWS, "sex": ["f", "x"] * 10}, {}, r"it has other categories in 'sex'"),
        ({**ROWS, "ill": ["no", "dead"] * 10}, {}, r"its classes are others"),
        (
            {**ROWS, "age": [None, 51, 63, 70] * 5},
            {"drop": "sex"},
            r"'sex'.*only one of the two has empty cells in 'age'",
        ),
        (
            {"sex": ROWS["sex"], "age": ROWS["age"], "ill": ROWS["ill"]},
            {},
            "in another order, first at column 1: 'sex' in place of 'age'",
        ),
    ],
)
def test_another_table_is_refused_with_the_names_of_its_columns(play, rows, options, sentence):
    others = client("a", ROWS), client("b", ROWS)
    with pytest.raises(
        UserError, match=rf"site 'c' has another table than 'a': .*{sentence}; agree on one schema"
    ) as told:
        play(*others, client("c", rows, features=3 if "sex" not in options.get("drop", "") else None, **options))
    for value in ("daily", "never", "dead", "'x'", "51"):
        assert value not in str(told.value)


def test_without_consent_only_that_they_differ_is_told(play):
    words = {"allow-disclosure": False, "disclose": ALL}
    tables = client("a", ROWS), client("b", ROWS), client("c", {**ROWS, **SMOKER})
    with pytest.raises(UserError, match=r"does not take part: fedavg discloses weights"):
        play(*tables, **words)
    heads = {c.id: {"table": {"whole": c.id}} for c in tables}
    assert "the columns are named if both sites allow it" in describe_table_difference(heads)


def test_a_method_that_takes_any_form_asks_for_no_table(play):
    found = play(client("a", ROWS), client("c", {**ROWS, **SMOKER}), method=Local(lr=0.05))
    assert found.last.round == 3
    assert found.out is not None
    told = json.loads((found.out / "manifest.json").read_text())["told"]
    assert all("table" not in head for head in told.values())


@pytest.mark.parametrize(
    "table",
    [None, 3, [], {"whole": 3}, {"whole": "x", "columns": 3}, {"whole": "x", "columns": {"a": 1}},
     {"whole": "x", "columns": {"a": []}}, {"columns": {"a": ["x", True]}}],
)  # fmt: skip
def test_what_no_honest_site_tells_is_as_if_it_had_no_table(table):
    heads = {"a": {"table": {"whole": "y"}}, "b": {"table": table}}
    assert "site 'b' has no table, as 'a' has" in describe_table_difference(heads)
    assert describe_table_difference({"b": {"table": table}}) in (None, describe_table_difference({"b": {}}))


def test_noise_is_not_undone_by_a_hash(play):
    told = build_table_hashes_for_header(
        client("a", ROWS), frozenset({"one_architecture"}), "run", with_names=True, adds_noise=True
    )
    assert told == {"table": {}}
    assert describe_table_difference({"a": told, "b": {"table": {"whole": "y"}}}) is None
    words = {"clip-norm": 1.0, "noise-multiplier": 1.0, "disclose": ""}
    found = play(client("a", ROWS), client("b", ROWS), method=FedAvg(lr=0.05, weighted=False), **words)
    assert found.last.round == 3


def test_a_schema_makes_tables_of_different_places_alike(tmp_path, play):
    south = {**ROWS, "age": [None, 51, 63, 70] * 5, "sex": ["x", "f"] * 10, "ill": ["dead", "no"] * 10}
    schemas = [pf.data.split_table(rows, "ill", None).schema for rows in (ROWS, south)]
    merged = merge_schemas(*schemas, to=tmp_path / "schema.json")
    assert read_schema(tmp_path / "schema.json") == read_schema(merged)
    assert merged["classes"] == ["dead", "no", "yes"]
    one, two = (pf.data.split_table(rows, "ill", None, schema=str(tmp_path / "schema.json")) for rows in (ROWS, south))
    assert one.feature_names == two.feature_names == ("age", "age is missing", "sex=f", "sex=m", "sex=x")
    assert one.class_names == two.class_names
    assert set(one.dataset.train.y.tolist()) == {1, 2}
    assert set(two.dataset.train.y.tolist()) == {0, 1}
    with pytest.raises(UserError, match=r"the target has no class of the schema \(dead, no, yes\) in row"):
        pf.data.split_table({**ROWS, "ill": ["perhaps", "no"] * 10}, "ill", None, schema=merged)
    with pytest.raises(UserError, match="features: the table has no column 'sex'"):
        pf.data.split_table({"age": ROWS["age"], "ill": ROWS["ill"]}, "ill", None, schema=merged)
    with pytest.raises(UserError, match=r"the schema already sets drop; leave drop='age' out"):
        pf.data.split_table(ROWS, "ill", None, schema=merged, drop="age")


def test_two_tables_of_other_words_are_of_no_use():
    base = pf.data.split_table(ROWS, "ill", None).schema
    with pytest.raises(UserError, match="column 'sex' holds numbers in one table and categories in another"):
        merge_schemas(base, pf.data.split_table({**ROWS, "sex": [1.5, 2] * 10}, "ill", None).schema)
    with pytest.raises(UserError, match="have one task, and these schemas are of classification and regression"):
        merge_schemas(base, pf.data.split_table({**ROWS, "ill": [0.5, 1] * 10}, "ill", None).schema)
    assert replace(read_schema(base)).classes == ("no", "yes")


def test_other_classes_are_refused_by_methods_that_take_any_columns(play):
    rows = {**ROWS, "ill": ["no", "dead"] * 10}
    method = FD(lr=0.05)
    with pytest.raises(UserError, match=r"site 'c' has another table than 'a': its classes are others") as told:
        play(client("a", ROWS), client("b", ROWS), client("c", rows), method=method)
    assert "dead" not in str(told.value)
    assert play(client("a", ROWS), client("c", {**ROWS, **SMOKER}), method=method).last.round == 3


def test_a_common_network_beside_the_sites_own_needs_the_same_columns(play):
    swapped = {"sex": ROWS["sex"], "age": ROWS["age"], "ill": ROWS["ill"]}
    rows = {**swapped, "sex": [1.0, 2, 3, 5] * 5}, {"age": ROWS["age"], "sex": [1.0, 2, 3, 5] * 5, "ill": ROWS["ill"]}
    with pytest.raises(UserError, match="site 'b' has another table than 'a': its columns are in another order"):
        play(client("a", rows[0]), client("b", rows[1]), method=FML(lr=0.05))
