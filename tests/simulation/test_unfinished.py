"""An engine on which the evaluation of a round rides with the training of the next: the same records as one after the
other, also of a run that is stopped in between. (Between sites it always does; here a simulation does.)"""

import json

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import Local, PFedLA
from polyfed.core.errors import RoundError
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.training_round import train_and_aggregate_round
from polyfed.simulation.storage.checkpoints import checkpoint as checkpoints
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.directory import describe_changed_files_of_run, read_metrics
from polyfed.testing import assert_runs_equal, small_clients, without_durations

METHOD = PFedLA(lr=0.05)


def play(out=None, method=METHOD, **words):
    given = {"rounds": 4, "seed": 3, "workers": 0, "clients_per_round": 2, **words}
    return pf.federate(small_clients(), method, out=out, **given)


@pytest.fixture
def together(monkeypatch):
    """Makes engines of this process ride; the phases and rounds that each got at once."""
    seen, run = [], InProcessEngine.run

    def watched(self, tasks):
        seen.append(sorted({(task.phase, task.round) for task in tasks}))
        return run(self, tasks)

    monkeypatch.setattr(InProcessEngine, "overlaps_evaluation", True)
    monkeypatch.setattr(InProcessEngine, "run", watched)
    return seen


@pytest.fixture
def stop(monkeypatch):
    """Ctrl-C when the round after this one begins."""

    def at(last):
        def playing(federation, now, *rest):
            if now.round == last:
                raise KeyboardInterrupt
            return train_and_aggregate_round(federation, now, *rest)

        monkeypatch.setattr("polyfed.simulation.rounds.round_loop.train_and_aggregate_round", playing)

    return at


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "words",
    [{"evaluate_every": 3}, *(pytest.param(w, marks=pytest.mark.slow) for w in ({}, {"checkpoint_every": 3}))],
    ids=str,
)
def test_records_predictions_and_models_are_the_same(tmp_path, together, words):
    found = play(tmp_path / "a", **words)
    rode = [phases for phases in together if len(phases) == 2]
    assert rode == [[("evaluate", n), ("local", n + 1)] for n in range(1, 4) if n % words.get("evaluate_every", 1) == 0]
    assert together[-2:] == [[("evaluate", 4)], [("export", 4)]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessEngine, "overlaps_evaluation", False)
        other = play(tmp_path / "b", **words)
    assert_runs_equal(found, other)
    assert without_durations(read_metrics(tmp_path / "a" / "metrics.jsonl")) == without_durations(other.history)
    assert [list(record) for record in found.history] == [list(record) for record in other.history]
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert describe_changed_files_of_run(tmp_path / "a") == []


def test_a_run_that_keeps_its_best_round_does_not_ride(together):
    """Whether a round is the best must be known before the next begins, since its state is kept then."""
    play(keep="best", rounds=2)
    assert all(len(phases) == 1 for phases in together)


@pytest.mark.thorough
@pytest.mark.parametrize("rides", [True, False])
@pytest.mark.parametrize("last", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_that_lacks_an_evaluation_makes_it_first(tmp_path, together, stop, last, rides):
    stop(last)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        play(out)
    assert checkpoints.load_newest_checkpoint(out / "checkpoint")[0].unevaluated_record["round"] == last
    assert len(read_metrics(out / "metrics.jsonl")) == last - 1
    assert describe_changed_files_of_run(out) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.simulation.rounds.round_loop.train_and_aggregate_round", train_and_aggregate_round)
        patch.setattr(InProcessEngine, "overlaps_evaluation", rides)
        whole = play()
        together.clear()
        assert_runs_equal(pf.resume(out, clients=small_clients()), whole)
    assert together[0] == ([("evaluate", last), ("local", last + 1)] if rides else [("evaluate", last)])
    assert {f"analysis/round-{n:06d}.npz" for n in range(5)} <= set(files(out))
    assert describe_changed_files_of_run(out) == []


def test_a_round_that_ends_the_run_costs_no_record_of_the_one_before(tmp_path, together):
    class Fails(torch.nn.Linear):
        trained = 0

        def forward(self, x):
            if self.training and len(x) > 2:
                Fails.trained += 1
                if Fails.trained > len(small_clients()):
                    raise RuntimeError("the second round")
            return super().forward(x)

    clients = [pf.Client(c.id, lambda: Fails(6, 3), c.train, c.test) for c in small_clients()]
    method = Local(lr=0.05, local_epochs=1, batch_size=64)
    with pytest.raises(RoundError, match="round 2 has 0 valid replies"):
        pf.federate(clients, method, rounds=3, workers=0, out=tmp_path / "run", on_error="skip")
    assert [record["round"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert "loss" in read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["clients"]["client-0"]


# -- what a checkpoint holds of it -----------------------------------------------------------------------------------------

RECORD = {
    "round": 2, "seconds": 0.5, "bytes_down_total": 3, "bytes_up_total": 4, "clients": {"a": {"train_loss": 0.1}},
    "summary": {}, "failures": [], "replied": ["a"], "train_loss": 0.1 + 0.2, "score": "accuracy",
}  # fmt: skip


def test_an_unfinished_record_comes_back_as_it_was(tmp_path):
    checkpoints.save_checkpoint_and_remove_older(tmp_path, Checkpoint(2, {"w": torch.ones(2)}, {}, RECORD), 1)
    found, _ = checkpoints.load_newest_checkpoint(tmp_path, last_metrics_round=1)
    assert found.unevaluated_record == RECORD
    assert found.last_recorded_round == 1
    assert checkpoints.load_newest_checkpoint(tmp_path, last_metrics_round=0)[0] is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"round": 3}, "the record in it is of round 3"),
        ({"round": "2"}, "the record of its round.round must be a whole number, got '2'"),
        ({"clients": {"a": 3}}, "the record of its round.clients.a must be a mapping"),
        ({"failures": {}}, "the record of its round.failures must be a list"),
        ({"seconds": "x"}, "the record of its round.seconds must be a number"),
        (None, "the record of its round has no bytes_down_total"),
    ],
    ids=str,
)
def test_a_record_that_none_is_is_named_and_the_checkpoint_before_is_used(tmp_path, wrong, sentence):
    checkpoints.save_checkpoint_and_remove_older(tmp_path, Checkpoint(1, {}, {}), 0)
    checkpoints.save_checkpoint_and_remove_older(
        tmp_path, Checkpoint(2, {}, {}, {"round": 2} if wrong is None else {**RECORD, **wrong}), 1
    )
    found, (note,) = checkpoints.load_newest_checkpoint(tmp_path)
    assert found.round == 1
    assert sentence in note


@pytest.mark.parametrize("text", ["", "[", "7", '{"round": NaN}'])
def test_so_is_one_that_is_no_json(tmp_path, monkeypatch, text):
    checkpoints.save_checkpoint_and_remove_older(tmp_path, Checkpoint(1, {}, {}), 0)
    monkeypatch.setattr(json, "dumps", lambda value, **_: text if value is RECORD else json.JSONEncoder().encode(value))
    checkpoints.save_checkpoint_and_remove_older(tmp_path, Checkpoint(2, {}, {}, RECORD), 1)
    found, (note,) = checkpoints.load_newest_checkpoint(tmp_path)
    assert found.round == 1
    assert "round-000002 is damaged" in note
