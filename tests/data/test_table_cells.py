"""Cells of a table: columns that do not vary at a site, and texts that stand for no value."""

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.data.partitioning.folds import Folds, split_into_folds
from polyfed.data.partitioning.resplit import resplit_clients


def linear(sites):
    return lambda: torch.nn.Linear(sites.num_features, sites.num_outputs)


def with_constant(site_rows=20):
    """A column that does not vary at site b, but for its last row; and a site of two rows."""
    draw = np.random.default_rng(3)
    frame = pd.DataFrame(
        {"age": draw.normal(60, 9, 42), "chol": draw.normal(200, 30, 42), "y": [0, 1] * 21, "site": "a"}
    )
    frame.loc[site_rows:, "site"] = "b"
    frame.loc[site_rows:, "chol"] = 0.0
    frame.loc[40:, "site"] = "d"
    return frame


def test_columns_that_do_not_vary_at_a_site_reach_networks_as_0_with_a_warning():
    frame = with_constant()
    with pytest.warns(UserWarning, match=r"for which networks get 0: site 'd': 'age'\. Give more rows") as told:
        sites = pf.data.split_table(frame, "y", "site")
    assert len(told) == 1
    with pytest.warns(UserWarning, match="chol is 0 at b"):
        clients = sites.build_clients(lambda: torch.nn.Linear(2, 2))
    assert clients[2].test.batch(torch.arange(1))[0].abs().max() == 0
    assert clients[1].train.batch(torch.arange(5))[0][:, 1].abs().max() == 0
    run = pf.federate(clients, "fedavg", rounds=1, workers=0)
    base = run.predict("b", {"age": [60.0], "chol": [0.0]})
    with pytest.warns(UserWarning, match=r"networks get 0: the inputs for client 'b': 'chol'"):
        assert torch.equal(run.predict("b", {"age": [60.0], "chol": [240.0]}), base)
    with pytest.warns(UserWarning, match=r"networks get 0: the inputs for client 'b': 'chol'"):
        run.predict("b", torch.tensor([[60.0, 240.0]]))


def test_columns_that_vary_somewhere_keep_their_scale_by_sums_over_all_sites(recwarn):
    sites = pf.data.split_table(with_constant(), "y", "site", preprocess="federated")
    assert all(spread > 0 for spread in sites.client_data[0].train.transform.spread)
    frame = with_constant().assign(chol=0.0)
    common = pf.data.split_table(frame, "y", "site", preprocess="federated").client_data[0].train.transform
    assert common.spread[1] == 0
    assert not [w for w in recwarn if "networks get 0" in str(w.message)]


def test_rows_that_are_dealt_again_are_told_of_too(recwarn):
    table = with_constant().query("site != 'd'").reset_index(drop=True)
    table.loc[25, "chol"] = 300.0
    clients = pf.data.split_table(table, "y", "site", seed=1).build_clients(lambda: torch.nn.Linear(2, 2))
    recwarn.clear()
    divided = resplit_clients(clients, 8)
    odd = [b for _, b in divided if not b.train.transform.spread[1]]
    assert 0 < len(odd) < 8
    assert len([w for w in recwarn if "networks get 0: site 'b': 'chol'" in str(w.message)]) == 1
    assert all(b.test.batch(torch.arange(len(b.test)))[0][:, 1].abs().max() == 0 for b in odd)


def test_columns_that_are_constant_in_different_folds_get_one_warning(recwarn):
    table = with_constant().query("site != 'd'").reset_index(drop=True).assign(dose=1.0)
    table.loc[25, "chol"] = 300.0
    table.loc[30, "dose"] = 2.0
    clients = pf.data.split_table(table, "y", "site", seed=1).build_clients(lambda: torch.nn.Linear(3, 2))
    recwarn.clear()
    split_into_folds(clients, Folds(5))
    (text,) = [str(w.message) for w in recwarn if "networks get 0" in str(w.message)]
    assert "site 'b': 'chol', 'dose'" in text or "site 'b': 'dose', 'chol'" in text


MARKED = {
    "age": [61.5, "?", 70, 55, 48.25, 66] * 8,
    "flag": ["0", "1", "?", "1", "0", "1"] * 8,
    "dose": [1, -9, 3, 4, 5, 6] * 8,
    "sex": ["f", "m", "f", "?", "m", "f"] * 8,
    "lab": list(range(48)),
    "ill": ["no", "yes"] * 24,
}


def in_every_form(rows, folder):
    table = pd.DataFrame(rows)
    table.to_csv(folder / "t.csv", index=False)
    table.astype(str).to_parquet(folder / "t.parquet")
    return {
        "csv": str(folder / "t.csv"), "parquet": folder / "t.parquet", "frame": table, "texts": table.astype(str),
        "category": table.astype(dict.fromkeys({"sex"} & set(rows), "category")), "mapping": rows,
        "arrays": {name: np.array(cells, dtype=object) for name, cells in rows.items()},
        "rows": table.to_dict("records"),
    }  # fmt: skip


def test_texts_that_stand_for_no_value_are_known_in_every_form_of_a_table(tmp_path):
    for missing in (["?", "-9"], "?,-9", np.array(["?", "-9"]), ("?", -9)):
        for form, rows in in_every_form(MARKED, tmp_path).items():
            pool = pf.data.split_table(rows, "ill", None, missing=missing).dataset
            assert [(c.name, c.categories, c.missing) for c in pool.preprocessor.columns] == [
                ("age", None, True), ("flag", None, True), ("dose", None, True), ("sex", ("f", "m"), True),
                ("lab", None, False),
            ], form  # fmt: skip
            expected = torch.tensor([61.5, torch.nan, 70, 55, 48.25, 66])
            assert torch.equal(pool.train.x[:6, 0].nan_to_num(-1.0), expected.nan_to_num(-1.0)), form
            assert bool(pool.train.x[1, 2].isnan()), form


def test_a_number_stands_for_no_value_in_one_column_alone(tmp_path):
    rows = {"chol": [0, 230, "?", 250] * 5, "sex": [0, 1] * 10, "ill": [0, 1, 1, 0] * 5}
    for form, source in in_every_form(rows, tmp_path).items():
        x = pf.data.split_table(source, "ill", None, missing="?,chol=0").dataset.train.x
        assert x[:4, 0].nan_to_num(-1.0).tolist() == [-1, 230, -1, 250], form
        assert x[:4, 1].tolist() == [0, 1, 0, 1], form
        with pytest.raises(UserError, match="missing: the table has no column 'chl'; did you mean chol"):
            pf.data.split_table(source, "ill", None, missing=["?", "chl=0"])


def test_a_message_names_the_option_in_every_form(tmp_path):
    for share in (0.1, 0.3, 0.5):
        marked = [f"{i}.5" if i % 10 >= 10 * share else "?" for i in range(60)]
        rows = {"chol": marked, "ill": [0, 1] * 30}
        for form, source in in_every_form(rows, tmp_path).items():
            with pytest.raises(UserError, match=r"give missing=\['\?'\];") as told:
                pf.data.split_table(source, "ill", None)
            assert "'chol' holds numbers" in str(told.value), form


def test_texts_that_are_numbers_are_numbers_and_a_category_that_is_a_sign_is_told_of():
    rows = {"age": ["61", "70.5", None, "50"] * 5, "flag": ["y", "n", "?", "?"] * 5, "n": range(20), "ill": [0, 1] * 10}
    with pytest.warns(UserWarning, match=r"column 'flag' has the category '\?'; .* missing=\['\?'\]"):
        sites = pf.data.split_table(rows, "ill", None)
    assert sites.feature_names[:2] == ("age", "n")
    assert pf.data.split_table(rows, "ill", None, categorical="age", missing="?").feature_names[1:4] == (
        "age=50",
        "age=61",
        "age=70.5",
    )
    commas = {"age": ["61", "70,5", None, "50"] * 5, "n": range(20), "ill": [0, 1] * 10}
    assert pf.data.split_table(commas, "ill", None, decimal=",").dataset.train.x[1, 0] == 70.5
    with pytest.raises(UserError, match=r"give decimal=','"):
        pf.data.split_table(commas, "ill", None)
    codes = {"plate": ["1_2", "12"] * 10, "n": range(20), "ill": [0, 1] * 10}  # int("1_2") is 12 in Python
    assert pf.data.split_table(codes, "ill", None, categorical="plate").feature_names[1:] == ("plate=12", "plate=1_2")
    with pytest.raises(UserError, match="'plate' holds numbers, and '1_2' in row 17"):
        pf.data.split_table({**codes, "plate": [*"1234"] * 4 + ["1_2", *"123"]}, "ill", None)
    with pytest.raises(UserError, match=r"the dict cannot be read as a table .*each column needs values of one kind"):
        pf.data.split_table({**codes, "plate": [2**70] * 20}, "ill", None)
    with pytest.raises(UserError, match="column 'age' has no value in any row"):
        pf.data.split_table({**rows, "age": ["?"] * 20}, "ill", None, missing="?")


def test_new_rows_with_a_text_among_numbers_are_refused_with_the_row():
    sites = pf.data.split_table({"age": range(20), "ill": [0, 1] * 10}, "ill", None, name="n")
    run = pf.federate(sites.build_clients(linear(sites)), "local", rounds=1, workers=0)
    assert torch.equal(run.predict("n", {"age": ["4", None]}), run.predict("n", {"age": [4, np.nan]}))
    with pytest.raises(
        UserError, match=r"column 'age' must hold numbers, .*'\?' in row 2; leave cells without a value"
    ):
        run.predict("n", {"age": [4, "?"]})


def test_odd_times_and_events_are_told():
    table = {"age": range(8), "h": ["north", "south"] * 4, "days": [3.0, 4, -5, 7, 8, -1, 2, 6], "died": [1, 0] * 4}
    with pytest.raises(UserError, match=r"target 'days' is below 0 in rows 3 and 6 .*a time is at least 0"):
        pf.data.split_table(table, "days", "h", event="died")
    table |= {"days": range(1, 9), "died": [0] * 8}
    with pytest.warns(UserWarning, match="event 'died' is 0 in every row: without an event no risk"):
        pf.data.split_table(table, "days", "h", event="died")


@pytest.mark.parametrize("column", ["ward", "y"])
def test_categories_that_are_intervals_are_categories_by_their_text(column):
    frame = with_constant().iloc[:40].assign(chol=np.random.default_rng(1).normal(size=40), ward=["u", "v"] * 20)
    frame[column] = pd.cut(frame["age"], 2)
    sites = pf.data.split_table(frame, "y", "site")
    if column == "y":
        assert sites.class_names == tuple(sorted(map(str, frame["y"].cat.categories)))
    run = pf.federate(sites.build_clients(linear(sites)), "fedavg", rounds=1, workers=0)
    assert run.predict("a", frame.drop(columns="y")).shape == (40, 2)


def test_categories_of_other_kinds_in_an_arrow_table_are_refused_with_the_column():
    lists = pyarrow.DictionaryArray.from_arrays([0, 1] * 6, [[1], [2]])
    table = pyarrow.table({"x": lists, "y": [0, 1] * 6, "site": ["a", "b"] * 6})
    with pytest.raises(UserError, match=r"column 'x' holds values of type list.*neither numbers nor texts"):
        pf.data.split_table(table, "y", "site")
