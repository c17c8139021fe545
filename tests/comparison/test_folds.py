"""`compare(folds=...)`: every example is tested once, methods are paired, and what was stopped goes on."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.comparison.execution.training_runs import execute_or_load_runs
from polyfed.core.evaluation.metrics import METRICS
from polyfed.data.partitioning.folds import Folds, split_into_folds
from polyfed.simulation.storage.predictions.prediction_store import read_predictions

QUICK = {"rounds": 1, "budget": "steps", "tune": "none", "references": False, "parallel": 1, "quiet": True,
         "engine": "inprocess"}  # fmt: skip


def linear():
    return nn.Linear(4, 2)


def sites(number=2, size=24, patients=None):
    rng, clients = np.random.default_rng(0), []
    for k in range(number):
        x = torch.from_numpy(rng.normal(size=(size, 4))).float()
        y = (x[:, 0] + torch.from_numpy(rng.normal(size=size)) > 0).long()
        more = {} if patients is None else {"columns": {"patient": np.arange(size) // patients}, "group": "patient"}
        pool = pf.Examples(x, y, **more)
        parts = [pool.select(torch.arange(*ends)) for ends in ((0, size // 2), (size // 2, size))]
        clients.append(pf.Client(f"site-{k:02d}", linear, *parts))
    return clients


def sites_that_learn_together():
    """Eight sites with one rule in 30 features and 36 examples each: one alone learns little."""
    rng, clients = np.random.default_rng(1), []
    for k in range(8):
        x = torch.from_numpy(rng.normal(size=(36, 30))).float()
        y = (x[:, :6].sum(1) > 0).long()
        clients.append(pf.Client(f"site-{k}", lambda: nn.Linear(30, 2), (x[:18], y[:18]), (x[18:], y[18:])))
    return clients


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in ("seconds", "path", "curve", "computed_from")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folds") / "out"
    found = pf.compare(sites(), ["fedavg"], **QUICK, folds=3, fold_repeats=2, metrics=["accuracy", "auc"], out=folder)
    return found.results, folder


def test_scores_are_those_of_all_folds_together(compared):
    content, folder = compared
    assert (content["folds"], content["fold_repeats"], len(content["seeds"])) == (3, 2, 6)
    assert content["tested"]["site-00"]["test"] == 24
    for label in ("local", "fedavg"):
        for client in content["clients"]:
            tables = [read_predictions(folder / label / f"seed-{s}", client, round=1) for s in range(6)]
            right = [METRICS["accuracy"](t.outputs, t.targets) * len(t.targets) for t in tables]
            assert sum(len(t.targets) for t in tables) == 48
            mean = content["methods"][label]["statistics"]["clients"][client]["mean"]
            assert mean == pytest.approx(sum(right) / 48)
    basis = content["answers"][0]["basis"]
    assert basis == "24 test examples"
    assert content["mean_answer"]["interval"] is not None
    assert any("divided into 3 folds, 2 times over" in sentence for sentence in content["covers"])


@pytest.mark.filterwarnings("ignore::UserWarning")  # about few examples
@pytest.mark.thorough
def test_a_client_with_fewer_examples_than_folds_trains_and_is_not_tested(tmp_path):
    """Scores, counts and intervals are those of the other clients; the small one is named, and in every file."""
    *clients, donor = sites(3)
    clients.append(pf.Client("tiny", linear, *(part.select(torch.arange(2)) for part in (donor.train, donor.test))))
    found = pf.compare(clients, ["fedavg"], **QUICK, folds=5, out=tmp_path / "out")
    content = found.results
    assert (content["clients"], sorted(content["tested"])) == (["site-00", "site-01"], ["site-00", "site-01"])
    (tiny,) = [row for row in content["answers"] if row["client"] == "tiny"]
    assert tiny["sentence"] == "tiny: not decided: 4 examples, too few for 5 folds"
    assert (tiny["answer"], tiny["gain"], tiny["interval"], tiny["test_examples"]) == ("undecided", None, None, 0)
    mean = content["mean_answer"]
    assert (mean["clients"], mean["test_examples"]) == ([2, 3], 48)
    assert content["methods"]["fedavg"]["statistics"]["participants"] == 2
    assert "tiny (4 examples) is too small for folds" in content["covers"][0]
    for told in ("mean over 2 of 3 sites", "4 examples, too few for 5 folds"):
        assert told in str(found)
    assert pf.load(tmp_path / "out").results == content
    rows = json.loads((tmp_path / "out" / "fedavg" / "seed-0" / "metrics.jsonl").read_text())["clients"]
    assert [client for client, row in rows.items() if "update_norm" in row] == ["site-00", "site-01", "tiny"]
    assert [client for client, row in rows.items() if "accuracy" in row] == ["site-00", "site-01"]
    page = found.report().read_text()
    for told in ("2 of 3 sites with 48 test examples", "4 examples, too few for 5 folds"):
        assert told in page
    with pytest.raises(pf.UserError, match=r"too many for the clients that are evaluated, tiny \(4 examples\)"):
        pf.compare(clients, ["fedavg"], **QUICK, folds=5, evaluate_clients=["tiny"])


def test_methods_are_paired(compared):
    """They share folds, seeds and first weights: data and seed of each run are those of the other methods' run."""
    content, folder = compared
    for seed in content["seeds"]:
        manifests = [
            json.loads((folder / label / f"seed-{seed}" / "manifest.json").read_text()) for label in content["methods"]
        ]
        assert len({manifest["data_fingerprint"] for manifest in manifests}) == 1
        runs = {
            label: pf.federate(
                split_into_folds(sites(), Folds(3, 2))[seed],
                label, rounds=1, seed=seed, workers=0, progress=False,
            )
            for label in ("local", "fedavg")
        } if seed == 1 else {}  # fmt: skip
        for label, run in runs.items():
            scores = {row["client"]: row["accuracy"] for row in run.table() if row["client"] != "mean"}
            assert content["methods"][label]["runs"][str(seed)]["scores"] == scores


def test_a_stopped_comparison_ends_as_one_that_was_not_and_repeats_may_be_added(compared, tmp_path):
    content, folder = compared
    stopped = tmp_path / "out"
    shutil.copytree(folder, stopped)
    (stopped / "comparison.json").unlink()
    for run in ("local/seed-4", "fedavg/seed-2"):
        shutil.rmtree(stopped / run)
    kept = (stopped / "fedavg" / "seed-3" / "metrics.jsonl").stat().st_mtime_ns
    words = {**QUICK, "metrics": ["accuracy", "auc"], "folds": 3, "out": stopped}
    again = pf.compare(sites(), ["fedavg"], **words, fold_repeats=2).results
    assert without_times(again) == without_times(content)
    assert (stopped / "fedavg" / "seed-3" / "metrics.jsonl").stat().st_mtime_ns == kept
    with pytest.raises(pf.UserError, match="holds a comparison of something else"):
        pf.compare(sites(), ["fedavg"], **{**words, "folds": 2}, fold_repeats=3)
    with pytest.raises(pf.UserError, match="needs 3 runs of each method, with a seed each; got 2 seeds"):
        pf.compare(sites(), ["fedavg"], **words, seeds=[0, 1])


def test_a_site_with_one_rare_class_has_an_auc_over_all_folds():
    """Two positive examples: not every fold tests one, so that no run has a score for all sites."""
    clients = sites(size=30)
    y = torch.zeros(30, dtype=torch.int64)
    y[[3, 20]] = 1
    x = clients[0].train.x
    clients[0] = pf.Client("site-00", linear, (x[:15], y[:15]), (x[15:], y[15:]))
    with pytest.warns(UserWarning, match="AUC is not defined at site-00 in 1 of 3 folds"):
        content = pf.compare(clients, ["fedavg"], **QUICK, folds=3, metrics=["auc"]).results
    scores = [run["scores"]["site-00"] for run in content["methods"]["local"]["runs"].values()]
    assert None in scores
    assert content["methods"]["local"]["statistics"]["clients"]["site-00"]["mean"] is not None
    assert content["answers"][0]["basis"] == "30 test examples, 2 of the rarer class"


def test_patients_are_the_units_of_answers(tmp_path):
    content = pf.compare(sites(patients=3), ["fedavg"], **QUICK, folds=4, out=tmp_path / "c").results
    assert pf.load(tmp_path / "c").results["tested"] == content["tested"]
    assert content["tested"]["site-00"]["groups"] == [8, 8]
    assert content["answers"][0]["basis"] == "24 test examples of 8 groups"
    assert any("All examples of a group went to one fold" in sentence for sentence in content["covers"])


def test_many_sites_have_a_mean_with_sites_as_units():
    content = pf.compare(sites(10, 12), ["fedavg"], **QUICK, folds=2).results
    model = content["site_model"]
    assert model["interval"][0] < model["gain"] < model["interval"][1]
    assert set(model["clients"]) == set(content["clients"])
    start = r"sites like these \(10 sites as units\): the mean gain of fedavg(_ft)? over [a-z ]+ alone is [+−]\d+\.\d, "
    assert re.match(start, content["verdicts"][1])
    few = pf.compare(sites(2, 12), ["fedavg"], **QUICK, folds=2).results
    assert few["site_model"] is None


@pytest.mark.thorough
def test_folds_are_dealt_again_until_the_mean_is_decided(tmp_path, capsys):
    """Decided by the first look at which the answer is not "undecided"; a stopped comparison goes on with its last look."""
    words = {**QUICK, "folds": 2, "fold_repeats": 3, "stop_when_decided": True, "out": tmp_path / "out"}
    words |= {"budget": "best", "quiet": False}
    found = pf.compare(sites(), ["fedavg"], **words).results
    assert capsys.readouterr().err.count("too few evaluated rounds for an answer") == 1, "once, not at each look"
    assert (found["fold_repeats"], found["most_repeats"]) == (3, 3), "nothing to decide after one round"
    assert any("at most 3 times" in sentence for sentence in found["covers"])
    again = pf.compare(sites(), ["fedavg"], **words).results
    assert without_times(again) == without_times(found)
    words |= {**QUICK, "rounds": 4, "folds": 3, "fold_repeats": 4, "out": tmp_path / "early"}
    early = pf.compare(sites_that_learn_together(), [FedAvg(lr=1.0)], **words).results
    assert early["mean_answer"]["answer"] == "join"
    assert early["fold_repeats"] < 4
    assert len(list((tmp_path / "early" / "local").iterdir())) == 3 * early["fold_repeats"]
    with pytest.raises(pf.UserError, match="give folds=5 and at least fold_repeats=2"):
        pf.compare(sites(), ["fedavg"], **QUICK, stop_when_decided=True)


def test_a_plan_says_runs_minutes_and_gains_and_writes_nothing(tmp_path):
    clients = sites(3, 60)
    words = QUICK | {"metrics": ["brier"]}
    found = pf.compare(clients, ["fedavg"], **words, folds=3, plan_only=True, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    plan = found.results["plan"]
    assert (plan["runs"], plan["search_runs"]) == (3 * 3, 0)
    assert plan["minutes"] > 0
    once, twice = plan["designs"].values()
    assert (once["runs"], twice["runs"]) == (3, 6)
    assert 0 < twice["mean"] < once["mean"] < once["client"]
    assert found.verdicts[0].startswith("3 methods: 9 runs: ")
    assert "decides a mean gain of" in found.verdicts[1]
    designs = pf.compare(clients, ["fedavg"], **words, resplit=3, plan_only=True).results["plan"]["designs"]
    assert list(designs) == ["resplit=3", "resplit=6", "folds=3"]
    assert designs["folds=3"]["mean"] < next(iter(designs.values()))["mean"], "each example is tested once"


def test_a_plan_s_pilot_writes_files_as_the_comparison_does_and_removes_them(tmp_path, monkeypatch):
    folders = []

    def execute(plan, run_specs, callbacks=()):
        folders.extend(job.folder for job in run_specs)
        done = execute_or_load_runs(plan, run_specs, callbacks)
        assert all((folder / "manifest.json").is_file() for folder in folders)
        return done

    monkeypatch.setattr("polyfed.comparison.planning.forecast.execute_or_load_runs", execute)
    pf.compare(sites(3, 60), ["fedavg"], **QUICK, folds=3, plan_only=True, out=tmp_path / "new" / "out")
    assert len(set(folders)) == 4
    assert {folder.parent.parent for folder in folders} == {tmp_path}
    assert list(tmp_path.iterdir()) == []


def test_a_plan_counts_what_simple_models_import_once_and_not_for_each_split(monkeypatch):
    clock = [0.0]

    def fit(clients, seed):
        clock[0] += 0.5 * len(clients) if clock[0] else 9.0  # the first call imports a library

    monkeypatch.setattr("polyfed.comparison.planning.forecast.fit_client_references", fit)
    monkeypatch.setattr("polyfed.comparison.planning.forecast.time", SimpleNamespace(monotonic=lambda: clock[0]))
    words = QUICK | {"references": True}
    plan = pf.compare(sites(2, 60), ["fedavg"], **words, folds=3, plan_only=True).results["plan"]
    assert plan["minutes"] * 60 == pytest.approx(3 * 2 * 0.5, abs=0.01)


def test_a_plan_leaves_out_clients_with_too_few_test_examples_to_judge():
    clients = sites(3, 60)
    small = clients[1]
    clients[1] = pf.Client(small.id, linear, small.train, small.test.select(torch.tensor([0])))
    plan = pf.compare(clients, ["fedavg"], **QUICK | {"metrics": ["brier"]}, plan_only=True).results["plan"]
    assert plan["designs"]["5 seeds"]["mean"] > 0


def test_a_plan_offers_no_folds_that_a_comparison_would_refuse():
    timed = [
        pf.Client(
            c.id, linear, *(replace(part, columns={"day": np.arange(60)}, time="day") for part in (c.train, c.test))
        )
        for c in sites(2, 60)
    ]
    words = QUICK | {"metrics": ["brier"], "seeds": 3}
    assert list(pf.compare(timed, ["fedavg"], **words, plan_only=True).results["plan"]["designs"]) == [
        "3 seeds",
        "6 seeds",
    ]
    with pytest.raises(pf.UserError, match="was split by time"):
        pf.compare(timed, ["fedavg"], **words, folds=3, plan_only=True)
