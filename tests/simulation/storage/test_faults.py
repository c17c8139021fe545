"""Runs whose directory is hit: killed at any write, damaged by a disk, given what it cannot hold."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import polyfed as pf
from polyfed.algorithms import FedAvg, FedProx, Local
from polyfed.core.errors import UserError
from polyfed.simulation.monitoring.progress import LineProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.storage.directory import RunDirectory, read_config
from polyfed.simulation.storage.paths import safe_file_name
from polyfed.testing import assert_runs_equal, small_clients, without_durations


class Killed(BaseException):
    """No `except Exception` sees it, and nothing can be written after it: as near to `kill -9` as one process gets."""


class KillPoints:
    """Lets `number` operations on the disk pass, and none after."""

    def __init__(self, monkeypatch, number):
        self.left = number
        for owner, name in (
            (os, "fsync"),
            (os, "link"),
            (Path, "rename"),
            (Path, "mkdir"),
            (shutil, "rmtree"),
            (Path, "unlink"),
        ):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, operation):
        def watched(*arguments, **options):
            if self.left <= 0:
                raise Killed
            self.left -= 1
            return operation(*arguments, **options)

        return watched


@pytest.mark.parametrize(
    ("more", "kill_points"),
    [
        ({"keep": "best", "checkpoint_every": 2}, range(0, 200, 15)),
        pytest.param({"keep": "best", "checkpoint_every": 2}, range(4, 200, 9), marks=pytest.mark.thorough),
        pytest.param({"keep": "best", "checkpoint_every": 2}, range(200), marks=pytest.mark.slow),
        pytest.param({"evaluate_every": 3}, range(200), marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_write_and_started_or_resumed_it_ends_as_if_it_had_not_been(tmp_path, more, kill_points):
    """Local's clients keep tensors, and two of three take part: there are idle ones, whose states are not written again."""
    options = {"rounds": 3, "workers": 0, "clients_per_round": 2, **more}

    def go_on(out):
        if (out / "config.yaml").exists():
            return pf.resume(out, clients=small_clients())
        return pf.federate(small_clients(), Local(lr=0.1), out=out, **options)

    whole = pf.federate(small_clients(), Local(lr=0.1), out=tmp_path / "whole", **options)
    started = resumed = 0
    for number in kill_points:
        out, run, kills = tmp_path / f"killed-{number}", None, 0
        for _ in range(2):  # what goes on is killed too
            with pytest.MonkeyPatch.context() as patch:
                KillPoints(patch, number)
                try:
                    run = go_on(out)
                except Killed:
                    kills += 1
                    started += not (out / "config.yaml").exists()
                    resumed += (out / "config.yaml").exists()
        if run is None:
            run = go_on(out)
        assert_runs_equal(run, whole)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert without_durations(lines) == without_durations(whole.history)
        for folder, kind in (("models", "safetensors"), ("predictions", "parquet")):
            names = [f"client-{k}.{kind}" for k in range(3)]
            assert sorted(p.name for p in (out / folder).iterdir() if not p.name.endswith(".signature.json")) == names
            for name in names:
                assert (out / folder / name).read_bytes() == (tmp_path / "whole" / folder / name).read_bytes()
        if kills == 0:
            break
    assert started > 1
    assert resumed > 6
    assert kills == 0


def test_a_run_goes_on_past_newer_damaged_checkpoints(tmp_path, monkeypatch):
    """Private states of idle clients come from the checkpoint that was loaded. Here the newest folder is of round 5 and
    damaged, the run goes on from 3, and stops at 4: the client that trained in round 5 must not have trained yet."""
    method, out = Local(lr=0.1), tmp_path / "run"
    options = {"rounds": 8, "workers": 0, "clients_per_round": 1, "evaluate_every": 8, "checkpoint_every": 3}
    whole = pf.federate(small_clients(), method, **options)
    good, last = Federation.reply_error, 5
    monkeypatch.setattr(Federation, "reply_error", lambda *given: good(*given) if len(read(out)) < last else "stop")
    with pytest.raises(pf.ClientError):
        pf.federate(small_clients(), method, out=out, **options)
    (out / "checkpoint" / "round-000005" / "server.safetensors").write_bytes(b"")
    last = 4
    warned = pytest.warns(RuntimeWarning, match="round-000005 is damaged .*; the one before it is used")
    with warned, pytest.raises(pf.ClientError):
        pf.resume(out, clients=small_clients())
    assert sorted(p.name for p in (out / "checkpoint").glob("round-*")) == ["round-000003", "round-000004"]
    last = 8
    assert_runs_equal(pf.resume(out, clients=small_clients()), whole)


def read(out):
    path = out / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_damaged_newer_checkpoints_are_removed_before_a_run_goes_on(tmp_path, monkeypatch):
    out = tmp_path / "run"
    pf.federate(small_clients(), Local(lr=0.1), rounds=6, workers=0, checkpoint_every=3, out=out)
    (out / "checkpoint" / "round-000006" / "server.safetensors").write_bytes(b"")
    monkeypatch.setattr(Federation, "reply_error", lambda self, *given: "refused")
    warned = pytest.warns(RuntimeWarning, match="is damaged")
    with warned, pytest.raises(pf.ClientError):
        pf.resume(out, clients=small_clients())
    assert [p.name for p in (out / "checkpoint").glob("round-*")] == ["round-000003"]


def test_a_lost_line_of_metrics_costs_a_round_not_the_run(tmp_path):
    whole = pf.federate(small_clients(), Local(lr=0.1), rounds=3, workers=0, out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.warns(RuntimeWarning, match=r"does not hold rounds 1 to 3, which .*; the one before it is used"):
        run = pf.resume(tmp_path / "run", clients=small_clients())
    assert_runs_equal(run, whole)
    (tmp_path / "run" / "metrics.jsonl").write_text(lines[0])
    with pytest.raises(UserError, match=r"metrics.jsonl reaches: .*does not hold rounds 1 to 3.*rounds 1 to 2"):
        pf.resume(tmp_path / "run", clients=small_clients())
    RunDirectory.open(tmp_path / "run").close()


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    method = FedAvg(lr=np.float64(0.1), local_epochs=2)
    run = pf.federate(
        small_clients(), method, rounds=1, clients_per_round=np.float64(0.5), workers=0, out=tmp_path / "run"
    )
    config = read_config(tmp_path / "run")
    assert (config["algorithm"]["lr"], config["clients_per_round"]) == (0.1, 0.5)
    assert_runs_equal(pf.resume(tmp_path / "run", clients=small_clients()), run)
    assert_runs_equal(pf.resume(tmp_path / "run", clients=small_clients(), algorithm=method), run)


@dataclass(frozen=True, kw_only=True)
class Described(FedAvg):
    """FedAvg with fields of unusual types."""

    steps: tuple[int, ...] = (3, 6)
    rule: Callable[[float], float] | None = None
    scales: list[float] = field(default_factory=list)


def test_a_method_that_cannot_be_written_runs_without_a_directory_only(tmp_path):
    method = Described(rule=abs)
    with pytest.raises(
        UserError, match=r"Described.rule is a builtin_function_or_method, which config.yaml cannot hold"
    ):
        pf.federate(small_clients(), method, rounds=1, workers=0, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    pf.federate(small_clients(), method, rounds=1, workers=0)


def test_a_failure_after_the_folder_was_made_gives_the_lock_back(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(RunDirectory, "close", lambda self: (closed.append(self.path), self._lock.close()))
    with pytest.raises(TypeError, match="not JSON serializable"):
        pf.federate(small_clients(), FedAvg(), rounds=1, workers=0, out=tmp_path / "run", facts={"x": object()})
    assert closed == [tmp_path / "run"]
    pf.federate(small_clients(), FedAvg(), rounds=1, workers=0, out=tmp_path / "run")


def test_resume_takes_no_other_method(tmp_path):
    pf.federate(small_clients(), Described(lr=0.1), rounds=1, workers=0, out=tmp_path / "run")
    again = {"clients": small_clients()}
    assert pf.resume(tmp_path / "run", algorithm=Described(lr=0.1), **again).last.round == 1
    with pytest.raises(
        UserError, match=r"not that of the run: lr was 0.1 and is now 0.2, steps was \[3, 6\] and is now"
    ):
        pf.resume(tmp_path / "run", algorithm=Described(lr=0.2, steps=(1,)), **again)
    with pytest.raises(UserError, match=r"name was 'Described' and is now 'fedprox'"):
        pf.resume(tmp_path / "run", algorithm=FedProx(lr=0.1), **again)
    with pytest.raises(UserError, match="algorithm must be a method"):
        pf.resume(tmp_path / "run", algorithm="fedavg", **again)
    RunDirectory.open(tmp_path / "run").close()


@dataclass(frozen=True, kw_only=True)
class Unexportable(FedAvg):
    """Evaluates, but gives no model at the end for one client; its worker dies if it is told to."""

    how: str = "raise"
    rounds: int = 1

    def personal_model(self, message, client_state, client, seed):
        model = copy.deepcopy(
            super().personal_model(message, client_state, client, seed)
        )  # not the module that others use too
        if client.id == "client-1":
            model.state_dict = self._fail
        return model

    def _fail(self):
        if self.how == "die":
            os._exit(7)
        raise MemoryError("no room")


def test_a_model_that_cannot_be_exported_costs_no_other(tmp_path, capsys):
    with pytest.warns(RuntimeWarning, match=r"round 1, client 'client-1', phase 'export': MemoryError.*is not written"):
        run = pf.federate(
            small_clients(),
            Unexportable(),
            rounds=1,
            workers=0,
            on_error="skip",
            out=tmp_path / "run",
            progress=LineProgress(),
        )
    assert run.last.round == 1
    assert "its model is not written" in capsys.readouterr().err
    assert sorted(p.stem for p in (tmp_path / "run" / "models").glob("*.safetensors")) == ["client-0", "client-2"]
    with pytest.raises(pf.ClientError, match="phase 'export'"):
        pf.federate(small_clients(), Unexportable(), rounds=1, workers=0, out=tmp_path / "raise")


def test_workers_that_die_at_the_export_are_told(tmp_path):
    with pytest.warns(RuntimeWarning) as told:
        pf.federate(
            small_clients(), Unexportable(how="die"), rounds=1, workers=2, on_error="skip", out=tmp_path / "run"
        )
    sentences = [str(w.message) for w in told]
    assert sum("export of client 'client-1': worker process" in s and "died" in s for s in sentences) == 2
    assert sum("is not written" in s for s in sentences) == 1


def test_ids_that_are_no_file_names(tmp_path):
    ids = ["北京市第一人民医院放射科肿瘤影像研究与数据管理中心东院区" * 2, "St. Mary's/north", "siteA", "sitea"]
    clients = [replace(c, id=i) for c, i in zip(small_clients(4), ids, strict=True)]
    run = pf.federate(clients, Local(), rounds=2, workers=0, out=tmp_path / "run")
    names = {p.name for p in (tmp_path / "run" / "models").glob("*.safetensors")}
    assert names == {f"{safe_file_name(i)}.safetensors" for i in ids}
    assert len({name.lower() for name in names}) == 4
    assert_runs_equal(pf.resume(tmp_path / "run", clients=clients), run)
