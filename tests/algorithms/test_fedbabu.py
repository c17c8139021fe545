"""FedBABU: a body under a head that nobody trains. What it is without a head, a round by hand, what fine-tuning moves."""

import copy

import pytest
import torch
from halves import FULL, OPTIONS, mixed, plain, play, run, short
from plain_torch import (
    LOCAL,
    assert_networks_equal,
    assert_tensors_near,
    draw_network,
    load,
    mean_of,
    normed,
    parameters_of,
    record_run,
    sgd,
    train,
    unequal_clients,
)
from two_parts import BODY, HEAD, swapped

import polyfed as pf
from polyfed.algorithms import FedAvgFT, FedBABU
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients
from tests.few_cases import few


def evaluated(method, clients, rounds=2):
    """State after some rounds, and for each client the tensors before and after fine-tuning."""
    federation, state, own, _ = play(method, clients, rounds=rounds)
    networks = {}
    with exclusive_single_torch_thread_with_grad():
        for c in clients:
            message = method.dispatch(state, federation.client_info(c.id, rounds, "personal"))
            ((name, server),) = method.other_models(message, own[c.id], c, 7)
            assert name == "server"
            before = {n: t.clone() for n, t in server.state_dict().items()}
            after = method.personal_model(message, own[c.id], c, 7).state_dict()
            networks[c.id] = before, {n: t.clone() for n, t in after.items()}
    return state, networks


@pytest.mark.parametrize("policy", few(["average", "local", "recompute"], ["recompute"]))
@pytest.mark.parametrize("nothing", [{"head_layers": 0}, {"head": ()}])
@pytest.mark.one_case
def test_without_a_head_it_is_fedavg_with_fine_tuning_bit_for_bit(policy, nothing):
    options = {**OPTIONS, "buffers": policy, "finetune_epochs": 2, "finetune_lr": 0.02}
    theirs = run(FedAvgFT(**options), small_clients())
    with pytest.warns(RuntimeWarning, match=r"this is FedAvg with fine-tuning \(fedavg_ft\)$"):
        ours = run(FedBABU(**options, **nothing), small_clients())
    for client in small_clients():
        one, other = theirs.model(client.id).state_dict(), ours.model(client.id).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert theirs.history[-1]["train_loss"] == ours.history[-1]["train_loss"]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.one_case
def test_rounds_and_fine_tuning_in_plain_torch_are_the_same(weighted, monkeypatch):
    """Two of three clients a round. All are evaluated after fine-tuning, of which the next round sees nothing."""
    clients = unequal_clients(normed, normed, normed)
    method = FedBABU(**LOCAL, finetune_epochs=3, weighted=weighted)
    recorded = record_run(monkeypatch, method, clients, rounds=4, clients_per_round=2)
    networks, tuned = {c.id: draw_network(normed) for c in clients}, {}
    body = parameters_of(draw_network(normed)[:-1])
    for cohort, minibatches in recorded.rounds:
        sent, sizes = [], [len(c.train) if weighted else 1 for c in clients if c.id in cohort]
        steps = {c.id: LOCAL["local_epochs"] * -(-len(c.train) // LOCAL["batch_size"]) for c in clients}
        for i in cohort:
            network = load(networks[i], body)
            train(network, sgd(network[:-1].parameters()), minibatches[i][: steps[i]])
            sent.append(parameters_of(network[:-1]))
        body = mean_of(sent, sizes)
        for i, network in networks.items():
            tuned[i] = copy.deepcopy(load(network, body))
            last = minibatches[i][steps[i] if i in cohort else 0 :]
            assert len(last) == 3 / LOCAL["local_epochs"] * steps[i]
            train(tuned[i], sgd(tuned[i].parameters(), lr=LOCAL["lr"] / 10), last)
    assert_tensors_near(recorded.run.last.state["model"], body)
    assert_networks_equal(recorded, tuned)


def test_fine_tuning_takes_a_tenth_of_the_rounds_rate():
    clients = plain(mixed())
    rate = FULL["lr"]
    networks = [evaluated(FedBABU(**FULL, finetune_lr=lr), clients)[1] for lr in (None, rate / 10, rate)]
    for c in clients:
        (_, default), (_, tenth), (_, whole) = (networks_of_lr[c.id] for networks_of_lr in networks)
        assert all(torch.equal(default[name], tenth[name]) for name in BODY + HEAD)
        assert not all(torch.equal(default[name], whole[name]) for name in BODY + HEAD)


def test_the_head_keeps_its_draw_and_is_never_sent():
    clients, draw = plain(mixed()), initial_state(short, 3)
    _, _, own, replies = play(FedBABU(**OPTIONS, weight_decay=0.1), clients, rounds=3)
    for c in clients:
        assert set(replies[c.id].tensors["model"]) == set(BODY)
        assert all(torch.equal(own[c.id]["head"][name], draw[name]) for name in HEAD)
        assert not torch.equal(replies[c.id].tensors["model"]["0.weight"], draw["0.weight"])


@pytest.mark.parametrize(("part", "moved"), [("all", BODY + HEAD), ("head", HEAD), ("body", BODY)])
@pytest.mark.one_case
def test_fine_tuning_moves_the_chosen_part_and_no_other(part, moved):
    _, networks = evaluated(FedBABU(**OPTIONS, finetune_part=part), plain(mixed()))
    for before, after in networks.values():
        assert {name for name in before if not torch.equal(before[name], after[name])} == set(moved)


def test_without_fine_tuning_all_clients_have_one_network():
    """The average body with the head as it was drawn."""
    state, networks = evaluated(FedBABU(**OPTIONS, finetune_epochs=0), plain(mixed()))
    for before, after in networks.values():
        expected = {**state["model"], **{name: initial_state(short, 3)[name] for name in HEAD}}
        assert all(torch.equal(before[name], expected[name]) for name in expected)
        assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_what_is_learnt_does_not_depend_on_fine_tuning():
    states = [play(FedBABU(**OPTIONS, **more), plain(mixed()), 2)[1] for more in ({}, {"finetune_epochs": 0})]
    assert all(torch.equal(states[0]["model"][name], states[1]["model"][name]) for name in BODY)


@pytest.mark.thorough
def test_fine_tuning_learns_clients_who_give_the_same_inputs_other_labels():
    """Before it, one network is right for one of three at best."""
    row = run(FedBABU(lr=0.2, batch_size=8, finetune_epochs=10), swapped(), rounds=10).table()[-1]
    assert row["accuracy"] > row["server_accuracy"] + 0.3
    assert row["accuracy"] > 0.85


@pytest.mark.thorough
def test_the_body_learns_under_a_head_that_is_not_trained():
    found = run(FedBABU(lr=0.2, batch_size=8, finetune_epochs=0), small_clients(), rounds=15)
    assert found.table()[-1]["accuracy"] > 0.8  # 1/3 is chance


@pytest.mark.parametrize("wrong", [{"finetune_epochs": -1}, {"finetune_part": "neck"}, {"finetune_lr": 0.0}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"FedBABU: (unknown )?{next(iter(wrong))}"):
        FedBABU(**wrong)
