"""FML in plain torch, by the losses of its paper: polyfed computes the same in rounds of clients of unlike sizes."""

import pytest
from plain_torch import (
    LOCAL,
    assert_networks_equal,
    assert_tensors_near,
    copy_of,
    deep,
    draw_network,
    load,
    mean_of,
    meme,
    normed,
    record_run,
    sgd,
    unequal_clients,
)
from torch.nn import functional as F

from polyfed.algorithms import FML
from polyfed.core.io.trusted_code import trust_code


def divergence(teacher, student):
    """KL(teacher ‖ student) of softmax outputs, the mean over examples."""
    p, q = teacher.detach().softmax(1), student.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


@pytest.mark.parametrize(("alpha", "beta", "weighted"), [(0.6, 0.3, True), (0.2, 0.5, False)])
@pytest.mark.one_case
def test_rounds_in_plain_torch_are_the_same(alpha, beta, weighted, monkeypatch):
    """Two of three clients a round, of two architectures. Each network has its own optimiser and loss."""
    trust_code("plain_torch:meme")
    clients = unequal_clients(normed, deep, normed)
    method = FML(**LOCAL, shared="plain_torch:meme", alpha=alpha, beta=beta, weighted=weighted)
    recorded = record_run(monkeypatch, method, clients, rounds=4, clients_per_round=2)

    own, common = {c.id: draw_network(c.model) for c in clients}, draw_network(meme)
    shared = copy_of(common)
    for cohort, minibatches in recorded.rounds:
        sent = []
        for i in cohort:
            load(common, shared)
            optimizers = sgd(own[i].parameters()), sgd(common.parameters())
            for x, y in minibatches[i]:
                z, s = own[i](x), common(x)
                losses = (
                    alpha * F.cross_entropy(z, y) + (1 - alpha) * divergence(s, z),
                    beta * F.cross_entropy(s, y) + (1 - beta) * divergence(z, s),
                )
                for optimizer, loss in zip(optimizers, losses, strict=True):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            sent.append(copy_of(common))
        shared = mean_of(sent, [len(c.train) if weighted else 1 for c in clients if c.id in cohort])

    assert_networks_equal(recorded, own)
    assert_tensors_near(recorded.run.last.state["model"], shared)
