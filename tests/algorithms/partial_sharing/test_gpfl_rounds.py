"""GPFL beside the paper's algorithm 1 and equations 3 to 11 in plain torch, with layer norm and cosines written out."""

import pytest
import torch
from plain_rounds_of_heads import (
    CLASSES,
    OPTIONS,
    SEED,
    WIDTH,
    descend,
    initial_network,
    mean_state,
    minibatches,
    narrow,
    round_seed,
    run_in_polyfed,
    unlike_clients,
)
from torch.nn import functional as F

from polyfed.algorithms import GPFL
from polyfed.algorithms.base.heads.conditioning import draw_conditioning_tensors


def conditioned(tensors, z, context):
    """relu((1 + γ(c))·z + β(c)), of a linear layer, ReLU and a layer norm each (eqs. 3 and 4)."""

    def vector(name):
        h = torch.relu(tensors[f"{name}.weight"] @ context + tensors[f"{name}.bias"])
        normal = (h - h.mean()) / ((h - h.mean()).square().mean() + 1e-5).sqrt()
        return normal * tensors[f"{name}.norm.weight"] + tensors[f"{name}.norm.bias"]

    return torch.relu((1 + vector("gamma")) * z + vector("beta"))


def personal_context(client, embeddings):
    """The mean of the embeddings by the client's shares of the classes."""
    return sum((client.train.y == k).double().mean() * embeddings[k] for k in range(CLASSES))


def train_all(net, shared, client, seed, lam, mu):
    received = shared["embeddings"].detach().clone()
    generic, personal = received.mean(0), personal_context(client, received)

    def loss_of(rows):
        z, y = net[:-1](client.train.x[rows]), client.train.y[rows]
        common, e = conditioned(shared, z, generic), shared["embeddings"]
        lengths = common.norm(dim=1).clamp(min=1e-12)  # that of an example whose numbers are all 0 after the ReLU
        cosines = torch.stack([(common @ e[k]) / (lengths * e[k].norm()) for k in range(CLASSES)], 1)
        loss = F.cross_entropy(net[-1](conditioned(shared, z, personal)), y) + F.cross_entropy(cosines, y)
        decay = sum(tensor.square().sum() for tensor in shared.values())
        return loss + lam * (common - received[y]).square().sum().sqrt() + mu / 2 * decay

    descend(net.train().parameters(), loss_of, minibatches(seed, len(client.train)), plain=list(shared.values()))
    net.eval()


@pytest.mark.parametrize(("lam", "mu"), [(0.02, 0.1), (0.5, 0.0)])
@pytest.mark.one_case
def test_four_rounds_with_two_clients_each_are_those_of_plain_torch(lam, mu):
    clients = {c.id: c for c in unlike_clients((narrow,) * 3)}
    run, rounds = run_in_polyfed(GPFL(**OPTIONS, lam=lam, mu=mu), list(clients.values()))
    nets, body = {i: initial_network(narrow) for i in clients}, {}
    common = {name: t.double() for name, t in draw_conditioning_tensors(CLASSES, WIDTH, SEED).items()}
    for number, members in enumerate(rounds, 1):
        trained = []
        for i in members:
            nets[i].load_state_dict(nets[i].state_dict() | body)
            shared = {name: tensor.clone().requires_grad_() for name, tensor in common.items()}
            train_all(nets[i], shared, clients[i], round_seed(number, i), lam, mu)
            parameters = {name: p.detach().clone() for name, p in nets[i].named_parameters() if name[0] != "5"}
            trained.append((parameters, {name: tensor.detach() for name, tensor in shared.items()}))
        n = [len(clients[i].train) for i in members]
        body, common = (mean_state(list(states), n) for states in zip(*trained, strict=True))
    assert run.last.state["model"].keys() == body.keys()  # the head is never sent
    for name, tensor in common.items():
        found = run.last.state["conditional"][name]
        torch.testing.assert_close(found, tensor, rtol=1e-9, atol=1e-9)
    for i, c in clients.items():
        nets[i].load_state_dict(nets[i].state_dict() | body)
        z = conditioned(common, nets[i][:-1](c.test.x), personal_context(c, common["embeddings"]))
        torch.testing.assert_close(run.model(i)(c.test.x), nets[i][-1](z), rtol=1e-9, atol=1e-9)
