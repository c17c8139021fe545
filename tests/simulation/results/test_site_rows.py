"""Rows of a table with its column of sites are predicted by the network of each row's site."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.testing import small_clients

random = np.random.default_rng(0)
FRAME = pd.DataFrame({"age": random.normal(50, 10, 90), "sex": random.choice(list("fm"), 90)})
FRAME["dose"] = FRAME["age"] + random.normal(0, 12, 90)
FRAME["town"] = random.permutation(["01", "1", "Köln"] * 30)


def line():
    return nn.Linear(3, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    clients = pf.data.split_table(FRAME, "dose", "town").build_clients(line)
    return pf.federate(
        clients, "local", rounds=2, workers=0, progress=False, out=tmp_path_factory.mktemp("rows") / "run"
    )


@pytest.mark.parametrize("form", ["frame", "mapping", "rows", "csv", "keyword"])
@pytest.mark.one_case
def test_each_row_is_predicted_by_its_site(run, form, tmp_path):
    FRAME.drop(columns="dose").to_csv(tmp_path / "new.csv", index=False)
    rows = {"mapping": FRAME.to_dict("list"), "rows": FRAME.to_dict("records"), "csv": tmp_path / "new.csv"}
    outputs = run.predict(x=FRAME) if form == "keyword" else run.predict(rows.get(form, FRAME))
    assert outputs.shape == (90, 1)
    for site in ("01", "1", "Köln"):
        of_site = torch.tensor((FRAME["town"] == site).tolist())
        torch.testing.assert_close(outputs[of_site], run.predict(site, FRAME[FRAME["town"] == site]))
    assert not torch.allclose(outputs, run.predict("1", FRAME))


def test_a_saved_run_and_tables_of_predictions_do_the_same(run):
    saved, outputs = pf.load(run.out), run.predict(FRAME)
    torch.testing.assert_close(saved.predict(FRAME, model=line), outputs, rtol=1e-5, atol=1e-4)
    by_site = dict.fromkeys(["01", "1", "Köln"], line)
    torch.testing.assert_close(saved.predict(FRAME, model=by_site), outputs, rtol=1e-5, atol=1e-4)
    assert run.predict_table(FRAME) == {"dose": [pytest.approx(value) for value in outputs[:, 0].tolist()]}
    assert saved.predict_table(FRAME, model=line).keys() == {"dose"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            FRAME.assign(town="Koln"),
            r"^rows 1, 2, 3, 4, 5 and 85 more: no client of this run is called 'Koln'; choices: 01, 1, Köln",
        ),
        (FRAME.assign(town=[None] + ["1"] * 89), r"^site: column 'town' has no value in row 1"),
        (
            FRAME.drop(columns="town"),
            r"the rows have no column 'town' .*; add it, or name the client .* \(client='01'\)$",
        ),
        (FRAME[["age"]].to_numpy(), r"^ndarray has no column 'town' with the site of each row; name the client"),
        ("1", r"the inputs are missing; give them after the client: predict\('1', x\)"),
    ],
)
def test_rows_without_a_known_site_are_refused(run, rows, words):
    for result in (run, pf.load(run.out)):
        with pytest.raises(pf.UserError, match=words):
            result.predict(rows)


def test_clients_that_are_no_sites_of_a_table_must_be_named():
    run = pf.federate(small_clients(), "local", rounds=1, workers=0, progress=False)
    with pytest.raises(
        pf.UserError,
        match=r"the clients are not the sites of a table's column, .*; name the client .* \(client='client-0'\)",
    ):
        run.predict(torch.zeros(2, 6))
