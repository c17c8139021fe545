"""Groups in a run: ids stay in memory, files have numbers, workers keep them, and patients on both sides are said."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.cli.main import main
from polyfed.simulation.checks.clients.data_leakage import warn_of_test_leakage
from polyfed.simulation.engines.ray.object_store import store_clients, unflatten_tensor
from polyfed.simulation.storage.predictions.prediction_store import read_predictions
from polyfed.testing import small_clients


def with_groups(client, ids, **options):
    sets = {name: getattr(client, name) for name in ("train", "test", "val")}
    parts = {
        name: pf.Examples(part.x, part.y, group=[f"{name}-{ids}-{k // 2}" for k in range(len(part))],
                          columns={"ward": ["w"] * len(part)}, **{n: np.arange(len(part)) + v for n, v in options.items()})
        for name, part in sets.items()
    }  # fmt: skip
    return pf.Client(client.id, client.model, parts["train"], parts["test"], parts["val"])


def test_no_file_has_an_id(tmp_path):
    clients = [with_groups(client, "secret") for client in small_clients(2)]
    run = pf.federate(clients, pf.algorithms.FedAvg(), rounds=1, workers=0, out=tmp_path / "run", progress=False)
    predictions = read_predictions(tmp_path / "run", "client-0")
    assert predictions.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert list(predictions.columns) == ["ward"]
    assert run.predictions("client-0").groups.tolist() == [0, 0, 1, 1, 2, 2]
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or b"secret" not in file.read_bytes(), file
    in_memory = pf.federate(clients, pf.algorithms.FedAvg(), rounds=1, workers=0, progress=False)
    assert in_memory.predictions("client-0").groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert list(in_memory.predictions("client-0").columns) == ["ward"]


def test_workers_get_groups_and_times():
    client = with_groups(small_clients(1)[0], "a", time=5)
    (stored,) = store_clients([client], put=lambda large: large)
    restored = stored.restore(unflatten_tensor)
    assert restored.val.group == "group"
    assert restored.val.column("group").tolist() == client.val.column("group").tolist()
    assert restored.train.times.tolist() == client.train.times.tolist()


def clients_of(train_ids, test_ids, **options):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=rng), torch.arange(20) % 2
    train = pf.Examples(x[:12], y[:12], group=train_ids, **{n: range(12) for n in options})
    test = pf.Examples(x[12:], y[12:], group=test_ids, **{n: range(12, 20) for n in options})
    return [pf.Client("north", None, train, test)]


def test_patients_on_both_sides_are_said():
    ids = np.arange(12) // 3
    with pytest.warns(UserWarning, match="test examples of groups that are also trained on: 3 of 8 of 'north'; "):
        warn_of_test_leakage(clients_of(ids, [3, 3, 3, 7, 7, 7, 8, 8]))
    warn_of_test_leakage(clients_of(ids, np.arange(8) + 100))
    warn_of_test_leakage(clients_of([None] * 12, [None] * 8))
    warn_of_test_leakage(clients_of(ids, [3] * 8, time=True))  # later rows of the same patients


def test_patients_whom_another_client_trains_on_are_said():
    (north,) = clients_of(np.arange(12) // 3, np.arange(8) + 100)
    south = replace(clients_of(np.arange(12) + 50, [3, 3, 2, 70, 71, None, None, 72])[0], id="south")
    with pytest.warns(UserWarning, match="test examples of groups that other clients train on: 3 of 8 of 'south'; "):
        warn_of_test_leakage([north, south])
    warn_of_test_leakage([north, replace(south, test=north.test)])
    (later,) = clients_of([3] * 12, [90] * 8, time=True)
    warn_of_test_leakage([replace(later, id="west"), south])  # split by time within patients, perhaps


def test_equal_inputs_with_other_targets_are_no_copies():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 2
    warn_of_test_leakage([pf.Client("north", None, (x, y), (x[:10].clone(), 1 - y[:10]))])
    with pytest.warns(UserWarning, match="10 of 10 of 'north'"):
        warn_of_test_leakage([pf.Client("north", None, (x, y), (x[:10].clone(), y[:10].clone()))])


def test_a_comparison_and_a_run_show_what_is_said_of_the_data(tmp_path):
    """The page of a comparison, its results, and the page of a run repeat the warnings about the data."""
    clients = [pf.Client(c.id, c.model, c.train, c.train.select(torch.arange(6))) for c in small_clients(2)]
    with pytest.warns(UserWarning, match="test examples that are also training examples"):
        comparison = pf.compare(clients, ["fedavg"], rounds=1, seeds=[0], references=False, tune="none", parallel=1,
                                quiet=True)  # fmt: skip
    assert comparison.results["warnings"][0].startswith(
        "Test examples that are also training examples of the same client: "
    )
    rng = np.random.default_rng(0)
    rows = [f"{k // 20 + 10},{rng.normal():.4f},{k % 2},{'ab'[k // 100]}" for k in range(200)]
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["patient,x,ill,hospital", *rows]), encoding="utf-8")
    out = tmp_path / "run"
    with pytest.warns(UserWarning, match="column 'patient' has 10 values"):
        main(["run", "--data", "table", "--data.path", str(table), "--data.target", "ill", "--data.site", "hospital",
              "--rounds", "1", "--quiet", "--out", str(out)])  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the data are read again
        main(["report", str(out)])
    assert "The data: column &#39;patient&#39; has 10 values" in (out / "report.html").read_text(encoding="utf-8")
