"""Unseen clients get what the method would have given them; curves are those of plain training; the run is left as it
was."""

import hashlib
import itertools
import shutil

import pytest
import torch
from torch import nn
from torch.func import functional_call

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedAvg, Local
from polyfed.core.evaluation.evaluate import evaluate
from polyfed.core.nn.module_cache import build_module, fill_module, initial_state
from polyfed.core.serialization import serialize_state
from polyfed.graphs import extract
from polyfed.hypernetworks.ghn import GHN, graph_to_tensors
from polyfed.simulation.results.unseen_clients import (
    TrainedServer,
    UnseenClientCurves,
    build_unseen_client,
    compare_with_scratch,
    compute_warm_start,
    initial_weights,
    load_trained_server,
    training_curve,
)
from polyfed.testing import small_clients

# What is proved here holds of the examples that were trained on.
pytestmark = pytest.mark.filterwarnings("ignore:test examples that are also training examples:UserWarning")


def thin():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def deep():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def with_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Recurrent(nn.Module):
    """Six inputs as a sequence of two threes; its last layer is one that the others have."""

    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.memory(x.reshape(-1, 2, 3))[0][:, -1])


def clients(*models):
    return [
        pf.Client(c.id, models[k % len(models)], c.train, c.test, c.val)
        for k, c in enumerate(small_clients(len(models)))
    ]


def method(**fields):
    return FLHAGHN(**{"lr": 0.05, "batch_size": 8, "latent": 12, **fields})


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A run of two architectures, one with BatchNorm."""
    folder = tmp_path_factory.mktemp("unseen") / "run"
    pf.federate(clients(deep, with_norm), method(), rounds=3, workers=0, out=folder, seed=4)
    return folder


@pytest.fixture(scope="module")
def run():
    return pf.federate(clients(deep, with_norm), method(), rounds=3, workers=0, seed=4)


def server_of(run):
    return TrainedServer(run.federation.algorithm, run.last.state, run.federation.settings, run.last.round)


def same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def files_of(folder):
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*") if f.is_file()
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("depth", "down"), [(0, "none"), (1, "none"), (6, "none"), (1, "int8")])
def test_a_newcomer_that_is_a_client_gets_what_the_client_has(depth, down):
    """Without buffers and private weights a client has nothing that an unseen client lacks."""
    run = pf.federate(clients(thin, deep), method(depth=depth), rounds=2, workers=0, compress_down=down)
    one = run.federation.clients["client-1"]
    start = run.warmstart(deep, one.train, test=one.test, id="client-1")
    row = run.history[-1]["clients"]["client-1"]
    assert start.before == {name: row[f"generated_{name}"] for name in ("accuracy", "loss")}
    assert start.after == {name: row[name] for name in ("accuracy", "loss")}
    same(start.model.state_dict(), run.model("client-1").state_dict())
    assert (start.coverage, start.local, start.held_out) == (1.0, {}, 0)


@pytest.mark.thorough
def test_the_score_before_is_that_of_the_weights_of_the_hypernetwork(run):
    """Computed from the server's tensors, without the method's client half."""
    data = run.federation.clients["client-0"]
    start = run.warmstart(thin, data.train, test=data.test)
    state = run.last.state["ghn"]
    form = run.federation.algorithm._config_of_message(state)
    ghn = GHN(form)
    ghn.load_state_dict(state)
    graph = extract(thin(), torch.zeros(2, 6))
    with torch.no_grad():
        weights = ghn(graph_to_tensors(graph, form.catalogue, torch.device("cpu")))
        right = functional_call(thin(), weights, (data.test.batch(torch.arange(len(data.test)))[0],))
    assert start.before["accuracy"] == float((right.argmax(1) == data.test.labels).double().mean())
    for name, value in weights.items():
        torch.testing.assert_close(start.generated[name], value)
    assert evaluate(fill_module(build_module(thin, 0), start.generated), data.test, "classification") == start.before
    assert evaluate(start.model, data.test, "classification") == start.after


def test_only_the_head_is_trained(run):
    data = run.federation.clients["client-0"]
    start = run.warmstart(deep, data.train, test=data.test)
    after = start.model.state_dict()
    assert {name for name in after if not torch.equal(after[name], start.generated[name])} == {"4.weight", "4.bias"}


def test_what_is_not_generated_is_counted_named_and_drawn():
    run = pf.federate(clients(thin, deep), method(), rounds=1, workers=0, seed=9)
    data = run.federation.clients["client-0"]
    start = run.warmstart(Recurrent, data.train, test=data.test)
    assert start.coverage == pytest.approx((8 * 3 + 3) / (4 * 8 * (3 + 8 + 2) + 8 * 3 + 3))
    assert set(start.local) == {f"memory.{kind}_{part}_l0" for kind in ("weight", "bias") for part in ("ih", "hh")}
    assert all(start.local.values())
    drawn = initial_state(Recurrent, 9)
    same({name: start.generated[name] for name in start.local}, {name: drawn[name] for name in start.local})
    assert not torch.equal(start.generated["head.weight"], drawn["head.weight"])
    same({name: start.model.state_dict()[name] for name in start.local}, {name: drawn[name] for name in start.local})


def test_a_network_of_which_nothing_is_generated_starts_as_drawn(run):
    def wide():
        return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))

    data = run.federation.clients["client-0"]
    start = run.warmstart(wide, data.train, test=data.test)
    assert (start.coverage, len(start.local)) == (0.0, 4)
    same(start.generated, initial_state(wide, 4))
    same(start.generated, initial_weights(server_of(run), start.client))


def test_statistics_of_batch_norm_are_those_of_the_newcomers_training_data(run):
    data = run.federation.clients["client-1"]
    start = run.warmstart(with_norm, data.train, test=data.test, id="someone")
    x = data.train.batch(torch.arange(len(data.train)))[0] @ start.generated["0.weight"].T + start.generated["0.bias"]
    torch.testing.assert_close(start.generated["1.running_mean"], x.mean(0))
    torch.testing.assert_close(start.generated["1.running_var"], x.var(0))


def test_the_model_is_its_own(run):
    data = run.federation.clients["client-0"]
    one, two = (run.warmstart(thin, data.train, test=data.test) for _ in range(2))
    same(one.model.state_dict(), two.model.state_dict())
    assert one.model is not two.model
    assert not one.model.training
    assert all(p.requires_grad and p.device.type == "cpu" for p in one.model.parameters())
    with torch.no_grad():
        one.model[0].weight.zero_()
        one.generated["0.weight"].zero_()
    assert two.model[0].weight.any()
    assert run.warmstart(thin, data.train, test=data.test).generated["0.weight"].any()


def test_run_data_and_random_state_stay_as_they_were(run):
    data = run.federation.clients["client-0"]
    before = serialize_state(run.last.state), data.train.x.clone(), torch.random.get_rng_state()
    torch.nn.functional.dropout(torch.ones(2))  # so that the state is not that of a fresh generator
    state = torch.random.get_rng_state()
    run.warmstart(with_norm, data.train)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert serialize_state(run.last.state) == before[0]
    assert torch.equal(data.train.x, before[1])


def test_a_fifth_is_held_out_with_the_classes_shares():
    x, y = torch.arange(100.0).unsqueeze(1), torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    client, held_out = build_unseen_client(lambda: nn.Linear(1, 3), (x, y), seed=1)
    assert (len(client.train), len(client.test), held_out) == (80, 20, 20)
    assert client.test.labels.bincount().tolist() == [10, 6, 4]
    rows = torch.cat([client.train.index, client.test.index])
    assert sorted(rows.tolist()) == list(range(100))
    assert torch.equal(build_unseen_client(lambda: nn.Linear(1, 3), (x, y), seed=1)[0].test.index, client.test.index)
    assert not torch.equal(
        build_unseen_client(lambda: nn.Linear(1, 3), (x, y), seed=2)[0].test.index, client.test.index
    )
    part = build_unseen_client(lambda: nn.Linear(1, 3), client.train, seed=1)[0]
    assert set(part.test.index.tolist()) < set(client.train.index.tolist())


def test_held_out_examples_are_reported_and_never_trained_on(run):
    data = run.federation.clients["client-1"].train
    start = run.warmstart(thin, data)
    assert start.held_out == len(start.client.test) == round(len(data) / 5)
    assert len(start.client.train) + start.held_out == len(data)


@pytest.mark.parametrize(("task", "score"), [("multilabel", "auc"), ("regression", "r2")])
def test_other_tasks(task, score):
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, :2] > 0).float() if task == "multilabel" else x[:, :2] * 2
    one = pf.Client("a", lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (x, y), (x, y), task=task)
    run = pf.federate([one], method(), rounds=1, workers=0)
    start = run.warmstart(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), (x, y))
    assert set(start.before) == {score, "loss"}
    assert start.held_out == 8


class Broken(nn.Module):
    """Gives NaN whatever its weights are."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 3)

    def forward(self, x):
        return self.line(x) * float("nan")


NUMBERS = itertools.count()


class Restless(nn.Linear):
    """Has another output each time: no graph."""

    def __init__(self):
        super().__init__(6, 3)

    def forward(self, x):
        return super().forward(x) + next(NUMBERS)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Broken, "'unseen': its network gives NaN or infinite outputs for its first training example"),
        (lambda: nn.Linear(6, 2), "label 2, but the network has 2 outputs"),
        (lambda: nn.Linear(5, 3), r"its network fails on a batch of shape \(2, 6\)"),
        (lambda: nn.Flatten(), "no parameters that can be trained"),
        (Restless, "client 'unseen': the layers of Restless cannot be followed"),
        (nn.Linear(6, 3), "model must be a callable that builds a network"),
    ],
)
def test_networks_that_do_not_suit_are_refused(run, model, sentence):
    data = run.federation.clients["client-0"]
    with pytest.raises(pf.UserError, match=sentence):
        run.warmstart(model, data.train, test=data.test)


def test_other_methods_say_which_one_can(tmp_path):
    run = pf.federate(clients(thin, thin), FedAvg(), rounds=1, workers=0, out=tmp_path / "run")
    data = run.federation.clients["client-0"].train
    sentence = "fedavg cannot give weights to a network that took no part; use a run of flha_ghn"
    with pytest.raises(pf.UserError, match=sentence):
        run.warmstart(deep, data)
    with pytest.raises(pf.UserError, match=f"run: {sentence}"):
        load_trained_server(tmp_path / "run")


def test_too_few_examples_to_hold_one_out(run):
    data = run.federation.clients["client-0"]
    with pytest.raises(pf.UserError, match=r"has 1 example, too few to hold one out for the score; give test="):
        run.warmstart(thin, data.train.select(torch.arange(1)))


def test_a_network_that_fails_later_is_told_with_its_client(run):
    class Late(nn.Module):
        """Works on two examples and not on more."""

        def __init__(self):
            super().__init__()
            self.line = nn.Linear(6, 3)

        def forward(self, x):
            return self.line(x).reshape(2 if len(x) > 2 else -1, 3)

    data = run.federation.clients["client-0"]
    with pytest.raises(pf.ClientError, match=r"round 3, client 'unseen', phase 'warm start': RuntimeError"):
        run.warmstart(Late, data.train, test=data.test)


def test_a_run_directory_gives_the_same_and_is_left_alone(run, out):
    before = files_of(out)
    server = load_trained_server(out)
    assert (server.round, server.settings.seed) == (3, 4)
    data = run.federation.clients["client-0"]
    client, _ = build_unseen_client(thin, data.train, test=data.test)
    found, expected = compute_warm_start(server, client), run.warmstart(thin, data.train, test=data.test)
    same(found.model.state_dict(), expected.model.state_dict())
    assert (found.before, found.after) == (expected.before, expected.after)
    assert files_of(out) == before


def test_a_damaged_checkpoint_is_passed_over_and_told(out, tmp_path):
    folder = shutil.copytree(out, tmp_path / "run")
    for number in (3, 2):
        file = folder / f"checkpoint/round-00000{number}/server.safetensors"
        file.write_bytes(file.read_bytes()[:-3])
        if number == 3:
            with pytest.warns(RuntimeWarning, match=r"round-000003 is damaged .*; the one before it is used"):
                assert load_trained_server(folder).round == 2
    before = files_of(folder)
    with pytest.raises(
        pf.UserError, match=r"no checkpoint of the run in .* is whole: .*; put a copy of what was lost back"
    ):
        load_trained_server(folder)
    assert files_of(folder) == before


def test_what_is_no_run_directory(out, tmp_path):
    with pytest.raises(pf.UserError, match=r"is not a run directory: it has no config\.yaml"):
        load_trained_server(tmp_path)
    folder = shutil.copytree(out, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint"))
    with pytest.raises(pf.UserError, match="has no checkpoint yet; go on with it, `polyfed resume"):
        load_trained_server(folder)
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("  latent:", "  latest:"))
    with pytest.raises(pf.UserError, match="algorithm has no field 'latest'"):
        load_trained_server(folder)


def test_a_curve_is_plain_training_one_epoch_after_another():
    """With full batches and without momentum, dropout or buffers: the rounds of `local`."""
    options = Local(batch_size=0, lr=0.3)
    run = pf.federate(clients(deep), options, rounds=4, workers=0, seed=2)
    one = run.federation.clients["client-0"]
    start = initial_state(deep, 2)
    curve = training_curve(one, start, options, 4)
    assert curve[0]["loss"] == evaluate(fill_module(build_module(deep, 0), start), one.test, "classification")["loss"]
    for record, scores in zip(run.history, curve[1:], strict=True):
        expected = record["clients"]["client-0"]
        assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert scores["accuracy"] == expected["accuracy"]
    assert training_curve(one, start, options, 0) == curve[:1]


def test_a_curve_has_its_own_rate_and_no_epochs_of_the_method(run):
    one = run.federation.clients["client-0"]
    start = initial_state(deep, 0)
    wild = method(local_epochs=7, lr=0.4, schedule="cosine")
    plain = method(lr=0.01)
    assert training_curve(one, start, wild, 3, lr=0.01) == training_curve(one, start, plain, 3)
    assert training_curve(one, start, wild, 3)[1] != training_curve(one, start, plain, 3)[1]
    assert training_curve(one, start, plain, 3, seed=1)[1] != training_curve(one, start, plain, 3)[1]
    same(start, initial_state(deep, 0))
    with pytest.raises(pf.UserError, match="epochs must be at least 0, got -1"):
        training_curve(one, start, plain, -1)
    with pytest.raises(pf.UserError, match="lr must be positive, got 0"):
        training_curve(one, start, plain, 1, lr=0.0)


def test_curves_start_where_they_should(run):
    data = run.federation.clients["client-0"]
    start = run.warmstart(thin, data.train, test=data.test)
    server = server_of(run)
    curves = compare_with_scratch(server, start, 2, lr=0.1)
    assert (curves.epochs, curves.score, curves.warm[0]) == (2, "accuracy", start.before["accuracy"])
    scratch = training_curve(start.client, initial_weights(server, start.client), server.algorithm, 2, lr=0.1, seed=4)
    assert curves.scratch == tuple(scores["accuracy"] for scores in scratch)
    other = compare_with_scratch(server, start, 2, lr=0.1, scratch_lr=0.02)
    slow = training_curve(start.client, initial_weights(server, start.client), server.algorithm, 2, lr=0.02, seed=4)
    assert other.warm == curves.warm
    assert other.scratch == tuple(scores["accuracy"] for scores in slow)


@pytest.mark.parametrize(
    ("warm", "scratch", "reached"),
    [
        ((0.5, 0.6, 0.9), (0.1, 0.7, 0.6), 1),
        ((0.7, 0.1), (0.1, 0.7), 0),
        ((0.1, 0.2), (0.1, 0.7), None),
        ((0.1, None, 0.8), (0.1, 0.2, 0.3), 2),
        ((0.9, 0.9), (0.1, None), None),
    ],
)
def test_the_epoch_at_which_the_warm_start_has_the_goal(warm, scratch, reached):
    assert UnseenClientCurves("accuracy", warm, scratch).epochs_to_match_scratch == reached
