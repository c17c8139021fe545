"""Three rounds of FLHA-GHN written once more in plain torch: graphs by hand, message passing by loops over nodes, and SGD,
average and refinement by their formulas (eq. 2, 3, 5, algorithm 1)."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.core.seeds import torch_generator
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from tests.few_cases import few

ROUNDS, CLASSES = 3, 3


class Residual(nn.Module):
    """A convolution with BatchNorm, another that is used twice, and a sum of both ways."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.same = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        a = self.norm(self.first(x)).relu()
        c = self.same(self.same(a).relu())
        return self.head(F.max_pool2d((a + c).relu(), 2).flatten(1))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv2d(1, 4, 3, padding=1)
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.out(F.max_pool2d(self.start(x).relu(), 2).flatten(1))


CONV1, NORM, CONV2, LINEAR = "conv2d-1-4-", "batch_norm-4-4-", "conv2d-4-4-", "linear-64-3-"  # how names of types begin
GRAPHS = {  # types of the nodes in the order of the data flow; edges; layer -> its nodes
    Residual: (
        (CONV1, NORM, CONV2, CONV2, "add", LINEAR),
        ((0, 1), (1, 2), (2, 3), (1, 4), (3, 4), (4, 5)),
        {"first": (0,), "norm": (1,), "same": (2, 3), "head": (5,)},
    ),
    Chain: ((CONV1, LINEAR), ((0, 1),), {"start": (0,), "out": (1,)}),
}
SHAPES = {CONV1: (4, 1, 3, 3), NORM: (4,), CONV2: (4, 4, 3, 3), LINEAR: (CLASSES, 64)}
HEADS = {Residual: "head", Chain: "out"}


def run_by_hand(kind, weights, buffers, x, training):
    """The network's outputs with these weights; moves the running statistics in training."""
    if kind is Chain:
        a = F.conv2d(x, weights["start.weight"], weights["start.bias"], padding=1).relu()
        return F.linear(F.max_pool2d(a, 2).flatten(1), weights["out.weight"], weights["out.bias"])
    a = F.conv2d(x, weights["first.weight"], weights["first.bias"], padding=1)
    a = F.batch_norm(a, *buffers, weights["norm.weight"], weights["norm.bias"], training=training).relu()
    b = F.conv2d(a, weights["same.weight"], weights["same.bias"], padding=1).relu()
    c = F.conv2d(b, weights["same.weight"], weights["same.bias"], padding=1)
    return F.linear(F.max_pool2d((a + c).relu(), 2).flatten(1), weights["head.weight"], weights["head.bias"])


def generated(kind, ghn, method):
    """θ_c by name, from the hypernetwork's tensors."""
    nodes, edges, layers = GRAPHS[kind]
    keys = list(dict.fromkeys(name.split(".")[1] for name in ghn if name.startswith("heads.")))
    columns = ["add", "concat", "other", *keys]

    def key_of(node):
        return next(key for key in columns if key.startswith(node))

    h = [F.one_hot(torch.tensor(columns.index(key_of(node))), len(columns)).float() for node in nodes]
    for t in range(method.depth):  # eq. 2
        a, b, bias = (ghn[f"gnn.{t}.{name}"] for name in ("lin_root.weight", "lin_rel.weight", "lin_rel.bias"))
        h = [
            (a @ h[v] + b @ sum((h[u] for u, w in edges if w == v), torch.zeros_like(h[v])) + bias).relu()
            for v in range(len(nodes))
        ]
    made = {}
    for layer, places in layers.items():  # eq. 3
        head = f"heads.{key_of(nodes[places[0]])}"
        latent = sum(h[v] for v in places) / len(places)
        z = F.leaky_relu(ghn[f"{head}.hidden.weight"] @ latent + ghn[f"{head}.hidden.bias"], 0.01)
        if method.normalise:
            z = z / (z.square().mean() + 1e-12).sqrt()
        scale = ghn[f"{head}.scale.weight"] @ z + ghn[f"{head}.scale.bias"]
        weight = scale * (ghn[f"{head}.out.weight"] @ z + ghn[f"{head}.out.bias"])
        made[f"{layer}.weight"] = weight.view(SHAPES[nodes[places[0]]])
        made[f"{layer}.bias"] = ghn[f"{head}.shift.weight"] @ z + ghn[f"{head}.shift.bias"]
    return made


def descend(tensors, loss_of, method, lr, steps):
    """SGD with momentum and clipping on copies of the tensors; those without a gradient stay."""
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    speeds = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for _ in range(steps):
        slopes = torch.autograd.grad(loss_of(tensors), list(tensors.values()), allow_unused=True)
        known = {name: slope for name, slope in zip(tensors, slopes, strict=True) if slope is not None}
        norm = math.sqrt(sum(float(slope.square().sum()) for slope in known.values()))
        factor = 1.0 if method.clip_norm is None else min(1.0, method.clip_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, slope in known.items():
                speeds[name] = method.momentum * speeds[name] + factor * slope
                tensors[name] -= lr * speeds[name]
    return {name: tensor.detach() for name, tensor in tensors.items()}


def by_hand(method, ghn, everyone):
    """The hypernetwork after three rounds, and each client's refined network: weights and running statistics."""
    buffers = {client.id: (torch.zeros(4), torch.ones(4)) for client in everyone}

    def loss_of(client, weights):
        x, y = client.train.batch(torch.arange(len(client.train)))
        return F.cross_entropy(run_by_hand(client.model, weights, buffers[client.id], x, True), y)

    for t in range(ROUNDS):
        lr = method.lr * 0.5 * (1 + math.cos(math.pi * t / ROUNDS))
        replies = [
            descend(ghn, lambda w, c=c: loss_of(c, generated(c.model, w, method)), method, lr, method.local_epochs)
            for c in everyone
        ]
        ghn = {name: sum(reply[name] for reply in replies) / len(replies) for name in ghn}
    refined = {}
    for client in everyone:
        weights = generated(client.model, ghn, method)
        own = {name: weights.pop(name) for name in list(weights) if name.startswith(HEADS[client.model])}
        head = descend(own, lambda w, c=client, of=weights: loss_of(c, {**of, **w}), method, method.refine_lr, 1)
        refined[client.id] = ({**weights, **head}, buffers[client.id])
    return ghn, refined


def clients():
    """Of unequal size, since the mean is unweighted."""
    centres = torch.randn(CLASSES, 1, 8, 8, generator=torch_generator(99))
    made = []
    for i, (kind, number) in enumerate(((Residual, 24), (Chain, 15), (Residual, 18))):
        y = torch.arange(number) % CLASSES
        x = centres[y] + 0.5 * torch.randn(number, 1, 8, 8, generator=torch_generator(i))
        made.append(pf.Client(f"c{i}", kind, (x, y), (x[:3], y[:3])))
    return made


@pytest.mark.parametrize(
    ("momentum", "clip_norm", "published"),
    few(
        [(0.0, None, False), (0.9, None, False), (0.9, 0.5, False), (0.9, 0.1, True)],
        {(0.9, 0.1, True)},
    ),
    ids=["sgd", "momentum", "clipped", "published"],
)
def test_three_rounds_are_those_of_plain_torch(momentum, clip_norm, published):
    method = FLHAGHN(
        graph="layers_and_norms",
        head="mlp", lr=0.01, batch_size=0, local_epochs=2, momentum=momentum, clip_norm=clip_norm, refine_lr=0.05,
        normalise=not published, initialisation="paper" if published else "kaiming",
    )  # fmt: skip
    everyone = clients()
    federation = Federation({c.id: c for c in everyone}, method, Settings(rounds=ROUNDS, seed=3))
    start = method.server_init(federation.server_context())["ghn"]
    run = pf.federate(everyone, method, rounds=ROUNDS, seed=3, workers=0)
    ghn, refined = by_hand(method, copy.deepcopy(start), everyone)
    moved = max(float((ghn[name] - start[name]).abs().max()) for name in ghn)
    assert moved > (1e-4 if published else 1e-3)
    for name, tensor in run.last.state["ghn"].items():
        assert float((tensor - ghn[name]).abs().max()) < 1e-6, name
    for client in everyone:
        network = run.model(client.id).state_dict()
        weights, (mean, variance) = refined[client.id]
        for name, tensor in weights.items():
            assert float((network[name] - tensor).abs().max()) < 1e-6, name
        if client.model is Residual:
            assert float((network["norm.running_mean"] - mean).abs().max()) < 1e-6
            assert float((network["norm.running_var"] - variance).abs().max()) < 1e-6
