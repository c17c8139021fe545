"""What tests of methods for adapters share: a frozen layer with one adapter, and its round in plain torch."""

import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.models.lora import add_lora
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import small_clients

A, B = (f"hidden.lora_{part}.default.weight" for part in "AB")
BASE, SCALE = "hidden.base_layer.weight", 2.0
FULL = {"lr": 0.2, "batch_size": 0}
"""Full batches, so that plain torch needs no order of examples."""


class Net(nn.Module):
    """A layer and a head without biases, in float64."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)
        self.double()

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


def with_head():
    return add_lora(Net(), rank=2, alpha=4.0, layers=["hidden"], train=["head.*"])


def adapter_alone():
    return add_lora(Net(), rank=2, alpha=4.0, layers=["hidden"])


def clients(number=3, network=with_head, shift=0, turn=0):
    """`turn` gives all clients other labels, and `shift` each further client labels that are one class further."""
    found = []
    for k, c in enumerate(small_clients(number)):
        sets = [(part.x.double(), (part.y + turn + shift * k) % 3) for part in (c.train, c.test, c.val)]
        found.append(pf.Client(c.id, network, *sets))
    return found


def run(method, people, rounds=2, **words):
    return pf.federate(people, method, rounds=rounds, seed=3, workers=0, evaluate_every=rounds, **words)


def descend(state, client, steps, lr, trained):
    """The tensors after steps of all examples that change the named ones alone, and the loss before each step."""
    state, losses = dict(state), []
    for _ in range(steps):
        leaves = {name: state[name].clone().requires_grad_() for name in trained}
        now = {**state, **leaves}
        hidden = client.train.x @ (now[BASE] + SCALE * now[B] @ now[A]).T
        loss = F.cross_entropy(torch.tanh(hidden) @ now["head.weight"].T, client.train.y)
        slopes = dict(zip(trained, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        state |= {name: state[name] - lr * slopes[name] for name in trained}
        losses.append(float(loss.detach()))
    return state, losses


def mean(trees, people, name):
    """The mean of one tensor, weighted by the numbers of examples."""
    n = [len(c.train) for c in people]
    return sum(k / sum(n) * tree[name] for k, tree in zip(n, trees, strict=True))


def first_state(method, people):
    """All tensors with which a run begins, the frozen layer too."""
    model = run(type(method)(lr=1e-30, batch_size=0), people, rounds=1).model(people[0].id)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def one_round(method, people):
    """The server's state before and after a round, and the replies between."""
    federation = Federation({c.id: c for c in people}, method, Settings(rounds=2, seed=3))
    before, replies = method.server_init(federation.server_context()), {}
    with exclusive_single_torch_thread_with_grad():
        for client in people:
            message = method.dispatch(before, federation.client_info(client.id, 1))
            replies[client.id], _ = method.local_update(message, method.client_init(client, 3), client, 7)
            assert federation.reply_error(replies[client.id], before, message) is None
        after = method.aggregate(before, replies, federation.server_context())
    return before, replies, after
