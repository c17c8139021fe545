"""Deployments with secure sums: the bits of the simulation, sites that drop out at each step, and a server that lies."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedAvg, FedAvgKD, PFedMe
from polyfed.core.errors import RoundError
from polyfed.core.messages.fixed_point import mean_from_fixed_point, parse_sum_message
from polyfed.deploy.flower.apps import client_app
from polyfed.deploy.flower.engine import envelope_from_record
from polyfed.deploy.privacy.accountant import compute_epsilon
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.testing import small_clients, without_durations
from polyfed.testing.algorithm_contract import _InterruptAfter

from ..test_faults import instead
from ..test_parity import assert_same, image_clients
from .test_secure_masking import uniform


def simulated(clients, method=None, **words):
    return pf.federate(
        clients, method or FedAvg(lr=0.05), **{"rounds": 3, "seed": 3, "workers": 0, "secure": True, **words}
    )


def exchanges(grid):
    """The messages to the first site, in their order."""
    heads = [json.loads(r["head"]["json"]) for n, kind, r in grid.seen if n == 101 and kind in ("train", "evaluate")]
    return ["sum" if head["kind"] == "sum" else head["phase"] for head in heads]


# -- the sum is that of the simulation ------------------------------------------------------------------------------------


def cases(tmp_path):
    mixed = image_clients(("flha_arch1", "flha_arch2"))
    LayerCatalogue.from_graphs(map(graph_of_client, mixed)).write_yaml(tmp_path / "catalogue.yaml")
    ghn = {
        "lr": 0.05,
        "hidden": 4,
        "depth": 1,
        "graph": "layers_and_norms",
        "catalogue": str(tmp_path / "catalogue.yaml"),
    }
    return {
        "fedavg": (small_clients(4), FedAvg(lr=0.05)),
        "unweighted": (small_clients(3), FedAvg(lr=0.05, weighted=False)),
        "flha_ghn": (mixed, FLHAGHN(**ghn)),
        "fedavg_kd": (small_clients(3), FedAvgKD(lr=0.05, teacher_rounds=2)),
        "pfedme": (small_clients(3), PFedMe(lr=0.05, personal_lr=0.05)),
    }


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("flha_ghn", "unweighted", "fedavg_kd")]


@pytest.mark.parametrize("name", ["fedavg", *LONG])
def test_a_deployment_gives_the_bits_of_a_simulation(tmp_path, secure_grid, secure_play, name):
    """Without consent to anything: the methods would disclose weights, and a sum does not."""
    clients, method = cases(tmp_path)[name]
    found = secure_grid(clients)
    assert_same(tmp_path, secure_play(found, method), simulated(clients, method))
    once = ["sum", "sum"]  # keys and shares before the first round
    assert exchanges(found) == once + ["local", "sum"] * 3 + ["evaluate", "export"]


@pytest.mark.thorough
def test_so_it_does_when_not_all_take_part_in_each_round(tmp_path, secure_grid, secure_play):
    clients = small_clients(4)
    secured = secure_grid(clients)
    run = secure_play(secured, rounds=4, **{"clients-per-round": 0.5})
    assert_same(tmp_path, run, simulated(clients, rounds=4, clients_per_round=0.5))
    assert not any(record["failures"] for record in run.history)
    # Who is in the next round only sends its keys with the evaluation of this one: no site gets two messages at once.
    asked = [envelope_from_record(record).head for _, kind, record in secured.seen if kind == "evaluate"]
    assert any("advertise" in head for head in asked)


@pytest.mark.thorough
def test_so_it_does_when_what_goes_down_is_compressed(tmp_path, secure_grid, secure_play):
    clients = small_clients(3)
    run = secure_play(secure_grid(clients), rounds=2, **{"compress-down": "int8"})
    assert_same(tmp_path, run, simulated(clients, rounds=2, compress_down="int8"))


@pytest.mark.thorough
def test_sites_that_train_outside_the_round_send_nothing(tmp_path, secure_grid, secure_play):
    clients, method = cases(tmp_path)["pfedme"]
    found = secure_grid(clients)
    run = secure_play(found, method, **{"clients-per-round": 2})
    assert_same(tmp_path, run, simulated(clients, method, clients_per_round=2))
    sent = [envelope_from_record(r) for _, kind, r in found.seen if kind == "reply"]
    trained = [letter for letter in sent if letter.head.get("phase") == "local"]
    assert sorted(bool(letter.body.tensors) for letter in trained) == [False] * 3 + [True] * 6


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path, secure_grid, secure_play):
    clients = small_clients(3)
    found = secure_grid(clients)
    with pytest.raises(KeyboardInterrupt):
        secure_play(found, progress=_InterruptAfter(1))
    assert_same(tmp_path, secure_play(found, resume=True), simulated(clients))


# -- what travels -----------------------------------------------------------------------------------------------------


def unmasked_by(monkeypatch):
    """Masks are zeros from here on, for sites and server alike: what tests of masks must find."""
    monkeypatch.setattr(
        "polyfed.deploy.secure_aggregation.crypto.generate_key_stream",
        lambda key, number: np.zeros(number, dtype=np.uint64),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("masks", [True, False])
def test_what_a_site_sends_is_noise_to_whoever_records_it(secure_grid, secure_play, monkeypatch, masks):
    if not masks:
        unmasked_by(monkeypatch)
    found = secure_grid(small_clients(3))
    secure_play(found, rounds=2)
    words = {101: [], 102: [], 103: []}
    for node, kind, record in found.seen:
        letter = envelope_from_record(record) if kind == "reply" else None
        if letter is not None and letter.body.tensors.get("sum"):
            words[node].append(letter.body.tensors["sum"]["words"].numpy().tobytes())
        if letter is not None:
            assert not letter.body.scalars
            assert set(letter.body.tensors) <= {"sum", "boxes of the secure sum", "bundle of the secure sum"}
    for sent in words.values():
        assert len(sent) == 2
        assert uniform(b"".join(sent)) == masks


def edges_in(down, up):
    """The attack of tests/algorithms/hypernetworks/test_flha_privacy.py: the edges of a graph from the change of the
    GNN's first layer, and the types of layers whose columns have changed, by more than numbers in fixed point do when
    they are rounded."""
    change = {name: up[name].double() - tensor.double() for name, tensor in down.items()}
    change = {name: torch.where(c.abs() > 1e-9, c, 0.0) for name, c in change.items()}
    own, following = (change[f"gnn.0.lin_{part}.weight"] for part in ("root", "rel"))
    used = [c for c in range(own.shape[1]) if own[:, c].any()]
    found = torch.linalg.lstsq(own[:, used], following).solution.round(decimals=1)
    return {(c, used[k]) for k in range(len(used)) for c in range(own.shape[1]) if found[k, c] > 0.5}, set(used)


def network(*order):
    """Layers of types that occur once each, in an order of its own."""

    def build():
        middle = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8, bias=False), "c": nn.LayerNorm(8)}
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *(middle[name] for name in order), nn.Linear(8, 3))

    return build


@pytest.mark.thorough
def test_the_graph_of_a_site_cannot_be_read_from_its_messages(tmp_path, secure_grid, secure_play, monkeypatch):
    """From traffic recorded without secure sums the attack reads every edge; with them it reads noise, unless masks are
    zeros."""
    clients = [
        pf.Client(c.id, network(*order), (c.train.x, c.train.y), (c.test.x, c.test.y))
        for c, order in zip(small_clients(3), ("ab", "ca", "bc"), strict=True)
    ]
    LayerCatalogue.from_graphs(map(graph_of_client, clients)).write_yaml(tmp_path / "catalogue.yaml")
    method = FLHAGHN(lr=0.01, graph="layers_and_norms", catalogue=str(tmp_path / "catalogue.yaml"))
    graph, catalogue = graph_of_client(clients[0]), LayerCatalogue.read_yaml(method.catalogue)
    types = [catalogue.node_types.index(node.type) for node in graph.nodes]
    for case in ("plain", "masked", "without masks"):
        secure, consent = case != "plain", {"allow-disclosure": case == "plain"}
        if case == "without masks":
            unmasked_by(monkeypatch)
        found = secure_grid(clients, secure=secure, **consent)
        secure_play(found, method, rounds=1, secure=secure, out=case, **consent)
        letters = {"train": [], "reply": [], "query": [], "evaluate": []}
        for node, kind, record in found.seen:
            if node == 101:
                letters[kind].append(envelope_from_record(record))
        down = next(letter.body.tensors["ghn"] for letter in letters["train"] if letter.head["kind"] == "task")
        reply = next(letter.body for letter in letters["reply"] if letter.head.get("phase") == "local")
        if secure:
            words, layout = parse_sum_message(reply)
            weight = len(clients[0].train) if method.weighted else 1  # which the server may know
            words = np.concatenate([np.full(1, weight, dtype=np.uint64), words[1:]])
            told, used = edges_in(down, mean_from_fixed_point(words, layout)[0]["ghn"])
        if case == "masked":
            assert told != {(types[u], types[v]) for u, v in graph.edges}
            assert used == set(range(down["gnn.0.lin_root.weight"].shape[1]))
        else:
            told, used = (told, used) if secure else edges_in(down, reply.tensors["ghn"])
            assert told == {(types[u], types[v]) for u, v in graph.edges}
            assert used == set(types)


def test_the_noise_of_all_sites_adds_up_to_what_one_alone_needs(tmp_path, secure_grid, secure_play):
    """Each adds its share, sized for the threshold (3, the default for three sites); what it costs is that of one alone."""
    clients, method = small_clients(3), FedAvg(lr=0.05, weighted=False, buffers="local")
    found = secure_grid(clients, disclose="", **{"clip-norm": 10.0, "noise-multiplier": 1.0})
    run, plain = secure_play(found, method, rounds=1), simulated(clients, method, rounds=1)
    noise = torch.cat([(t - plain.last.state["model"][n]).flatten() for n, t in run.last.state["model"].items()])
    assert len(noise) == 99
    assert 0.6 < float(noise.std()) / (10.0 * math.sqrt(3 / 2) / 3) < 1.4
    (file,) = (tmp_path / "sites" / "client-0" / "state").glob("*/metrics.jsonl")
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["epsilon"] for line in told if "epsilon" in line] == [compute_epsilon({1.0: 1}, 1e-5)]


# -- sites that drop out ------------------------------------------------------------------------------------------------


def gone(found, node, wave, rounds=(1,)):
    """The site of a node does not answer letters of a kind: "advertise", "share", "local" or "hand_out"."""
    good = client_app()

    def app(message, context):
        head = json.loads(message.content["head"]["json"])
        if wave == "local":
            asked = head["round"] if head.get("phase") == "local" else None
        else:
            asked = head.get(wave) if head["kind"] == "sum" else None
            asked = asked["round"] if isinstance(asked, dict) else asked
        if asked in rounds:
            return None
        return good(message, context)

    found.nodes[node].app = app


@pytest.mark.parametrize(
    "wave", ["hand_out", *(pytest.param(w, marks=pytest.mark.thorough) for w in ("share", "advertise", "local"))]
)
def test_a_site_that_drops_out_at_a_step_costs_its_part_only(tmp_path, secure_grid, secure_play, wave):
    clients = small_clients(4)
    found = secure_grid(clients)
    gone(found, 104, wave)
    run = secure_play(found, **{"round-seconds": 0.05, "on-error": "skip"})
    first, second, third = run.history
    assert third["failures"] == []
    if wave == "hand_out":  # its numbers are in the sum: three others open it
        assert first["failures"] == []
    if wave != "local":  # whose answer has the keys for the next round
        assert len(second["failures"]) == (wave == "hand_out"), second["failures"]
    if wave == "hand_out":
        assert without_durations([first]) == without_durations(simulated(clients, on_error="skip").history[:1])
        return
    assert [failure["client"] for failure in first["failures"]] == ["client-3"]
    others = simulated(clients[:3], rounds=1)
    scores = [first["clients"][f"client-{k}"]["loss"] for k in range(3)]
    assert scores == [others.history[0]["clients"][f"client-{k}"]["loss"] for k in range(3)], (
        "its part was not left out"
    )


def test_fewer_than_the_threshold_end_the_round_without_a_sum(secure_grid, secure_play):
    found = secure_grid(small_clients(4))
    for node in (103, 104):
        gone(found, node, "local", rounds=(2,))
    with pytest.raises(RoundError, match="its reply is in no sum: 2 sites have replied, and 3 are needed"):
        secure_play(found, rounds=3, **{"round-seconds": 0.05, "on-error": "skip"})


@pytest.mark.thorough
def test_two_that_do_not_hand_out_shares_end_the_round_and_it_is_played_again(tmp_path, secure_grid, secure_play):
    """Resumed, the round has the same survivors: a site opens a round for one list only."""
    clients = small_clients(4)
    found = secure_grid(clients)
    good = [found.nodes[node].app for node in (103, 104)]
    for node in (103, 104):
        gone(found, node, "hand_out", rounds=(2,))
    with pytest.raises(RoundError, match="2 sites have released shares for the secure sum, which needs 3"):
        secure_play(found, rounds=3, **{"round-seconds": 0.05, "on-error": "skip"})
    for node, app in zip((103, 104), good, strict=True):
        found.nodes[node].app = app
    assert_same(tmp_path, secure_play(found, resume=True), simulated(clients))


@pytest.mark.thorough
def test_a_round_that_was_opened_is_not_opened_for_others(secure_grid, secure_play, caplog):
    """The sum of four, and then the sum of three of them: the difference would be the numbers of one site."""
    found = secure_grid(small_clients(4))
    good = [found.nodes[node].app for node in (103, 104)]
    for node in (103, 104):
        gone(found, node, "hand_out", rounds=(2,))
    with pytest.raises(RoundError, match="2 sites have released shares"):
        secure_play(found, rounds=3, **{"round-seconds": 0.05, "on-error": "skip"})
    for node, app in zip((103, 104), good, strict=True):
        found.nodes[node].app = app
    gone(found, 104, "local", rounds=(2,))
    with pytest.raises(RoundError, match="1 sites have released shares"):
        secure_play(found, resume=True)
    assert "was opened for other sites before" in caplog.text


def test_a_site_that_garbles_its_part_is_left_out(secure_grid, secure_play):
    """As any reply that cannot be used; its masks are taken off with the others' shares."""
    clients = small_clients(4)
    found = secure_grid(clients)

    def shorter(letter):
        if "sum" not in letter.body.tensors:
            return letter
        tree = letter.body.tensors["sum"]
        body = dataclasses.replace(letter.body, tensors={"sum": {**tree, "words": tree["words"][:-1]}})
        return dataclasses.replace(letter, body=body)

    instead(shorter)(found.nodes[101])
    run = secure_play(found, rounds=1, **{"on-error": "skip"})
    (failure,) = run.history[0]["failures"]
    assert failure["client"] == "client-0"
    assert "words, and its layout" in failure["reason"]
    others = simulated(clients[1:], rounds=1)
    assert run.history[0]["clients"]["client-1"]["loss"] == others.history[0]["clients"]["client-1"]["loss"]
    assert np.isfinite(run.history[0]["clients"]["client-0"]["loss"])
