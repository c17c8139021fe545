"""FedRoD: a generic model with a balanced loss, and a head of each client's own. Identities, rounds by hand, learning."""

import pytest
import torch
from halves import FULL, OPTIONS, mixed, plain, play, run, short
from torch.nn import functional as F
from two_parts import BODY, HEAD, mean_of, swapped

import polyfed as pf
from polyfed.algorithms import FedAvg, FedRoD
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import torch_generator
from polyfed.testing import small_clients


def lacking():
    """Three clients, of which one has all classes, in other numbers, and two lack one."""
    return plain(mixed(classes=[(0, 1), (1, 2), (0, 1, 2)]))


@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.1}])
def test_with_gamma_0_the_generic_model_is_fedavgs_bit_for_bit(more):
    """With BatchNorm and dropout; whatever the personal head does, and also where the gradient is clipped."""
    options = {**OPTIONS, **more, "buffers": "local"}
    fedavg, fedrod = (run(m, small_clients(), rounds=3) for m in (FedAvg(**options), FedRoD(**options, gamma=0.0)))
    one, other = fedavg.last.state["model"], fedrod.last.state["model"]
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert fedavg.history[-1]["train_loss"] == fedrod.history[-1]["train_loss"]
    assert fedavg.table()[-1]["accuracy"] == fedrod.table()[-1]["server_accuracy"]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_rounds_in_plain_torch_are_the_same(gamma):
    clients = lacking()
    _, state, own, replies = play(FedRoD(**FULL, gamma=gamma), clients, rounds=2)
    theta = initial_state(short, 3)
    heads = [(torch.zeros(3, 8), torch.zeros(3)) for _ in clients]
    for _ in range(2):
        trained = []
        for k, c in enumerate(clients):
            x, y, p = c.train.x, c.train.y, {name: tensor.clone() for name, tensor in theta.items()}
            n = torch.tensor([float((y == label).sum()) for label in range(3)])
            for _ in range(3):
                leaves = {name: tensor.requires_grad_(True) for name, tensor in p.items()}
                z = torch.tanh(x @ leaves["0.weight"].T + leaves["0.bias"])
                g = z @ leaves["2.weight"].T + leaves["2.bias"]
                weighted = n**gamma * g.exp()
                balanced = -(weighted[torch.arange(len(y)), y] / weighted.sum(1)).log().mean()
                slopes = torch.autograd.grad(balanced, list(leaves.values()))
                w, b = (tensor.requires_grad_(True) for tensor in heads[k])
                personal = F.cross_entropy(g.detach() + z.detach() @ w.T + b, y)
                dw, db = torch.autograd.grad(personal, [w, b])
                p = {name: p[name].detach() - 0.1 * slope for name, slope in zip(p, slopes, strict=True)}
                heads[k] = (w.detach() - 0.1 * dw, b.detach() - 0.1 * db)
            trained.append(p)
        theta = mean_of(trained, [len(c.train) for c in clients], BODY + HEAD)
    for c, (w, b) in zip(clients, heads, strict=True):
        assert set(replies[c.id].tensors) == {"model"}
        torch.testing.assert_close(own[c.id]["personal"]["weight"], w, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own[c.id]["personal"]["bias"], b, rtol=1e-5, atol=1e-6)
    for name, tensor in theta.items():
        torch.testing.assert_close(state["model"][name], tensor, rtol=1e-5, atol=1e-6)


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


def test_the_generic_model_is_better_than_fedavgs_where_classes_are_rare():
    """Tested on all classes alike: without the balance (γ = 0) it prefers the frequent class."""
    balanced, unbalanced = (
        run(FedRoD(lr=0.2, batch_size=8, gamma=gamma), imbalanced(), rounds=8).table()[-1]["server_accuracy"]
        for gamma in (1.0, 0.0)
    )
    assert balanced > unbalanced + 0.08


def test_personal_heads_learn_clients_who_give_the_same_inputs_other_labels():
    row = run(FedRoD(lr=0.2, batch_size=8), swapped(), rounds=15).table()[-1]
    assert row["accuracy"] > row["server_accuracy"] + 0.3
    assert row["accuracy"] > 0.75


@pytest.mark.parametrize("wrong", [{"gamma": -1.0}, {"label_smoothing": 0.1}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"FedRoD: {next(iter(wrong))} must be"):
        FedRoD(**wrong)
