"""What the monitor of updates and robust rules cost in a round of W1: processor time beside that of training.

    python benchmarks/robust_cost.py --out benchmarks/results/robust_cost.json

Processor seconds in one thread, the least of three: training of one client of W1 (1,000 random images of 28×28, the CNN of
582,026 weights, minibatches of 32, one epoch), and what the server does for one client's reply: the norm alone, as it was
recorded before; norm and sketch; the cosines of twenty clients, a client; the mean, and each rule in its place, a client of
twenty.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.algorithm import Message
from polyfed.core.training.loop import fit
from polyfed.models import ModelSpec
from polyfed.simulation.monitoring.update_directions import cosines_to_mean
from polyfed.simulation.monitoring.update_norms import measure_update

CLIENTS = 20
RULES = (None, "clip:3x", "median", "trimmed_mean:0.2", "krum:2", "multi_krum:2", "geometric_median")


def seconds(call, number=3):
    def once():
        start = time.process_time()
        call()
        return time.process_time() - start

    return min(once() for _ in range(number))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = ModelSpec("cnn_582k", {}, (1, 28, 28), 10)
    x, y = torch.rand(1000, 1, 28, 28), torch.arange(1000) % 10
    client, module = pf.Client("a", net, (x, y), (x[:10], y[:10])), net()
    training = seconds(lambda: fit(module, client, FedAvg(lr=0.01), lr=0.01, seed=0))
    start = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    message = Message({"model": start}, {"lr": 0.01})
    replies = {
        f"c{k:02}": Message(
            {"model": {n: t + 0.01 * torch.randn_like(t) for n, t in start.items()}}, {"num_examples": 1000}
        )
        for k in range(CLIENTS)
    }
    first = replies["c00"]
    sent = first.tensors["model"]
    sketches = {i: measure_update(reply, message).sketch for i, reply in replies.items()}
    costs = {
        "training": training,
        "norm, as before": seconds(
            lambda: [float(torch.linalg.vector_norm(t - start[n], dtype=torch.float64)) for n, t in sent.items()]
        ),
        "norm and sketch": seconds(lambda: measure_update(first, message)),
        "cosines": seconds(lambda: cosines_to_mean(sketches)) / CLIENTS,
    }

    def combine(rule):
        method = FedAvg(robust=rule)
        state = {"model": start, "robust_norms": [1.0]}  # as after a round: the bound is known
        total = method.empty_reply_sum(dict.fromkeys(replies, 1000.0), state)
        for i, reply in replies.items():
            method.add_reply(total, i, reply, message)
        method.aggregate(state, total, None)

    for rule in RULES:
        costs[f"mean, robust={rule}"] = seconds(lambda rule=rule: combine(rule)) / CLIENTS
    weights = sum(tensor.numel() for tensor in start.values())
    found = {"weights": weights, "clients": CLIENTS, "processor seconds a client": costs}
    found["share of training in %"] = {name: round(100 * cost / training, 2) for name, cost in costs.items()}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
