"""The patients of four hospitals that polyfed contains: UCI's rows, unchanged, as clients and as a recipe."""

import json
from importlib.resources import files

import pytest
import torch

import polyfed as pf
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.data.sources.published.heart import Heart, read_heart_table


def test_the_rows_are_uci_s():
    """Rows, labels and missing values by hospital, as UCI's page and FLamby's data sheet count them."""
    rows = read_heart_table().to_pylist()
    sites = {
        name: [row for row in rows if row["hospital"] == name] for name in ("Cleveland", "Hungary", "Switzerland", "VA")
    }
    labels = {name: [sum(row["num"] == k for row in part) for k in range(5)] for name, part in sites.items()}
    assert labels == {
        "Cleveland": [164, 55, 36, 35, 13], "Hungary": [188, 106, 0, 0, 0], "Switzerland": [8, 48, 32, 30, 5],
        "VA": [51, 56, 41, 42, 10],
    }  # fmt: skip
    missing = {
        name: [sum(row[c] is None for row in part) for c in ("chol", "slope", "ca", "thal")]
        for name, part in sites.items()
    }
    assert missing == {
        "Cleveland": [0, 0, 4, 2], "Hungary": [23, 190, 291, 266], "Switzerland": [0, 17, 118, 52], "VA": [7, 102, 198, 166],
    }  # fmt: skip
    assert all(row["chol"] == 0 for row in sites["Switzerland"]), "not measured, and 0 in UCI's file"


def test_the_licence_is_beside_the_data():
    folder = files("polyfed.data.sources.published") / "heart_disease"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "CC BY 4.0" in text
    assert all(name in text for name in ("Janosi", "Steinbrunn", "Pfisterer", "Detrano"))
    assert sum(len(file.read_bytes()) for file in folder.iterdir() if file.name.endswith(".data")) < 43_000


def test_hospitals_are_clients():
    sites = pf.data.heart(val_fraction=0.15, drop="ca")
    with pytest.warns(
        UserWarning, match=r"chol is 0 at Switzerland \(123 of 123 values\), VA \(49 of 193 values\), never"
    ):
        clients = sites.build_clients(lambda: torch.nn.Linear(sites.num_features, sites.num_outputs))
    assert [c.id for c in clients] == ["Cleveland", "Hungary", "Switzerland", "VA"]
    assert sum(len(part) for c in clients for part in (c.train, c.val, c.test)) == 920
    assert torch.isfinite(clients[1].train.batch(torch.arange(10))[0]).all()
    assert Heart(positive=None).load().num_outputs == 5
    pool = Heart().load()
    assert pool.class_names == pool.preprocessor.classes == sites.class_names == ("no disease", "disease")
    assert pool.train.y.equal((Heart(positive=None).load().train.y > 0).long()), "disease is 1 to 4, as in UCI's files"
    assert Heart(positive=">1").load().class_names == ("<=1", ">1")
    with pytest.raises(UserError, match="positiv"):
        pf.data.heart(positiv=">0")


def test_the_recipe_runs_offline(tmp_path):
    out = tmp_path / "run"
    main(["run", "heart", "--rounds", "1", "--baselines", "[]", "--quiet", "--out", str(out)])
    (record,) = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert set(record["clients"]) == {"Cleveland", "Hungary", "Switzerland", "VA"}
    assert "auc" in record["clients"]["VA"]


def test_the_column_of_sites_is_the_default(tmp_path, capsys):
    words = ["data", "--data", "heart", "--data.missing", "chol=0", "--plot", str(tmp_path / "data.png")]
    main([*words, "--data.positive", ">=2"])
    shown = capsys.readouterr().out
    assert "Switzerland" in shown
    assert ">=2" in shown
    assert "(outcome: num)" in " ".join(shown.split())
    main([*words, "--data.partition", "iid", "--data.clients", "3"])
    assert "client-002" in capsys.readouterr().out


def test_numbers_that_stand_for_no_value_can_be_emptied_as_the_look_at_the_data_advises(monkeypatch, tmp_path):
    sites = pf.data.heart(missing="chol=0")
    sites.build_clients(lambda: torch.nn.Linear(sites.num_features, sites.num_outputs))  # without a warning
    kinds = {(finding.kind, finding.column) for finding in pf.look(sites).findings}
    assert ("code", "chol") not in kinds
    assert ("code", "chol") in {(finding.kind, finding.column) for finding in pf.look(pf.data.heart()).findings}
    assert Heart().load().train.y.equal(Heart(missing="chol=0").load().train.y)
    monkeypatch.chdir(tmp_path)
    assert main(["look", "heart", "--data.missing", "chol=0"]) == 0
