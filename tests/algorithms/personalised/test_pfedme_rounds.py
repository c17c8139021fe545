"""pFedMe, algorithm 1 of its paper in plain torch: polyfed computes the same in three rounds of clients of unlike sizes."""

import pytest
import torch
from plain_torch import (
    LOCAL,
    assert_networks_equal,
    assert_tensors_near,
    draw_network,
    mean_of,
    normed,
    parameters_of,
    record_run,
    sgd,
    unequal_clients,
)
from torch.nn import functional as F

from polyfed.algorithms import PFedMe


@pytest.mark.parametrize(("weighted", "beta"), [(False, 1.0), (True, 0.7)])
@pytest.mark.one_case
def test_rounds_in_plain_torch_are_the_same(weighted, beta, monkeypatch):
    """Two of three clients are averaged, and all train. The step of w has momentum and weight decay."""
    clients = unequal_clients(normed, normed, normed)
    inner = {"k": 3, "lam": 4.0, "personal_lr": 0.06}
    method = PFedMe(**LOCAL, **inner, beta=beta, weighted=weighted)
    recorded = record_run(monkeypatch, method, clients, clients_per_round=2)

    theta = {c.id: draw_network(normed) for c in clients}  # their buffers stay with the clients
    w = parameters_of(draw_network(normed))
    for cohort, minibatches in recorded.rounds:
        sent = {}
        for i, network in theta.items():
            assert len(minibatches[i]) > 2
            network.load_state_dict(w, strict=False)
            local = {name: tensor.clone() for name, tensor in w.items()}
            outer = sgd(local.values())
            for x, y in minibatches[i]:
                for _ in range(inner["k"]):
                    slopes = torch.autograd.grad(F.cross_entropy(network(x), y), list(network.parameters()))
                    with torch.no_grad():
                        for (name, p), slope in zip(network.named_parameters(), slopes, strict=True):
                            p -= inner["personal_lr"] * (slope + inner["lam"] * (p - local[name]))
                for name, p in network.named_parameters():
                    local[name].grad = inner["lam"] * (local[name] - p.detach())
                outer.step()
            sent[i] = local
        sizes = [len(c.train) if weighted else 1 for c in clients if c.id in cohort]
        mean = mean_of([sent[i] for i in cohort], sizes)
        w = {name: (1 - beta) * tensor + beta * mean[name] for name, tensor in w.items()}

    assert {len(cohort) for cohort, _ in recorded.rounds} == {2}
    assert_networks_equal(recorded, theta)
    assert_tensors_near(recorded.run.last.state["model"], w)
