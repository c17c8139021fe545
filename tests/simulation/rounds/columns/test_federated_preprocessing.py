"""Preprocessing from sums over sites: as two rounds of a federation, what all rows in one place give."""

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.data.tabular.fit_preprocessor import fit_preprocessor
from polyfed.simulation.rounds.columns.federated_preprocessing import apply_preprocessing, fit_common_preprocessing
from polyfed.simulation.storage.directory import read_manifest


def frame(number=90):
    draw = np.random.default_rng(0)
    age = np.where(draw.random(number) < 0.2, np.nan, draw.normal(1e4, 3, number))
    site = draw.choice(["a", "b", "c", "d"], number)
    return pd.DataFrame({"age": np.where(site == "d", np.nan, age), "sex": draw.choice(["f", "m"], number),
                         "lab": draw.normal(0, 1, number), "ill": draw.integers(0, 2, number), "site": site})  # fmt: skip


def clients_of(data, **options):
    sites = pf.data.split_table(data, "ill", "site", **options)
    return sites.build_clients(lambda: torch.nn.Linear(sites.num_features, sites.num_outputs))


def test_two_rounds_give_the_moments_of_all_training_rows():
    clients = clients_of(frame())
    found = fit_common_preprocessing(clients)
    values = np.concatenate([c.train.x[c.train.index].double().numpy()[:, [0, 2]] for c in clients])
    np.testing.assert_allclose(found.prepared.mean, np.nanmean(values, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.prepared.spread, np.nanstd(values, axis=0), rtol=1e-9)
    direct = fit_preprocessor(clients[0].train.transform, [c.train for c in clients], "federated")
    np.testing.assert_allclose(found.prepared.mean, direct.mean, rtol=1e-13)
    assert found.facts["rounds"] == 2
    assert 0 < found.facts["bytes_up"] < 4 * 2 * 1000
    assert all(apply_preprocessing(c, found.prepared).test.transform == found.prepared for c in clients)


def test_secure_sums_give_the_same_up_to_fixed_point():
    clients = clients_of(frame())
    plain, secure = fit_common_preprocessing(clients).prepared, fit_common_preprocessing(clients, secure=True).prepared
    np.testing.assert_allclose(secure.mean, plain.mean, atol=1e-8)
    np.testing.assert_allclose(secure.spread, plain.spread, atol=1e-8)
    assert secure != plain


def test_a_column_that_fixed_point_cannot_tell_from_a_constant_is_named(recwarn):
    table = frame()
    numbers = [name for name in table if table[name].dtype == float]
    table[numbers[0]] *= 1e-7
    clients = clients_of(table)
    fit_common_preprocessing(clients)
    fit_common_preprocessing(clients_of(frame()), secure=True)
    assert not [w for w in recwarn if "vary by too little" in str(w.message)]
    with pytest.warns(UserWarning, match=f"the columns {numbers[0]} vary by too little for secure sums"):
        fit_common_preprocessing(clients, secure=True)


def test_examples_of_no_table_are_refused():
    x, y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(UserError, match="needs examples of one table at all clients"):
        fit_common_preprocessing([pf.Client("a", None, (x, y), (x, y))])


def test_a_run_on_federated_preprocessing_tells_its_cost(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    frame().to_csv("t.csv", index=False)
    command = "run --data table --data.path t.csv --data.target ill --data.site site --rounds 1 --quiet --out r"
    assert main([*command.split(), "--data.preprocess", "federated"]) == 0
    assert "preprocessing from sums over all clients: " in capsys.readouterr().out
    assert read_manifest("r")["preparation"]["rounds"] == 2
    files = sorted((tmp_path / "r/models").glob("*.preprocessing.json"))
    assert len({file.read_text() for file in files}) == 1
    run = pf.resume("r")
    assert run.federation.clients["a"].train.transform.scope == "federated"
