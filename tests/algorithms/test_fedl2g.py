"""FedL2G: guiding gradients by differences, a round in plain torch, and what guiding is worth on real digits."""

import functools

import pytest
import torch
import torch.nn.functional as F
from halves import FULL, OPTIONS, mixed, plain, play, run

import polyfed as pf
from polyfed.algorithms import FedL2G
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.data import IID, SOURCES, Split, make_clients
from polyfed.models import ModelSpec

GUIDES = ["logits", "features"]


def guided_loss(weights, x, y, vectors, guide):
    """CE + the mean of ‖z − v_y‖²/d of a linear layer, tanh and a linear layer, by their tensors."""
    hidden = torch.tanh(x @ weights["0.weight"].T + weights["0.bias"])
    outputs = hidden @ weights["2.weight"].T + weights["2.bias"]
    z = outputs if guide == "logits" else hidden
    return F.cross_entropy(outputs, y) + (0.0 if vectors is None else ((z - vectors[y]) ** 2).mean())


def quiz_loss_after_a_step(weights, study, quiz, vectors, guide, lr):
    """Of W' = W − η∇, which depends on the vectors."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    loss = guided_loss(leaves, *study, vectors, guide)
    steps = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    moved = {name: leaves[name] - lr * step for name, step in zip(leaves, steps, strict=True)}
    return guided_loss(moved, *quiz, None, guide)


def parts(client, quiz_rows):
    """Study and quiz examples."""
    held_out = torch.zeros(len(client.train), dtype=torch.bool)
    held_out[quiz_rows] = True
    x, y = client.train.x, client.train.y
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])


@pytest.mark.parametrize("guide", GUIDES)
def test_a_round_written_out_in_plain_torch_is_the_same(guide):
    """The second round of clients of which two have two classes of three, with the full batch. The gradients go through the
    tried step, with derivatives of second order, and are those that differences give."""
    clients = plain(mixed(classes=[(0, 1), (1, 2), (0, 1, 2)]))
    method = FedL2G(**FULL, guide=guide, server_lr=0.7, quiz_size=6)
    _, state, own, _ = play(method, clients)
    _, after, trained, replies = play(method, clients, rounds=2)
    vectors, sums, counts = state["guides"]["vectors"], torch.zeros(3, 1), torch.zeros(3, 1)
    for c in clients:
        study, quiz = parts(c, own[c.id]["quiz"])
        assert len(quiz[1]) == 6
        weights = dict(own[c.id]["model"])
        for _ in range(3):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
            steps = torch.autograd.grad(guided_loss(leaves, *study, vectors, guide), list(leaves.values()))
            weights = {n: (leaves[n] - 0.1 * step).detach() for n, step in zip(leaves, steps, strict=True)}
        torch.testing.assert_close(trained[c.id]["model"], weights, rtol=1e-5, atol=1e-6)

        v = vectors.clone().requires_grad_()
        (expected,) = torch.autograd.grad(quiz_loss_after_a_step(weights, study, quiz, v, guide, 0.1), v)
        sent = replies[c.id].tensors["classes"]
        torch.testing.assert_close(sent["sums"], expected, rtol=1e-4, atol=1e-7)
        present = torch.bincount(study[1], minlength=3) > 0
        assert torch.equal(sent["weights"] > 0, present)
        sums, counts = sums + expected * present[:, None], counts + present[:, None]

        exact = {n: t.double() for n, t in weights.items()}
        doubles = [(x.double(), y) for x, y in (study, quiz)]
        for place in ((0, 0), (1, 2), (2, 1)):
            shift = torch.zeros_like(vectors, dtype=torch.float64)
            shift[place] = 1e-4
            ahead, behind = (
                quiz_loss_after_a_step(exact, *doubles, vectors.double() + s, guide, 0.1) for s in (shift, -shift)
            )
            assert float(sent["sums"][place]) == pytest.approx(
                float((ahead - behind).detach() / 2e-4), rel=1e-3, abs=1e-7
            )
    torch.testing.assert_close(
        after["guides"]["vectors"], vectors - 0.7 * sums / counts.clamp(min=1), rtol=1e-4, atol=1e-6
    )


def test_a_step_of_the_vectors_lowers_the_quiz_loss():
    """Of one client, with the weights that it had when it sent the gradient."""
    (client,) = plain(mixed())[:1]
    method = FedL2G(**FULL, server_lr=0.5, quiz_size=8)
    _, state, own, _ = play(method, [client])
    _, after, trained, _ = play(method, [client], rounds=2)
    study, quiz = parts(client, own[client.id]["quiz"])
    weights = trained[client.id]["model"]
    before, behind = (
        quiz_loss_after_a_step(weights, study, quiz, s["guides"]["vectors"], "logits", 0.1).detach()
        for s in (state, after)
    )
    assert behind < before


def test_quiz_examples_are_not_trained_on():
    """Others in their place change what is sent, and not the network."""
    client = plain(mixed())[0]
    method = FedL2G(**OPTIONS, quiz_size=5)
    own = method.client_init(client, 3)
    x = client.train.x.clone()
    x[own["quiz"]] += 5.0
    other = pf.Client(client.id, client.model, (x, client.train.y), client.test, client.val)
    results = [method.local_update(Message({}, {"lr": 0.1, "trains": 1.0}), own, c, 7) for c in (client, other)]
    for name, tensor in results[0][1]["model"].items():
        assert torch.equal(results[1][1]["model"][name], tensor)
    assert not torch.equal(*(reply.tensors["classes"]["sums"] for reply, _ in results))


def test_at_first_the_vectors_alone_are_trained():
    clients = mixed()
    found = run(FedL2G(**OPTIONS, guide_rounds=2), clients, rounds=3)
    first = run(FedL2G(**OPTIONS, guide_rounds=2), clients, rounds=2)
    drawn = {c.id: FedL2G().client_init(c, 3)["model"] for c in clients}
    for c in clients:
        for name, tensor in drawn[c.id].items():
            assert torch.equal(first.last.client_states[c.id]["model"][name], tensor)
        assert not torch.equal(found.last.client_states[c.id]["model"]["0.weight"], drawn[c.id]["0.weight"])
    assert first.history[-1]["train_loss"] is None
    assert found.history[-1]["train_loss"] is not None


def test_networks_with_different_numbers_of_outputs_are_refused():
    clients = mixed()
    wide = pf.Client("wide", ModelSpec("mlp", {"hidden": (4,)}, (6,), 5), clients[0].train, clients[0].test)
    with pytest.raises(UserError, match="networks need the same number of outputs"):
        run(FedL2G(**OPTIONS), [*clients, wide])


# -- real digits ---------------------------------------------------------------------------------------------------


@functools.cache
def loss(**fields):
    """On test examples, of four clients with 40 digits and two networks, after 15 rounds."""
    pool = SOURCES["digits"](common_test=0.3).load()
    split = Split(clients=4, examples_per_client=40, test_fraction=0.5, public_fraction=0.2, global_test=-1)
    data, _ = make_clients(pool, split, IID(), seed=0)
    nets = [ModelSpec("mlp", {"hidden": hidden}, pool.input_shape, pool.num_outputs) for hidden in ((32,), (64, 32))]
    clients = [pf.Client(d.id, nets[k % 2], d.train, d.test, None, d.global_test) for k, d in enumerate(data)]
    method = FedL2G(lr=0.1, local_epochs=2, batch_size=10, **fields)
    return pf.federate(clients, method, rounds=15, evaluate_every=15, workers=0).table()[-1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("guide", "rate", "margin"), [("logits", 30.0, 0.02), ("features", 300.0, 0.03)])
def test_learned_vectors_guide_better_than_the_first_ones(guide, rate, margin):
    """Losses with seeds 0 and 1: logits 1.419 and 1.431, learned 1.317 and 1.387; features 1.056 and 1.095, learned 0.944
    and 1.033. The margins are half of the lesser gain."""
    assert loss(guide=guide, server_lr=rate) < loss(guide=guide, server_lr=1e-9) - margin
