"""What tests of methods for different architectures share: small clients of two architectures, rounds played by hand."""

import torch
from torch import nn

import polyfed as pf
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.seeds import derive_seed
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.5}
FULL = {"lr": 0.1, "batch_size": 0, "local_steps": 3}


def short():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def normed():
    """Another architecture with a representation of the same width; BatchNorm and dropout tell training from evaluation."""
    hidden = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 8), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(8, 3))


def mixed(classes=None):
    """Three clients, two architectures; `classes` by client, where they do not have all."""
    found = []
    for k, (c, factory) in enumerate(zip(small_clients(), (short, normed, short), strict=True)):
        keep = (
            torch.ones(len(c.train), dtype=torch.bool)
            if classes is None
            else torch.isin(c.train.y, torch.tensor(classes[k]))
        )
        found.append(pf.Client(c.id, factory, (c.train.x[keep], c.train.y[keep]), c.test, c.val))
    return found


def plain(clients):
    return [pf.Client(c.id, short, c.train, c.test, c.val) for c in clients]


def run(method, clients, rounds=2, **options):
    return pf.federate(clients, method, rounds=rounds, seed=3, workers=0, **options)


def begin(method, clients, public=None):
    federation = Federation({c.id: c for c in clients}, method, Settings(rounds=5, seed=3), public)
    return (
        federation,
        method.server_init(federation.server_context()),
        {c.id: method.client_init(c, 3) for c in clients},
    )


def play(method, clients, rounds=1, skip=(), public=None):
    """State and private states after some rounds, and the last replies; `skip` leaves clients out of the last."""
    federation, state, own = begin(method, clients, public)
    replies = {}
    with exclusive_single_torch_thread_with_grad():
        for number in range(1, rounds + 1):
            replies = {}
            for c in clients:
                if number == rounds and c.id in skip:
                    continue
                down = method.dispatch(state, federation.client_info(c.id, number))
                replies[c.id], own[c.id] = method.local_update(down, own[c.id], c, derive_seed(3, number, c.id))
                assert federation.reply_error(replies[c.id], state, down) is None
            state = method.aggregate(state, replies, federation.server_context())
    return federation, state, own, replies


def features(net, x):
    """The input of the last layer, in evaluation mode."""
    with torch.no_grad():
        return net.eval()[:-1](x)


def network(client, own):
    net = client.model()
    net.load_state_dict(own["model"])
    return net
