"""Predictions: what is kept, that every number of metrics.jsonl can be computed from it again, and what damages do."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, Local, PFedMe
from polyfed.core.evaluation.evaluate import compute_metrics
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import torch_generator
from polyfed.simulation.storage.predictions import prediction_store as predictions
from polyfed.simulation.storage.predictions.predictions_parquet import list_rounds_in_file
from polyfed.testing import small_clients
from tests.stopped import Stop

OPTIONS = {"rounds": 4, "workers": 0, "seed": 1}


def files(out):
    return {file.name: file.read_bytes() for file in sorted((out / "predictions").iterdir())}


def predicted_rounds(out, client):
    return list_rounds_in_file(predictions._predictions_file(out, client), "test")


def regression_clients():
    generator = torch_generator(0)
    made = []
    for name in ("a", "B/c"):  # of which one cannot be the name of a file
        x, y = torch.randn(40, 3, generator=generator), torch.randn(40, generator=generator)
        train, test, val = ((x[rows], y[rows]) for rows in (slice(30), slice(30, 37), slice(37, 39)))
        made.append(pf.Client(name, lambda: nn.Linear(3, 1), train, test, val, task="regression"))
    return made


def label_clients():
    generator = torch_generator(0)
    x, y = torch.randn(60, 3, generator=generator), (torch.rand(60, 4, generator=generator) < 0.5).float()
    return [pf.Client("a", lambda: nn.Linear(3, 4), (x[20:], y[20:]), (x[:20], y[:20]), task="multilabel")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("clients", "method", "metrics"),
    [
        (small_clients, FedAvg(lr=0.1), ["auc", "balanced_accuracy", "accuracy", "ece"]),
        (small_clients, PFedMe(lr=0.1), None),
        (regression_clients, Local(lr=0.1), ["mae", "r2", "rmse"]),
        (label_clients, FedAvg(lr=0.1), ["auc", "f1"]),
    ],
)
def test_every_evaluated_number_can_be_computed_again(tmp_path, clients, method, metrics):
    run = pf.federate(clients(), method, out=tmp_path / "run", evaluate_every=3, metrics=metrics, **OPTIONS)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for client in clients():
        assert predicted_rounds(tmp_path / "run", client.id) == [3, 4]
        for number in (3, 4):
            row = lines[number - 1]["clients"][client.id]
            for split, prefix in (("test", ""), ("val", "val_")):
                if getattr(client, split) is None:
                    continue
                kept = predictions.read_predictions(tmp_path / "run", client.id, split=split, round=number)
                assert torch.equal(kept.targets, getattr(client, split).labels)
                found = compute_metrics(kept.outputs, kept.targets, client.task, resolve_metrics(metrics, client.task))
                assert len(found) == 1 + len(metrics or ["accuracy"])
                assert {f"{prefix}{name}": value for name, value in found.items()}.items() <= row.items()
                assert torch.equal(run.predictions(client.id, split, number).outputs, kept.outputs)
        assert run.predictions(client.id).round == 4


def test_the_file_can_be_read_without_polyfed(tmp_path):
    clients = small_clients(2)
    run = pf.federate(clients, Local(), out=tmp_path / "run", rounds=2, workers=0)
    table = pq.read_table(tmp_path / "run" / "predictions" / "client-1.parquet")
    assert table.column_names == ["round", "split", "example", "target", "output"]
    rows = table.to_pylist()
    assert [row["round"] for row in rows] == [1] * 9 + [2] * 9
    assert [row["split"] for row in rows] == (["test"] * 6 + ["val"] * 3) * 2
    assert [row["example"] for row in rows] == [*range(6), *range(3)] * 2
    assert [row["target"] for row in rows[:6]] == clients[1].test.labels.tolist()
    assert rows[9]["output"] == run.predictions("client-1", round=2).outputs[0].tolist()
    right = np.mean([np.argmax(row["output"]) == row["target"] for row in rows[9:15]])
    assert right == run.table()[1]["accuracy"]


def test_without_a_directory_they_are_the_same(tmp_path):
    with_folder = pf.federate(regression_clients(), Local(lr=0.1), out=tmp_path / "run", **OPTIONS)
    without = pf.federate(regression_clients(), Local(lr=0.1), **OPTIONS)
    for number in (1, 4, None):
        one, other = (run.predictions("B/c", "val", number) for run in (with_folder, without))
        assert one.round == other.round
        assert torch.equal(one.outputs, other.outputs)
        assert torch.equal(one.targets, other.targets)


def test_columns_come_with_their_examples(tmp_path):
    x, y = torch.randn(14, 6, generator=torch_generator(0)), torch.arange(14) % 3
    more = {"sex": list("ffmmffmmffmmff"), "age": np.arange(20, 34), "round": np.ones(14)}
    store = Examples(x, y, columns=more)
    train = store.select(torch.tensor([1, 2, 3, 4, 6, 7, 8, 9, 10]))
    test, val = store.select(torch.tensor([11, 0, 5])), Examples(x[12:], y[12:], columns={"age": [1.5, 2]})
    made = small_clients(1)[0]
    for out in (None, tmp_path / "run"):
        run = pf.federate([pf.Client("a", made.model, train, test, val)], Local(), rounds=1, workers=0, out=out)
        kept = run.predictions("a")
        assert {name: values.tolist() for name, values in kept.columns.items()} | {"age": None} == {
            "sex": ["m", "f", "f"], "age": None, "round": [1.0, 1.0, 1.0],
        }  # fmt: skip
        assert kept.columns["age"].tolist() == [31, 20, 25]
        assert run.predictions("a", "val").columns["age"].tolist() == [1.5, 2]
    rows = pq.read_table(tmp_path / "run" / "predictions" / "a.parquet").to_pylist()
    assert [row["sex"] for row in rows] == ["m", "f", "f", None, None]
    assert rows[0]["round"] == 1  # of training; the examples' own column is beside it
    assert rows[0]["round_"] == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [pytest.param(10**9, marks=pytest.mark.slow), 3 * 324])
def test_a_stopped_run_ends_with_the_same_files(tmp_path, monkeypatch, limit):
    """With room for all rounds, and for three: 27 examples of 3 classes take 324 bytes a round."""
    monkeypatch.setattr(predictions, "LIMIT_BYTES", limit)
    options = {"rounds": 6, "workers": 0, "seed": 11}
    whole = pf.federate(small_clients(), FedAvg(lr=0.5), out=tmp_path / "whole", **options)
    known = predicted_rounds(tmp_path / "whole", "client-0")
    assert whole.best_round == 4
    assert known == ([1, 2, 3, 4, 5, 6] if limit > 1000 else [4, 6])
    for stop in range(1, 6):
        out = tmp_path / f"stopped-{stop}"
        with pytest.raises(KeyboardInterrupt):
            pf.federate(small_clients(), FedAvg(lr=0.5), out=out, progress=Stop(stop), **options)
        assert not list((out / "predictions").glob("*.parquet"))
        pf.resume(out, clients=small_clients())
        assert files(out) == files(tmp_path / "whole")


def test_in_memory_only_the_best_and_the_last_round_are_kept_where_there_is_no_room(monkeypatch):
    options = {"rounds": 6, "workers": 0, "seed": 11}
    whole = pf.federate(small_clients(), FedAvg(lr=0.5), **options)
    assert whole.best_round == 4
    monkeypatch.setattr(predictions, "LIMIT_BYTES", 2 * 324)  # it is full after the second round
    run = pf.federate(small_clients(), FedAvg(lr=0.5), **options)
    for number in range(1, 7):
        if number in (4, 6):
            kept, expected = (of.predictions("client-1", "val", number).outputs for of in (run, whole))
            assert torch.equal(kept, expected)
        else:
            with pytest.raises(pf.UserError, match=f"after round {number} were kept; give one of 4, 6"):
                run.predictions("client-1", "val", number)


def test_a_run_killed_between_its_checkpoints_ends_with_the_same_files(tmp_path):
    """Rounds that no checkpoint covers are played again."""
    options = {"rounds": 5, "workers": 0, "checkpoint_every": 2}
    pf.federate(small_clients(), FedAvg(lr=0.3), out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        pf.federate(small_clients(), FedAvg(lr=0.3), out=tmp_path / "killed", progress=Stop(3), **options)
    shutil.rmtree(tmp_path / "killed" / "checkpoint" / "round-000003")  # as kill -9 would have it
    spool = tmp_path / "killed" / "predictions" / ".rounds"
    assert len(list(spool.iterdir())) == 3
    pf.resume(tmp_path / "killed", clients=small_clients())
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.thorough
def test_a_run_that_had_ended_and_lost_its_last_checkpoint(tmp_path):
    options = {"rounds": 4, "workers": 0}
    pf.federate(small_clients(), FedAvg(lr=0.3), out=tmp_path / "run", **options)
    before = files(tmp_path / "run")
    assert len(before) == 3
    pf.resume(tmp_path / "run", clients=small_clients())
    assert files(tmp_path / "run") == before
    server = tmp_path / "run" / "checkpoint" / "round-000004" / "server.safetensors"
    server.write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="is damaged"):
        pf.resume(tmp_path / "run", clients=small_clients())
    assert files(tmp_path / "run") == before


def test_a_round_that_is_too_large_is_not_kept_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "LARGEST_BYTES", 300)
    monkeypatch.setattr(predictions, "LIMIT_BYTES", 200)
    with pytest.warns(RuntimeWarning, match="the predictions of a round take 0 MiB") as told:
        run = pf.federate(small_clients(), Local(), rounds=2, workers=0, out=tmp_path / "run")
    assert len([w for w in told if "predictions" in str(w.message)]) == 1
    assert (
        "the predictions of a round take" in json.loads((tmp_path / "run" / "manifest.json").read_text())["predictions"]
    )
    with pytest.raises(pf.UserError, match=r"client-0.parquet is missing"):
        run.predictions("client-0")


def test_a_client_that_cannot_be_evaluated_has_none_of_that_round(tmp_path):
    clients = small_clients(2)
    calls = []

    def sometimes(outputs, targets):
        """Fails at its third call: the test examples of client-1 in round 1, after the two sets of client-0."""
        calls.append(len(targets))
        if len(calls) == 3:
            raise ValueError("no such thing")
        return 0.5

    run = pf.federate(clients, Local(), rounds=2, workers=0, out=tmp_path / "run", metrics=sometimes, on_error="skip")
    assert [f["phase"] for f in run.history[0]["failures"]] == ["evaluate"]
    assert predicted_rounds(tmp_path / "run", "client-0") == [1, 2]
    assert predicted_rounds(tmp_path / "run", "client-1") == [2]
    with pytest.raises(pf.UserError, match="client 'client-1' after round 1 were kept; give one of 2"):
        run.predictions("client-1", round=1)


def test_what_is_missing_or_damaged_is_said(tmp_path):
    run = pf.federate(small_clients(1), Local(), rounds=2, workers=0, out=tmp_path / "run")
    memory = pf.federate(small_clients(1), Local(), rounds=2, workers=0)
    for of in (run, memory):
        with pytest.raises(pf.UserError, match="after round 7 were kept; give one of 1, 2"):
            of.predictions("client-0", round=7)
        with pytest.raises(pf.UserError, match="split must be 'test' or 'val', got 'train'"):
            of.predictions("client-0", "train")
        with pytest.raises(pf.UserError, match="no client 'client-9'"):
            of.predictions("client-9")
    with pytest.raises(pf.UserError, match=r"nobody.parquet is missing"):
        predictions.read_predictions(tmp_path / "run", "nobody")
    file = tmp_path / "run" / "predictions" / "client-0.parquet"
    whole = file.read_bytes()
    for content in (b"", whole[:-9], whole[:4] + bytes(200) + whole[204:]):
        file.write_bytes(content)
        with pytest.raises(pf.UserError, match=r"client-0.parquet holds no predictions that can be read"):
            predictions.read_predictions(tmp_path / "run", "client-0")
    pq.write_table(pa.table({"round": [1, 2], "split": ["test", "test"], "output": [1, 2]}), file)
    with pytest.raises(pf.UserError, match="holds no predictions"):
        predictions.read_predictions(tmp_path / "run", "client-0")
