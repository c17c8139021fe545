"""Metrics that are asked for: in records, tables and files, and which of them decides."""

import json

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, Local, PFedMe
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.seeds import torch_generator
from polyfed.simulation.engines.pool import PoolEngine
from polyfed.simulation.monitoring.progress import LineProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.round_scores import round_of_best_score
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.testing import assert_runs_equal, small_clients


def cost(outputs, targets):
    """Share of wrong examples of class 0."""
    return float((outputs.argmax(1) != targets)[targets == 0].double().mean())


COST = Metric("cost", cost, higher_is_better=False, label="cost of misses")


def two_classes(number=2):
    generator = torch_generator(3)
    made = []
    for k in range(number):
        x, y = torch.randn(70, 6, generator=generator), torch.arange(70) % 2
        x[:, 0] += y
        train, test, val = ((x[rows], y[rows]) for rows in (slice(30, 70), slice(20), slice(20, 30)))
        made.append(pf.Client(f"c{k}", lambda: nn.Linear(6, 2), train, test, val))
    return made


def test_auc_of_two_classes_needs_no_labels_of_another_form():
    run = pf.federate(two_classes(), FedAvg(lr=0.1), rounds=2, workers=0, metrics=["auc"])
    rows = run.table()
    assert list(rows[0]) == ["client", "auc", "loss", "val_auc", "val_loss", "num_examples"]
    kept = run.predictions("c0")
    difference = kept.outputs[:, 1] - kept.outputs[:, 0]
    positive, negative = difference[kept.targets == 1], difference[kept.targets == 0]
    assert rows[0]["auc"] == pytest.approx(float((positive[:, None] > negative).double().mean()))


@pytest.mark.parametrize("workers", [0, 2])
def test_functions_and_names_are_computed_on_every_set_and_network(workers):
    common = small_clients()[0].test
    clients = [pf.Client(c.id, c.model, c.train, c.test, c.val, common) for c in small_clients()]
    run = pf.federate(
        clients, PFedMe(lr=0.1), rounds=1, workers=workers, metrics=[COST, "accuracy", "balanced_accuracy"]
    )
    names = ["cost", "accuracy", "balanced_accuracy", "loss"]
    prefixes = ["", "val_", "global_", "server_", "server_global_", "server_val_"]
    row = run.table()[0]
    assert list(row) == ["client", *(f"{part}{name}" for part in prefixes for name in names), "num_examples"]
    assert row["cost"] == cost(run.predict("client-0", clients[0].test.x), clients[0].test.y)
    assert row["global_cost"] == row["cost"]
    assert run.federation.metrics[0] is COST


def records(name, values):
    return [{"round": n, "summary": {name: {"mean": value}}} for n, value in enumerate(values, 1)]


def test_the_best_round_has_the_highest_or_the_lowest_score_as_the_metric_says():
    history = records("val_cost", [0.3, 0.1, 0.1, 0.2])
    assert round_of_best_score(history, COST) == 2
    assert round_of_best_score(history, Metric("cost", cost)) == 1
    assert round_of_best_score(history) is None
    assert round_of_best_score(records("val_auc", [0.3, 0.4])) == 2
    run = pf.federate(small_clients(), FedAvg(lr=0.5), rounds=5, workers=0, seed=11, metrics=["brier", "accuracy"])
    values = [record["summary"]["val_brier"]["mean"] for record in run.history]
    assert run.best_round == 1 + values.index(min(values))
    assert [record["best_round"] for record in run.history][-1] == run.best_round
    mean = run.table(at="best")[-1]
    assert mean["val_brier"] == min(values)
    worse = pf.federate(
        small_clients(), FedAvg(lr=0.5), rounds=5, workers=0, seed=11, metrics=Metric("up", METRICS["brier"].function)
    )
    assert worse.best_round == 1 + values.index(max(values))


def test_a_run_directory_tells_the_metric_that_decides(tmp_path, capsys):
    pf.federate(small_clients(), Local(), rounds=1, workers=0, out=tmp_path / "run", metrics=[COST, "auc"],
                progress=LineProgress())  # fmt: skip
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["score"] == {"name": "cost", "label": "cost of misses", "unit": "", "higher_is_better": False}
    (record,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert f"cost {record['summary']['cost']['mean']:.3f}" in capsys.readouterr().err
    pf.federate(small_clients(), Local(), rounds=1, workers=0, out=tmp_path / "plain")
    manifest = json.loads((tmp_path / "plain" / "manifest.json").read_text())
    assert manifest["score"] == {"name": "accuracy", "label": "accuracy", "unit": "%", "higher_is_better": True}


def test_a_metric_that_fails_is_a_failure_of_the_client():
    calls = []

    def bad(outputs, targets):
        calls.append(len(targets))
        if len(calls) > 1:  # it works when it is tried, before training
            raise ArithmeticError("no such score")
        return 0.0

    for workers in (0, 2):
        calls.clear()
        with pytest.raises(pf.ClientError, match=r"metric 'bad' failed .* ArithmeticError: no such score"):
            pf.federate(small_clients(), Local(), rounds=1, workers=workers, metrics=[bad])
    run = pf.federate(small_clients(), Local(), rounds=1, workers=0, metrics=[bad], on_error="skip")
    assert {f["phase"] for f in run.history[0]["failures"]} == {"evaluate"}
    assert run.table()[-1]["bad"] is None


def test_a_score_that_is_not_finite_is_none():
    odd = Metric("odd", lambda outputs, targets: float("inf"))
    run = pf.federate(small_clients(), Local(), rounds=1, workers=0, metrics=odd)
    assert run.table()[0]["odd"] is None
    assert "odd" not in run.history[0]["summary"]
    assert run.best_round is None


@pytest.mark.thorough
def test_a_resumed_run_has_the_same_metrics(tmp_path):
    options = {"rounds": 2, "workers": 0}
    whole = pf.federate(small_clients(), FedAvg(), metrics=[COST, "f1"], out=tmp_path / "own", **options)
    clients = small_clients()
    with pytest.raises(pf.UserError, match=r"has the metric 'cost', which is not built in; give its metrics again"):
        pf.resume(tmp_path / "own", clients=clients)
    with pytest.raises(pf.UserError, match="metrics are not those of the run: they were cost, f1 and are now cost"):
        pf.resume(tmp_path / "own", clients=clients, metrics=[COST])
    assert_runs_equal(whole, pf.resume(tmp_path / "own", clients=clients, metrics=[COST, "f1"]))
    built_in = pf.federate(clients, FedAvg(), metrics=["f1", "sensitivity_at_75"], out=tmp_path / "names", **options)
    again = pf.resume(tmp_path / "names", clients=clients)
    assert_runs_equal(built_in, again)
    assert [metric.name for metric in again.federation.metrics] == ["f1", "sensitivity_at_75"]
    plain = pf.federate(clients, FedAvg(), out=tmp_path / "plain", **options)
    assert_runs_equal(plain, pf.resume(tmp_path / "plain", clients=clients, metrics="accuracy"))
    with pytest.raises(pf.UserError, match="they were not given and are now f1"):
        pf.resume(tmp_path / "plain", clients=clients, metrics="f1")


def test_metrics_are_checked_before_anything_is_computed(tmp_path):
    with pytest.raises(pf.UserError, match="r2 is not a metric of a task of classification"):
        pf.federate(small_clients(), FedAvg(), rounds=1, metrics=["r2"], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(pf.UserError, match="metrics must be names such as"):
        Settings(metrics="auc")
    assert Settings(metrics=["auc"]).metrics == ("auc",)


def test_a_metric_that_cannot_be_sent_stays_in_this_process(monkeypatch):
    from polyfed.models import ModelSpec
    from polyfed.simulation.engines.factory import build_engine

    clients = [pf.Client(c.id, ModelSpec("mlp", {"hidden": [4]}, (6,), 3), c.train, c.test) for c in small_clients()]
    monkeypatch.setattr("polyfed.simulation.engines.factory.can_fork", lambda device: False)
    here = Metric("here", lambda outputs, targets: 0.0)
    with pytest.raises(pf.UserError, match="metric 'here' cannot be sent to another process"):
        build_engine("pool", Local(), clients, torch.device("cpu"), 2, metrics=[here])
    with pytest.warns(RuntimeWarning, match="metric 'here' cannot be sent"):
        build_engine("auto", Local(), clients, torch.device("cpu"), 2, metrics=[here]).close()


@pytest.mark.slow
def test_spawned_workers_compute_the_same_metrics():
    from polyfed.models import ModelSpec

    clients = [pf.Client(c.id, ModelSpec("mlp", {"hidden": [8]}, (6,), 3), c.train, c.test) for c in small_clients()]
    metrics = (METRICS["ece"], METRICS["sensitivity_at_90"], COST)
    federation = Federation({c.id: c for c in clients}, FedAvg(), Settings(), metrics=metrics)
    start = Checkpoint(0, FedAvg().server_init(federation.server_context()), {})
    tasks = [federation.build_single_task("evaluate", c, start) for c in federation.clients]
    found = []
    for method in ("fork", "spawn"):
        engine = PoolEngine(FedAvg(), clients, torch.device("cpu"), 1, start_method=method, metrics=metrics)
        try:
            found.append({result.task.client: result for result in engine.run(tasks)})
        finally:
            engine.close()
    for client, result in found[0].items():
        assert result.metrics == found[1][client].metrics
        assert torch.equal(result.predictions["test"], found[1][client].predictions["test"])
