"""Users' callbacks: they see each round's record, may stop a run, and cannot damage it."""

import json

import numpy as np
import pytest

import polyfed as pf
from polyfed.algorithms import Local
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.storage.checkpoints.checkpoint import load_newest_checkpoint
from polyfed.simulation.storage.directory import describe_changed_files_of_run, read_manifest, read_metrics
from polyfed.testing import assert_runs_equal, small_clients
from tests.few_cases import few

METHOD = pf.algorithms.FedRep(lr=0.05, local_epochs=1)


class Watch(pf.Callback):
    """Remembers what each hook gets; stops after round `last`."""

    def __init__(self, last=None):
        self.last, self.calls = last, []

    def on_start(self, records):
        self.calls.append(("start", [record["round"] for record in records]))

    def on_aggregated(self, round_number):
        self.calls.append(("aggregated", round_number))

    def on_round(self, record):
        self.calls.append(("round", record["round"]))
        self.record = record
        return record["round"] != self.last

    def on_end(self):
        self.calls.append(("end", None))


class Breaks(pf.Callback):
    def __init__(self, hook):
        self.hook = hook

    def on_start(self, records):
        assert self.hook != "on_start", "start"

    def on_round(self, record):
        if self.hook == "on_round" and record["round"] == 2:
            raise pf.RoundError("a full mailbox")

    def on_end(self):
        assert self.hook != "on_end", "end"


def run_small(out=None, method=METHOD, **options):
    defaults = {"rounds": 4, "seed": 3, "workers": 0, "clients_per_round": 2}
    return pf.federate(small_clients(), method, out=out, **(defaults | options))


@pytest.fixture
def overlapping(monkeypatch):
    monkeypatch.setattr(InProcessEngine, "overlaps_evaluation", True)


def test_hooks_get_the_records_of_metrics_jsonl_and_nothing_else(tmp_path):
    watch, other = Watch(), Watch()
    run = run_small(tmp_path / "run", rounds=2, callbacks=[watch, other])
    rounds = [(hook, n) for n in (1, 2) for hook in ("round", "aggregated")]
    assert watch.calls == other.calls == [("start", []), *rounds, ("end", None)]
    assert watch.record == run.history[-1]
    assert json.loads(json.dumps(watch.record)) == read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert_runs_equal(run, run_small(rounds=2))
    assert run.stopped_by is None
    assert "stopped" not in read_manifest(tmp_path / "run")


@pytest.mark.parametrize(
    "options", few([{"checkpoint_every": 3}, {"keep": 3}, {"evaluate_every": 4}], [{"checkpoint_every": 3}]), ids=str
)
def test_a_callback_stops_a_run_that_can_be_resumed(tmp_path, options):
    out = tmp_path / "run"
    run = run_small(out, callbacks=[Watch(), Watch(2)], **options)
    assert run.stopped_by == "Watch"
    assert [record["round"] for record in run.history] == [1, 2]
    assert read_manifest(out)["stopped"] == {"round": 2, "by": "Watch"}
    assert load_newest_checkpoint(out / "checkpoint")[0].round == 2
    assert len(list((out / "models").glob("*.safetensors"))) == len(small_clients())
    assert describe_changed_files_of_run(out) == []

    watch = Watch()
    resumed = pf.resume(out, clients=small_clients(), callbacks=[watch])
    assert_runs_equal(resumed, run_small(**options))
    assert watch.calls[:2] == [("start", [1, 2]), ("round", 3)]
    assert resumed.stopped_by is None
    assert not read_manifest(out)["stopped"]
    assert describe_changed_files_of_run(out) == []


def stop_after_two(record):
    return record["round"] < 2


def test_a_function_sees_each_round_and_stops_the_run_with_false(tmp_path):
    out, seen = tmp_path / "run", []
    run = run_small(out, callbacks=[seen.append, stop_after_two, lambda record: np.bool_(record["round"] < 3)])
    assert seen == list(run.history)
    assert (run.stopped_by, len(seen)) == ("stop_after_two", 2)
    assert read_manifest(out)["stopped"] == {"round": 2, "by": "stop_after_two"}
    resumed = pf.resume(out, clients=small_clients(), callbacks=[seen.append])
    assert_runs_equal(resumed, run_small(callbacks=[lambda record: 0, lambda record: True]))  # which stop nothing
    assert [record["round"] for record in seen] == [1, 2, 3, 4]


def test_a_function_that_changes_its_record_changes_no_run():
    def change(record):
        record["clients"].clear()
        record.clear()

    options = {"rounds": 3, "clients_per_round": 2, "sampler": "power_of_choice", "workers": 0}
    runs = [pf.federate(small_clients(3), "fedavg", callbacks=given, **options) for given in ([], [change])]
    assert [sorted(record) for record in runs[1].history] == [sorted(record) for record in runs[0].history]
    assert [set(record["clients"]) for record in runs[1].history] == [
        set(record["clients"]) for record in runs[0].history
    ]


def test_a_function_that_fails_is_named_and_costs_no_round(tmp_path):
    def log_to_a_server(record):
        assert record["round"] < 3, "the server is gone"

    with pytest.raises(pf.UserError, match=r"log_to_a_server failed in on_round: Asser(.|\n)*3 of 4 rounds are saved"):
        run_small(tmp_path / "run", callbacks=[log_to_a_server])
    assert_runs_equal(pf.resume(tmp_path / "run", clients=small_clients()), run_small())


def test_who_stops_after_the_last_round_stops_nothing(tmp_path):
    run = run_small(tmp_path / "run", rounds=2, callbacks=[Watch(2)])
    assert run.stopped_by is None
    assert "stopped" not in read_manifest(tmp_path / "run")


@pytest.mark.parametrize("evaluate_every", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_round_that_trains_while_the_one_before_is_evaluated_is_the_last(tmp_path, overlapping, evaluate_every):
    out = tmp_path / "run"
    run = run_small(out, rounds=6, evaluate_every=evaluate_every, callbacks=[Watch(2)])
    assert [record["round"] for record in run.history] == [1, 2, 3]
    assert read_manifest(out)["stopped"] == {"round": 3, "by": "Watch"}
    assert load_newest_checkpoint(out / "checkpoint")[0].unevaluated_record is None
    resumed = pf.resume(out, clients=small_clients())
    assert_runs_equal(resumed, run_small(rounds=6, evaluate_every=evaluate_every))


@pytest.mark.parametrize(
    ("overlaps", "hook", "saved"),
    few(
        [(overlaps, *case) for overlaps in (False, True) for case in (("on_start", 0), ("on_round", 2), ("on_end", 4))],
        {(True, "on_round", 2)},
    ),
)
def test_a_callback_that_fails_costs_no_round(tmp_path, monkeypatch, hook, saved, overlaps):
    monkeypatch.setattr(InProcessEngine, "overlaps_evaluation", overlaps)
    out = tmp_path / "run"
    with pytest.raises(
        pf.UserError, match=f"the callback Breaks failed in {hook}: (.|\n)*{saved} of 4 rounds are saved"
    ):
        run_small(out, callbacks=[Breaks(hook)])
    assert len(read_metrics(out / "metrics.jsonl")) == saved
    assert describe_changed_files_of_run(out) == []
    assert_runs_equal(pf.resume(out, clients=small_clients()), run_small())


def test_a_callback_that_fails_without_a_directory_says_so():
    with pytest.raises(pf.UserError, match="failed in on_round: RoundError: a full mailbox; correct it, and start"):
        run_small(callbacks=[Breaks("on_round")])


def test_ctrl_c_in_a_callback_is_no_fault_of_it(tmp_path):
    class Interrupted(pf.Callback):
        def on_round(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="interrupted; 1 of 4 rounds are saved"):
        run_small(tmp_path / "run", callbacks=[Interrupted()])


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Watch(), "must be a list of functions of a round's record or polyfed.Callback objects, got <"),
        (print, r"got <built-in function print>; give a list: callbacks=\[print\]"),
        ("watch", "polyfed.Callback objects, got 'watch'"),
        ([Watch], "a class; give an object of it"),
        ([3], "got 3, which is neither"),
    ],
)
def test_what_is_no_list_of_callbacks_is_refused_before_the_run(tmp_path, callbacks, message):
    with pytest.raises(pf.UserError, match=message):
        run_small(tmp_path / "run", Local(), callbacks=callbacks)
    assert not (tmp_path / "run").exists()


class StopOneMethod(pf.Callback):
    """Stops runs of other methods than `local` after round 2, and notes each record in a file."""

    def __init__(self, log):
        self.log = log

    def on_start(self, records):
        self.rounds = len(records)

    def on_round(self, record):
        self.rounds += 1
        assert self.rounds == record["round"]
        with self.log.open("a") as file:
            file.write(f"{record['round']}\n")
        return record["round"] != 2 or record["bytes_up"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_comparison_calls_them_in_each_run_and_repeats_no_stopped_run(tmp_path, parallel):
    def run():
        return pf.compare(
            small_clients(), ["fedavg"], rounds=4, seeds=[0, 1], tune="none", references=False, workers=0, quiet=True,
            parallel=parallel, out=tmp_path / "out", callbacks=[StopOneMethod(tmp_path / "log")],
        )  # fmt: skip

    comparison = run()
    assert {row["method"] for row in comparison.table()} == {"local", "fedavg", "fedavg_ft"}
    lines = sorted((tmp_path / "log").read_text().split())
    assert lines == sorted(2 * ["1", "2", "3", "4"] + 4 * ["1", "2"])
    for method, rounds in (("local", 4), ("fedavg", 2), ("fedavg_ft", 2)):
        for seed in (0, 1):
            assert len(read_metrics(tmp_path / "out" / method / f"seed-{seed}" / "metrics.jsonl")) == rounds
    assert run().table() == comparison.table()
    assert sorted((tmp_path / "log").read_text().split()) == lines


def test_a_callback_that_fails_in_a_comparison_is_named_with_the_run():
    with pytest.raises(pf.UserError, match=r"Breaks failed in on_round: .*\(method local, seed 0\)"):
        pf.compare(
            small_clients(), ["fedavg"], rounds=3, seeds=[0], tune="none", references=False, workers=0, quiet=True,
            parallel=1, callbacks=[Breaks("on_round")],
        )  # fmt: skip
