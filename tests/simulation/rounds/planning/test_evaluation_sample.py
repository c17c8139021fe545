"""Evaluation by sample: which clients, the same for every method, and what the records and intervals say."""

import json

import numpy as np
import pytest

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.simulation.rounds.planning.evaluation_sample import mean_interval, sample_evaluated_clients
from polyfed.simulation.settings import Settings
from polyfed.testing import small_clients
from polyfed.testing.run_equality import assert_runs_equal, without_durations

OPTIONS = {"rounds": 3, "seed": 3, "workers": 0, "clients_per_round": 2}


def evaluated_in(record):
    return [client for client, row in record["clients"].items() if "loss" in row]


def test_all_methods_evaluate_the_same_clients():
    by_method = [
        [evaluated_in(record) for record in pf.federate(small_clients(6), name, evaluate_clients=2, **OPTIONS).history]
        for name in ("fedavg", "local", "ditto")
    ]
    assert by_method[0] == by_method[1] == by_method[2]
    assert all(len(clients) == 2 for clients in by_method[0])
    assert len({tuple(clients) for clients in by_method[0]}) > 1, "drawn again for each round"


def test_training_and_scores_are_those_of_a_full_evaluation():
    some = pf.federate(small_clients(6), "fedavg", evaluate_clients=0.5, **OPTIONS)
    everyone = pf.federate(small_clients(6), "fedavg", **OPTIONS)
    for sampled, full in zip(some.history, everyone.history, strict=True):
        assert sampled["train_loss"] == full["train_loss"]
        assert sampled["evaluated"]["clients"] == 3
        assert sampled["evaluated"]["of"] == 6
        assert "evaluated" not in full
        for client in evaluated_in(sampled):
            assert sampled["clients"][client]["accuracy"] == full["clients"][client]["accuracy"]
    for client in some.federation.clients:
        assert all(
            (a == b).all()
            for a, b in zip(
                some.model(client).state_dict().values(), everyone.model(client).state_dict().values(), strict=True
            )
        )


def test_table_and_words():
    run = pf.federate(small_clients(6), "fedavg", evaluate_clients=2, **OPTIONS)
    rows = run.table()
    assert [row["client"] for row in rows[:-1]] == evaluated_in(run.history[-1])
    assert (rows[-1]["evaluated"], rows[-1]["of"]) == (2, 6)
    assert "6 clients (2 evaluated)" in repr(run)
    with pytest.raises(UserError, match="each round of this run evaluated other clients"):
        run.table("best")


def test_all_at_the_end():
    run = pf.federate(small_clients(5), "fedavg", evaluate_clients=2, evaluate_all_at_end=True, **OPTIONS)
    assert [len(evaluated_in(record)) for record in run.history] == [2, 2, 5]
    assert "evaluated" not in run.history[-1]


def test_named_clients():
    run = pf.federate(small_clients(5), "fedavg", evaluate_clients=["client-3", "client-1"], keep="best", **OPTIONS)
    assert [evaluated_in(record) for record in run.history] == [["client-1", "client-3"]] * 3
    assert run.history[-1]["evaluated"] == {"clients": 2, "of": 5}
    assert run.table("best")


@pytest.mark.parametrize(
    ("words", "error"),
    {
        "many": ({"evaluate_clients": 9}, "evaluate_clients=9 asks for more clients than the 4 there are"),
        "unknown": ({"evaluate_clients": ["client-9"]}, "evaluate_clients: no client 'client-9'; did you mean client-"),
        "best": ({"evaluate_clients": 2, "keep": "best"}, "keep='best' compares rounds by their scores"),
        "loss": ({"evaluate_clients": 0.5, "keep": "loss"}, "keep='loss' compares rounds by their scores"),
        "zero": ({"evaluate_clients": 0}, "evaluate_clients must be a fraction above 0"),
        "twice": ({"evaluate_clients": ["a", "a"]}, "evaluate_clients must be .* a list of different ids"),
        "end": ({"evaluate_all_at_end": 1}, "evaluate_all_at_end must be true or false"),
    }.values(),
)
def test_refused(words, error):
    with pytest.raises(UserError, match=error):
        pf.federate(small_clients(4), "fedavg", **OPTIONS, **words)


@pytest.mark.thorough
def test_resumed(tmp_path):
    def stop(record):
        return record["round"] < 2

    words = {**OPTIONS, "rounds": 4, "evaluate_clients": 2}
    whole = pf.federate(small_clients(5), "ditto", out=tmp_path / "whole", **words)
    pf.federate(small_clients(5), "ditto", out=tmp_path / "run", callbacks=[stop], **words)
    resumed = pf.resume(tmp_path / "run", clients=small_clients(5))
    assert_runs_equal(whole, resumed)
    stored = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert without_durations(stored) == without_durations(whole.history)
    assert "; 2 of 5 clients evaluated" in shown(tmp_path / "run")
    assert pf.load(tmp_path / "run").table()[-1]["of"] == 5
    page = pf.load(tmp_path / "run").report().read_text()
    assert "over 2 of 5 sites, drawn at random; 95 % interval of the mean over all" in page


def shown(folder):
    from polyfed.cli.commands.results.show_command import _state_sentence, describe_directory

    return _state_sentence(describe_directory(folder))


def test_intervals_hold_for_the_mean_over_all_clients():
    generator = np.random.default_rng(0)
    population = generator.beta(2, 1, 60)
    held = [
        low <= population.mean() <= high
        for low, high in (mean_interval(generator.choice(population, 20, replace=False), 60) for _ in range(2000))
    ]
    assert 0.93 < np.mean(held) < 0.97
    assert mean_interval([0.5], 9) is None
    assert mean_interval([0.0, 1.0], 9, are_shares=True) == [0.0, 1.0]


def test_every_client_is_as_likely():
    settings, ids = Settings(evaluate_clients=3), [f"{i:02}" for i in range(12)]
    counts = dict.fromkeys(ids, 0)
    for number in range(1, 2001):
        for client in sample_evaluated_clients(settings, ids, number):
            counts[client] += 1
    assert all(440 < count < 560 for count in counts.values())
