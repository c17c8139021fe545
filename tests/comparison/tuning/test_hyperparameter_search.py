"""Hyper-parameters of a comparison: found on validation examples, by a grid or by Optuna, also when a run diverges."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedProx
from polyfed.comparison.compare import run_comparison
from polyfed.comparison.execution import final_runs
from polyfed.comparison.plan import ComparisonPlan
from polyfed.comparison.planning.client_set import ClientSet
from polyfed.comparison.planning.method_selection import select_methods
from polyfed.comparison.storage.comparison_directory import load_comparison
from polyfed.comparison.tuning import hyperparameter_search
from polyfed.core.errors import RoundError
from polyfed.data.partitioning.validation_split import hold_out_missing_validation_sets
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.directory import read_manifest
from polyfed.testing import small_clients
from tests.comparison.losses import set_loss

# Whose labels are right is chosen here; the validation examples are those that were trained on.
pytestmark = pytest.mark.filterwarnings("ignore:validation examples that are also training examples:UserWarning")

QUICK = {"rounds": 2, "seeds": [0, 1], "references": False, "parallel": 1, "quiet": True}
SHORT = QUICK | {"rounds": 1, "seeds": [0]}


def misleading():
    """Two clients whose test labels are wrong and whose validation labels are right."""
    return [pf.Client(c.id, c.model, c.train, (c.test.x, (c.test.y + 1) % 3), val=c.train) for c in small_clients(2)]


def files(folder):
    return sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_the_grid_is_searched_on_validation_examples_alone(tmp_path):
    """A rate of 1e-9 learns nothing and 0.5 does: validation finds it, though the test labels are wrong."""
    clients, words = misleading(), QUICK | {"rounds": 8, "tune": {"lr": [1e-9, 0.5]}}
    found = pf.compare(clients, ["fedprox"], **words, out=tmp_path / "a")
    told = found.results["tuning"]
    assert list(told["methods"]) == ["local", "fedavg", "fedavg_ft", "fedprox"]
    assert all(entry["chosen"] == {"lr": 0.5} for entry in told["methods"].values())
    assert all(entry["runs"] == 2 for entry in told["methods"].values())
    assert found.results["methods"]["fedprox"]["fields"]["lr"] == 0.5
    assert found.results["best_by"] == "validation"
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("metrics.jsonl"))
    again = pf.compare(clients, ["fedprox"], **words, out=tmp_path / "a")
    assert again.results == found.results
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("metrics.jsonl")) == before  # nothing repeated


@pytest.mark.slow
def test_optuna_finds_a_rate_in_a_range_and_repeats_nothing(tmp_path):
    """Half of the range, by its logarithm, learns nothing in eight rounds; what is found does."""
    clients = misleading()
    words = QUICK | {"rounds": 8, "tune": {"lr": "1e-7..0.5", "mu": [0.0, 0.01]}, "trials": 6}
    found = pf.compare(clients, ["fedprox"], **words, out=tmp_path / "a")
    told = found.results["tuning"]
    assert "lr, mu, by Optuna: up to 6 runs" in told["sentence"]
    for label, entry in told["methods"].items():
        assert entry["runs"] == 6
        assert set(entry["chosen"]) == ({"lr", "mu"} if label == "fedprox" else {"lr"})
        rates = [one["fields"]["lr"] for one in entry["tried"]]
        assert len(set(rates)) == 6
        assert all(1e-7 <= rate <= 0.5 for rate in rates)
        best = min(entry["tried"], key=lambda one: one["loss"])
        assert entry["chosen"] == best["fields"]
        assert entry["chosen"]["lr"] > 0.01
        assert found.results["methods"][label]["fields"]["lr"] == entry["chosen"]["lr"]
    before = files(tmp_path)
    assert pf.compare(clients, ["fedprox"], **words, out=tmp_path / "a").results == found.results
    assert files(tmp_path) == before


SCRIPT = """
import sys
import polyfed as pf
from tests.comparison.tuning.test_hyperparameter_search import misleading
pf.compare(misleading(), ["fedprox"], rounds=25, seeds=[0], parallel=2, out=sys.argv[1], quiet=True,
           tune={"lr": "0.001..0.5"}, trials=3)
"""


@pytest.mark.slow
def test_a_search_by_optuna_that_was_killed_asks_for_the_same_runs_again(tmp_path):
    def call(out):
        return subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)])

    assert call(tmp_path / "whole").wait() == 0
    out = tmp_path / "killed"
    process = call(out)
    while len(list(out.glob("tuning/*/*/models"))) < 6:  # four methods: the second trial has begun
        assert process.poll() is None
    process.kill()
    process.wait()
    assert call(out).wait() == 0

    def searched(folder):
        return sorted(str(p.relative_to(folder)) for p in folder.glob("tuning/*/*/metrics.jsonl"))

    assert searched(out) == searched(tmp_path / "whole")
    contents = [load_comparison(folder).results for folder in (tmp_path / "whole", out)]
    assert contents[0]["tuning"] == contents[1]["tuning"]
    for label, method in contents[0]["methods"].items():
        assert method["runs"]["0"]["scores"] == contents[1]["methods"][label]["runs"]["0"]["scores"]


@pytest.mark.parametrize(
    "asked",
    [{"tune": {"lr": [0.1, 1e38]}}, pytest.param({"tune": {"lr": [1e38, 0.1]}, "trials": 4}, marks=pytest.mark.slow)],
)
def test_a_rate_that_diverges_is_tried_and_does_not_win(asked):
    found = pf.compare(misleading(), ["fedavg"], **(SHORT | {"rounds": 2} | asked))
    assert found.failed == {}
    for entry in found.results["tuning"]["methods"].values():
        assert entry["chosen"] == {"lr": 0.1}
        assert {one["fields"]["lr"]: one["loss"] is None for one in entry["tried"]} == {0.1: False, 1e38: True}


def test_a_method_that_diverges_with_every_rate_has_failed():
    """Of the methods only FedProx has mu, and 1e30 is beyond what it can bear."""
    found = pf.compare(misleading(), [FedProx(batch_size=4)], **SHORT, tune={"mu": [1e30, 1e31]})
    assert found.failed.keys() == {"fedprox"}
    assert [row["method"] for row in found.table()] == ["local", "fedavg", "fedavg_ft"]


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_where_the_best_diverges_with_another_seed_the_next_best_is_compared(monkeypatch, tmp_path, kept):
    """Of three values of mu the best in the search fails with the second seed, and the next with the first."""
    good, failing = final_runs.execute_or_load_runs, {(0.3, 1), (0.2, 0)}

    def ranking(plan, jobs, *rest):
        played, failed = good(plan, jobs, *rest)
        for job, one in played.items():
            set_loss(one.history[-1], 1 - getattr(job.method, "mu", 0))
        return played, failed

    def diverging(plan, jobs, *rest):
        played, failed = good(plan, jobs, *rest)
        wrong = [job for job in played if (getattr(job.method, "mu", None), job.seed) in failing]
        return {j: one for j, one in played.items() if j not in wrong}, failed | {
            j: RoundError("diverged") for j in wrong
        }

    monkeypatch.setattr(hyperparameter_search, "execute_or_load_runs", ranking)
    monkeypatch.setattr(final_runs, "execute_or_load_runs", diverging)
    words = QUICK | {"rounds": 1, "tune": {"mu": [0.1, 0.2, 0.3]}, "out": tmp_path / "a" if kept else None}
    found = pf.compare(misleading(), ["fedprox"], **words)
    told = found.results["tuning"]["methods"]["fedprox"]
    assert (told["chosen"], told["diverged"]) == ({"mu": 0.1}, [{"mu": 0.3}, {"mu": 0.2}])
    assert found.results["methods"]["fedprox"]["fields"]["mu"] == 0.1
    assert found.failed == {}
    assert any("mu 0.2 was better in the search, but diverged" in note for note in found.results["notes"])
    if kept:
        paths = [run["path"] for run in found.results["methods"]["fedprox"]["runs"].values()]
        assert all((found.out / path / "metrics.jsonl").is_file() and path.count("/") == 2 for path in paths)
        before = files(tmp_path)
        assert pf.compare(misleading(), ["fedprox"], **words).results == found.results
        assert files(tmp_path) == before
    failing |= {(0.1, 1)}
    assert pf.compare(misleading(), ["fedprox"], **words).failed.keys() == {"fedprox"}


def test_the_grid_is_around_what_each_method_has():
    methods = {"mild": FedProx(mu=0.01), "bold": FedProx(mu=0.3)}
    found = pf.compare(misleading(), methods, **SHORT, tune={"mu": "grid"})
    told = found.results["tuning"]["methods"]
    assert [one["fields"]["mu"] for one in told["mild"]["tried"]] == [0.001, 0.003, 0.01, 0.03, 0.1]
    assert [one["fields"]["mu"] for one in told["bold"]["tried"]] == [0.03, 0.09, 0.3, 0.9, 3.0]
    with pytest.raises(pf.UserError, match="schedule of a method is 'constant', which has no multiples to try"):
        pf.compare(misleading(), methods, **SHORT, tune={"schedule": "grid"})


@pytest.mark.slow
def test_equal_values_are_tried_once_and_parts_of_whole_numbers_are_whole():
    words = SHORT | {"parallel": 2}
    found = pf.compare(misleading(), ["pfedme"], **words, tune={"lr": [0.1, 0.10], "k": "grid"})
    tried = [one["fields"] for one in found.results["tuning"]["methods"]["pfedme"]["tried"]]
    assert tried == [{"lr": 0.1, "k": k} for k in (1, 2, 5, 15, 50)]


def test_values_that_only_the_clients_refuse_are_found_before_anything_is_written(tmp_path):
    clients, words = misleading(), {**SHORT, "out": tmp_path / "a"}
    with pytest.raises(pf.UserError, match="not all values that are to be searched for heur_pfedla suit these clients"):
        pf.compare(clients, ["heur_pfedla"], **words, tune={"k": [1, 500]})
    assert not (tmp_path / "a").exists()
    found = pf.compare(clients, ["heur_pfedla"], **words, tune={"k": [1, 2]})
    assert found.results["methods"]["heur_pfedla"]["fields"]["k"] in (1, 2)


@pytest.mark.slow
def test_values_may_be_numbers_of_numpy_and_mappings(tmp_path):
    words = {**SHORT, "public": torch.randn(20, 6), "out": tmp_path / "a"}
    found = pf.compare(misleading(), ["pfedme"], **words, tune={"k": list(np.array([1, 2])), "lr": [np.float32(0.5)]})
    assert found.results == load_comparison(tmp_path / "a").results
    teachers = [{"name": "mlp", "hidden": [8]}, "mlp", {"name": "mlp", "hidden": [8]}]
    for asked in ({}, {"trials": 2}):
        told = pf.compare(misleading(), ["fedavg_kd"], **(words | {"out": None}), tune={"teacher": teachers}, **asked)
        assert told.results["tuning"]["methods"]["fedavg_kd"]["chosen"]["teacher"] in teachers
        assert told.results["tuning"]["methods"]["fedavg_kd"]["runs"] == 2


def test_a_run_without_a_score_for_a_client_does_not_win(monkeypatch):
    """The mean over the clients that are left would."""
    clients, good = misleading(), hyperparameter_search.execute_or_load_runs

    def diverging(plan, jobs, *rest):
        played, failed = good(plan, jobs, *rest)
        for job, one in played.items():
            if getattr(job.method, "mu", None) == 0.3:
                last = one.history[-1]
                set_loss(last, {"client-0": None, "client-1": 0.0})
        return played, failed

    monkeypatch.setattr(hyperparameter_search, "execute_or_load_runs", diverging)
    for asked in ({}, {"trials": 4}):
        found = pf.compare(clients, ["fedprox"], **SHORT, tune={"mu": [0.3, 0.1]}, **asked)
        told = found.results["tuning"]["methods"]["fedprox"]
        assert told["chosen"] == {"mu": 0.1}
        assert {one["fields"]["mu"] for one in told["tried"] if one["loss"] is None} == {0.3}


@pytest.mark.thorough
def test_a_search_is_read_at_the_rounds_at_which_methods_are_compared(monkeypatch, tmp_path):
    """One value is best in the middle and falls, the other is best after all rounds. A directory keeps what was chosen."""
    clients, good = misleading(), hyperparameter_search.execute_or_load_runs

    def falling(plan, jobs, *rest):
        played, failed = good(plan, jobs, *rest)
        for job, one in played.items():
            course = (
                (0.8, 0.1, 0.1, 0.1, 0.7, 0.7, 0.7) if getattr(job.method, "mu", 0) == 0.3 else (0.8,) * 3 + (0.5,) * 4
            )
            for record, loss in zip(one.history, course, strict=True):
                record["bytes_down_total"], record["bytes_up_total"] = record["round"], 0
                set_loss(record, loss)
        return played, failed

    monkeypatch.setattr(hyperparameter_search, "execute_or_load_runs", falling)
    words = SHORT | {"rounds": 7, "tune": {"mu": [0.3, 0.1]}}

    def chosen(**asked):
        told = pf.compare(clients, ["fedprox"], **words, **asked).results["tuning"]
        return told["methods"]["fedprox"]["chosen"]["mu"], "of the last 3 evaluated rounds" in told["sentence"]

    assert chosen() == (0.3, False)
    assert chosen(budget="steps", out=tmp_path / "a") == (0.1, True)
    before = files(tmp_path)
    assert chosen(budget="best", out=tmp_path / "a") == (0.1, True)
    assert files(tmp_path) == before
    assert chosen(budget="bytes=4") == (0.3, True)  # the rounds 2 to 4


@pytest.mark.thorough
def test_a_budget_within_which_there_is_no_round_is_no_failure():
    words = SHORT | {"tune": {"mu": [0.3, 0.1]}}
    found = pf.compare(misleading(), ["fedprox"], **words, budget="bytes=0.5")
    assert found.results["tuning"]["methods"]["fedprox"]["chosen"]["mu"] in (0.1, 0.3)


@pytest.mark.parametrize("asked", [{}, {"trials": 2}])
def test_fields_of_methods_that_are_left_out_are_not_searched(asked):
    first, second = misleading()
    other = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    clients = [pf.Client(first.id, lambda: copy.deepcopy(other), first.train, first.test, first.val), second]
    found = pf.compare(clients, ["fedprox", "fedavg_kd"], **SHORT, tune={"mu": [0.1, 1.0]}, **asked)
    assert found.skipped.keys() == {"fedprox"}
    assert all(entry["runs"] == 0 for entry in found.results["tuning"]["methods"].values())


def test_the_data_of_a_seed_are_dealt_once_however_many_runs_there_are():
    divided = []

    def cast(seed):
        divided.append(seed)
        return ClientSet(tuple(misleading()))

    plan = ComparisonPlan(
        "", select_methods(["fedprox"]), (0, 1), Settings(rounds=1), cast, parallel_runs=1, quiet=True,
        search_space={"mu": [0.1, 1.0]}, num_trials=3,
    )  # fmt: skip
    run_comparison(plan)
    assert divided == [0, 1, 0, 1, 0]  # looked at beforehand, run, and read


def test_whole_numbers_stay_whole():
    """pFedMe's k is a number of steps."""
    found = pf.compare(misleading(), ["pfedme"], **SHORT, tune={"k": "1..3"}, trials=2)
    assert isinstance(found.results["methods"]["pfedme"]["fields"]["k"], int)


def bare(number=2):
    """Clients without validation examples."""
    return [pf.Client(c.id, c.model, c.train, c.test) for c in small_clients(number)]


@pytest.mark.thorough
def test_every_method_is_tuned_unasked_and_trained_on_all_examples_afterwards(tmp_path):
    """Without validation examples a fifth of the training examples is held out, for the search alone."""
    clients = bare()
    found = pf.compare(clients, ["fedavg"], **(SHORT | {"rounds": 2}), out=tmp_path / "a")
    told = found.results["tuning"]
    assert sorted(told["methods"]) == ["fedavg", "fedavg_ft", "local"]
    assert all(5 <= one["runs"] <= 7 for one in told["methods"].values())
    for label, one in told["methods"].items():
        best = min(value["loss"] for value in one["tried"])
        chosen = [value["loss"] for value in one["tried"] if value["fields"] == one["chosen"]]
        assert chosen == [best]
        assert found.results["methods"][label]["fields"]["lr"] == one["chosen"]["lr"]
        runs = found.results["methods"][label]["runs"].values()
        assert {run["round"] for run in runs} == {told["rounds"][label]}
    assert found.results["budget"]["sentence"].startswith("each method at its best round by validation loss")
    assert len(told["losses"]["fedavg"]) == 2
    trained = read_manifest(tmp_path / "a" / "fedavg" / "seed-0")["data_fingerprint"]
    searched = read_manifest(next((tmp_path / "a" / "tuning" / "fedavg").iterdir()))["data_fingerprint"]
    assert trained == data_fingerprint(clients)
    assert searched == data_fingerprint(hold_out_missing_validation_sets(clients, seed=0))
    assert [len(c.train) + len(c.val) for c in hold_out_missing_validation_sets(clients, seed=0)] == [
        len(c.train) for c in clients
    ]


def test_what_is_held_out_has_every_class_and_is_disjoint():
    for before, after in zip(bare(3), hold_out_missing_validation_sets(bare(3), seed=1), strict=True):
        rows = torch.cat([after.train.x[after.train.index], after.val.x[after.val.index]])
        assert torch.equal(rows.sort(dim=0).values, before.train.x.sort(dim=0).values)
        assert set(after.val.labels.tolist()) == {0, 1, 2}
    tiny = pf.Client("tiny", None, (torch.randn(4, 2), torch.arange(4) % 2), (torch.randn(4, 2), torch.arange(4) % 2))
    assert hold_out_missing_validation_sets([tiny], seed=0)[0].val is None


@pytest.mark.parametrize("seed", range(4))
def test_no_client_holds_out_a_patient_that_another_trains_on(seed):
    """The first client has a validation set, and the second is too small for one: neither is split."""

    def sets(*patients):
        rows = [name for name in patients for _ in range(4)]
        return pf.Examples(torch.zeros(len(rows), 2), torch.arange(len(rows)) % 2, group=rows)

    a = pf.Client("a", None, sets("p0", "p1", "p2"), sets("t0"), sets("p3"))
    b = pf.Client("b", None, sets("p4"), sets("t1"))
    c = pf.Client("c", None, sets(*(f"p{k}" for k in range(10))), sets("t2"))
    after = hold_out_missing_validation_sets([c, a, b], seed)
    trained = {name for client in after for name in client.train.column("group").tolist()}
    held_out = {name for client in after if client.val for name in client.val.column("group").tolist()}
    assert len(after[0].val) >= 4
    assert not trained & held_out


def test_a_value_at_the_edge_of_what_was_tried_is_named():
    found = pf.compare(misleading(), ["fedavg"], **(SHORT | {"rounds": 2}), tune={"lr": [1e-9, 1e-8, 0.5]})
    assert "lr of fedavg" in found.results["tuning"]["edge"]
    assert "lr of local at client-0, client-1" in found.results["tuning"]["edge"]
    assert any("at the edge of what was tried" in text for text in found.results["warnings"])
