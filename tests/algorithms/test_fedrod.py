"""FedRoD: a generic model with a balanced loss, and a head of each client's own. Identities, rounds by hand, learning."""

import pytest
import torch
from halves import OPTIONS, mixed, plain, play, run, short
from plain_torch import (
    LOCAL,
    assert_tensors_near,
    draw_network,
    load,
    mean_of,
    normed,
    parameters_of,
    record_run,
    sgd,
    unequal_clients,
)
from torch.nn import functional as F
from two_parts import swapped

import polyfed as pf
from polyfed.algorithms import FedAvg, FedRoD
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.seeds import torch_generator
from polyfed.testing import small_clients


def lacking():
    """Three clients, of which one has all classes, in other numbers, and two lack one."""
    return plain(mixed(classes=[(0, 1), (1, 2), (0, 1, 2)]))


@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.1}])
@pytest.mark.one_case
def test_with_gamma_0_the_generic_model_is_fedavgs_bit_for_bit(more):
    """With BatchNorm and dropout; whatever the personal head does, and also where the gradient is clipped."""
    options = {**OPTIONS, **more, "buffers": "local"}
    fedavg, fedrod = (run(m, small_clients(), rounds=3) for m in (FedAvg(**options), FedRoD(**options, gamma=0.0)))
    one, other = fedavg.last.state["model"], fedrod.last.state["model"]
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert fedavg.history[-1]["train_loss"] == fedrod.history[-1]["train_loss"]
    assert fedavg.table()[-1]["accuracy"] == fedrod.table()[-1]["server_accuracy"]


@pytest.mark.parametrize(("gamma", "weighted"), [(1.0, True), (0.5, False)])
@pytest.mark.one_case
def test_rounds_in_plain_torch_are_the_same(gamma, weighted, monkeypatch):
    """Two of three clients a round, two of which lack a class. The generic model has momentum and weight decay."""
    clients = unequal_clients(normed, normed, normed, lacks=(0, 1, None))
    method = FedRoD(**LOCAL, gamma=gamma, weighted=weighted)
    recorded = record_run(monkeypatch, method, clients, rounds=4, clients_per_round=2)
    networks, theta = {c.id: draw_network(normed) for c in clients}, parameters_of(draw_network(normed))
    heads = {c.id: (torch.zeros(3, 5).double(), torch.zeros(3).double()) for c in clients}
    for cohort, minibatches in recorded.rounds:
        sent, sizes = [], [len(c.train) if weighted else 1 for c in clients if c.id in cohort]
        for i in cohort:
            network = load(networks[i], theta)
            optimizer, labels = sgd(network.parameters()), clients[int(i[-1])].train.y
            n = torch.tensor([float((labels == label).sum()) for label in range(3)]).double()
            for x, y in minibatches[i]:
                z = network[:-1](x)
                g = network[-1](z)
                share = n**gamma * g.exp()
                balanced = -(share[torch.arange(len(y)), y] / share.sum(1)).log().mean()
                w, b = (tensor.requires_grad_() for tensor in heads[i])
                dw, db = torch.autograd.grad(F.cross_entropy(g.detach() + z.detach() @ w.T + b, y), [w, b])
                heads[i] = (w - LOCAL["lr"] * dw).detach(), (b - LOCAL["lr"] * db).detach()
                optimizer.zero_grad()
                balanced.backward()
                optimizer.step()
            sent.append(parameters_of(network))
        theta = mean_of(sent, sizes)
    assert_tensors_near(recorded.run.last.state["model"], theta)
    for c in clients:
        w, b = heads[c.id]
        assert_tensors_near(recorded.run.last.client_states[c.id]["personal"], {"weight": w, "bias": b})
        network, x = load(networks[c.id], theta).eval(), c.test.x
        z = network[:-1](x)
        torch.testing.assert_close(recorded.run.model(c.id)(x), network[-1](z) + z @ w.T + b, rtol=0, atol=1e-9)


def test_the_evaluated_network_is_the_sum_of_both_heads():
    clients, method = lacking(), FedRoD(**OPTIONS)
    federation, state, own, _ = play(method, clients, rounds=2)
    for c in clients:
        message = method.dispatch(state, federation.client_info(c.id, 2, "personal"))
        theta, h, x = state["model"], own[c.id]["personal"], c.test.x
        z = torch.tanh(x @ theta["0.weight"].T + theta["0.bias"])
        g = z @ theta["2.weight"].T + theta["2.bias"]
        with exclusive_single_torch_thread_with_grad():
            network = method.personal_model(message, own[c.id], c, 0)
            torch.testing.assert_close(network(x), g + z @ h["weight"].T + h["bias"])
            ((name, generic),) = method.other_models(message, own[c.id], c, 0)
            torch.testing.assert_close(generic(x), g)
        assert name == "server"
        assert h["weight"].abs().max() > 0.01


def test_a_client_that_never_took_part_has_the_generic_model():
    found = run(FedRoD(**OPTIONS), small_clients(), rounds=1, clients_per_round=1)
    rows = found.history[-1]["clients"]
    assert (
        sum(row["accuracy"] == row["server_accuracy"] and row["loss"] == row["server_loss"] for row in rows.values())
        == 2
    )


def test_the_generic_model_does_not_feel_the_personal_head():
    """A client that comes with any head sends the same."""
    clients, method = lacking(), FedRoD(**OPTIONS)
    federation, state, own, _ = play(method, clients, rounds=1)
    message, c = method.dispatch(state, federation.client_info("client-0", 2)), clients[0]
    other = {**own[c.id], "personal": {n: t + 3 for n, t in own[c.id]["personal"].items()}}
    with exclusive_single_torch_thread_with_grad():
        sent = [method.local_update(message, s, c, 5)[0].tensors["model"] for s in (own[c.id], other)]
    assert all(torch.equal(sent[0][name], sent[1][name]) for name in sent[0])
    for name, tensor in other["personal"].items():  # nor does training change the private state that it got
        assert torch.equal(tensor, own[c.id]["personal"][name] + 3)


def imbalanced():
    """Three clients with 40 examples of one class, 12 of another and 4 of the last, which overlap; tested on all alike."""
    generator = torch_generator(5)
    centres = 0.8 * torch.randn(3, 6, generator=generator)

    def drawn(y):
        return centres[y] + torch.randn(len(y), 6, generator=generator), y

    everything = drawn(torch.arange(300) % 3)
    return [pf.Client(f"c{k}", short, drawn(torch.tensor([0] * 40 + [1] * 12 + [2] * 4)), everything) for k in range(3)]


@pytest.mark.thorough
def test_the_generic_model_is_better_than_fedavgs_where_classes_are_rare():
    """Tested on all classes alike: without the balance (γ = 0) it prefers the frequent class."""
    balanced, unbalanced = (
        run(FedRoD(lr=0.2, batch_size=8, gamma=gamma), imbalanced(), rounds=8).table()[-1]["server_accuracy"]
        for gamma in (1.0, 0.0)
    )
    assert balanced > unbalanced + 0.08


@pytest.mark.thorough
def test_personal_heads_learn_clients_who_give_the_same_inputs_other_labels():
    row = run(FedRoD(lr=0.2, batch_size=8), swapped(), rounds=15).table()[-1]
    assert row["accuracy"] > row["server_accuracy"] + 0.3
    assert row["accuracy"] > 0.75


@pytest.mark.parametrize("wrong", [{"gamma": -1.0}, {"label_smoothing": 0.1}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"FedRoD: {next(iter(wrong))} must be"):
        FedRoD(**wrong)
