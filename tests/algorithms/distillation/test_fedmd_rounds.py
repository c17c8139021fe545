"""FedMD beside the paper's algorithm 1 in plain torch: digest the mean outputs on public examples, revisit one's own."""

import pytest
import torch
from plain_rounds_of_heads import (
    OPTIONS,
    SEED,
    assert_networks_equal,
    descend,
    initial_network,
    minibatches,
    public_inputs,
    round_seed,
    run_in_polyfed,
    train_locally,
    unlike_clients,
)

import polyfed as pf
from polyfed.algorithms import FedMD
from polyfed.core.seeds import derive_seed, torch_generator


def public_rows(number):
    """Those of which clients send outputs in this round."""
    return torch.randperm(30, generator=torch_generator(derive_seed(SEED, number, "rad")))[:20]


@pytest.mark.parametrize(("distance", "weighted"), [("l1", False), ("l2", True)])
@pytest.mark.one_case
def test_four_rounds_with_two_clients_each_are_those_of_plain_torch(distance, weighted):
    clients, pool = {c.id: c for c in unlike_clients()}, public_inputs()
    digest = {"digest_epochs": 2, "digest_batch_size": 6, "public_size": 20, "distance": distance}
    method = FedMD(**OPTIONS, **digest, weighted=weighted)
    public = pf.Examples(pool, torch.zeros(30, dtype=torch.int64))
    run, rounds = run_in_polyfed(method, list(clients.values()), public=public)
    nets, mean = {i: initial_network(c.model) for i, c in clients.items()}, None
    for number, members in enumerate(rounds, 1):
        sent, old_rows, new_rows = {}, public_rows(number - 1), public_rows(number)
        for i in members:
            net, seed = nets[i], round_seed(number, i)

            def apart(rows, net=net, old_rows=old_rows, mean=mean):
                gap = net(pool[old_rows[rows]]) - mean[rows]
                return gap.abs().mean() if distance == "l1" else gap.square().mean()

            if mean is not None:
                descend(net.train().parameters(), apart, minibatches(derive_seed(seed, "digest"), 20, 6, 2))
            sent[i] = train_locally(net, clients[i], seed)(pool[new_rows]).detach()
        n = {i: len(clients[i].train) if weighted else 1 for i in members}
        mean = sum(n[i] * z for i, z in sent.items()) / sum(n.values())
    torch.testing.assert_close(run.last.state["outputs"]["logits"].double(), mean, rtol=1e-6, atol=1e-6)
    assert_networks_equal(run, nets, 1e-6)
