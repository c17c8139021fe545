"""FedKD beside the paper's algorithm 1 and equations 1 to 9 in plain torch: two networks that teach each other, and updates
of the shared one by their largest singular values, up and down."""

import torch
from plain_rounds_of_heads import (
    OPTIONS,
    SEED,
    assert_networks_equal,
    assert_states_near,
    descend,
    initial_network,
    minibatches,
    round_seed,
    run_in_polyfed,
    unlike_clients,
    wide,
)
from torch.nn import functional as F

from polyfed.algorithms import FedKD
from polyfed.core.io.trusted_code import trust_code


def divergence(teacher, student):
    p = teacher.detach().softmax(1)
    return (p * (p.log() - student.log_softmax(1))).sum(1).mean()


def compressed(update, energy):
    """The largest singular values that hold more than this share of the squares, if that is fewer numbers."""
    if update.dim() < 2:
        return update
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    rank = next(k for k in range(1, len(s) + 1) if s[:k].square().sum() > energy * s.square().sum())
    return update if rank * sum(update.shape) >= update.numel() else u[:, :rank] @ s[:rank].diag() @ v[:rank]


def train_both(own, shared, bridge, client, seed):
    """Each loss has the other network and the divisor as constants; H trains both, and the matrix."""

    def loss_of(rows):
        x, y = client.train.x[rows], client.train.y[rows]
        f, f_shared = own[:-1](x), shared[:-1](x)
        z, s = own[-1](f), shared[-1](f_shared)
        hidden = (f - f_shared @ bridge.T).square().mean()
        tasks = F.cross_entropy(z, y), F.cross_entropy(s, y)
        divisor = (tasks[0] + tasks[1]).detach()
        return sum(tasks) + (divergence(s, z) + divergence(z, s) + hidden) / divisor

    parameters = [*own.train().parameters(), *shared.train().parameters(), bridge]
    descend(parameters, loss_of, minibatches(seed, len(client.train)))
    own.eval(), shared.eval()


def test_four_rounds_with_two_clients_each_are_those_of_plain_torch():
    trust_code("plain_rounds_of_heads:wide")
    clients = {c.id: c for c in unlike_clients()}
    method = FedKD(**OPTIONS, shared="plain_rounds_of_heads:wide", t_start=0.6, t_end=0.9)
    run, rounds = run_in_polyfed(method, list(clients.values()))
    nets, server = {i: initial_network(c.model) for i, c in clients.items()}, initial_network(wide).state_dict()
    bridges = {i: method.client_init(c, SEED)["bridge"]["weight"].requires_grad_() for i, c in clients.items()}
    saved = 0
    for number, members in enumerate(rounds, 1):
        energy, updates = 0.6 + 0.3 * (number - 1) / 3, []
        for i in members:
            shared = wide()
            shared.load_state_dict(server)
            train_both(nets[i], shared, bridges[i], clients[i], round_seed(number, i))
            change = {name: tensor - server[name] for name, tensor in shared.state_dict().items()}
            small = {name: tensor if number == 1 else compressed(tensor, energy) for name, tensor in change.items()}
            saved += sum(not torch.equal(small[name], tensor) for name, tensor in change.items())
            updates.append(small)
        for name in server:
            mean = sum(update[name] for update in updates) / len(updates)
            server[name] = server[name] + (mean if number == 1 else compressed(mean, energy))
    assert saved
    assert_states_near(run.last.state["model"], server)
    assert_networks_equal(run, nets)
    for i, bridge in bridges.items():
        assert_states_near(run.last.client_states[i]["bridge"], {"weight": bridge})
