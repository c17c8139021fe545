"""The norm of each client's update is recorded and told, and a loss that is not finite is a warning."""

import dataclasses
import html
import io
import json
import warnings
import weakref

import pytest
import torch
from rich.console import Console

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg, FedKD, FedProto, Local, PFedHN
from polyfed.cli.commands.deploy.flower_command import show_newest_run
from polyfed.cli.commands.results.report_command import show_report
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.report.data.run_records import read_run_record
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.monitoring import update_norms
from polyfed.simulation.monitoring.progress import LineProgress
from polyfed.simulation.monitoring.update_norms import (
    describe_diverged_losses,
    describe_round_warnings,
    measure_update,
    norms_by_client,
    outlier_norm_ratios,
)
from polyfed.testing import small_clients, without_durations
from tests.few_cases import few

honest = InProcessEngine.run


def scaled_by(factor):
    """Has client-0 send its change times a factor."""

    def run(engine, tasks):
        for result in honest(engine, tasks):
            if result.task.client == "client-0" and result.reply is not None:
                down = result.task.message.tensors["model"]
                model = {
                    name: down[name] + factor * (tensor - down[name]) if tensor.is_floating_point() else tensor
                    for name, tensor in result.reply.tensors["model"].items()
                }
                result = dataclasses.replace(result, reply=Message({"model": model}, result.reply.scalars))
            yield result

    return run


def federate(method=None, clients=None, rounds=2, **settings):
    return pf.federate(clients or small_clients(4), method or FedAvg(lr=0.01), rounds=rounds, workers=0, **settings)


def test_the_norm_is_that_of_the_change_of_the_model():
    run = federate(rounds=1)
    replies = {}
    for task in (
        task
        for block in run.federation.build_task_blocks("local", ["client-1"], 1, run.federation.initial_checkpoint())
        for task in block
    ):
        engine = InProcessEngine(run.federation.algorithm, list(run.federation.clients.values()), torch.device("cpu"))
        replies = next(engine.run([task])).reply.tensors["model"], task.message.tensors["model"]
    sent, received = replies
    squares = sum(
        float(((sent[n].double() - received[n].double()) ** 2).sum()) for n in sent if sent[n].is_floating_point()
    )
    assert norms_by_client(run.history[0])["client-1"] == pytest.approx(squares**0.5, rel=1e-6)


def test_an_update_that_outweighs_all_others_is_told_in_the_history_the_log_and_the_records(tmp_path, monkeypatch):
    monkeypatch.setattr(InProcessEngine, "run", scaled_by(50.0))
    stream = io.StringIO()
    run = federate(FedAvg(lr=0.001), out=tmp_path / "run", progress=LineProgress(stream, norms=True))
    norms = norms_by_client(run.history[0])
    assert set(norms) == {"client-0", "client-1", "client-2", "client-3"}
    assert set(outlier_norm_ratios(norms)) == {"client-0"}
    (sentence,) = run.history[0]["warnings"]
    assert sentence.startswith("round 1: the update of 'client-0' has a norm of ")
    assert f"warning: {sentence}" in stream.getvalue()
    assert "round 1: norms of updates: client-0 " in stream.getvalue()
    told = read_run_record(tmp_path / "run")
    assert told.update_norms[1] == norms
    assert sentence in told.warnings


def test_honest_clients_get_no_warning(monkeypatch):
    run = federate()
    assert all(record["warnings"] == [] for record in run.history)
    assert all(len(norms_by_client(record)) == 4 for record in run.history)


def test_losses_that_are_finite_nowhere_are_a_warning_once(monkeypatch):
    monkeypatch.setattr(InProcessEngine, "run", scaled_by(1000.0))
    with pytest.warns(RuntimeWarning, match="round 1: no client has a finite test loss") as caught:
        run = federate(FedAvg(lr=0.05), rounds=2)
    assert len(caught) == 1
    assert any("no client has a finite test loss" in sentence for sentence in run.history[0]["warnings"])


def test_a_loss_that_is_not_finite_at_one_client_is_told_with_its_name():
    rows = {"a": {"loss": None, "train_loss": 1.0}, "b": {"loss": 0.5, "train_loss": 1.0}, "c": {}}
    record = {"round": 3, "clients": rows}
    eval_alone = "what forward does in eval mode alone (statistics of BatchNorm, a branch on self.training)"
    reason = f"and the training loss is: an outlier among the examples, or {eval_alone}"
    assert describe_round_warnings(record) == [f"round 3: the test loss of 'a' is not finite, {reason}"]
    rows["a"]["train_loss"] = None
    assert "round 3: the test loss of 'a' is not finite" in describe_round_warnings(record)
    assert describe_diverged_losses([record]) == ""
    everyone = {"round": 3, "clients": {"a": {"loss": None, "train_loss": 1.0}}}
    assert describe_diverged_losses([everyone]).endswith(f"or an update has ruined the model, or {eval_alone}")
    many = {f"c{k}": {"loss": None} for k in range(5)} | {"d": {"loss": 1.0}}
    assert describe_round_warnings({"round": 1, "clients": many}) == [
        "round 1: the test loss of 'c0', 'c1', 'c2' and 2 more is not finite"
    ]


def test_secure_sums_hide_the_norm():
    run = federate(secure=True)
    assert all(norms_by_client(record) == {} for record in run.history)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_no_method_subtracts_what_is_a_difference_already(name):
    """The differences that replies declare are of no group that would be subtracted again."""
    assert REGISTRY[name]._differences == frozenset({"fedkd": {"update"}, "qfedavg": {"delta"}}.get(name, ()))


@pytest.mark.parametrize(
    ("method", "known"),
    few(
        [(Local(), False), (FedProto(), True), (PFedHN(hidden=8, local_steps=2), True), (FedKD(), True)],
        [(Local(), False), (FedProto(), True)],
    ),
)
def test_replies_that_are_no_update_of_a_message_have_the_norm_of_what_they_hold(method, known):
    run = federate(method, rounds=3)
    assert all((len(norms_by_client(record)) == 4) is known for record in run.history)


def test_integer_tensors_scalars_and_half_numbers():
    down = Message({"model": {"w": torch.tensor([-6e4], dtype=torch.float16), "n": torch.tensor(1)}})
    sent = Message(
        {"model": {"w": torch.tensor([6e4], dtype=torch.float16), "n": torch.tensor(10**6)}}, {"train_loss": 9.0}
    )
    assert measure_update(sent, down).norm == pytest.approx(1.2e5, rel=1e-3)
    assert measure_update(Message({"model": {"n": torch.tensor(5)}}), down).norm is None
    # Adapters of a lower rank are the first components of what came down.
    down, sent = torch.ones(3, 2), torch.full((1, 2), 4.0)
    assert measure_update(Message({"m": {"a": sent}}), Message({"m": {"a": down}})).norm == pytest.approx(18**0.5)


@pytest.mark.thorough
def test_engines_and_resumed_runs_have_the_same_norms(tmp_path):
    whole = federate(rounds=3)
    pf.federate(small_clients(4), FedAvg(lr=0.01), rounds=3, workers=0, engine="cohort", out=tmp_path / "run")
    config = (tmp_path / "run/config.yaml").read_text()
    assert "rounds: 3" in config
    (tmp_path / "run/checkpoint/round-000003").rename(tmp_path / "away")
    resumed = pf.resume(tmp_path / "run", clients=small_clients(4))
    for one, other in zip(whole.history, resumed.history, strict=True):
        assert norms_by_client(one) == pytest.approx(norms_by_client(other), rel=1e-4)
    again = pf.federate(small_clients(4), FedAvg(lr=0.01), rounds=3, workers=2, engine="pool")
    assert without_durations(again.history) == without_durations(whole.history)


def test_records_of_early_versions_can_be_read(tmp_path):
    federate(out=tmp_path / "run")
    file = tmp_path / "run/metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        del record["warnings"]
        for row in record["clients"].values():
            del row["update_norm"]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = read_run_record(tmp_path / "run")
    assert (told.update_norms, told.warnings) == ({}, ())


def test_the_status_of_a_deployment_shows_norms_and_warnings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(InProcessEngine, "run", scaled_by(50.0))
    run = federate(FedAvg(lr=0.001), out=tmp_path / "runs/run-1", rounds=1)
    file = tmp_path / "runs/run-1/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sites": sorted(run.federation.clients)}))
    show_newest_run(tmp_path / "runs", Console(width=200))
    printed = capsys.readouterr().out
    assert f"warning: {run.history[0]['warnings'][0]}" in printed
    assert "update_norm" in printed
    assert f"{norms_by_client(run.history[0])['client-1']:.4f}" in printed


def test_the_status_says_that_secure_sums_hide_norms(tmp_path, capsys):
    federate(out=tmp_path / "runs/run-1", rounds=1, secure=True)
    show_newest_run(tmp_path / "runs", Console(width=200))
    printed = capsys.readouterr().out
    assert "secure sums hide the norms of single updates" in printed
    assert "update_norm" not in printed


def page_of(folder):
    show_report([folder], Console(record=True, width=200, quiet=True))
    return html.unescape((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_has_norms_by_client_and_round_and_says_whose_stand_out(tmp_path, monkeypatch):
    monkeypatch.setattr(InProcessEngine, "run", scaled_by(50.0))
    run = federate(FedAvg(lr=0.001), out=tmp_path / "run")
    page = page_of(tmp_path / "run")
    assert "Update norm of each site" in page
    assert f"{norms_by_client(run.history[1])['client-2']:.4g}" in page
    assert "The update of client-0 stands out in 2 rounds: up to " in page
    assert "2 warnings about its rounds; the first: round 1: the update of 'client-0'" in page


def test_the_page_of_secure_sums_and_of_an_early_version_has_no_norms(tmp_path):
    federate(out=tmp_path / "secure", secure=True)
    assert "Secure sums hide single updates" in page_of(tmp_path / "secure")
    test_records_of_early_versions_can_be_read(tmp_path)
    assert "Update norm of each site" not in page_of(tmp_path / "run")


def test_a_norm_that_is_no_number_is_a_damaged_file(tmp_path):
    federate(out=tmp_path / "run")
    file = tmp_path / "run/metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole.replace('"update_norm": ', '"update_norm": "x", "other": '))
    with pytest.raises(UserError, match="update_norm of client 'client-0' in round 1 is"):
        read_run_record(tmp_path / "run")
    file.write_text(whole.replace('"warnings": []', '"warnings": [1]'))
    with pytest.raises(UserError, match="a warning of round 1 is not text"):
        read_run_record(tmp_path / "run")


@pytest.mark.thorough
def test_the_page_of_a_comparison_has_norms_and_no_warning_of_python_is_raised(tmp_path):
    """A rate at which everyone diverges is a part of a comparison."""
    methods = {"fedavg": FedAvg(lr=0.01), "wild": FedAvg(lr=1e20)}
    words = {"rounds": 2, "seeds": [0], "tune": None, "references": False, "workers": 0, "quiet": True}
    pf.compare(small_clients(3), methods, out=tmp_path / "compared", parallel=1, **words)
    assert "Update norm of each site" in page_of(tmp_path / "compared")


def test_the_change_in_a_tensor_is_let_go_before_the_next_but_one(monkeypatch):
    """Of a large model no copy of the whole update is in memory."""
    compute, changes = update_norms._change_of_tensor, []

    def compute_and_count(sent, received):
        assert sum(change() is not None for change in changes) <= 1
        changes.append(weakref.ref(change := compute(sent, received)))
        return change

    monkeypatch.setattr(update_norms, "_change_of_tensor", compute_and_count)
    sent, received = ({f"w{k}": torch.full((3000,), value) for k in range(6)} for value in (3.0, 1.0))
    measured = update_norms.measure_update(Message({"model": sent}), Message({"model": received}))
    assert measured.norm == pytest.approx(2 * 18000**0.5)
    assert len(changes) == 6
