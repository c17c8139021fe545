"""Shares with the tests of methods with a body and a head: gradient descent on either in plain torch, and clients for whom
no common head is right.
"""

import torch
from halves import short
from torch.nn import functional as F

import polyfed as pf
from polyfed.testing import small_clients

BODY, HEAD = ("0.weight", "0.bias"), ("2.weight", "2.bias")


def descend(tensors, trained, examples, steps=3, lr=0.1):
    """Full-batch gradient descent on some tensors of `short`, in plain torch."""
    p = {name: tensor.clone() for name, tensor in tensors.items()}
    for _ in range(steps):
        leaves = {name: p[name].requires_grad_(name in trained) for name in p}
        hidden = torch.tanh(examples.x @ leaves["0.weight"].T + leaves["0.bias"])
        loss = F.cross_entropy(hidden @ leaves["2.weight"].T + leaves["2.bias"], examples.y)
        slopes = dict(zip(trained, torch.autograd.grad(loss, [leaves[name] for name in trained]), strict=True))
        p = {name: (p[name].detach() - lr * slopes[name] if name in trained else p[name].detach()) for name in p}
    return p


def mean_of(trees, sizes, names):
    return {name: sum(n * tree[name] for tree, n in zip(trees, sizes, strict=True)) / sum(sizes) for name in names}


def swapped(labels=(0, 1, 2)):
    """Clients that give the same inputs other labels, so that no network is right for two of them."""

    def turned(examples, k):
        return examples.x, (examples.y + k) % 3

    return [
        pf.Client(c.id, short, *(turned(part, k) for part in (c.train, c.test, c.val)))
        for k, c in zip(labels, small_clients(len(labels)), strict=True)
    ]
