"""A run on a table is resumed with this table alone: names of columns and categories count, as rows do."""

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.core.errors import UserError


def clients_of(rows):
    sites = pf.data.split_table(rows, "y", "h")
    return sites.build_clients(lambda: torch.nn.Linear(sites.num_features, sites.num_outputs))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.rename(columns={"age": "crp", "crp": "age"}),  # the same numbers under swapped names
        lambda rows: rows.rename(columns={"crp": "albumin"}),
        lambda rows: rows.assign(ward=rows["ward"].map({"in": "home", "out": "out"})),
    ],
)
@pytest.mark.one_case
def test_renamed_columns_and_categories_are_refused(tmp_path, change):
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({name: draw.normal(size=60) for name in ("age", "crp")}).assign(
        ward=["in", "out"] * 30, h=["a", "b", "c"] * 20, y=["no", "yes", "yes"] * 20
    )
    run = pf.federate(clients_of(rows), "local", rounds=1, workers=0, out=tmp_path / "run")
    with pytest.raises(UserError, match="columns or categories of the table have other names, or another order"):
        pf.resume(tmp_path / "run", clients=clients_of(change(rows)))
    resumed = pf.resume(tmp_path / "run", clients=clients_of(rows.copy()))
    assert resumed.table() == run.table()


@pytest.mark.filterwarnings("ignore::UserWarning")  # about few rows
def test_a_comparison_goes_on_with_the_columns_with_which_it_began(tmp_path):
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({name: draw.normal(size=40) for name in ("age", "crp")}).assign(
        h=["a", "b"] * 20, y=["no", "yes", "yes", "no"] * 10
    )
    words = {"rounds": 1, "seeds": [0], "tune": "none", "references": False, "parallel": 1, "quiet": True}
    before = pf.compare(clients_of(rows), "fedavg", out=tmp_path / "compared", **words)
    swapped = rows.rename(columns={"age": "crp", "crp": "age"})
    with pytest.raises(UserError, match="columns or categories of the table have other names, or another order, than"):
        pf.compare(clients_of(swapped), "fedavg", out=tmp_path / "compared", **words)
    assert pf.compare(clients_of(rows.copy()), "fedavg", out=tmp_path / "compared", **words).table() == before.table()
