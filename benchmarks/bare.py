"""FedAvg as a bare PyTorch loop, written without polyfed's loop: the yardstick of speed and accuracy.

It shares only the network and the arrays with polyfed. `layout` and the number of threads are arguments, so that the
comparison is of loops, not of settings.
"""

import copy
import time

import torch
import torch.nn.functional as F


def federate(model, clients, rounds, *, lr, batch_size, channels_last, clients_per_round=None, seed=0, shuffle=None):
    """Trains `model` in place.

    Args:
        clients: list of (x float (n, 1, 28, 28), y int64 (n,)).
        clients_per_round: clients a round; None takes all.
        shuffle: (round from 1, client, number) -> order of its examples; None draws one here.

    Returns:
        Seconds of each round.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    total_seconds = []
    for r in range(rounds):
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(seed * 1000 + r)
        order = (
            range(len(clients))
            if clients_per_round is None
            else torch.randperm(len(clients), generator=generator).tolist()
        )
        mean, weight = None, 0
        for c in order[:clients_per_round]:
            x, y = clients[c]
            local = copy.deepcopy(model).train()
            optimizer = torch.optim.SGD(local.parameters(), lr=lr)
            shuffled = shuffle(r + 1, c, len(y)) if shuffle else torch.randperm(len(y), generator=generator)
            for i in range(0, len(y), batch_size):
                rows = shuffled[i : i + batch_size]
                batch = x[rows].contiguous(memory_format=layout)
                optimizer.zero_grad()
                F.cross_entropy(local(batch), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                if mean is None:
                    mean = [p * len(y) for p in local.parameters()]
                else:
                    for m, p in zip(mean, local.parameters(), strict=True):
                        m.add_(p, alpha=len(y))
            weight += len(y)
        with torch.no_grad():
            for p, m in zip(model.parameters(), mean, strict=True):
                p.copy_(m / weight)
        total_seconds.append(time.perf_counter() - start)
    return total_seconds


@torch.inference_mode()
def accuracy(model, x, y, batch_size=128):
    model.eval()
    batches = zip(x.split(batch_size), y.split(batch_size), strict=True)
    return sum(int((model(xb).argmax(1) == yb).sum()) for xb, yb in batches) / len(y)
