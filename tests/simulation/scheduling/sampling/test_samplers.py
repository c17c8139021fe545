"""Samplers draw whom they say, a run with one is the same on every engine, and it resumes with the same draws."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.core.errors import RunInterrupt, UserError
from polyfed.simulation.scheduling.sampling.last_losses import update_last_losses
from polyfed.simulation.scheduling.sampling.oort import Oort
from polyfed.simulation.scheduling.sampling.power_of_choice import PowerOfChoice
from polyfed.simulation.scheduling.sampling.registry import build_sampler
from polyfed.simulation.scheduling.sampling.sampler import AvailableSampler, Sampler, SamplingRound, UniformSampler
from polyfed.simulation.scheduling.timing.availability import AvailabilityTrace
from polyfed.simulation.scheduling.timing.client_times import ClientTimes
from polyfed.simulation.scheduling.timing.rates import ClientRates
from polyfed.simulation.settings import Settings
from polyfed.testing import assert_runs_equal, small_clients
from tests.few_cases import few

IDS = [f"client-{k}" for k in range(6)]
GIVEN = {"workers": 0, "quiet": True, "clients_per_round": 2}


def records(*losses_by_round):
    """Records of rounds with these training losses."""
    return [
        {"round": k + 1, "clients": {client: {"train_loss": loss} for client, loss in losses.items()}}
        for k, losses in enumerate(losses_by_round)
    ]


def cohorts(run):
    return [[client for client, row in record["clients"].items() if "bytes_up" in row] for record in run.history]


def times(seconds, traces=None):
    """Clients whose updates take these seconds."""
    return ClientTimes(pf.algorithms.FedAvg(), dict.fromkeys(seconds, 1), ClientRates(
        "speeds", 0, {client: 1 / value for client, value in seconds.items()}
    ), None, traces)  # fmt: skip


def test_power_of_choice_takes_the_highest_losses_of_all_candidates():
    history = records({"client-0": 9.0, "client-1": 1.0}, {"client-0": 2.0, "client-2": 3.0, "client-3": 4.0})
    moment = SamplingRound(3, 3)
    drawn = PowerOfChoice(candidates=6).draw(moment, IDS, history, np.random.default_rng(0))
    assert set(drawn) == {"client-4", "client-5", "client-3"}  # who has not trained comes first, then the highest loss
    history += records({"client-4": 0.1, "client-5": 0.2})
    drawn = PowerOfChoice(candidates=6).draw(moment, IDS, history, np.random.default_rng(0))
    assert drawn == ["client-3", "client-2", "client-0"]  # of client-0 the newest loss, 2


def test_power_of_choice_draws_candidates_by_their_numbers_of_examples():
    moment = SamplingRound(1, 1, {"client-0": 1, "client-1": 9})
    generator = np.random.default_rng(0)
    counts = Counter(PowerOfChoice(candidates=1).draw(moment, IDS[:2], [], generator)[0] for _ in range(500))
    assert 420 < counts["client-1"] < 480  # nine of ten


def test_available_clients_only():
    traces = {client: AvailabilityTrace(((0.0, 10.0),), 100.0) for client in IDS[:3]} | {
        client: AvailabilityTrace(((50.0, 60.0),), 100.0) for client in IDS[3:]
    }
    clock = times(dict.fromkeys(IDS, 1.0), traces)
    rng = np.random.default_rng(0)
    assert set(AvailableSampler().draw(SamplingRound(1, 5, simulated_seconds=5, times=clock), IDS, [], rng)) == set(
        IDS[:3]
    )
    assert set(AvailableSampler().draw(SamplingRound(1, 2, simulated_seconds=55, times=clock), IDS, [], rng)) < set(
        IDS[3:]
    )
    nobody = SamplingRound(1, 5, simulated_seconds=20, times=clock)
    assert set(AvailableSampler().draw(nobody, IDS, [], rng)) == set(IDS[3:])  # they come back first
    assert AvailableSampler().draw(SamplingRound(1, 5, {}, 20, clock, may_be_empty=True), IDS, [], rng) == []


def test_oort_prefers_much_loss_and_short_updates():
    """Without exploration and bonus, the two best of utility n·L·(T/t)^α take part; computed by hand."""
    history = records({"client-0": 1.0, "client-1": 1.0, "client-2": 4.0, "client-3": 0.1})
    num_examples = {"client-0": 100, "client-1": 100, "client-2": 50, "client-3": 100}
    # T is the median of 1, 1, 2, 1 seconds = 1; client-2 has 200·(1/2)² = 50, the others 100, 100 and 10
    clock = times({"client-0": 1.0, "client-1": 1.0, "client-2": 2.0, "client-3": 1.0})
    sampler = Oort(exploration=0, least_exploration=0, preferred_percentile=50, cutoff=1.0)
    moment = SamplingRound(2, 2, num_examples, times=clock)
    assert set(sampler.draw(moment, IDS[:4], history, np.random.default_rng(0))) == {"client-0", "client-1"}
    slow_is_fine = Oort(exploration=0, least_exploration=0, preferred_percentile=50, cutoff=1.0, alpha=0.0)
    drawn = slow_is_fine.draw(
        SamplingRound(2, 1, num_examples, times=clock), IDS[:4], history, np.random.default_rng(0)
    )
    assert drawn == ["client-2"]  # 200


def test_oort_explores_fast_clients_first():
    clock = times({client: 1.0 if client in ("client-4", "client-5") else 1e6 for client in IDS})
    history = records({"client-0": 1.0, "client-1": 2.0})
    drawn = Oort(exploration=1.0).draw(SamplingRound(1, 2, times=clock), IDS, history, np.random.default_rng(0))
    assert set(drawn) == {"client-4", "client-5"}
    half = Oort(exploration=0.5, exploration_decay=1.0).draw(
        SamplingRound(7, 2, times=clock), IDS, history, np.random.default_rng(0)
    )
    assert len(set(half) & {"client-4", "client-5"}) == 1  # one explores, and the other has trained
    assert len(set(half) & {"client-0", "client-1"}) == 1


def test_oort_allows_longer_rounds_when_utility_falls():
    state = {}
    falling = records(*({"client-0": 1.0 / (k + 1)} for k in range(4)))
    Oort(pacer_rounds=2).draw(SamplingRound(5, 1, state=state), IDS, falling, np.random.default_rng(0))
    assert state["percentile"] == 40
    rising = records(*({"client-0": 1.0 + k} for k in range(4)))
    state = {}
    Oort(pacer_rounds=2).draw(SamplingRound(5, 1, state=state), IDS, rising, np.random.default_rng(0))
    assert state["percentile"] == 30


def test_the_uniform_sampler_draws_as_before():
    clients = small_clients(5)
    run = pf.federate(clients, "fedavg", rounds=3, **GIVEN)
    named = pf.federate(clients, "fedavg", rounds=3, sampler=UniformSampler(), **GIVEN)
    assert cohorts(run) == cohorts(named)
    assert_runs_equal(run, named)
    assert run.last.schedule is None
    assert "simulated_seconds" not in run.history[0]


@dataclass(frozen=True)
class InTurn(Sampler):
    """Takes the clients in turn, and remembers where it is."""

    step: int = 1

    def draw(self, round, ids, history, rng):
        first = round.state.get("next", 0)
        round.state["next"] = (first + self.step * round.size) % len(ids)
        return [ids[(first + k) % len(ids)] for k in range(round.size)]


class Stop(pf.Callback):
    def __init__(self, after):
        self.after = after

    def on_round(self, record):
        if record["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "sampler", few(["power_of_choice:3", "oort", {"name": "oort", "exploration": 0.5}, InTurn(step=2)], ["oort"])
)
def test_a_resumed_run_draws_the_same_clients(tmp_path, sampler):
    clients, given = small_clients(5), {"rounds": 5, "sampler": sampler, "speeds": "uniform:1-20", **GIVEN}
    whole = pf.federate(clients, "fedavg", **given)
    with pytest.raises(RunInterrupt):
        pf.federate(clients, "fedavg", out=tmp_path / "run", callbacks=[Stop(3)], **given)
    own = sampler if isinstance(sampler, Sampler) else None
    resumed = pf.resume(tmp_path / "run", clients=clients, sampler=own, workers=0, quiet=True)
    assert cohorts(resumed) == cohorts(whole)
    assert_runs_equal(resumed, whole)
    if own is not None:
        assert cohorts(whole)[:2] == [["client-0", "client-1"], ["client-0", "client-4"]]
        with pytest.raises(UserError, match=r"asks to import .*InTurn' as a sampler .*polyfed.resume.*sampler="):
            pf.resume(tmp_path / "run", clients=clients, quiet=True)
        with pytest.raises(UserError, match=r"sampler is not that of the run: it was .*'step': 2.* and is now"):
            pf.resume(tmp_path / "run", clients=clients, sampler=InTurn(), quiet=True)


@dataclass(frozen=True)
class DrawsNothing(Sampler):
    value: str | None

    def draw(self, round, ids, history, rng):
        return self.value


@pytest.mark.parametrize("value", [None, "client-0"])
def test_a_sampler_that_draws_no_list(value):
    with pytest.raises(UserError, match="sampler DrawsNothing must draw a list of client ids, got"):
        pf.federate(small_clients(3), "fedavg", rounds=1, clients_per_round=2, workers=0, sampler=DrawsNothing(value))


@dataclass(frozen=True)
class Wrong(Sampler):
    ids: tuple[str, ...]

    def draw(self, round, ids, history, rng):
        return list(self.ids)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (("client-9",), "sampler Wrong drew 'client-9', which is not among the clients that it may draw"),
        ((), "sampler Wrong must draw 1 to 2 different clients, got 0"),
        (("client-0", "client-0"), "sampler Wrong must draw 1 to 2 different clients, got 2"),
        (("client-0", "client-1", "client-2"), "must draw 1 to 2 different clients, got 3"),
    ],
)
def test_what_a_sampler_draws_is_checked(ids, sentence):
    with pytest.raises(UserError, match=sentence):
        pf.federate(small_clients(4), "fedavg", rounds=1, sampler=Wrong(ids), **GIVEN)


def test_bad_input():
    for value, sentence in {
        "oortt": "unknown sampler 'oortt'; did you mean oort",
        3: "sampler must be a name such as 'oort', or a mapping with a name, got 3",
    }.items():
        with pytest.raises(UserError, match=sentence):
            Settings(sampler=value)
    with pytest.raises(UserError, match="oort: exploration must be from 0 to 1, got 2"):
        Settings(sampler={"name": "oort", "exploration": 2.0})
    with pytest.raises(UserError, match="power_of_choice: candidates must be a whole number of at least 1, got 0"):
        Settings(sampler="power_of_choice:0")
    with pytest.raises(UserError, match=r"asks to import 'my_code:Mine' as a sampler"):
        build_sampler("my_code:Mine")
    with pytest.raises(UserError, match="sampler='available' needs to know when clients are available"):
        pf.federate(small_clients(3), "fedavg", rounds=1, sampler="available", **GIVEN)
    with pytest.raises(UserError, match="sampler Oort reads the clients' training losses, which secure=True hides"):
        pf.federate(small_clients(3), "fedavg", rounds=1, sampler="oort", secure=True, **GIVEN)


def test_clients_that_send_no_loss_are_no_news_without_a_word():
    """As real sites do that do not disclose it."""
    with pytest.warns(RuntimeWarning, match=r"the clients that took part sent none, .*disclose='train_loss'"):
        assert update_last_losses(state := {}, [{"replied": ["a"], "clients": {"a": {"seconds": 1.0}}}]) == {}
    assert update_last_losses(state, [{}, {"replied": ["a"], "clients": {"a": {"train_loss": 1.0}}}]) == {"a": 1.0}
    assert update_last_losses({}, [{"replied": [], "clients": {}}]) == {}


class Line(torch.nn.Linear):
    """A network without buffers."""

    def __init__(self):
        super().__init__(6, 3)


@pytest.mark.thorough
def test_power_of_choice_lowers_the_highest_loss_faster():
    """Five clients are alike, and one has other labels: it is drawn more often, and learns more."""

    def client(c, shift):
        return pf.Client(c.id, Line, (c.train.x, (c.train.y + shift) % 3), (c.test.x, (c.test.y + shift) % 3))

    clients = [client(c, c.id == "client-5") for c in small_clients(6)]
    given = {"rounds": 15, "workers": 0, "quiet": True, "clients_per_round": 2}
    runs = {
        name: pf.federate(clients, pf.algorithms.FedAvg(lr=0.05), sampler=name, **given)
        for name in ("uniform", "power_of_choice:6")
    }
    turns = {name: sum("client-5" in cohort for cohort in cohorts(run)) for name, run in runs.items()}
    assert turns["power_of_choice:6"] >= 2 * turns["uniform"]
    losses = {
        name: sum(record["clients"]["client-5"]["loss"] for record in run.history[-8:]) / 8
        for name, run in runs.items()
    }
    assert losses["power_of_choice:6"] < 0.8 * losses["uniform"]
