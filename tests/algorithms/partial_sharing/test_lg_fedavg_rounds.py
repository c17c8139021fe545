"""LG-FedAvg, algorithm 1 of its paper in plain torch: polyfed computes the same in rounds of two architectures."""

import pytest
import torch
from plain_torch import (
    LOCAL,
    assert_networks_equal,
    assert_tensors_near,
    deep,
    draw_network,
    mean_of,
    normed,
    record_run,
    sgd,
    train,
    unequal_clients,
)

from polyfed.algorithms import LGFedAvg


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.one_case
def test_rounds_in_plain_torch_are_the_same(weighted, monkeypatch):
    """Two of three clients a round; the others get the new head, too, and are evaluated with it."""
    clients = unequal_clients(normed, deep, normed)
    recorded = record_run(monkeypatch, LGFedAvg(**LOCAL, weighted=weighted), clients, rounds=4, clients_per_round=2)

    drawn = LGFedAvg().client_init(clients[0], 3)["head"]  # the first head, the same for all
    networks = {c.id: draw_network(c.model) for c in clients}
    head = {"weight": drawn["0.weight"], "bias": drawn["0.bias"]}
    for cohort, minibatches in recorded.rounds:
        for i in cohort:
            networks[i][-1].load_state_dict(head)
            train(networks[i], sgd(networks[i].parameters()), minibatches[i])
        sizes = [len(c.train) if weighted else 1 for c in clients if c.id in cohort]
        head = mean_of([networks[i][-1].state_dict() for i in cohort], sizes)
    trained = {i: [p.clone() for p in network.parameters()] for i, network in networks.items()}
    for network in networks.values():
        network[-1].load_state_dict(head)

    assert len({tuple(cohort) for cohort, _ in recorded.rounds}) > 1
    assert_tensors_near(recorded.run.last.state["head"], {"0.weight": head["weight"], "0.bias": head["bias"]})
    assert_networks_equal(recorded, networks)
    for client, parameters in trained.items():
        assert not torch.equal(parameters[-1], networks[client][-1].bias)
