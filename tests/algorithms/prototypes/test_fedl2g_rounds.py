"""FedL2G in plain torch, with derivatives of second order through the tried step: polyfed computes the same rounds."""

import copy

import pytest
import torch
from plain_torch import (
    LOCAL,
    SEED,
    assert_tensors_near,
    deep,
    draw_network,
    normed,
    record_run,
    sgd,
    unequal_clients,
)
from torch.func import functional_call
from torch.nn import functional as F

from polyfed.algorithms import FedL2G
from polyfed.algorithms.prototypes import fedl2g

NEAR = 2e-6  # vectors and their gradients travel in single precision


def guided_loss(network, parameters, x, y, vectors, guide):
    """CE + the mean of ‖z − v_y‖²/d, where z are the outputs or the input of the last layer; without vectors, CE."""
    body = {name: p for name, p in parameters.items() if not name.startswith(f"{len(network) - 1}.")}
    hidden = functional_call(network[:-1], body, x)
    outputs = F.linear(hidden, *list(parameters.values())[-2:])
    z = outputs if guide == "logits" else hidden
    return F.cross_entropy(outputs, y) + (0.0 if vectors is None else (z - vectors[y]).square().mean())


def guiding_gradient(network, study, quiz, vectors, guide):
    """∇_V of the quiz loss after one step of plain SGD on the guided loss."""
    network, v = copy.deepcopy(network), vectors.clone().requires_grad_()
    weights = dict(network.named_parameters())
    slopes = torch.autograd.grad(
        guided_loss(network, weights, *study, v, guide), list(weights.values()), create_graph=True
    )
    moved = {name: w - LOCAL["lr"] * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return torch.autograd.grad(guided_loss(network, moved, *quiz, None, guide), v)[0]


@pytest.mark.parametrize(("guide", "rate", "weighted"), [("logits", 0.7, False), ("features", 5.0, True)])
@pytest.mark.one_case
def test_rounds_in_plain_torch_are_the_same(guide, rate, weighted, monkeypatch):
    """Two of three clients a round, of two architectures; the first two clients lack a class."""
    clients = unequal_clients(normed, deep, normed, lacks=(0, 1, None))
    tried = {c.id: [] for c in clients}  # study and quiz minibatches of the tried steps, by turns
    take = fedl2g.minibatch_of_two_or_more

    def recorded_minibatch(examples, rows):
        x, y = take(examples, rows)
        (owner,) = [c.id for c in clients if (c.train.x == x[0]).all(1).any()]
        tried[owner].append((x, y))
        return x, y

    monkeypatch.setattr(fedl2g, "minibatch_of_two_or_more", recorded_minibatch)
    method = FedL2G(**LOCAL, guide=guide, server_lr=rate, quiz_size=4, weighted=weighted)
    recorded = record_run(monkeypatch, method, clients, rounds=4, clients_per_round=2)
    studies = {
        i: iter(pairs[-2 * sum(i in cohort for cohort, _ in recorded.rounds) :: 2]) for i, pairs in tried.items()
    }

    networks = {c.id: draw_network(c.model) for c in clients}
    vectors = fedl2g.draw_first_vectors(3, 3 if guide == "logits" else 5, SEED).double()
    lacking = 0
    for cohort, minibatches in recorded.rounds:
        total, weights = torch.zeros_like(vectors), torch.zeros(3, 1, dtype=torch.float64)
        for i in cohort:
            network, train = networks[i], clients[int(i[-1])].train
            optimizer = sgd(network.parameters())
            for x, y in minibatches[i]:
                optimizer.zero_grad()
                guided_loss(network, dict(network.named_parameters()), x, y, vectors, guide).backward()
                optimizer.step()
            held_out = recorded.run.last.client_states[i]["quiz"]
            study, quiz = next(studies[i]), (train.x[held_out], train.y[held_out])
            has_class = torch.tensor([[float(c in study[1])] for c in range(3)], dtype=torch.float64)
            share = has_class * ((len(train) - len(held_out)) if weighted else 1)
            total += share * guiding_gradient(network, study, quiz, vectors, guide)
            weights += share
            lacking += int((has_class == 0).sum())
        vectors = vectors - rate * total / weights.clamp(min=1)

    assert lacking > 1
    assert_tensors_near(recorded.run.last.state["guides"], {"vectors": vectors.float()}, NEAR)
    for client, network in networks.items():
        assert_tensors_near(recorded.run.model(client).state_dict(), network.state_dict(), NEAR)
