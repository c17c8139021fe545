"""The evaluation of a round rides on the training of the next: the same records with one exchange a round."""

import dataclasses
import json

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedAvg, FedHeNN, Local, PFedLA
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.deploy.flower.engine import FlowerEngine, envelope_from_record, envelope_to_record
from polyfed.deploy.protocol.piggyback import EVALUATION_KEY, build_envelope_per_client, split_training_and_evaluation
from polyfed.deploy.protocol.wire import SITE_HEAD_BYTES, Envelope
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.storage.checkpoints import checkpoint as checkpoints
from polyfed.simulation.storage.directory import describe_changed_files_of_run, read_metrics
from polyfed.testing import small_clients, without_durations

from ..conftest import ALL, ONE, MemoryGrid
from ..test_faults import instead
from ..test_parity import assert_same, deployed

POOL = """import torch
def public():
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(5))
"""


def methods(tmp_path):
    """Method, the server's file and the public examples of the simulation."""
    LayerCatalogue.from_graphs(map(graph_of_client, small_clients())).write_yaml(tmp_path / "catalogue.yaml")
    public = torch.randn(24, 6, generator=torch.Generator().manual_seed(5))
    catalogue = str(tmp_path / "catalogue.yaml")
    return {
        "fedavg": (FedAvg(lr=0.05), ONE, None),
        "flha_ghn": (FLHAGHN(lr=0.05, hidden=4, depth=1, graph="layers_and_norms", catalogue=catalogue), "", None),
        "pfedla": (PFedLA(lr=0.05), ONE, None),
        "fedhenn": (FedHeNN(lr=0.05, rad_size=12, rad_batch=6, eta0=1.0), POOL, public),
        "local": (Local(lr=0.05), "", None),
    }


def simulated(method, **words):
    return pf.federate(small_clients(), method, **{"rounds": 2, "seed": 3, "workers": 0, **words})


def letters(grid, *kinds):
    """Head and body of the messages of these kinds to and from the first site."""
    return [envelope_from_record(record) for node, kind, record in grid.seen if node == 101 and kind in kinds]


@pytest.fixture
def exchanges(monkeypatch):
    """How many messages go to sites in each exchange."""
    seen, exchange = [], FlowerEngine.exchange

    def counted(self, letters, number):
        seen.append({client: letter.head.get("phase", "sum") for client, letter in letters.items()})
        return exchange(self, letters, number)

    monkeypatch.setattr(FlowerEngine, "exchange", counted)
    return seen


@pytest.mark.parametrize(
    "name", ["fedavg", "pfedla", *(pytest.param(n, marks=pytest.mark.slow) for n in ("flha_ghn", "fedhenn", "local"))]
)
def test_a_round_is_one_exchange_and_gives_the_bits_of_a_simulation(tmp_path, nodes, exchanges, name):
    method, file, public = methods(tmp_path)[name]
    run, grid = deployed(tmp_path, nodes, small_clients(), method, file, rounds=2)
    assert_same(tmp_path, run, simulated(method, public=public))
    everyone = [client.id for client in small_clients()]
    assert exchanges == [dict.fromkeys(everyone, phase) for phase in ("local", "local", "evaluate", "export")]
    first, second = letters(grid, "train")
    assert EVALUATION_KEY not in first.head
    assert second.head[EVALUATION_KEY]["round"] == 1
    assert not [group for group in second.body.tensors if "evaluation" in group], "something travels twice"


def test_what_training_does_not_get_travels_beside(tmp_path, nodes):
    """FedAvg whose result is the mean over all sites' newest models: of the two that are evaluated, training gets one."""
    told = ",".join([ALL, *(f"cohort_{name}" for name in ALL.split(","))])
    method, words = FedAvg(lr=0.05, averaged_over="all"), {"rounds": 4, "clients-per-round": 2}
    run, grid = deployed(tmp_path, lambda c: nodes(c, disclose=told), small_clients(), method, ONE, **words)
    assert_same(tmp_path, run, simulated(method, rounds=4, clients_per_round=2))
    found = [envelope_from_record(record) for _, kind, record in grid.seen if kind == "train"]
    groups = [(letter.head["round"], *sorted(letter.body.tensors)) for letter in found if EVALUATION_KEY in letter.head]
    assert groups[:2] == [(2, "model")] * 2, "all who have replied are the cohort"
    assert groups[-2:] == [(4, "for the evaluation: model", "model")] * 2


def test_who_does_not_train_is_evaluated_by_a_message_of_its_own_in_the_same_exchange(tmp_path, nodes, exchanges):
    words = {"rounds": 3, "clients-per-round": 1}
    run, _ = deployed(tmp_path, nodes, small_clients(), PFedLA(lr=0.05), ONE, **words)
    assert_same(tmp_path, run, simulated(PFedLA(lr=0.05), rounds=3, clients_per_round=1))
    assert [sorted(seen.values()) for seen in exchanges] == [
        ["local"], *[["evaluate", "evaluate", "local"]] * 2, ["evaluate"] * 3, ["export"] * 3,
    ]  # fmt: skip


def test_a_round_that_is_not_evaluated_has_its_record_at_once(tmp_path, nodes, exchanges):
    run, grid = deployed(tmp_path, nodes, small_clients(), Local(lr=0.05), "", rounds=4, **{"evaluate-every": 2})
    assert without_durations(run.history) == without_durations(
        simulated(Local(lr=0.05), rounds=4, evaluate_every=2).history
    )
    assert [letter.head.get(EVALUATION_KEY, {}).get("round") for letter in letters(grid, "train")] == [
        None,
        None,
        2,
        None,
    ]


# -- a run that is stopped -------------------------------------------------------------------------------------------------


class _Stops(MemoryGrid):
    """The server is stopped when it sends its first message of a round and phase."""

    def __init__(self, nodes, phase, number):
        super().__init__(nodes)
        self.at = {"phase": phase, "round": number}

    def push_messages(self, messages):
        (message,) = messages
        head = json.loads(message.content["head"]["json"])
        if self.at and self.at.items() <= head.items():
            self.at = {}
            raise KeyboardInterrupt
        return super().push_messages(messages)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("phase", "number", "waiting"), [("local", 2, 1), ("evaluate", 3, 3), ("export", 3, None)], ids=str
)
def test_the_evaluation_that_a_stopped_run_lacks_is_made_first(tmp_path, run, nodes, phase, number, waiting):
    grid = _Stops(nodes(small_clients()), phase, number)
    method, out = PFedLA(lr=0.05), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(grid=grid, method=method)
    newest, _ = checkpoints.load_newest_checkpoint(out / "checkpoint")
    assert (newest.unevaluated_record or {}).get("round") == waiting
    assert len(read_metrics(out / "metrics.jsonl")) == newest.last_recorded_round
    assert describe_changed_files_of_run(out) == []
    before = len(grid.seen)
    found = run(grid=grid, method=method, resume=True, file="")
    assert_same(tmp_path, found, simulated(method, rounds=3))
    if waiting == 1:
        asked = [envelope_from_record(record).head for _, kind, record in grid.seen[before:] if kind == "train"]
        assert asked[0]["round"] == 2
        assert asked[0][EVALUATION_KEY]["round"] == 1
    assert describe_changed_files_of_run(out) == []


def test_a_stopped_run_knows_when_its_metrics_were_changed(tmp_path, run, nodes):
    with pytest.raises(KeyboardInterrupt):
        run(grid=_Stops(nodes(small_clients()), "local", 3), method=Local(lr=0.05))
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"train_loss": ', '"train_loss": 1'))
    assert "metrics.jsonl was changed in rounds 1 to 1" in describe_changed_files_of_run(tmp_path / "run")[0]


# -- failures --------------------------------------------------------------------------------------------------------------


class _Fails(torch.nn.Linear):
    """Cannot be used in one of the two modes, but for the few examples with which it is tried before the first round."""

    text = "patient 4711"

    def __init__(self, training):
        super().__init__(6, 3)
        self.broken = training

    def forward(self, x):
        if self.training == self.broken and len(x) > 2:
            raise RuntimeError(self.text)
        return super().forward(x)


def broken(*modes):
    """Clients of which the first ones fail so."""
    found = [lambda mode=mode: _Fails(mode) for mode in modes]
    models = [*found, *[lambda: torch.nn.Linear(6, 3)] * 3]
    return [pf.Client(c.id, model, c.train, c.test, c.val) for c, model in zip(small_clients(), models, strict=False)]


@pytest.mark.parametrize("training", [True, False], ids=["training fails", "evaluation fails"])
def test_what_fails_costs_only_what_it_was_asked_for(run, nodes, training):
    grid = MemoryGrid(nodes(broken(training), disclose="accuracy,loss,num_examples,train_loss"))
    found = run(grid=grid, method=Local(lr=0.05), rounds=2)
    phase = "local" if training else "evaluate"
    for record in found.history:
        (failure,) = record["failures"]
        assert (failure["client"], failure["phase"]) == ("client-0", phase)
        assert failure["reason"] == "RuntimeError (its text is in the log of the site)"
        assert ("loss" in record["clients"]["client-0"]) == training
        assert ("train_loss" in record["clients"].get("client-0", {})) == (not training)
    clients = [pf.Client(c.id, lambda: torch.nn.Linear(6, 3), c.train, c.test, c.val) for c in small_clients()[1:]]
    others = pf.federate(clients, Local(lr=0.05), rounds=2, seed=3, workers=0).history
    for name in ("client-1", "client-2"):
        told = [r["clients"][name]["loss"] for r in found.history]
        assert told == [r["clients"][name]["loss"] for r in others]


def test_a_long_text_of_an_exception_does_not_cost_the_training(run, nodes, monkeypatch):
    """Both are in one head, of which the server reads so much and no more."""
    monkeypatch.setattr(_Fails, "text", "x" * SITE_HEAD_BYTES)
    found = run(grid=MemoryGrid(nodes(broken(False))), method=Local(lr=0.05), rounds=2)
    failures = [(f["phase"], f["reason"][:20]) for record in found.history for f in record["failures"]]
    assert failures == [("evaluate", "RuntimeError: xxxxxx")] * 2


def told(**words):
    """A change of what the answer to a training says of the evaluation that rode on it."""

    def change(letter):
        if EVALUATION_KEY not in letter.head:
            return letter
        return Envelope({**letter.head, EVALUATION_KEY: {**letter.head[EVALUATION_KEY], **words}}, letter.body)

    return change


LIES = {
    "another round": (told(round=2), "answers for round 2, expected 1"),
    "another site": (told(client="client-1"), "answers for client 'client-1'"),
    "another run": (told(run="a"), "answers for run 'a'"),
    "another phase": (told(phase="local"), "answers for phase 'local'"),
    "NaN": (told(metrics={"accuracy": float("nan")}), "its metrics are not scores or losses"),
    "huge": (told(metrics={"accuracy": 10**400}), "its metrics are not scores or losses"),
    "no score": (told(metrics={"bytes_up": 1.0}), "its metrics are not scores or losses"),
    "a refusal": (told(refused="a\nb"), "refuses: a b"),
    "within": (told(evaluation={}), "sends an evaluation that it was not asked for"),
    "nothing": (
        lambda le: Envelope({**le.head, EVALUATION_KEY: None}, le.body) if EVALUATION_KEY in le.head else le,
        "sends no result of the",
    ),
}
DIFFERENT = ("another round", "NaN", "nothing")


@pytest.mark.parametrize("lie", [n if n in DIFFERENT else pytest.param(n, marks=pytest.mark.thorough) for n in LIES])
def test_a_site_that_lies_of_its_evaluation_loses_that_only(run, nodes, lie):
    change, sentence = LIES[lie]
    found = run(instead(change), method=Local(lr=0.05), rounds=2, file="")
    (failure,) = found.history[0]["failures"]
    assert (failure["client"], failure["phase"]) == ("client-0", "evaluate")
    assert sentence in failure["reason"]
    assert "loss" not in found.history[0]["clients"]["client-0"]
    assert found.history[1] == found.history[1] | {"failures": []}
    whole = simulated(Local(lr=0.05)).history
    assert without_durations(found.history)[1] == without_durations(whole)[1]


def test_with_secure_sums_it_costs_no_part_of_the_sum(tmp_path, secure_grid, secure_play):
    clients = small_clients()
    grid = secure_grid(clients)
    instead(LIES["NaN"][0])(grid.nodes[101])
    found = secure_play(grid, rounds=2, **{"on-error": "skip"})
    assert [[(f["client"], f["phase"]) for f in r["failures"]] for r in found.history] == [
        [("client-0", "evaluate")],
        [],
    ]
    other = pf.federate(clients, FedAvg(lr=0.05), rounds=2, seed=3, workers=0, secure=True)
    assert without_durations(found.history)[1] == without_durations(other.history)[1]


def test_an_answer_whose_head_is_too_large_is_not_read_at_all(run):
    many = {f"{'x' * 9}_{k:09d}_loss": 0.5 for k in range(SITE_HEAD_BYTES // 30)}
    found = run(instead(told(metrics=many)), method=Local(lr=0.05), rounds=2, file="")
    (first,), (second,) = (record["failures"] for record in found.history)
    assert (first["phase"], second["phase"]) == ("evaluate", "local")
    assert "at most 65536 are read" in first["reason"]
    assert first["reason"] == second["reason"]


def test_an_evaluation_that_nobody_asked_for_is_refused(run):
    def more(letter):
        return Envelope({**letter.head, EVALUATION_KEY: {"metrics": {"accuracy": 1.0}}}, letter.body)

    found = run(instead(more), method=Local(lr=0.05), rounds=1, file="")
    (failure,) = found.history[0]["failures"]
    assert (failure["phase"], failure["client"]) == ("local", "client-0")
    assert "sends an evaluation that it was not asked for" in failure["reason"]


def test_what_leaves_is_booked_as_often_as_without_riding(tmp_path, nodes):
    """The number of examples, and training and metrics of each round."""
    _, grid = deployed(tmp_path, nodes, small_clients(), FedAvg(lr=0.05), ONE, rounds=2)
    book = json.loads((tmp_path / "sites" / "client-0" / "state" / "privacy.json").read_text())
    assert book["data_sets"] == {"data": {"0.0": 1 + 2 * 2}}
    assert [bool(letter.head.get(EVALUATION_KEY)) for letter in letters(grid, "reply")] == [
        False,
        False,
        True,
        False,
        False,
    ]
    (file,) = (tmp_path / "sites" / "client-0" / "state").glob("*/metrics.jsonl")
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["phase"], line["round"]) for line in told] == [
        ("local", 1), ("evaluate", 1), ("local", 2), ("evaluate", 2), ("export", 2),
    ]  # fmt: skip


def test_metrics_that_cannot_be_booked_do_not_leave(run, nodes, tmp_path):
    """A book that is damaged after round 1."""
    grid = MemoryGrid(nodes(small_clients()))

    def spoil(letter):
        (tmp_path / "sites" / "client-0" / "state" / "privacy.json").write_text("{")
        return letter

    instead(spoil)(grid.nodes[101])
    found = run(grid=grid, method=Local(lr=0.05), rounds=2, file="")
    assert [f["phase"] for f in found.history[0]["failures"]] == ["evaluate"]
    assert "loss" not in found.history[0]["clients"]["client-0"]
    assert "accuracy" not in json.dumps(letters(grid, "reply")[2].head)


# -- one letter for two -----------------------------------------------------------------------------------------------------


def same(one, other):
    assert list(one.tensors) == list(other.tensors)
    assert dict(one.scalars) == dict(other.scalars)
    for group, tree in one.tensors.items():
        assert list(tree) == list(other.tensors[group])
        for name, tensor in tree.items():
            theirs = other.tensors[group][name]
            assert (tensor.dtype, tensor.shape) == (theirs.dtype, theirs.shape)
            assert tensor.numpy().tobytes() == theirs.numpy().tobytes(), name


W = {"a": torch.tensor([0.0, float("nan")]), "b": torch.ones(2, 3), "n": torch.tensor(3)}
LARGE = {"w": torch.zeros(1000), "b": torch.zeros(3)}
PAIRS = {
    "the same": ({"model": W}, {"model": W}, 0),
    "the same numbers": ({"model": W}, {"model": {n: t.clone() for n, t in W.items()}}, 0),
    "under another name": ({"model": W, "more": {"x": torch.ones(1)}}, {"result": W}, 0),
    "minus zero": ({"model": W}, {"model": {**W, "a": torch.tensor([-0.0, float("nan")])}}, 1),
    "another type": ({"model": W}, {"model": {**W, "n": torch.tensor(3, dtype=torch.int32)}}, 1),
    "another order": ({"model": W}, {"model": {name: W[name] for name in ("n", "b", "a")}}, 0),
    "a part": ({"model": W}, {"model": {"b": W["b"]}}, 0),
    "another value in the middle": ({"model": W}, {"model": {"n": W["n"], "b": torch.zeros(2, 3), "a": W["a"]}}, 1),
    "most in another group": ({"model": {"b": W["b"]}, "copy": W}, {"model": W}, 0),
    "others": ({"model": W}, {"model": {"c": torch.ones(1)}, "x": {"a": torch.zeros(9)}}, 2),
    "nothing to train with": ({}, {"model": W}, 3),
    "nothing to evaluate with": ({"model": W}, {}, 0),
    "empty": ({"model": {}, "e": {"t": torch.zeros(0, 4)}}, {"model": {}, "e": {"t": torch.zeros(0, 4)}}, 0),
}  # fmt: skip


def tasks(local, personal):
    scalars = {"lr": 0.1 + 0.2, "inf": float("inf"), "k": 3}
    return [
        ClientTask("local", 2, "north", Message(local, {"lr": 0.5}), None, 7, 1),
        ClientTask("evaluate", 1, "north", Message(personal, scalars), None, 8, 1),
    ]


def order(task):
    return {"kind": "task", "phase": task.phase, "round": task.round, "seed": task.seed, "client": task.client}


@pytest.mark.parametrize("pair", PAIRS)
def test_both_letters_come_out_of_one_and_nothing_travels_twice(pair):
    local, personal, number = PAIRS[pair]
    one, other = tasks(local, personal)
    letter = build_envelope_per_client([one, other], order)["north"]
    beside = {g: tree for g, tree in letter.body.tensors.items() if g not in local}
    assert sum(map(len, beside.values())) == number
    both = split_training_and_evaluation(envelope_from_record(envelope_to_record(letter)))
    same(both.training.body, one.transmitted_message)
    same(both.evaluation.body, other.transmitted_message)
    assert both.training.head == order(one)
    assert both.evaluation.head == order(other)
    assert both.nbytes == (Message(beside).nbytes if beside else 0)


def test_what_many_sites_get_is_compared_once(monkeypatch):
    compared, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(1) or equal(a, b))
    one, other = {"model": LARGE}, {"model": {name: tensor.clone() for name, tensor in LARGE.items()}}
    many = [dataclasses.replace(task, client=f"site-{k}") for k in range(50) for task in tasks(one, other)]
    assert len(build_envelope_per_client(many, order)) == 50
    assert len(compared) == len(LARGE)


WRONG = [
    7, {}, {"round": 1, "seed": 2}, {"tensors": {"model": ["nowhere", None]}}, {"tensors": {"model": ["model", [9]]}},
    {"tensors": {"model": ["model", [-2]]}}, {"tensors": {"model": ["model", [True]]}}, {"tensors": {"model": 3}},
    {"tensors": {"model": ["model", [-1]]}}, {"tensors": {"model": [[], []]}}, {"tensors": []}, {"scalars": {"lr": "x"}},
    {"scalars": {"lr": True}}, {"scalars": None},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_a_server_garbles_is_refused(wrong):
    letter = build_envelope_per_client(tasks({"model": W}, {"model": W}), order)["north"]
    asked = (
        {**letter.head[EVALUATION_KEY], **wrong} if isinstance(wrong, dict) and wrong and "seed" not in wrong else wrong
    )
    with pytest.raises(UserError, match="the evaluation in the message's header cannot be read"):
        split_training_and_evaluation(Envelope({**letter.head, EVALUATION_KEY: asked}, letter.body))
