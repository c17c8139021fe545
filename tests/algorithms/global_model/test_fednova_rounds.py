"""FedNova, eq. 4 and section 4.1 of its paper in plain torch: polyfed computes the same in rounds of a whole network."""

import pytest
from plain_torch import (
    LOCAL,
    assert_tensors_near,
    copy_of,
    draw_network,
    load,
    mean_of,
    normed,
    record_run,
    sgd,
    unequal_clients,
)
from torch.nn import functional as F

from polyfed.algorithms import FedNova

NEAR = 1e-6  # polyfed sends ‖a_i‖₁ in single precision; in double it agrees to 1e-11


@pytest.mark.parametrize(("weighted", "momentum"), [(True, 0.6), (True, 0.0), (False, 0.6)])
@pytest.mark.one_case
def test_rounds_in_plain_torch_are_the_same(weighted, momentum, monkeypatch):
    """Of 2, 4 and 4 minibatches an epoch, two clients a round, with weight decay; statistics are averaged as they are."""
    clients = unequal_clients(normed, normed, normed)
    method = FedNova(**LOCAL | {"momentum": momentum}, weighted=weighted)
    recorded = record_run(monkeypatch, method, clients, rounds=4, clients_per_round=2)

    network = draw_network(normed)
    x, names, counts = copy_of(network), [name for name, _ in network.named_parameters()], set()
    for cohort, minibatches in recorded.rounds:
        shares = [len(c.train) if weighted else 1 for c in clients if c.id in cohort]
        directions, norms, trained = [], [], []
        for i in cohort:
            optimizer = sgd(load(network, x).parameters(), momentum=momentum)
            norm, applied = 0.0, 0.0
            for inputs, labels in minibatches[i]:
                optimizer.zero_grad()
                F.cross_entropy(network(inputs), labels).backward()
                optimizer.step()
                applied = momentum * applied + 1  # the weights that this step gives to all gradients so far
                norm += applied
            trained.append(copy_of(network))
            norms.append(norm)
            directions.append({name: (x[name] - trained[-1][name]) / norm for name in names})
            counts.add(len(minibatches[i]))
        tau = sum(share * norm for share, norm in zip(shares, norms, strict=True)) / sum(shares)
        step = mean_of(directions, shares)
        x = {**mean_of(trained, shares), **{name: x[name] - tau * step[name] for name in names}}

    assert counts == {4, 8}
    state = recorded.run.last.state
    assert_tensors_near({**state["model"], **state["buffers"]}, x, NEAR)
    assert state["steps"]["weight"].item() == pytest.approx(tau)
