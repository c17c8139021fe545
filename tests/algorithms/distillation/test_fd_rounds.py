"""FD beside the paper's algorithm 1 in plain torch: a client learns the mean outputs of the others for each class."""

import pytest
import torch
from halves import mixed, play, run
from plain_rounds_of_heads import (
    OPTIONS,
    assert_networks_equal,
    initial_network,
    mean_by_class,
    round_seed,
    run_in_polyfed,
    train_locally,
    unlike_clients,
)
from torch.nn import functional as F

from polyfed.algorithms import FD, Local


def distance_of(scores, target, outputs):
    """Of a network's outputs for an example from the others' mean outputs for its class."""
    return (
        -(target * scores.log_softmax(0)).sum() if outputs == "probabilities" else ((scores - target) ** 2).mean() / 2
    )


@pytest.mark.parametrize("outputs", ["probabilities", "logits"])
@pytest.mark.one_case
def test_four_rounds_with_two_clients_each_are_those_of_plain_torch(outputs):
    clients = {c.id: c for c in unlike_clients()}
    result, rounds = run_in_polyfed(FD(**OPTIONS, gamma=1.7, outputs=outputs), list(clients.values()))
    nets, last = {i: initial_network(c.model) for i, c in clients.items()}, {}
    for number, members in enumerate(rounds, 1):
        sent = {}
        for i in members:
            others = [means for j, means in last.items() if j != i]

            def loss_of(net, x, y, others=others):
                z, total = net(x), 0.0
                for scores, c in zip(z, y.tolist(), strict=True):
                    theirs = [means[c] for means in others if c in means]
                    if theirs:
                        total = total + distance_of(scores, sum(theirs) / len(theirs), outputs)
                return F.cross_entropy(z, y) + 1.7 * total / len(y)

            c = clients[i]
            z = train_locally(nets[i], c, round_seed(number, i), loss_of)(c.train.x).detach()
            sent[i] = mean_by_class(z.softmax(1) if outputs == "probabilities" else z, c.train.y)
        last = sent
    assert_networks_equal(result, nets, 1e-6)


def test_evaluation_needs_no_means_of_others():
    federation, state, _, _ = play(FD(**OPTIONS), mixed())
    assert "others" in FD().dispatch(state, federation.client_info("client-0", 2)).tensors
    assert FD().dispatch(state, federation.client_info("client-0", 2, "evaluate")).tensors == {}


def test_alone_there_is_nobody_to_learn_from():
    one = mixed()[:1]
    found, alone = run(FD(**OPTIONS), one), run(Local(**OPTIONS), one)
    torch.testing.assert_close(
        found.last.client_states["client-0"]["model"], alone.last.client_states["client-0"]["model"]
    )
