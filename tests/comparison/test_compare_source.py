"""Comparisons over a source: the clients that are evaluated are made once, the others when they are drawn."""

import dataclasses

import pytest

import polyfed as pf
from polyfed.comparison.planning import client_set
from polyfed.core.errors import UserError
from polyfed.data import SourceManifest, SyntheticClients
from polyfed.testing import small_clients

WORDS = {"rounds": 2, "seeds": [0, 1], "workers": 0, "parallel": 1, "quiet": True, "evaluate_clients": 3}


class CountingSource:
    """The clients of a list, some without validation examples; counts how often each is made."""

    def __init__(self, clients, *, validates=True):
        self.listed = {client.id: client for client in clients}
        self.validates, self.times = validates, dict.fromkeys(self.listed, 0)

    @property
    def ids(self):
        return list(reversed(self.listed))

    def client(self, id):
        self.times[id] += 1
        client = self.listed[id]
        return client if self.validates else dataclasses.replace(client, val=None)

    def manifest(self):
        return SourceManifest([len(self.listed[i].train) for i in self.ids])


def scores_of(comparison):
    methods = comparison.results["methods"]
    return {(label, seed): run["scores"] for label, entry in methods.items() for seed, run in entry["runs"].items()}


@pytest.mark.parametrize(
    ("tune", "seeds"),
    [({"lr": [0.05, 0.2]}, [0]), ("none", [0, 1])],
)
@pytest.mark.thorough
def test_scores_are_those_of_a_list(tune, seeds):
    clients, words = small_clients(5), {**WORDS, "seeds": seeds, "tune": tune, "references": False}
    listed = pf.compare(clients, ["fedrep"], **words)
    over_source = pf.compare(CountingSource(clients), ["fedrep"], **words)
    assert scores_of(over_source) == scores_of(listed)
    assert over_source.results["panel"] == listed.results["panel"]
    assert over_source.results["mean_answer"] == listed.results["mean_answer"]
    assert list(over_source.results["methods"]) == ["local", "fedavg", "fedavg_ft", "fedrep"]


@pytest.mark.thorough
def test_evaluated_clients_train_alone_in_each_round_and_others_never_all():
    source = CountingSource(small_clients(40))
    drawn = pf.compare(source, ["fedprox"], clients_per_round=2, tune="none", **WORDS)
    all_train = pf.compare(small_clients(40), ["fedprox"], tune="none", references=False, **WORDS)
    alone = {key: scores for key, scores in scores_of(drawn).items() if key[0] == "local"}
    assert alone == {key: scores for key, scores in scores_of(all_train).items() if key[0] == "local"}
    assert sum(times == 0 for times in source.times.values()) > 20
    assert "No network was trained on the data of all clients pooled" in " ".join(drawn.results["left_out"])


@pytest.mark.thorough
def test_goes_on_in_its_directory(tmp_path):
    words = {**WORDS, "clients_per_round": 2, "tune": "none", "references": False, "out": tmp_path / "c"}
    first = pf.compare(CountingSource(small_clients(9)), ["fedprox"], **words)
    (tmp_path / "c" / "fedprox" / "seed-1" / "config.yaml").unlink()
    trained = tmp_path / "c" / "fedprox" / "seed-0" / "metrics.jsonl"
    written = trained.stat().st_mtime_ns
    for file in sorted((tmp_path / "c" / "fedprox" / "seed-1").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    again = pf.compare(CountingSource(small_clients(9)), ["fedprox"], **words)
    assert trained.stat().st_mtime_ns == written
    assert scores_of(again) == scores_of(first)
    with pytest.raises(UserError, match="holds a comparison of something else"):
        pf.compare(CountingSource(small_clients(8)), ["fedprox"], **words)


def test_unsuited_methods_are_left_out():
    source = CountingSource(small_clients(6))
    words = {**WORDS, "rounds": 1, "seeds": [0], "tune": "none", "references": False}
    comparison = pf.compare(source, ["fedprox", "pfedme"], **words)
    assert "trains every client in every round" in comparison.results["skipped"]["pfedme"]


@pytest.mark.thorough
def test_forecast():
    comparison = pf.compare(CountingSource(small_clients(6)), ["fedprox"], plan_only=True, references=False, **WORDS)
    assert comparison.results["plan"]["score"]
    assert repr(comparison).startswith("Comparison(a plan, nothing trained; ")


def test_refused(monkeypatch):
    source = CountingSource(small_clients(6), validates=False)
    with pytest.raises(UserError, match="client 'client-0' of the source has none; make clients with val="):
        pf.compare(source, ["fedprox"], **{**WORDS, "evaluate_clients": ["client-0", "client-5"]})
    for words in ({"folds": 3, "seeds": None}, {"resplit": 2, "seeds": None}):
        with pytest.raises(UserError, match="folds and resplit divide the examples of all clients again"):
            pf.compare(source, ["fedprox"], **{**WORDS, **words})
    monkeypatch.setattr(client_set, "MOST_EVALUATED", 5)
    with pytest.raises(UserError, match="6 of the 6 of the source are too many; give evaluate_clients=200"):
        pf.compare(source, ["fedprox"], tune="none", **{**WORDS, "evaluate_clients": 1.0})
    with pytest.raises(UserError, match="asks for more clients than the 6 there are"):
        pf.compare(source, ["fedprox"], tune="none", **{**WORDS, "evaluate_clients": 7})


def test_a_source_of_many_clients():
    source = SyntheticClients(20_000)
    words = {**WORDS, "seeds": [0], "clients_per_round": 3, "tune": "none", "references": False}
    comparison = pf.compare(source, ["fedprox"], **words)
    assert comparison.results["panel"]["of"] == 20_000
    assert len(comparison.results["clients"]) == 3
