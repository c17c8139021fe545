"""A site that lies among three: it is named, and moves the model by no more than the bound that a deployment has."""

import dataclasses
import io
import math
import re
import statistics
import sys

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAMP, FedAvg, HeteroFL
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.deploy.privacy.gaussian_mechanism import noise_incompatibility_error
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.protocol.wire import Envelope
from polyfed.deploy.server.server import Deployment
from polyfed.deploy.server.server_config import build_or_restore_server
from polyfed.deploy.server.update_bound import bound_updates
from polyfed.deploy.site import disclosure_guard
from polyfed.deploy.site.site_task import parse_site_task
from polyfed.deploy.trial import local_trial as trials
from polyfed.deploy.trial.project import create_project
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.monitoring.progress import LineProgress
from polyfed.simulation.monitoring.update_directions import update_bound_sentences
from polyfed.simulation.storage.checkpoints.checkpoint import load_newest_checkpoint
from polyfed.simulation.storage.directory import read_config, read_metrics
from polyfed.testing import small_clients
from tests.few_cases import few

from .test_loopback import DISCLOSE, command, port  # noqa: F401

LIAR = "client-2"
honest = InProcessEngine.run


TIMES = 20


def forge(reply, received):
    """−20 times the change that was trained."""
    model = {
        name: received[name] - TIMES * (tensor - received[name]) if tensor.is_floating_point() else tensor
        for name, tensor in reply.tensors["model"].items()
    }
    return Message({"model": model}, reply.scalars)


def lies(engine, tasks):
    for result in honest(engine, tasks):
        if result.task.client == LIAR and result.reply is not None:
            result = dataclasses.replace(result, reply=forge(result.reply, result.task.message.tensors["model"]))
        yield result


def honest_accuracy(run):
    return statistics.fmean(row["accuracy"] or 0.0 for i, row in run.history[-1]["clients"].items() if i != LIAR)


def honest_loss(run):
    return statistics.fmean(row["loss"] for i, row in run.history[-1]["clients"].items() if i != LIAR)


def test_a_liar_among_three_sites_is_bounded_and_named(run, tmp_path, monkeypatch):
    stream, method = io.StringIO(), FedAvg(lr=0.05)
    plain = run(method=method, rounds=4, out="plain")
    monkeypatch.setattr(InProcessEngine, "run", lies)
    words = {"max-update-norm": "auto", "progress": LineProgress(stream, norms=True)}
    bounded = run(method=method, rounds=4, out="bounded", **words)
    free = run(method=method, rounds=4, out="free")
    assert read_config(tmp_path / "bounded")["algorithm"]["robust"] == "clip:3.0x"
    for record in bounded.history:
        norms = {i: row["update_norm"] for i, row in record["clients"].items()}
        assert set(record["robust"]["scaled"]) == {LIAR}
        assert record["robust"]["scaled"][LIAR] * norms[LIAR] == pytest.approx(record["robust"]["bound"], rel=1e-3)
    assert any(f"{LIAR!r} pulls against the others" in s for record in bounded.history for s in record["warnings"])
    named = [s for record in bounded.history for s in record["warnings"]]
    assert named
    assert all(LIAR in sentence for sentence in named if "no client" not in sentence)
    assert "scaled down to it: client-2 (times " in stream.getvalue()
    assert all("robust" not in record for record in free.history)
    assert honest_accuracy(free) <= honest_accuracy(bounded) <= honest_accuracy(plain) + 0.15


@pytest.mark.thorough
def test_the_default_changes_no_bit_where_nobody_lies(run):
    """3 times the median is above what honest sites send here."""
    bounded = run(method=FedAvg(lr=0.05), out="bounded", **{"max-update-norm": "auto"})
    free = run(method=FedAvg(lr=0.05), out="free")
    assert all(record["robust"]["scaled"] == {} for record in bounded.history)
    for ours, theirs in zip(bounded.history, free.history, strict=True):
        assert ours["summary"] == theirs["summary"]
        assert [row["update_norm"] for row in ours["clients"].values()] == [
            row["update_norm"] for row in theirs["clients"].values()
        ]


WORDS = {"sites": "a,b,c", "out": "run", "algorithm.name": "local"}


@pytest.mark.parametrize(
    "value", [0, -1.0, "none", "abc", "inf", float("inf"), True, "nan", float("nan"), "off-if-secure"]
)
def test_a_bound_that_is_none_is_refused(value):
    with pytest.raises(UserError, match="max-update-norm must be auto, a positive number, or off, got"):
        build_or_restore_server({**WORDS, "max-update-norm": value})


@pytest.mark.parametrize(
    ("algorithm", "setting", "secure", "rule", "words"),
    [
        (FedAvg(), "auto", False, "clip:3.0x", "limited to 3 times the running median of their norms"),
        (FedAvg(), 2.5, False, "clip:2.5", "limited to a norm of 2.5"),
        (FedAvg(), 2.5, True, "clip:2.5", "each site limits its update to a norm of 2.5"),
        (FedAvg(), "auto", True, "clip:3.0x", "each site limits its update to 3 times the running median"),
        (FedAvg(), "off", True, None, "max-update-norm is off, so one site can outweigh all others"),
        (FedAvg(), "off", False, None, "max-update-norm is off, so one site can outweigh all others"),
        (FedAvg(robust="median"), "auto", False, "median", "combined by robust = 'median'"),
        (FedAvg(adapters="svd"), "auto", False, None, "adapters of several ranks"),
        (HeteroFL(), "auto", False, None, "heterofl's server does more with replies"),
    ],
)
def test_what_bound_a_deployment_has_is_said(algorithm, setting, secure, rule, words):
    bounded = bound_updates(algorithm, setting, secure=secure)
    assert bounded.algorithm.robust == rule
    assert re.search(words, bounded.sentence)


def test_a_number_where_no_bound_can_be_is_refused():
    with pytest.raises(UserError, match="is not possible: fedamp's server does more"):
        bound_updates(FedAMP(), 1.0, secure=False)
    with pytest.raises(UserError, match="are two rules; leave one of them out"):
        bound_updates(FedAvg(robust="median"), 1.0, secure=False)


@pytest.mark.parametrize(("bound", "number"), [("auto", 7), (2.5, 6), ("off", 6)])
def test_only_runs_that_count_norms_speak_a_protocol_that_older_sites_refuse(tmp_path, bound, number):
    words = {**WORDS, "algorithm.name": "fml", "secure": True, "max-update-norm": bound, "out": str(tmp_path / "run")}
    assert build_or_restore_server(words).build_secure_sum_head()["protocol"] == number


def test_a_site_of_a_secure_sum_refuses_a_task_without_the_bound(tmp_path):
    head = {"phase": "local", "round": 1, "seed": 0, "run_seed": 0, "keep": 0, "state": None, "algorithm": {},
            "secure": True, "part": True}  # fmt: skip
    for scalars in ({}, {"counted_median": float("nan")}, {"counted_median": -1.0}):
        with pytest.raises(RefusalError, match="a bound on updates in secure sums needs a positive number"):
            parse_site_task(
                Envelope(head, Message({}, scalars)), "a", tmp_path, FedAvg(robust="clip"), clips_updates=False
            )


def test_fewer_sites_than_krum_needs_are_refused_before_anything_starts(tmp_path):
    assert Deployment(sites=("a",), out=tmp_path).max_update_norm == "auto"
    with pytest.raises(UserError, match=r"robust='krum:1' is not possible: .* 2f \+ 3 = 5"):
        build_or_restore_server(
            {**WORDS, "algorithm.name": "fedavg", "algorithm.robust": "krum", "allow-disclosure": True}
        )


SITE = """
import os
from polyfed.core.algorithm import Message
from polyfed.deploy.site.disclosure_guard import DisclosureGuard
from polyfed.testing import small_clients

NAME = os.environ["POLYFED_SITE"]
protect = DisclosureGuard.clip_noise_and_compress_reply

def forge(guard, reply, received, *more):
    start = received.tensors["model"]
    model = {
        name: start[name] - 20 * (tensor - start[name]) if tensor.is_floating_point() else tensor
        for name, tensor in reply.tensors["model"].items()
    }
    return protect(guard, Message({"model": model}, reply.scalars), received, *more)

if NAME == "client-2":
    DisclosureGuard.clip_noise_and_compress_reply = forge

def client():
    return {c.id: c for c in small_clients(3)}[NAME]
"""


@pytest.mark.slow
def test_a_liar_among_three_sites_of_their_own_processes(tmp_path, port):  # noqa: F811
    """Real SuperNodes: the log, the records and `polyfed flower status` name the liar and its factor."""
    project = create_project(tmp_path / "federation", ["client-0", "client-1", LIAR])
    project.site_file.write_text(SITE)
    (project.path / "server" / "server.py").write_text("from polyfed.testing import SmallNet as model\n")
    server = project.path / "server" / "server.py"
    settings = ['algorithm.name="fedavg"', "algorithm.lr=0.05", "secure=false", "rounds=4", f'file="{server}"']
    with trials.start_trial(project, project.read_site_names(), port, DISCLOSE + "allow-disclosure=true"):
        out = project.path / "runs" / "run-1"
        done = command(
            "run", str(project.path), "--allow-disclosure", "--out", str(out), *(f"--set={s}" for s in settings)
        )
        assert done.returncode == 0, done.stderr[-3000:]
        status = command("status", str(project.path)).stdout
    records = read_metrics(out / "metrics.jsonl")
    assert all(set(record["robust"]["scaled"]) == {LIAR} for record in records)
    assert any(f"{LIAR!r} pulls against the others" in s for record in records for s in record["warnings"])
    assert "scaled down to it: client-2 (times " in status
    assert "updates are limited to 3 times the running median of their norms (max-update-norm)" in done.stderr


SECURE_SITE = SITE.replace("clip_noise_and_compress_reply", "clip_noise_and_mask_reply").replace("- 20 *", "+ 1000 *")


@pytest.mark.slow
def test_a_broken_site_of_a_new_project_with_secure_sums_is_bounded(tmp_path, port):  # noqa: F811
    """Real SuperNodes, and the words of `polyfed flower init`: the record counts the site that its own log names."""
    project = create_project(tmp_path / "federation", ["client-0", "client-1", LIAR])
    project.site_file.write_text(SECURE_SITE)
    server = project.path / "server" / "server.py"
    server.write_text("from polyfed.testing import SmallNet as model\n")
    settings = ['algorithm.name="fedavg"', "algorithm.lr=0.05", "rounds=3", f'file="{server}"']
    with trials.start_trial(project, project.read_site_names(), port, DISCLOSE) as trial:
        out = project.path / "runs" / "run-1"
        done = command("run", str(project.path), "--out", str(out), *(f"--set={s}" for s in settings))
        assert done.returncode == 0, done.stderr[-3000:]
        status = command("status", str(project.path)).stdout
        logs = {name: (trial.folder / f"{name}.log").read_text() for name in project.read_site_names()}
    records = read_metrics(out / "metrics.jsonl")
    assert [record["robust"]["within_bound"] for record in records] == [2, 2, 2]
    assert all(record["robust"]["norm_of_mean"] <= record["robust"]["bound"] for record in records)
    assert "each site limits its update to 3 times the running median of their norms (max-update-norm)" in done.stderr
    assert "scaled down to it: 1 of 3" in status
    scaled = "was scaled down to the bound of"
    assert {name: log.count(scaled) for name, log in logs.items()} == {"client-0": 0, "client-1": 0, LIAR: 3}


def test_a_site_with_noise_refuses_a_bound_in_secure_sums():
    reason = noise_incompatibility_error(FedAvg(weighted=False, robust="clip:1"), secure_sums=True)
    assert "would limit its noise too" in reason
    assert 'max-update-norm = "off"' in reason
    assert noise_incompatibility_error(FedAvg(weighted=False, robust="clip:1"), secure_sums=False) is None


@pytest.mark.thorough
def test_sites_of_a_secure_sum_limit_their_updates_as_a_simulation_does(secure_grid, secure_play):
    words = {"rounds": 2, "max-update-norm": 0.05}
    run = secure_play(secure_grid(small_clients()), **words)
    simulated = pf.federate(
        small_clients(), FedAvg(lr=0.05, robust="clip:0.05"), rounds=2, seed=3, workers=0, secure=True
    )
    assert [record["summary"] for record in run.history] == [record["summary"] for record in simulated.history]
    assert [record["robust"] for record in run.history] == [record["robust"] for record in simulated.history]
    assert all(0 < record["robust"]["norm_of_mean"] <= 0.05 * (1 + 1e-6) for record in run.history)


def test_a_broken_site_in_a_secure_sum_limits_itself(secure_grid, secure_play, monkeypatch):
    """Its update is 1000 times too large by mistake: its software limits it, and the others' part of the mean remains."""
    monkeypatch.setattr(sys.modules[__name__], "TIMES", 1000)
    monkeypatch.setattr(InProcessEngine, "run", lies)
    run = secure_play(secure_grid(small_clients()), rounds=1, **{"max-update-norm": 0.05})
    assert 0 < run.history[0]["robust"]["norm_of_mean"] < 0.05
    assert not [text for text in run.history[0]["warnings"] if "secure sum" in text]


def test_a_liar_in_a_secure_sum_moves_the_mean_by_the_bound(secure_grid, secure_play, monkeypatch, tmp_path):
    """It does not limit its update; the server limits the mean, and nobody is named."""
    encode = disclosure_guard.encode_reply_in_fixed_point
    monkeypatch.setattr(InProcessEngine, "run", lies)
    monkeypatch.setattr(
        disclosure_guard, "encode_reply_in_fixed_point",
        lambda reply, algorithm, *more: encode(reply, dataclasses.replace(algorithm, robust=None), *more),
    )  # fmt: skip
    monkeypatch.setattr(sys.modules[__name__], "TIMES", 1000)
    run = secure_play(secure_grid(small_clients()), rounds=1, **{"max-update-norm": 0.05})
    (record,) = run.history
    assert record["robust"]["norm_of_mean"] > 0.5
    (sentence,) = [text for text in record["warnings"] if "secure sum" in text]
    assert "nobody can see which" in sentence
    start = run.federation.initial_checkpoint().state["model"]
    newest = load_newest_checkpoint(tmp_path / "run/checkpoint")[0].state["model"]
    squares = sum(float((newest[n] - start[n]).square().sum()) for n in start if start[n].is_floating_point())
    assert squares**0.5 == pytest.approx(0.05, rel=1e-3)


@pytest.mark.thorough
def test_by_default_sites_of_a_secure_sum_follow_the_median_as_a_simulation_does(secure_grid, secure_play):
    run = secure_play(secure_grid(small_clients()), rounds=4, **{"max-update-norm": "auto"})
    simulated = pf.federate(small_clients(), FedAvg(lr=0.05, robust="clip"), rounds=4, seed=3, workers=0, secure=True)
    assert [record["summary"] for record in run.history] == [record["summary"] for record in simulated.history]
    assert [record["robust"] for record in run.history] == [record["robust"] for record in simulated.history]
    assert all(record["robust"]["within_bound"] == 3 for record in run.history)


def test_a_broken_site_of_a_secure_sum_is_counted_and_knows_itself(secure_grid, secure_play, monkeypatch, caplog):
    """Its update is 1000 times too large by mistake. The record says that one of three was scaled; its own log, which."""
    monkeypatch.setattr(sys.modules[__name__], "TIMES", 1000)
    monkeypatch.setattr(InProcessEngine, "run", lies)
    with caplog.at_level("WARNING", "polyfed.site"):
        run = secure_play(secure_grid(small_clients()), rounds=3, **{"max-update-norm": "auto"})
    for record in run.history:
        assert record["robust"]["within_bound"] == 2
        assert "scaled down to it: 1 of 3" in update_bound_sentences(record)[0]
    assert math.isfinite(honest_loss(run))
    assert len([text for text in caplog.messages if "was scaled down to the bound of" in text]) == 3


@pytest.mark.parametrize(
    ("lie", "said"), few([((-5, 1), "which cannot be"), ((0, 1), None)], [((-5, 1), "which cannot be")])
)
def test_a_site_that_lies_about_its_counts(secure_grid, secure_play, monkeypatch, lie, said):
    """Counts that cannot be are reported and change nothing; others move the bound as one site of three may."""
    encode = disclosure_guard.encode_reply_in_fixed_point

    def encode_with_lie(reply, *more):
        encoded = encode(reply, *more)
        if reply.scalars["num_examples"] == liar_examples:
            encoded.tensors["sum"]["words"][-2:] = torch.tensor(lie)
        return encoded

    clients = {client.id: client for client in small_clients()}
    liar_examples = len(clients[LIAR].train)
    assert [len(client.train) for client in clients.values()].count(liar_examples) == 1
    monkeypatch.setattr(disclosure_guard, "encode_reply_in_fixed_point", encode_with_lie)
    run = secure_play(secure_grid(small_clients()), rounds=3, **{"max-update-norm": "auto"})
    warnings = [text for record in run.history for text in record["warnings"] if "which cannot be" in text]
    bounds = [record["robust"]["bound"] for record in run.history]
    assert len(warnings) == (3 if said else 0)
    assert (len(set(bounds)) == 1) == bool(said)
