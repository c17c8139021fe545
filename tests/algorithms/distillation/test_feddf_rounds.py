"""FedDF beside the paper's algorithm 3 in plain torch: FedAvg by architecture, then mean outputs are distilled."""

import torch
from plain_rounds_of_heads import (
    OPTIONS,
    SEED,
    assert_networks_equal,
    initial_network,
    mean_state,
    minibatches,
    narrow,
    public_inputs,
    round_seed,
    run_in_polyfed,
    train_locally,
    unlike_clients,
    wide,
)

import polyfed as pf
from polyfed.algorithms import FedDF
from polyfed.core.seeds import derive_seed


def test_four_rounds_with_two_clients_each_are_those_of_plain_torch():
    clients, pool = {c.id: c for c in unlike_clients()}, public_inputs()
    method = FedDF(**OPTIONS, server_steps=7, server_batch_size=8, server_lr=0.02)
    public = pf.Examples(pool, torch.zeros(30, dtype=torch.int64))
    run, rounds = run_in_polyfed(method, list(clients.values()), public=public)
    averages = {factory: initial_network(factory) for factory in (narrow, wide)}
    for number, members in enumerate(rounds, 1):
        trained = {i: initial_network(clients[i].model) for i in members}
        for i, net in trained.items():
            net.load_state_dict(averages[clients[i].model].state_dict())
            train_locally(net, clients[i], round_seed(number, i))
        teacher = (sum(net(pool) for net in trained.values()) / len(members)).softmax(1).detach()
        for factory, student in averages.items():
            own = [i for i in members if clients[i].model is factory]
            if own:
                states, n = [trained[i].state_dict() for i in own], [len(clients[i].train) for i in own]
                student.load_state_dict(mean_state(states, n))
            adam = torch.optim.Adam(student.train().parameters(), lr=0.02)
            steps = list(minibatches(derive_seed(SEED, number, "server"), 30, 8, 2))[:7]
            for rows in steps:
                adam.zero_grad()
                p, q = teacher[rows], student(pool[rows]).softmax(1)
                ((p * (p.log() - q.log())).sum() / len(rows)).backward()
                adam.step()
    assert_networks_equal(run, {i: averages[c.model].eval() for i, c in clients.items()}, 1e-5)
