"""Clients that are computed together end where each alone ends, up to rounding."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from cohorts import ALIGNED, BASE, assert_near, clients, normed, plain, play
from torch import nn

import polyfed as pf
from polyfed.algorithms import (
    APFL,
    IFCA,
    Ditto,
    FedAMP,
    FedAvg,
    FedAvgFT,
    FedBN,
    FedDyn,
    FedHeNN,
    FedHeNNHomo,
    FedProx,
    FedRep,
    HeurPFedLA,
    Local,
    Moon,
    PerFedAvg,
    PFedLA,
    PFedMe,
    Scaffold,
)
from polyfed.core.algorithm import Message
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.training import cohort
from polyfed.simulation.engines import benchmark
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.benchmark import MIN_CLIENTS, EngineChoice
from polyfed.simulation.engines.cohort import CohortEngine
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.federate import resume
from polyfed.testing import assert_runs_equal
from polyfed.testing.algorithm_contract import _InterruptAfter

METHODS = [
    FedAvg(**BASE),
    FedAvgFT(**BASE),
    FedProx(**BASE, mu=0.5),
    FedRep(lr=0.05, local_epochs=2, head=("3",)),
    FedBN(**BASE),
    Local(**BASE),
    PFedLA(**BASE),
    HeurPFedLA(**BASE),
    PerFedAvg(**BASE),
    PerFedAvg(**BASE, variant="hf"),
    PFedMe(**BASE, personal_lr=0.02),
    Ditto(**BASE),
    Scaffold(**BASE),
    FedDyn(**BASE, alpha=0.3),
    APFL(**BASE),
    FedAMP(**BASE),
    IFCA(**BASE),
    FedHeNNHomo(**ALIGNED),
    FedHeNN(**ALIGNED),
]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:FedBN")
@pytest.mark.parametrize(
    "method",
    [
        m
        if type(m).__name__ in ("FedAvg", "PFedMe", "FedRep", "FedHeNNHomo")
        else pytest.param(m, marks=pytest.mark.slow)
        for m in METHODS
    ],
    ids=lambda m: type(m).__name__ + getattr(m, "variant", ""),
)
def test_a_method_ends_where_it_ends_one_by_one(method, computed):
    """After five rounds, with clients of different sizes, in float64."""
    alone, many = (play(method, clients(), engine) for engine in ("inprocess", "cohort"))
    assert computed["train"] >= 25
    assert computed["outputs_of"] >= 25
    assert_near(alone, many, 1e-9)


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.one_case
def test_batch_norm_is_computed_together(computed, more):
    """Of clients with equally many examples, and with different numbers: what fills a batch does not meet the others."""
    runs = [play(FedAvg(**BASE), clients(normed, more=more), engine, rounds=2) for engine in ("inprocess", "cohort")]
    assert computed["train"] == 10
    assert_near(*runs, 1e-9)


def test_a_loss_of_a_methods_own_is_trained_one_by_one(computed):
    runs = [play(Moon(**BASE), clients(), engine, rounds=2) for engine in ("inprocess", "cohort")]
    assert computed["train"] == 5  # in the first round there is no contrast
    assert_near(*runs, 1e-9)


def test_any_division_into_cohorts_gives_the_same(monkeypatch):
    whole = play(FedAvg(**BASE, momentum=0.5), clients(number=7), "cohort", rounds=3)
    monkeypatch.setattr(cohort, "MAX_COHORT_SIZE", 3)
    assert_near(whole, play(FedAvg(**BASE, momentum=0.5), clients(number=7), "cohort", rounds=3), 1e-10)


@pytest.mark.thorough
def test_a_pool_computes_a_cohort_in_each_worker():
    one, two = (play(FedRep(lr=0.05, head=("3",)), clients(number=7), "cohort", 2, workers=w) for w in (0, 2))
    assert_near(one, two, 1e-10)


def test_a_stopped_run_goes_on(tmp_path):
    out = tmp_path / "run"
    whole = play(FedAvg(**BASE), clients(), "cohort", rounds=2, clients_per_round=4)
    with pytest.raises(KeyboardInterrupt):
        play(FedAvg(**BASE), clients(), "cohort", rounds=2, clients_per_round=4, out=out, progress=_InterruptAfter(1))
    assert_runs_equal(whole, resume(out, clients=clients()))


class Kills(nn.Module):
    """Kills its process for an input beyond 100; that is the last client's."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3).double()

    def forward(self, x):
        if x.detach().numpy().max() > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.fc(x)


def spoilt(model, value=200.0):
    people = clients(model)
    people[-1].train.x[0] = value
    return people


def replied(run):
    return [client for client, row in run.history[0]["clients"].items() if "bytes_up" in row]


def fails(x, generator):
    raise ValueError("no augmentation")


def test_a_clients_exception_is_its_own(computed):
    """In the middle of what is computed for all: then each is computed alone."""
    people = clients()
    people[2] = pf.Client("c2", plain, replace(people[2].train, augment=fails), people[2].test)
    runs = [play(FedAvg(**BASE), people, engine, 1, on_error="skip") for engine in ("inprocess", "cohort")]
    failures = runs[1].history[0]["failures"]
    assert [(f["client"], f["reason"]) for f in failures] == [("c2", "ValueError: no augmentation")]
    assert replied(runs[1]) == ["c0", "c1", "c3", "c4"]
    assert computed["train"] == 0
    assert_near(*runs, 1e-9)


def test_a_client_that_diverges_spoils_no_other(computed):
    people = spoilt(plain, float("nan"))
    run = play(FedAvg(**BASE), people, "cohort", rounds=1, on_error="skip")
    alone = play(FedAvg(**BASE), people, "inprocess", rounds=1, on_error="skip")
    assert computed["train"] == 5
    assert replied(run) == replied(alone) == ["c0", "c1", "c2", "c3"]
    assert_near(alone, run, 1e-9)


@pytest.mark.filterwarnings("ignore:round 1")
def test_a_client_that_kills_its_worker_fails_alone():
    run = play(FedAvg(**BASE), spoilt(Kills), "cohort", rounds=1, on_error="skip", workers=1)
    assert {f["client"] for f in run.history[0]["failures"]} == {"c4"}
    assert replied(run) == ["c0", "c1", "c2", "c3"]


# -- the choice of "auto" -----------------------------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch):
    """Instead of a clock: one by one a step takes 1 s, together all take `together`."""
    found = {"together": 8.0}

    def seconds(work, device):
        work()
        return found["together"] if work.__name__ == "<lambda>" else 1.0

    monkeypatch.setattr(benchmark, "_measure_seconds", seconds)
    monkeypatch.setattr(benchmark, "_LONGEST", 10.0)
    return found


def many(model=plain):
    return clients(model, MIN_CLIENTS, more=0)


@pytest.mark.thorough
@pytest.mark.parametrize(("seconds", "engine"), [(8.0, "cohort"), (31.0, "one by one")])
def test_auto_takes_what_is_measured_and_the_manifest_says_so(timed, tmp_path, seconds, engine):
    timed["together"] = seconds
    out = tmp_path / "run"
    run = play(FedAvg(**BASE), many(), "auto", rounds=1, out=out)
    kept = json.loads((out / "manifest.json").read_text())["auto"]
    assert kept["engine"] == engine
    assert list(kept["gains"].values()) == [round(MIN_CLIENTS / seconds, 2)]
    assert_runs_equal(run, play(FedAvg(**BASE), many(), "cohort" if engine == "cohort" else "inprocess", rounds=1))


@pytest.mark.thorough
def test_a_run_that_goes_on_keeps_its_choice(timed, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        play(FedAvg(**BASE), many(), "auto", rounds=2, out=out, progress=_InterruptAfter(1))
    timed["together"] = 1000.0  # would be one by one now
    assert_runs_equal(play(FedAvg(**BASE), many(), "cohort", rounds=2), resume(out, clients=many()))


@pytest.mark.thorough
def test_auto_measures_nothing_in_small_runs_and_none_that_is_trained_alone(timed, tmp_path):
    cases = [
        (FedAvg(**BASE), clients(), {}),
        (FedAvg(**BASE), many(), {"clients_per_round": MIN_CLIENTS - 1}),
        (FedAvg(**BASE, accumulate=2), many(), {}),
    ]
    for number, (method, people, more) in enumerate(cases):
        out = tmp_path / str(number)
        play(method, people, "auto", rounds=1, out=out, **more)
        assert json.loads((out / "manifest.json").read_text())["auto"] == EngineChoice().to_manifest_entry() | {
            "gains": {}
        }


def test_architectures_that_gain_nothing_are_computed_apart():
    people = [pf.Client(c.id, normed if i % 2 else plain, c.train, c.test) for i, c in enumerate(clients(number=8))]
    engine = CohortEngine(Local(**BASE), people, torch.device("cpu"), sequential=[cached_module(plain).architecture])
    tasks = [ClientTask("local", 1, c.id, Message({}, {"lr": 0.1}), None, 5, 3) for c in people]
    one = {
        result.task.client: result for result in InProcessEngine(Local(**BASE), people, torch.device("cpu")).run(tasks)
    }
    for result in engine.run(tasks):
        same = all(
            torch.equal(t, one[result.task.client].client_state["model"][n])
            for n, t in result.client_state["model"].items()
        )
        assert same or result.task.client in ("c1", "c3", "c5", "c7")


class Counts(nn.Module):
    """Its outputs depend on how many training steps it has made, which no state dict holds."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.double()

    def forward(self, x):
        if self.training:
            self.steps += 1
        return self.head(self.body(x).relu()) / (1 + 0.1 * self.steps)


def test_a_network_that_counts_for_itself_is_trained_one_by_one():
    runs = [
        play(FedRep(**BASE, local_epochs=1), clients(Counts), engine, rounds=2) for engine in ("inprocess", "cohort")
    ]
    assert_near(*runs, 1e-9)
