"""Runs over a source of clients: the bits of a list, clients made where they run and dropped after, checks, resuming."""

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.errors import ClientError, UserError
from polyfed.data import SyntheticClients
from polyfed.data.sources.client_source import SourceManifest
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.start.preparation import check_and_build_federation
from polyfed.simulation.settings import Settings
from polyfed.testing import SmallNet, small_clients
from polyfed.testing.run_equality import assert_runs_equal
from tests.few_cases import few

OPTIONS = {"rounds": 2, "seed": 3, "clients_per_round": 3, "workers": 0}


class ListedSource:
    """The clients of a list, copied each time; ids in another order than sorted."""

    def __init__(self, clients, with_counts=True):
        self.listed, self.with_counts = {client.id: client for client in clients}, with_counts

    @property
    def ids(self):
        return list(reversed(self.listed))

    def client(self, id):
        return replace_parts(self.listed[id])

    def manifest(self):
        return SourceManifest([len(self.listed[i].train) for i in self.ids]) if self.with_counts else None


def replace_parts(client, **parts):
    names = ("id", "model", "train", "test", "val", "global_test", "task", "loss")
    return pf.Client(**{name: getattr(client, name) for name in names} | parts)


@pytest.mark.parametrize("words", [{"workers": 0}, {"workers": 2}, {"engine": "cohort"}], ids=str)
@pytest.mark.parametrize("method", few(["fedavg", "ditto"], ["ditto"]))
@pytest.mark.one_case
def test_bits_of_a_list(words, method):
    options = {**OPTIONS, **words}
    listed = pf.federate(small_clients(5), method, **options)
    assert_runs_equal(listed, pf.federate(ListedSource(small_clients(5)), method, **options))


def test_bits_without_a_manifest():
    listed = pf.federate(small_clients(5), "fedavg", **OPTIONS)
    found = pf.federate(ListedSource(small_clients(5), with_counts=False), "fedavg", **OPTIONS)
    for client in ("client-0", "client-4"):
        for a, b in zip(listed.model(client).parameters(), found.model(client).parameters(), strict=True):
            assert torch.equal(a, b)
    assert [r["summary"]["accuracy"]["mean"] for r in listed.history] == [
        r["summary"]["accuracy"]["mean"] for r in found.history
    ]


@pytest.mark.parametrize("name", few(["pfedhn", "flha_ghn", "fedproto"], ["pfedhn"]))
def test_methods_whose_server_knows_networks(name):
    def wide():
        return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))

    def narrow():
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    factories = (narrow, narrow) if name == "fedproto" else (wide, narrow)
    clients = [replace_parts(client, model=factories[i % 2]) for i, client in enumerate(small_clients(4))]

    class Mixed(ListedSource):
        def manifest(self):
            counts = [len(self.listed[i].train) for i in self.ids]
            return SourceManifest(counts, factories, [int(i[-1]) % 2 for i in self.ids])

    listed = pf.federate(clients, name, **OPTIONS)
    assert_runs_equal(listed, pf.federate(Mixed(clients), name, **OPTIONS))


class Counted:
    """Counts the clients that are alive, and those that were made."""

    def __init__(self, n):
        self.inner, self.alive, self.made, self.most = SyntheticClients(n, examples=(8, 12)), weakref.WeakSet(), 0, 0
        self.ids = self.inner.ids

    def client(self, id):
        client = self.inner.client(id)
        self.alive.add(client.train)
        self.made += 1
        self.most = max(self.most, len(self.alive))
        return client


@pytest.mark.parametrize(("engine", "most"), [("inprocess", 2), ("cohort", 5)])
def test_few_clients_are_alive(engine, most):
    source = Counted(5_000)
    gc.disable()
    try:
        run = pf.federate(source, "fedavg", rounds=3, clients_per_round=4, evaluate_clients=4, engine=engine, workers=0)
    finally:
        gc.enable()
    assert source.most <= most, (
        "the client that runs, or those of a cohort, and the first, against which they are checked"
    )
    assert source.made < 100
    assert [row["client"] for row in run.table()[:-1]] == sorted(
        client for client, row in run.history[-1]["clients"].items() if "loss" in row
    )
    assert all(len(record["clients"]) <= 8 for record in run.history)
    assert source.most <= most


def test_resumed(tmp_path):
    words = {**OPTIONS, "rounds": 4, "evaluate_clients": 3}
    source = SyntheticClients(200, examples=(8, 12))
    whole = pf.federate(source, "ditto", out=tmp_path / "whole", **words)
    pf.federate(source, "ditto", out=tmp_path / "run", callbacks=[lambda record: record["round"] < 2], **words)
    resumed = pf.resume(tmp_path / "run", clients=SyntheticClients(200, examples=(8, 12)))
    assert [strip(record) for record in whole.history] == [strip(record) for record in resumed.history]
    evaluated = [client for client, row in whole.history[-1]["clients"].items() if "loss" in row]
    for client in evaluated:
        assert torch.equal(whole.predictions(client).outputs, resumed.predictions(client).outputs)
    assert {path.stem.partition(".")[0] for path in (tmp_path / "run" / "models").iterdir()} == set(evaluated)
    assert pf.load(tmp_path / "run").table()[-1]["of"] == 200
    with pytest.raises(UserError, match="the clients are not those of the run"):
        pf.resume(tmp_path / "run", clients=SyntheticClients(200, examples=(8, 12), seed=1))
    with pytest.raises(UserError, match="were made in Python"):
        pf.resume(tmp_path / "run")


def strip(record):
    return {k: v for k, v in record.items() if not k.startswith("seconds") and k != "clients"}


class Faulty(ListedSource):
    """One client is not like the others."""

    def __init__(self, client, **parts):
        super().__init__(small_clients(4), with_counts=False)
        self.odd, self.parts = client, parts

    def client(self, id):
        client = super().client(id)
        if id != self.odd:
            return client
        if "raise" in self.parts:
            raise OSError("disk is gone")
        return "client-1" if "text" in self.parts else replace_parts(client, **self.parts)


def other_network():
    return nn.Linear(6, 3)


def failing_network():
    return nn.Linear(7, 3)


SEVERAL = (torch.zeros(4, 6), torch.zeros(4, 3))
FAULTS = {
    "architecture": ({"model": other_network}, "needs one architecture, but the 2 clients have 2: 'client-1' differs"),
    "network": ({"model": failing_network}, "client 'client-1': its network fails on a batch of shape"),
    "labels": ({"train": (torch.zeros(4, 6), torch.tensor([0, 1, 2, 3]))}, "client-1.*class"),
    "id": ({"id": "client-2"}, "returned the client 'client-2'; it must have the id that was asked for"),
    "kind": ({"text": 1}, "must return a polyfed.Client, got str"),
    "error": ({"raise": 1}, "the source cannot make client 'client-1': OSError: disk is gone"),
    "task": ({"task": "multilabel", "train": SEVERAL, "test": SEVERAL, "val": None},
             "clients of one federation must have one task, got"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "error"), FAULTS.values(), ids=FAULTS)
def test_a_client_is_checked_when_it_is_drawn(parts, error):
    words = {**OPTIONS, "clients_per_round": 4}
    with pytest.raises(ClientError, match=error):
        pf.federate(Faulty("client-1", **parts), "fedavg", **words)


@pytest.mark.parametrize("workers", [0, 2])
def test_on_error_skip_goes_on_without_it(workers):
    words = {**OPTIONS, "clients_per_round": 4, "workers": workers}
    run = pf.federate(Faulty("client-1", model=other_network), "fedavg", on_error="skip", **words)
    assert {failure["client"] for record in run.history for failure in record["failures"]} == {"client-1"}
    assert "needs one architecture" in run.history[0]["failures"][0]["reason"]
    assert run.history[-1]["summary"]["accuracy"]


def test_the_first_client_is_checked_before_round_1():
    first = Faulty("client-3", model=failing_network)
    with pytest.raises(UserError, match="client 'client-3': its network fails"):
        pf.federate(first, "fedavg", **OPTIONS)


class Ids:
    def __init__(self, ids):
        self.ids = ids

    def client(self, id):
        return small_clients(1)[0]


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([], "the source has no ids"),
        (["a", "a"], "two clients have the id 'a'"),
        ([1, 2], "ids of a source must be texts"),
        (["a", "\ud800"], r"must be texts of Unicode, and one has '\\ud800', half of a character"),
        *(
            (wrong, "the ids of a source must be a sequence of texts, got")
            for wrong in (None, 3, "ab", {"a"}, {"a": 1}, iter("a"))
        ),
    ],
)
def test_ids(ids, error):
    with pytest.raises(UserError, match=error):
        pf.federate(Ids(ids), "fedavg", **OPTIONS)


REFUSED = {
    "everyone": ("pfedme", {}, "trains every client in every round"),
    "loss": (
        "fedavg",
        {"keep": "loss"},
        "keep='loss' needs the numbers of validation examples of all clients that are",
    ),
    "cross_site": ("fedavg", {"cross_site": True}, "cross_site scores every client's model at every client"),
    "privacy": (
        pf.algorithms.FedAvg(privacy=pf.Privacy(target_epsilon=8.0)),
        {},
        "privacy needs the numbers of examples",
    ),
}


@pytest.mark.parametrize(("method", "words", "error"), REFUSED.values(), ids=REFUSED)
def test_refused(method, words, error):
    with pytest.raises(UserError, match=error):
        pf.federate(ListedSource(small_clients(4)), method, **OPTIONS, **words)


def test_lists_are_needed_elsewhere():
    with pytest.raises(
        UserError, match=r"ListedSource is a source, .* only federate, resume and compare take one; give"
    ):
        pf.look(ListedSource(small_clients(3)))


def test_all_of_many_clients_is_warned_of():
    source = Counted(20_000)
    first = source.client(source.ids[0])
    source.client = {first.id: first}.__getitem__
    with pytest.warns(RuntimeWarning, match="all 20000 clients of the source are made and evaluated") as told:
        assert_stops(source)
    assert told


def assert_stops(source):
    with pytest.raises(ClientError, match="the source cannot make client 'client-00"):
        pf.federate(source, "fedavg", rounds=1, clients_per_round=2, workers=0)


@pytest.mark.parametrize(("manifest", "error"), [
    (lambda: SourceManifest([9, 9, 9]), "client 'client-2' has .* training examples, and the source's manifest says 9"),
    (SourceManifest([9, 9, 9]), "the source's manifest says 9"),
    (lambda: 1 / 0, "source.manifest.. failed: ZeroDivisionError: division by zero"),
    ({"num_examples": 3}, "must return a polyfed.data.SourceManifest, got dict"),
])  # fmt: skip
def test_a_manifest_that_is_wrong(manifest, error):
    source = ListedSource(small_clients(3))
    source.manifest = manifest
    with pytest.raises(UserError, match=error):
        pf.federate(source, "fedavg", **OPTIONS)


def test_a_manifest_with_other_networks_than_the_clients_have():
    source = Faulty("client-1", model=other_network)
    source.manifest = lambda: SourceManifest(
        models=[SmallNet, other_network], model_of=[0, 1, 0, 0]
    )  # from client-3 on
    words = {**OPTIONS, "clients_per_round": 4}
    with pytest.raises(ClientError, match=r"'client-[12]' has another network than the source's manifest says"):
        pf.federate(source, "pfedhn", **words)
    source.manifest = lambda: SourceManifest(models=[SmallNet, other_network], model_of=[0, 0, 1, 0])
    assert pf.federate(source, "pfedhn", **words).history[-1]["summary"]


def test_a_source_that_makes_another_client_each_time():
    source, calls = ListedSource(small_clients(3)), []

    def client(id):
        calls.append(id)
        train = source.listed[id].train
        return replace_parts(source.listed[id], train=(train.x + len(calls), train.y))

    source.client = client
    with pytest.raises(UserError, match="makes client 'client-2' with other data the second time"):
        pf.federate(source, "fedavg", **OPTIONS)
    assert calls == ["client-2"] * 2


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (ListedSource, r"or a source with ids and client\(id\), got ListedSource \(the class itself: make one\)"),
        (type("NoClient", (), {"ids": ["a"]})(), r"got NoClient with no method client\(id\)"),
    ],
)
def test_what_is_almost_a_source(value, error):
    with pytest.raises(UserError, match=error):
        pf.federate(value, "fedavg", **OPTIONS)


def test_manifest_of_another_length():
    source = ListedSource(small_clients(3))
    source.manifest = lambda: SourceManifest([1, 2])
    with pytest.raises(UserError, match="num_examples has 2 numbers, and the source 3 clients"):
        pf.federate(source, "fedavg", **OPTIONS)


def test_clients_of_a_source_can_be_sent_to_another_process():
    settings = Settings(rounds=1, clients_per_round=2, workers=0)
    source = SyntheticClients(40, examples=(8, 12))
    federation = check_and_build_federation(source, pf.algorithms.FedAvg(), settings, None, None)
    clients = pickle.loads(pickle.dumps(federation.clients))  # noqa: S301
    chosen = federation.sample_round_clients(1)
    (tasks,) = federation.build_task_blocks("local", chosen, 1, federation.initial_checkpoint())
    here, there = (
        [result.reply for result in InProcessEngine(federation.algorithm, of, torch.device("cpu")).run(tasks)]
        for of in (federation.clients, clients)
    )
    for ours, theirs in zip(here, there, strict=True):
        assert ours.tensors.keys() == theirs.tensors.keys()
        for group, tree in ours.tensors.items():
            assert all(torch.equal(tensor, theirs.tensors[group][name]) for name, tensor in tree.items())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedavg", {"regions": {"client-0": "north"}}, "regions has no region for the client 'client-1'"),
        ("pfedla", {"regions": 2}, "pfedla needs each reply by itself"),
        ("pfedla", {"asynchronous": pf.FedBuff(buffer=2)}, "needs a method whose server takes the mean"),
        ("fedavg", {"asynchronous": pf.FedBuff(buffer=20)}, "waits for more clients than the 5 there are"),
        ("fedavg", {"sampler": "available"}, "give availability="),
    ],
)
def test_settings_are_refused_as_for_a_list(method, options, message):
    for clients in (small_clients(5), ListedSource(small_clients(5))):
        with pytest.raises(UserError, match=message):
            pf.federate(clients, method, **OPTIONS, **options)


def test_a_sampler_of_ones_own_draws_from_a_source():
    class Second(pf.Sampler):
        def draw(self, round, ids, history, rng):
            return ids[1:2]

    run = pf.federate(ListedSource(small_clients(5)), "fedavg", **OPTIONS, sampler=Second())
    trained = [[i for i, row in record["clients"].items() if "bytes_down" in row] for record in run.history]
    assert trained == [["client-1"], ["client-1"]]


def test_best_round_by_the_loss_of_named_clients():
    clients = small_clients(4)
    words = {**OPTIONS, "rounds": 4, "keep": "loss", "evaluate_clients": ["client-1", "client-3"]}
    over_source, listed = (pf.federate(them, "fedavg", **words) for them in (ListedSource(clients), clients))
    assert over_source.best_round == listed.best_round
    assert_runs_equal(over_source, listed)


@pytest.mark.thorough
def test_the_start_looks_at_a_thousand_clients_at_most(monkeypatch):
    looked_at, analyse = [], pf.algorithms.PFedLA.analysis

    def analyse_and_count(method, state, ids):
        looked_at.append(len(ids))
        return analyse(method, state, ids)

    monkeypatch.setattr(pf.algorithms.PFedLA, "analysis", analyse_and_count)
    method = pf.algorithms.PFedLA(neighbours=2, hidden=2, embedding_dim=2)
    pf.federate(SyntheticClients(5_000), method, **{**OPTIONS, "rounds": 1, "evaluate_clients": 3})
    assert looked_at == [1_000, 3]
