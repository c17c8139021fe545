"""Metrics and predictions at sites: what the server asks for, what it is told, and what stays."""

import json
from dataclasses import replace

import pytest
import torch
from flwr.app import Message
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.algorithm import Message as Sent
from polyfed.core.errors import UserError
from polyfed.deploy.flower.engine import envelope_from_record, envelope_to_record
from polyfed.deploy.flower.records import parse_flower_record
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.site.process.node_config import build_site
from polyfed.simulation.storage.directory import read_config, read_manifest
from polyfed.simulation.storage.predictions import predictions_parquet
from polyfed.testing import small_clients, without_durations
from tests.few_cases import few

from .conftest import ALL, MemoryGrid

TOLD = ",".join([ALL, *(f"{part}{name}" for part in ("", "val_") for name in ("auc", "brier", "sensitivity_at_85"))])
WORDS = {"metrics": "brier, auc,sensitivity_at_85"}


def _one_output():
    return nn.Linear(6, 1)


@pytest.mark.thorough
def test_sites_compute_what_the_server_asks_for_as_a_simulation_does(tmp_path, run, nodes):
    found = run(grid=MemoryGrid(nodes(small_clients(), disclose=TOLD)), **WORDS)
    other = pf.federate(
        small_clients(), FedAvg(lr=0.05), rounds=3, seed=3, workers=0, metrics=["brier", "auc", "sensitivity_at_85"]
    )
    assert without_durations(found.history) == without_durations(other.history)
    assert found.best_round == other.best_round
    assert read_manifest(tmp_path / "run")["score"]["higher_is_better"] is False
    assert read_config(tmp_path / "run")["metrics"] == ["brier", "auc", "sensitivity_at_85"]
    assert list(found.table()[0])[1:3] == ["brier", "auc"]


def test_sites_compute_the_c_index_of_survival(tmp_path, run, nodes):
    file = tmp_path / "one_output.py"
    file.write_text("from torch import nn\n\n\ndef model():\n    return nn.Linear(6, 1)\n")
    clients = []
    for client in small_clients():
        time = torch.arange(len(client.train.labels)) % 7 + 1.0
        train, test = (
            (part.input_tensor[: len(part)], torch.stack([time[: len(part)], (time[: len(part)] > 3).float()], 1))
            for part in (client.train, client.test)
        )
        clients.append(pf.Client(client.id, _one_output, train, test, task="survival"))
    found = run(grid=MemoryGrid(nodes(clients, disclose=f"{ALL},c_index")), metrics="c_index", file=str(file))
    other = pf.federate(clients, FedAvg(lr=0.05), rounds=3, seed=3, workers=0, metrics="c_index")
    assert without_durations(found.history) == without_durations(other.history)
    assert all(row["c_index"] is not None for row in found.table())


@pytest.mark.thorough
def test_a_site_tells_only_the_metrics_that_its_owner_discloses(run, nodes):
    grid = MemoryGrid(nodes(small_clients(), disclose="num_examples,auc"))
    run(grid=grid, **WORDS)
    told = {
        name
        for _, kind, record in grid.seen
        if kind == "reply" and (head := envelope_from_record(record).head)
        for part in (head, head.get("evaluation", {}))
        for name in part.get("metrics", {})
    }
    assert told == {"auc"}


def test_predictions_stay_at_the_site(tmp_path, run, nodes):
    """Of the newest evaluated round, in a folder of the site; not a number of them travels."""
    grid = MemoryGrid(nodes(small_clients()))
    found = run(grid=grid, **{"evaluate-every": 2})
    other = pf.federate(small_clients(), FedAvg(lr=0.05), rounds=3, seed=3, workers=0)
    everything = b"".join(
        str(dict(record["head"])).encode() + b"".join(parse_flower_record(record)[2].values())
        for _, _, record in grid.seen
    )
    for client in small_clients():
        (file,) = (tmp_path / "sites" / client.id / "state").glob("*/predictions/*.parquet")
        assert file.name == f"{client.id}.parquet"
        assert predictions_parquet.list_rounds_in_file(file, "test") == [3]
        for split in ("test", "val"):
            outputs, targets, *_ = predictions_parquet.read_outputs_and_targets(file, split, 3)
            assert torch.equal(outputs, other.predictions(client.id, split).outputs)
            assert torch.equal(targets, getattr(client, split).labels)
            assert outputs.numpy().tobytes()[:32] not in everything
        assert all(
            not letter.body.tensors
            for _, kind, record in grid.seen
            if kind == "reply" and (letter := envelope_from_record(record)).head.get("phase") == "evaluate"
        )
    assert not (tmp_path / "run" / "predictions").exists()
    with pytest.raises(UserError, match="the predictions of 'client-0' are at its site"):
        found.predictions("client-0")
    with pytest.raises(UserError, match="the models of 'client-0' are at its site"):
        found.predict("client-0", torch.zeros(1, 6))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"metrics": "cost"}, "metrics has 'cost', which sites do not know; choices: accuracy, auc"),
        ({"metrics": "r2"}, "r2 is not a metric of a task of classification"),
        ({"keep": "best"}, "keep = 'best' is not possible between sites"),
        ({"sampler": "oort"}, "sampler is for simulations alone"),
    ],
)
def test_what_sites_cannot_do_is_refused(tmp_path, run, words, sentence):
    with pytest.raises(UserError, match=sentence):
        run(**words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("names", [["cost"], ["os:getcwd"], "auc", [7], ["r2"]])
def test_a_site_refuses_metrics_that_it_does_not_have(nodes, names):
    node = nodes(small_clients())[101]
    head = {
        "kind": "task", "protocol": PROTOCOL, "run": "a", "algorithm": {"name": "local"}, "phase": "evaluate",
        "round": 1, "client": "client-0", "seed": 1, "run_seed": 1, "state": None, "keep": 0, "metrics": names,
    }  # fmt: skip
    grid = MemoryGrid({101: node})
    (number,) = grid.push_messages([Message(envelope_to_record(Envelope(head)), 101, "evaluate")])
    (answer,) = grid.pull_messages([number])
    refused = envelope_from_record(answer.content).head["refused"]
    assert "not built into polyfed at this site" in refused or "r2 is not a metric of a task" in refused


INVENTED = {f"{letter}_accuracy": 0.5 for letter in "abcdefghijklmnopqrstuvwxyz"}


@pytest.mark.parametrize(
    "lie",
    few(
        [{"cost": 1.0}, {"accuracy": 37.0}, {"val_accuracy": -0.1}, {"mae": -1.0}, INVENTED],
        [{"accuracy": 37.0}, INVENTED],
    ),
    ids=[*"cavmi"],
)
def test_a_site_that_tells_of_other_metrics_is_a_failure(run, lie):
    def spoil(node):
        original = node.app

        def app(message, context):
            reply = original(message, context)
            letter = envelope_from_record(reply.content)
            if letter.head.get("phase") == "evaluate":
                lying = Envelope({**letter.head, "metrics": lie}, letter.body)
                return Message(envelope_to_record(lying), reply_to=message)
            return reply

        node.app = app

    found = run(spoil=spoil, **{"on-error": "skip"})
    reason = "its metrics are not scores or losses" if len(lie) == 1 else "sends its metrics with 26 prefixes"
    assert reason in json.dumps(found.history[-1]["failures"])
    assert "a_accuracy" not in found.history[-1]["summary"]


def test_a_site_names_its_own_loss(nodes, tmp_path, monkeypatch):
    """By a word of its node configuration, which is the same as a client with this loss; the server has no say."""
    client = small_clients(1)[0]
    head = {"kind": "task", "protocol": PROTOCOL, "run": "a", "algorithm": {"name": "fedavg"}, "phase": "local", "round": 1,
            "client": client.id, "seed": 1, "run_seed": 1, "state": None, "keep": 0}  # fmt: skip
    down = Sent({"model": {n: t.clone() for n, t in client.model().state_dict().items()}}, {"lr": 0.1})

    def trained(client, run, **words):
        answer = build_site(nodes([client], **words)[101].config).answer_envelope(Envelope({**head, "run": run}, down))
        assert "refused" not in answer.head
        return answer.body.tensors["model"]

    given = trained(replace(client, loss=nn.MultiMarginLoss()), "a")
    for name in (named := trained(client, "b", loss="torch.nn:MultiMarginLoss")):
        assert torch.equal(named[name], given[name])
    assert any(not torch.equal(t, given[n]) for n, t in trained(client, "c").items())
    with pytest.raises(UserError, match="loss 'no_such:focal': there is no module 'no_such'"):
        build_site(nodes([client], loss="no_such:focal")[101].config)
