"""pFedLA with `neighbours=k`: one hypernetwork for all clients, the paper's form at k = N, and a cost that does not grow."""

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.algorithms import HeurPFedLA, Local, PFedLA
from polyfed.algorithms.hypernetworks import neighbour_weights
from polyfed.core.algorithm import ClientInfo, Message
from polyfed.hypernetworks.layer_aggregation import stack_hypernetworks
from polyfed.hypernetworks.shared_hypernetwork import (
    NO_NEIGHBOUR,
    SharedHypernetworkSizes,
    init_client_part,
    init_trunk,
    score_candidates,
    with_neighbours,
)
from polyfed.testing import assert_runs_equal, small_clients
from tests.few_cases import few

OPTIONS = {"lr": 0.05, "local_epochs": 2, "batch_size": 8, "momentum": 0.5}


def federate(method, clients=None, **options):
    return pf.federate(clients or small_clients(), method, **({"rounds": 3, "workers": 0} | options))


def replies_of(state, clients, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        c: Message({"model": {n: t + 0.1 * torch.randn(t.shape, generator=generator).to(t.dtype)
                              for n, t in state["models"][c].items()}}, {"num_examples": 1.0})
        for c in clients
    }  # fmt: skip


def tied_states(papers, client):
    """The state of a run of the paper's form, and the same with the one hypernetwork: this client's, for all clients."""
    state = federate(papers).last.state
    network = state["hypernetworks"][client]
    trunk = {name: tensor for name, tensor in network.items() if name.startswith("trunk.")}
    everyone = torch.arange(len(state["clients"]))
    parts = {
        c: {
            "embedding": network["embedding"] if c == client else torch.zeros_like(network["embedding"]),
            "rows": network["heads.weight"][:, j],
            "neighbours": everyone,
            "biases": network["heads.bias"] if c == client else torch.zeros_like(network["heads.bias"]),
        }
        for j, c in enumerate(state["clients"])
    }
    return state, {**state, "hypernetworks": parts, "trunk": trunk, "recent": []}


@pytest.mark.parametrize("normalise", few(["relu", "softmax"], ["relu"]))
@pytest.mark.parametrize("method", [PFedLA, HeurPFedLA])
@pytest.mark.one_case
def test_with_all_clients_as_neighbours_a_client_has_the_papers_bits(method, normalise):
    """k = N and parameters tied: one client's rounds give the weights, models and hypernetwork of the paper's form."""
    client, fields = "client-1", {"hn_lr": 0.3, "normalise": normalise, **OPTIONS}
    papers, ours = method(**fields), method(neighbours=3, **fields)
    before, state = tied_states(papers, client)
    for round_number in range(3):
        sent = [m.dispatch(s, ClientInfo(client)).tensors["model"] for m, s in ((papers, before), (ours, state))]
        assert sent[0].keys() == sent[1].keys()
        assert all(torch.equal(sent[0][name], sent[1][name]) for name in sent[0])
        alphas = [m.analysis(s, [client])["alpha"] for m, s in ((papers, before), (ours, state))]
        assert torch.equal(*alphas)
        replies = replies_of(before, [client], round_number)
        before, state = papers.aggregate(before, replies, None), ours.aggregate(state, replies, None)
        network = before["hypernetworks"][client]
        own = state["hypernetworks"][client]
        assert torch.equal(network["embedding"], own["embedding"])
        assert torch.equal(network["heads.bias"], own["biases"])
        assert all(torch.equal(network[name], tensor) for name, tensor in state["trunk"].items())
        rows = torch.stack([state["hypernetworks"][c]["rows"] for c in state["clients"]], 1)
        assert torch.equal(network["heads.weight"], rows)


def doubled(state):
    def change(tree):
        return {n: t.double() if t.is_floating_point() else t for n, t in tree.items()}

    by_client = {name: {c: change(tree) for c, tree in state[name].items()} for name in ("models", "hypernetworks")}
    return {**state, **by_client, "trunk": change(state["trunk"])}


def explicit_model(state, leaves, client, normalise):
    """θ̄_i with every sum written out."""
    neighbours = state["hypernetworks"][client]["neighbours"].tolist()
    hidden = leaves[client, "embedding"]
    for layer in range(3):
        hidden = (leaves["trunk", f"trunk.{layer}.weight"] @ hidden + leaves["trunk", f"trunk.{layer}.bias"]).relu()
    mixed = {}
    for layer, names in enumerate(state["layers"].values()):
        rows = [leaves[state["clients"][j], "rows"][layer] for j in neighbours]
        z = torch.stack([row @ hidden for row in rows]) + leaves[client, "biases"][layer]
        alpha = z.softmax(0) if normalise == "softmax" else z.relu() / (z.relu().sum() + 1e-8)
        for name in names:
            mixed[name] = sum(
                a * state["models"][state["clients"][j]][name] for a, j in zip(alpha, neighbours, strict=True)
            )
    return mixed


@pytest.mark.parametrize("normalise", ["relu", "softmax"])
@pytest.mark.one_case
def test_the_update_is_the_mean_step_of_autograd_on_the_explicit_graph(normalise):
    method = PFedLA(neighbours=2, hn_lr=0.3, normalise=normalise, **OPTIONS)
    state = doubled(federate(method).last.state)
    if normalise == "softmax":
        state["hypernetworks"] = {
            c: {n: 0.1 * t if n == "rows" else t for n, t in part.items()} for c, part in state["hypernetworks"].items()
        }
    replies = replies_of(state, ["client-0", "client-2"])
    after = method.aggregate(state, replies, None)
    before = {(c, n): t for c, part in state["hypernetworks"].items() for n, t in part.items() if n != "neighbours"}
    before |= {("trunk", n): t for n, t in state["trunk"].items()}
    steps = {key: [] for key in before}
    for client, reply in replies.items():
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in before.items()}
        mixed = explicit_model(state, leaves, client, normalise)
        delta = [(reply.tensors["model"][name] - tensor).detach() for name, tensor in mixed.items()]
        ascent = torch.autograd.grad(list(mixed.values()), list(leaves.values()), delta, allow_unused=True)
        for key, step in zip(leaves, ascent, strict=True):
            steps[key] += [] if step is None else [step]
    assert sum(bool(parts) for parts in steps.values()) >= 6 + 2 * 2 + 2  # trunk, embeddings and biases, rows
    for (part, name), parts in steps.items():
        moved = after["trunk"][name] if part == "trunk" else after["hypernetworks"][part][name]
        if name == "biases":  # neighbours are chosen anew after the step
            kept = state["hypernetworks"][part]["neighbours"].equal(after["hypernetworks"][part]["neighbours"])
            if not kept:
                continue
        expected = before[part, name] + 0.3 * (sum(parts) / len(parts) if parts else 0)
        torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-12)


class CountedModels(dict):
    """Models that note who is read."""

    def __init__(self, models):
        super().__init__(models)
        self.read = []

    def __getitem__(self, client):
        self.read.append(client)
        return super().__getitem__(client)


def test_only_the_neighbours_models_are_read():
    method = PFedLA(neighbours=2, **OPTIONS)
    state = federate(method, small_clients(5), rounds=4).last.state
    models = CountedModels(state["models"])
    list(method.dispatch_all({**state, "models": models}, [ClientInfo("client-3", 5, 5)]))
    neighbours = state["hypernetworks"]["client-3"]["neighbours"].tolist()
    assert models.read == [f"client-{j}" for j in neighbours]
    assert 3 in neighbours
    assert len(neighbours) == 2


def test_neighbours_are_those_whose_rows_point_where_the_embedding_does():
    sizes = SharedHypernetworkSizes(neighbours=3, layers=2, embedding=8, hidden=6)
    trunk = init_trunk(sizes, 0)
    parts = [init_client_part(f"client-{j}", sizes, 0) for j in range(20)]
    rows = torch.stack([part["rows"] for part in parts])
    scores = score_candidates(trunk, parts[4]["embedding"], rows)
    hidden = parts[4]["embedding"]
    for layer in range(3):
        hidden = (trunk[f"trunk.{layer}.weight"] @ hidden).relu()
    torch.testing.assert_close(scores, (rows @ hidden).sum(1))
    best = neighbour_weights.choose_neighbours(scores, list(range(20)), 4, 3)
    others = [j for j in scores.argsort(descending=True).tolist() if j != 4]
    assert best == sorted([4, *others[:2]])


def test_a_bad_neighbour_is_replaced_and_a_good_one_keeps_its_bias():
    sizes = SharedHypernetworkSizes(neighbours=2, layers=1, embedding=4, hidden=4)
    parts = {f"c{j}": init_client_part(f"c{j}", sizes, 0) for j in range(4)}
    state = {
        "clients": sorted(parts),
        "hypernetworks": parts,
        "trunk": init_trunk(sizes, 0),
        "recent": [0, 1, 2, 3],
        "seed": 0,
    }
    rows = torch.stack([part["rows"] for part in parts.values()])
    (good,) = set(neighbour_weights._with_best_neighbours(state, "c0", rows, sizes)["neighbours"].tolist()) - {0}
    part = with_neighbours(parts["c0"], [0, good])
    for bias, stays in ((5.0, True), (-50.0, False)):
        part["biases"][0, part["neighbours"].tolist().index(good)] = bias
        after = neighbour_weights._with_best_neighbours(
            {**state, "hypernetworks": {**parts, "c0": part}}, "c0", rows, sizes
        )
        assert (good in after["neighbours"].tolist()) == stays
        place = after["neighbours"].tolist().index(good) if stays else 1 - after["neighbours"].tolist().index(0)
        assert after["biases"][0, place].item() == (bias if stays else 0.0)


def test_a_client_alone_is_local_bit_for_bit():
    alone, local = (
        federate(PFedLA(neighbours=4, **OPTIONS), small_clients(1)),
        federate(Local(**OPTIONS), small_clients(1)),
    )
    ours, theirs = alone.model("client-0").state_dict(), local.model("client-0").state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_state_grows_with_the_clients_that_replied_only():
    method = PFedLA(neighbours=2, **OPTIONS)
    run = federate(method, small_clients(6), rounds=2, clients_per_round=2)
    state = run.last.state
    replied = {i for record in run.history for i, row in record["clients"].items() if "bytes_up" in row}
    assert set(state["hypernetworks"]) == replied
    assert [state["clients"][j] for j in state["recent"]] == [
        *(i for i in sorted(r for r in replied if "bytes_up" not in run.history[1]["clients"].get(r, {}))),
        *(i for i in sorted(run.history[1]["clients"]) if "bytes_up" in run.history[1]["clients"][i]),
    ]
    sizes = SharedHypernetworkSizes(2, 3, method.embedding_dim, method.hidden)
    for part in state["hypernetworks"].values():
        assert sum(tensor.numel() for tensor in part.values()) == sizes.num_entries_per_client
    assert set(run.history[0]["analysis"]) == {"own_weight", "zero_rows"}


def test_candidates_are_those_that_replied_last(monkeypatch):
    monkeypatch.setattr(neighbour_weights, "MAX_CANDIDATES", 3)
    state = federate(PFedLA(neighbours=2, **OPTIONS), small_clients(6), rounds=3, clients_per_round=2).last.state
    assert len(state["recent"]) == 3


@pytest.mark.thorough
def test_resumed_it_goes_on_bit_for_bit(tmp_path):
    method = HeurPFedLA(neighbours=2, **OPTIONS)
    whole = federate(method, rounds=4, clients_per_round=2)
    out = tmp_path / "run"
    federate(method, rounds=4, clients_per_round=2, out=out)
    for stale in (out / "checkpoint" / "round-000004").iterdir():
        stale.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert_runs_equal(whole, pf.resume(out, clients=small_clients(), workers=0))
    with np.load(out / "analysis" / "round-000004.npz", allow_pickle=False) as kept:
        np.testing.assert_allclose(kept["alpha"].sum(2), 1, rtol=1e-6)


def test_a_state_with_neighbours_of_other_clients_is_refused():
    method = PFedLA(neighbours=2, **OPTIONS)
    state = federate(method).last.state
    part = {**state["hypernetworks"]["client-0"], "neighbours": torch.tensor([0, 9])}
    forged = {**state, "hypernetworks": {**state["hypernetworks"], "client-0": part}}
    with pytest.raises(pf.UserError, match=r"names \[0, 9\] as neighbours of 'client-0'"):
        method.dispatch(forged, ClientInfo("client-0"))


def test_a_diverged_hypernetwork_is_named():
    method = PFedLA(neighbours=2, hn_lr=0.7, **OPTIONS)
    state = federate(method).last.state
    trunk = {name: tensor * float("inf") for name, tensor in state["trunk"].items()}
    with pytest.raises(pf.UserError, match=r"hypernetwork has diverged.*lower hn_lr, which is 0.7"):
        method.dispatch({**state, "trunk": trunk}, ClientInfo("client-0"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"neighbours": 0}, "neighbours must be at least 1, or none, got 0"),
        ({"neighbours": 2, "weights": "similarity"}, "neighbours must be none with weights='similarity'"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(pf.UserError, match=message):
        PFedLA(**fields)


def test_networks_of_one_form_stack():
    """What is put together for a client has the names and shapes of the paper's network with k outputs."""
    sizes = SharedHypernetworkSizes(neighbours=3, layers=2, embedding=4, hidden=5)
    part = with_neighbours(init_client_part("a", sizes, 0), [1, 2])
    assert part["neighbours"].tolist() == [1, 2, NO_NEIGHBOUR]
    network = neighbour_weights.client_hypernetwork(init_trunk(sizes, 0), part, [part["rows"]] * 2)
    stacked = stack_hypernetworks([network, network])
    assert tuple(stacked["heads.weight"].shape) == (2, 2, 2, 5)
    assert tuple(stacked["heads.bias"].shape) == (2, 2, 2)
