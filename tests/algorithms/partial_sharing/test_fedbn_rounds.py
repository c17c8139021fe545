"""FedBN beside the paper's algorithm 1 in plain torch: everything but batch norm is averaged over a round's clients."""

import pytest
from plain_rounds_of_heads import (
    OPTIONS,
    assert_networks_equal,
    initial_network,
    narrow,
    round_seed,
    run_in_polyfed,
    train_locally,
    unlike_clients,
)

from polyfed.algorithms import FedBN

NORM = ("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")


@pytest.mark.parametrize("weighted", [False, True], ids=["paper", "by-examples"])
@pytest.mark.one_case
def test_four_rounds_with_two_clients_each_are_those_of_plain_torch(weighted):
    clients = {c.id: c for c in unlike_clients((narrow,) * 3)}
    run, rounds = run_in_polyfed(FedBN(**OPTIONS, weighted=weighted), list(clients.values()))
    nets, shared = {i: initial_network(narrow) for i in clients}, {}
    for number, members in enumerate(rounds, 1):
        for i in members:
            nets[i].load_state_dict(nets[i].state_dict() | shared)
            train_locally(nets[i], clients[i], round_seed(number, i))
        n = {i: len(clients[i].train) if weighted else 1 for i in members}
        states = {i: nets[i].state_dict() for i in members}
        for name in states[members[0]].keys() - set(NORM):
            shared[name] = sum(n[i] * states[i][name] for i in members) / sum(n.values())
    for net in nets.values():
        net.load_state_dict(net.state_dict() | shared)
    assert_networks_equal(run, nets)
