"""Clients in any iterable, numbers of NumPy, and what of progress is shown: `federate` and `compare` take the same."""

import inspect

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.monitoring.progress_argument import resolve_progress
from polyfed.simulation.storage.directory import read_manifest
from polyfed.testing import small_clients

CLIENTS = small_clients(3)
QUICK = {"seeds": [0], "tune": "none", "references": False, "parallel": 1, "quiet": True}


def scores(result):
    return [list(row.items()) for row in result.table()]


@pytest.mark.parametrize(
    "given",
    [
        lambda: (client for client in CLIENTS),
        lambda: {client.id: client for client in CLIENTS}.values(),
        lambda: tuple(CLIENTS),
        lambda: np.array(CLIENTS, dtype=object),
    ],
)
@pytest.mark.one_case
def test_clients_come_in_any_iterable(given):
    expected = scores(pf.federate(CLIENTS, "fedavg", rounds=1, workers=0))
    assert scores(pf.federate(given(), "fedavg", rounds=1, workers=0)) == expected
    compared = pf.compare(given(), ["fedprox"], rounds=1, **QUICK)
    assert set(compared.results["clients"]) == {client.id for client in CLIENTS}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (CLIENTS[0], r"got one client, 'client-0': \[client\]"),
        ({client.id: client for client in CLIENTS}, r"got a mapping; give its values: list\(clients.values\(\)\)"),
        (None, "got NoneType"),
        ("north", "must be a list of polyfed.Client objects, .* got str"),
        (3, "got int"),
        ([], "needs at least one client, got none"),
        (iter(()), "needs at least one client, got none"),
        ([CLIENTS[0], None], "must be polyfed.Client objects, got NoneType"),
    ],
)
def test_what_is_no_list_of_clients_is_refused_in_one_sentence(given, sentence, tmp_path):
    for start in (
        lambda: pf.federate(given, "fedavg", rounds=1, out=tmp_path / "run"),
        lambda: pf.compare(given, ["fedprox"], rounds=1, out=tmp_path / "compared", **QUICK),
    ):
        with pytest.raises(pf.UserError, match=sentence):
            start()
    assert not list(tmp_path.iterdir())


def test_settings_may_be_numbers_of_numpy():
    plain = {
        "rounds": 2,
        "seed": 3,
        "clients_per_round": 2,
        "evaluate_every": 1,
        "min_replies": 1,
        "keep": 2,
        "workers": 0,
    }
    of_numpy = {name: np.int64(value) for name, value in plain.items()} | {"secure": np.bool_(False)}
    method = pf.algorithms.FedAvg(lr=np.float64(0.05), batch_size=np.int64(8), local_epochs=np.int32(1))
    assert method == pf.algorithms.FedAvg(lr=0.05, batch_size=8)
    run = pf.federate(CLIENTS, method, **of_numpy)
    assert scores(run) == scores(pf.federate(CLIENTS, pf.algorithms.FedAvg(lr=0.05, batch_size=8), **plain))
    assert run.federation.settings == pf.federate(CLIENTS, method, **plain).federation.settings


@pytest.mark.thorough
def test_a_comparison_may_have_numbers_of_numpy():
    words = QUICK | {"seeds": np.arange(2), "parallel": np.int64(1), "target": np.float32(0.5)}
    tuned = pf.compare(CLIENTS, ["fedprox"], rounds=1, **words | {"tune": {"lr": np.logspace(-2, -1, 2)}})
    assert [entry["fields"] for entry in tuned.results["tuning"]["methods"]["fedprox"]["tried"]] == [
        {"lr": pytest.approx(0.01)}, {"lr": pytest.approx(0.1)}
    ]  # fmt: skip
    assert tuned.results["seeds"] == [0, 1]


def test_every_method_keeps_pythons_own_numbers():
    for name, kind in REGISTRY.items():
        plain = kind()
        numbers = {
            field: value for field in inspect.signature(kind).parameters
            if isinstance(value := getattr(plain, field), int | float) and not isinstance(value, bool)
        }  # fmt: skip
        given = {f: np.int64(v) if isinstance(v, int) else np.float64(v) for f, v in numbers.items()}
        made = kind(**given)
        assert made == plain, name
        assert all(type(getattr(made, field)) is type(value) for field, value in numbers.items()), name


def test_progress_is_said_in_the_same_words_by_both():
    assert {"progress", "quiet"} <= set(inspect.signature(pf.federate).parameters)
    assert {"progress", "quiet"} <= set(inspect.signature(pf.resume).parameters)
    assert {"progress", "quiet"} <= set(inspect.signature(pf.compare).parameters)
    silent = SilentProgress()
    assert resolve_progress(silent, quiet=True) is silent
    assert isinstance(resolve_progress(False), SilentProgress)
    assert isinstance(resolve_progress(True, quiet=True), SilentProgress)
    with pytest.raises(pf.UserError, match=r"progress must be True, False, a Progress or a function of .* got 'bar'"):
        resolve_progress("bar")
    pf.federate(CLIENTS, "fedavg", rounds=1, workers=0, quiet=True)


@pytest.mark.parametrize(
    ("target", "names"),
    [(["ill", "well"] * 12, ("ill", "well")), ([1.5 + k / 7 for k in range(24)], None)],
    ids=["classes", "numbers"],
)
def test_classes_of_a_table_have_their_names_in_runs_and_comparisons(target, names, tmp_path):
    rows = {"site": ["north"] * 12 + ["south"] * 12, "age": [40.25 + 1.5 * k for k in range(24)], "outcome": target}
    tables = pf.data.split_table(rows, "outcome", "site")
    clients = tables.build_clients(lambda: torch.nn.Linear(1, len(names or [0])))
    run = pf.federate(clients, "fedavg", rounds=1, workers=0, out=tmp_path / "run")
    assert run.class_names == names
    assert read_manifest(tmp_path / "run").get("class_names") == (names and list(names))
    compared = pf.compare(clients, ["fedavg"], rounds=1, **QUICK)
    assert compared.results["class_names"] == (names and list(names))


def test_a_single_example_that_is_a_view_with_a_stride_is_taken(tmp_path):
    x, y = torch.randn(24, 4), torch.arange(24) % 2
    clients = [
        pf.Client(i, lambda: torch.nn.Linear(4, 2), (x[k::3][:6], y[k::3][:6]), (x[k::3][7:8], y[k::3][7:8]))
        for k, i in enumerate("abc")
    ]
    assert len(pf.federate(clients, "fedavg", rounds=1, workers=0, out=tmp_path / "run").table()) == 4
