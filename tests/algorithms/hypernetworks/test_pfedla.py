"""pFedLA and HeurpFedLA: identities 3, 4 and 5 of the paper's method, its gradient, and what goes wrong."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, HeurPFedLA, Local, PFedLA
from polyfed.algorithms.hypernetworks import pfedla
from polyfed.core.algorithm import ClientInfo
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.hypernetworks import layer_aggregation
from polyfed.testing import SmallNet, assert_runs_equal, small_clients
from tests.few_cases import few

OPTIONS = {"lr": 0.05, "local_epochs": 2, "batch_size": 8, "momentum": 0.5}


def federate(method, clients=None, **options):
    return pf.federate(clients or small_clients(), method, **({"rounds": 3, "workers": 0} | options))


def same_models(one, other, **tolerance):
    for client in one.federation.clients:
        models = dict(one.model(client).state_dict()), dict(other.model(client).state_dict())
        torch.testing.assert_close(*models, **tolerance)


def started_with(monkeypatch, weight, bias):
    """Hypernetworks whose heads have constant weights and these biases, (N, L, N)."""
    good = layer_aggregation.init_aggregation_hypernetwork

    def create(client, sizes, seed):
        made = good(client, sizes, seed)
        biases = bias(torch.zeros(sizes.clients, sizes.layers, sizes.clients))
        row = biases[int(client.removeprefix("client-"))]
        return made | {"heads.weight": torch.full_like(made["heads.weight"], weight), "heads.bias": row}

    monkeypatch.setattr(pfedla, "init_aggregation_hypernetwork", create)


def own_only(zeros):
    return torch.eye(len(zeros))[:, None, :].expand_as(zeros).clone()


def test_uniform_weights_are_unweighted_fedavg(monkeypatch):
    started_with(monkeypatch, 1.0, lambda zeros: zeros)
    uniform = federate(PFedLA(hn_lr=0.0, **OPTIONS))
    averaged = federate(FedAvg(weighted=False, buffers="local", **OPTIONS))
    same_models(uniform, averaged, rtol=1e-4, atol=1e-4)  # three rounds of training amplify the rounding
    alpha = uniform.federation.algorithm.analysis(uniform.last.state, ["client-0"])["alpha"]
    torch.testing.assert_close(alpha, torch.full((1, 3, 3), 1 / 3))


@pytest.mark.parametrize("method", [PFedLA, pytest.param(HeurPFedLA, marks=pytest.mark.thorough)])
def test_weights_on_oneself_alone_are_local_bit_for_bit(monkeypatch, method):
    started_with(monkeypatch, 0.0, own_only)
    same_models(federate(method(hn_lr=0.0, **OPTIONS)), federate(Local(**OPTIONS)), rtol=0, atol=0)


def test_one_client_is_local_bit_for_bit():
    run = federate(PFedLA(**OPTIONS), small_clients(1))
    same_models(run, federate(Local(**OPTIONS), small_clients(1)), rtol=0, atol=0)


def test_learning_the_weights_changes_the_models():
    fixed, learned = (federate(PFedLA(hn_lr=rate, **OPTIONS)) for rate in (0.0, 5.0))
    assert not torch.allclose(fixed.model("client-0").head.weight, learned.model("client-0").head.weight)
    before, after = (r.federation.algorithm.analysis(r.last.state, ["client-0"])["alpha"] for r in (fixed, learned))
    assert not torch.allclose(before, after)


def test_retaining_no_layer_is_pfedla():
    assert_same_run_but_private(federate(HeurPFedLA(k=0, **OPTIONS)), federate(PFedLA(**OPTIONS)))


def assert_same_run_but_private(one, other):
    same_models(one, other, rtol=0, atol=0)
    for ours, theirs in zip(one.history, other.history, strict=True):
        assert ours["summary"] == theirs["summary"]
        assert (ours["bytes_down"], ours["bytes_up"]) == (theirs["bytes_down"], theirs["bytes_up"])


def test_retaining_all_layers_is_local_and_downloads_nothing():
    run = federate(HeurPFedLA(k=3, **OPTIONS))
    same_models(run, federate(Local(**OPTIONS)), rtol=0, atol=0)
    assert [record["bytes_down"] for record in run.history] == [0, 0, 0]
    assert run.history[0]["bytes_up"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("k", [1, 2])
def test_bytes_saved_are_those_of_the_retained_layers(k):
    method = HeurPFedLA(k=k, **OPTIONS)
    before, after = (federate(method, rounds=rounds) for rounds in (2, 3))
    state = before.last.state
    for row, client in enumerate(state["clients"]):
        alpha = method.analysis(state, [client])["alpha"][0]
        kept = sorted(range(3), key=lambda layer: -alpha[layer, row].item())[:k]
        names = [n for layer, names in enumerate(state["layers"].values()) for n in names if layer not in kept]
        down = safetensors_num_bytes({f"model/{name}": state["models"][client][name] for name in names})
        assert after.history[2]["clients"][client]["bytes_down"] == down
    full = federate(PFedLA(**OPTIONS)).history[2]
    assert after.history[2]["bytes_up"] == full["bytes_up"] == full["bytes_down"]


def trained_state(method, rounds=3):
    """A state in which the clients' models differ, in float64."""
    state = federate(method, rounds=rounds).last.state
    double = {c: {n: t.double() for n, t in model.items()} for c, model in state["models"].items()}
    return {**state, "models": double, "hypernetworks": each(state, torch.Tensor.double)}


def each(state, change):
    """Every client's hypernetwork, changed."""
    return {c: {n: change(t) for n, t in network.items()} for c, network in state["hypernetworks"].items()}


def all_of(state):
    """The hypernetworks of all clients, one above the other."""
    return layer_aggregation.stack_hypernetworks(list(state["hypernetworks"].values()))


def replies_of(state, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        c: {n: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in model.items()}
        for c, model in state["models"].items()
    }


def explicit_mixture(state, networks, row, normalise="relu"):
    """θ̄_i by the definition, every sum written out."""
    alpha = layer_aggregation.layer_aggregation_weights(
        {n: t[row : row + 1] for n, t in networks.items()}, [row], normalise
    )[0]
    return {
        name: sum(alpha[layer, j] * state["models"][c][name] for j, c in enumerate(state["clients"]))
        for layer, names in enumerate(state["layers"].values())
        for name in names
    }


def test_the_default_rate_grows_with_the_number_of_clients():
    by_default, by_hand = (federate(PFedLA(hn_lr=rate, **OPTIONS), clients_per_round=2) for rate in (None, 0.3))
    assert_runs_equal(by_default, by_hand)  # of all clients, not of those in the round


@pytest.mark.parametrize("normalise", ["relu", pytest.param("softmax", marks=pytest.mark.thorough)])
def test_the_update_is_that_of_autograd_on_the_explicit_graph(normalise):
    method = PFedLA(hn_lr=0.3, normalise=normalise, **OPTIONS)
    state = trained_state(method)
    if normalise == "softmax":
        state["hypernetworks"] = each(state, lambda t: 0.1 * t)  # z of about 40 would saturate it
    replies = replies_of(state)
    after = all_of(pfedla.update_models_and_hypernetworks(state, replies, method))
    for row, client in enumerate(state["clients"]):
        leaves = {n: t.clone().requires_grad_() for n, t in all_of(state).items()}
        mixed = explicit_mixture(state, leaves, row, normalise)
        delta = {n: (replies[client][n] - mixed[n]).detach() for n in mixed}
        ascent = torch.autograd.grad(list(mixed.values()), list(leaves.values()), list(delta.values()))
        assert any(float(step.abs().max()) > 1e-6 for step in ascent)
        for (name, before), step in zip(all_of(state).items(), ascent, strict=True):
            torch.testing.assert_close(after[name][row], (before + 0.3 * step)[row], rtol=1e-9, atol=1e-12)


def test_the_update_is_that_of_finite_differences():
    method = PFedLA(hn_lr=1.0, **OPTIONS)
    state = trained_state(method)
    replies = replies_of(state)
    networks = all_of(state)
    step = {
        n: t - networks[n] for n, t in all_of(pfedla.update_models_and_hypernetworks(state, replies, method)).items()
    }
    mixed = explicit_mixture(state, networks, 1)
    delta = {n: replies["client-1"][n] - mixed[n] for n in mixed}

    def projection(name, place, change):
        moved = {**networks, name: networks[name].clone()}
        moved[name][place] += change
        return sum(float((explicit_mixture(state, moved, 1)[n] * delta[n]).sum()) for n in delta)

    generator = np.random.default_rng(0)
    for name, tensor in networks.items():
        for _ in range(4):
            place = (1, *(int(generator.integers(size)) for size in tensor.shape[1:]))
            slope = (projection(name, place, 1e-5) - projection(name, place, -1e-5)) / 2e-5
            assert step[name][place].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_a_step_lowers_the_clients_loss_to_first_order():
    """One small full-batch step: Δθ = −η∇L, so that a step ρ changes L by −ρ‖JᵀΔθ‖²/η."""

    def still():
        net = SmallNet()
        net.body[1], net.body[3] = nn.Identity(), nn.Identity()  # a loss without statistics and chance
        return net.double()

    clients = [
        pf.Client(c.id, still, (c.train.x.double(), c.train.y), (c.test.x.double(), c.test.y)) for c in small_clients()
    ]
    state = federate(PFedLA(**OPTIONS), clients).last.state
    state["hypernetworks"] = each(state, torch.Tensor.double)
    eta, rho = 1e-3, 1e-3
    method = PFedLA(lr=eta, batch_size=0, hn_lr=rho)
    for row, client in enumerate(clients):
        down = method.dispatch(state, ClientInfo(client.id))
        reply, _ = method.local_update(down, {}, client, 0)
        after, networks = (
            pfedla.update_models_and_hypernetworks(state, {client.id: reply.tensors["model"]}, method),
            all_of(state),
        )
        step = {n: t - networks[n] for n, t in all_of(after).items()}
        squared = sum(float(s.square().sum()) for s in step.values()) / rho**2  # ‖JᵀΔθ‖²

        def loss(networks, row=row, client=client):
            net = still()
            net.load_state_dict(explicit_mixture(state, networks, row))
            with torch.no_grad():
                return nn.functional.cross_entropy(net(client.train.x), client.train.y).item()

        larger = {
            n: t + 100 * step[n] for n, t in networks.items()
        }  # far enough for float64, near enough for first order
        change = loss(larger) - loss(networks)
        assert change < 0
        assert change == pytest.approx(-100 * rho * squared / eta, rel=0.05)


def test_all_clients_of_a_round_see_one_snapshot():
    """A client's update depends on the state at the start of the round, not on who else replied."""
    method = PFedLA(hn_lr=1.0, **OPTIONS)
    state = trained_state(method)
    replies = replies_of(state)
    together = pfedla.update_models_and_hypernetworks(state, replies, method)["hypernetworks"]
    for row, client in enumerate(state["clients"]):
        alone = pfedla.update_models_and_hypernetworks(state, {client: replies[client]}, method)
        for name, tensor in alone["hypernetworks"][client].items():
            torch.testing.assert_close(tensor, together[client][name], rtol=1e-9, atol=1e-12)
        kept = [alone["hypernetworks"][c] is state["hypernetworks"][c] for c in state["clients"]]
        assert kept == [r != row for r in range(3)]  # the same tensors: a round costs what its clients do
        assert [alone["models"][c] is state["models"][c] for c in state["clients"]] == [r != row for r in range(3)]


def test_messages_made_together_are_those_made_one_by_one():
    method = HeurPFedLA(**OPTIONS)
    state = federate(method).last.state
    everyone = [ClientInfo(client, 2, 3) for client in state["clients"]]
    for who, message in zip(everyone, method.dispatch_all(state, everyone), strict=True):
        single = method.dispatch(state, who)
        assert single.scalars == message.scalars
        for name, tensor in single.tensors["model"].items():
            torch.testing.assert_close(tensor, message.tensors["model"][name])


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("module", ["body.0", "body.1", "head"]),
        ("block", ["body", "head"]),
        ("model", ["model"]),
        ("tensor", ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"]),
    ],
)
def test_what_a_layer_is(layer, expected):
    state = federate(PFedLA(layer=layer, **OPTIONS), rounds=1).last.state
    assert list(state["layers"]) == expected
    assert all_of(state)["heads.bias"].shape == (3, len(expected), 3)


def test_a_row_without_positive_weights_keeps_the_own_layer_and_is_recorded(monkeypatch):
    def dead_for_the_first(zeros):
        bias = zeros.clone()
        bias[0, 1] = -1000.0
        return bias

    started_with(monkeypatch, 1.0, dead_for_the_first)
    run = federate(PFedLA(hn_lr=0.0, **OPTIONS))
    alpha = run.federation.algorithm.analysis(run.last.state, ["client-0"])["alpha"][0]
    assert alpha[1].tolist() == [1.0, 0.0, 0.0]
    assert alpha[0].tolist() == pytest.approx([1 / 3] * 3)
    assert [record["analysis"] for record in run.history] == [{"zero_rows": 1}] * 3


def test_weights_of_every_round_are_kept_for_plots(tmp_path):
    run = federate(PFedLA(**OPTIONS), clients_per_round=2, out=tmp_path / "run")
    files = sorted((tmp_path / "run" / "analysis").iterdir())
    assert [file.name for file in files] == [f"round-{n:06d}.npz" for n in range(4)]
    for number, file in enumerate(files):
        with np.load(file, allow_pickle=False) as kept:
            rows = [i for i in kept["clients"] if number == 0 or "bytes_up" in run.history[number - 1]["clients"][i]]
            assert kept["rows"].tolist() == rows
            assert kept["alpha"].shape == (len(rows), 3, 3)
            np.testing.assert_allclose(kept["alpha"].sum(2), 1, rtol=1e-6)
    expected = run.federation.algorithm.analysis(run.last.state, rows)["alpha"].numpy()
    with np.load(files[-1]) as kept:
        np.testing.assert_array_equal(kept["alpha"], expected)


def test_analysis_of_rounds_that_are_played_again_is_removed(tmp_path):
    out = tmp_path / "run"
    federate(PFedLA(**OPTIONS), rounds=4, out=out, checkpoint_every=2)
    (out / "metrics.jsonl").write_text("\n".join((out / "metrics.jsonl").read_text().splitlines()[:3]) + "\n")
    kept = (out / "analysis" / "round-000002.npz").read_bytes()
    for n in (3, 4):
        (out / "analysis" / f"round-{n:06d}.npz").write_bytes(b"stale")
    with pytest.warns(RuntimeWarning, match="the one before it is used"):
        pf.resume(out, clients=small_clients(), workers=0)
    assert (out / "analysis" / "round-000002.npz").read_bytes() == kept
    for n in (3, 4):
        with np.load(out / "analysis" / f"round-{n:06d}.npz") as again:
            assert again["alpha"].shape == (3, 3, 3)


@pytest.mark.slow
def test_300_clients_of_which_a_tenth_takes_part():
    source = small_clients(1)[0]
    clients = [pf.Client(f"{n:03d}", SmallNet, source.train.select(torch.arange(6)), source.test) for n in range(300)]
    method = PFedLA(lr=0.1, hidden=8, embedding_dim=8)
    run = federate(method, clients, rounds=2, clients_per_round=0.1, evaluate_every=2)
    took_part = [{i for i, row in r["clients"].items() if "bytes_up" in row} for r in run.history]
    assert [len(ids) for ids in took_part] == [30, 30]
    initial = run.last.state["models"][next(iter(run.federation.clients.keys() - took_part[0] - took_part[1]))]
    for client, model in run.last.state["models"].items():
        assert (model is initial) == (client not in took_part[0] | took_part[1])
    with_trained = {i for i, row in run.history[-1]["clients"].items() if "trained_loss" in row}
    assert with_trained == took_part[0] | took_part[1]


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        pf.UserError, match=r"k=4 layers are to be retained, but the network has 3 \(body.0, body.1, head\)"
    ):
        federate(HeurPFedLA(k=4), out=tmp_path / "run")
    mixed = [
        *small_clients(2),
        pf.Client("other", lambda: nn.Linear(6, 3), *next((c.train, c.test) for c in small_clients(1))),
    ]
    with pytest.raises(pf.UserError, match="'other' differs from 'client-0'"):
        federate(PFedLA(), mixed, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        (HeurPFedLA, {"k": -1}, "k must be a number of layers, at least 0, got -1"),
        (PFedLA, {"hn_lr": float("nan")}, "hn_lr must be at least 0, or none, got nan"),
        (PFedLA, {"normalise": "l1"}, "unknown normalise 'l1'"),
        (PFedLA, {"layer": "modul"}, "unknown layer 'modul'; did you mean module"),
        (PFedLA, {"buffers": "average"}, "buffers must be 'local' or 'recompute'"),
        (PFedLA, {"embedding_dim": 0}, "embedding_dim must be at least 1, got 0"),
        (PFedLA, {"hidden": 0}, "hidden must be at least 1, got 0"),
        (PFedLA, {"sharpness": -1.0}, "sharpness must be at least 0, got -1.0"),
        (PFedLA, {"weights": "distance"}, "unknown weights 'distance'"),
    ],
)
def test_bad_hyper_parameters(method, fields, message):
    with pytest.raises(pf.UserError, match=message):
        method(**fields)


@pytest.mark.parametrize("method", few([PFedLA, HeurPFedLA], [PFedLA]))
def test_both_networks_are_evaluated(method):
    run = federate(method(**OPTIONS))
    row = run.table()[0]
    assert list(row) == [
        "client", "accuracy", "loss", "val_accuracy", "val_loss", "trained_accuracy", "trained_loss",
        "trained_val_accuracy", "trained_val_loss", "num_examples",
    ]  # fmt: skip
    assert row["loss"] != row["trained_loss"]
    without = federate(method(evaluate_trained=False, **OPTIONS))
    assert "trained_loss" not in without.table()[0]
    assert without.table()[0]["loss"] == row["loss"]


@pytest.mark.thorough
def test_resumed_from_a_checkpoint_of_a_sampled_cohort_goes_on_bit_for_bit(tmp_path):
    whole = federate(HeurPFedLA(**OPTIONS), rounds=4, clients_per_round=2)
    out = tmp_path / "run"
    federate(HeurPFedLA(**OPTIONS), rounds=4, clients_per_round=2, out=out)
    for stale in (out / "checkpoint" / "round-000004").iterdir():
        stale.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert_runs_equal(whole, pf.resume(out, clients=small_clients(), workers=0))


def test_what_is_evaluated_is_what_the_next_round_sends():
    """Algorithm 1 returns the θ̄_i of line 5 in its last round, so those that are evaluated here one round before."""
    run = federate(PFedLA(**OPTIONS), rounds=2)
    for client in run.federation.clients:
        message = run.federation.algorithm.dispatch(run.last.state, run.federation.client_info(client, 3))
        evaluated = run.model(client).state_dict()
        for name, tensor in message.tensors["model"].items():
            assert torch.equal(evaluated[name], tensor), name
