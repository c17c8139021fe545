"""What a score costs: AUC and average precision from ranks, by scikit-learn's functions, and an epoch of a small network.

    python benchmarks/scores.py --out benchmarks/results/scores.json

Microseconds of the processor a call, the least of five means, in one thread. The examples are of two classes. The network
has 20 inputs and 32 hidden units, and trains in minibatches of 16.
"""

import argparse
import json
import platform
import time
from functools import partial
from pathlib import Path

import numpy as np
import sklearn.metrics
import torch
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy

from polyfed.core.evaluation.metrics import METRICS

SIZES = (15, 100, 1000)
THEIRS = {"auc": sklearn.metrics.roc_auc_score, "average_precision": sklearn.metrics.average_precision_score}


def microseconds(call, number):
    def once():
        start = time.process_time()
        for _ in range(number):
            call()
        return 1e6 * (time.process_time() - start) / number

    call()
    return min(once() for _ in range(5))


def epoch_of(size):
    network = Sequential(Linear(20, 32), ReLU(), Linear(32, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    x, y = torch.randn(size, 20), torch.arange(size) % 2

    def epoch():
        for xs, ys in zip(x.split(16), y.split(16), strict=True):
            optimizer.zero_grad()
            cross_entropy(network(xs), ys).backward()
            optimizer.step()

    return epoch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {"processor": platform.processor() or platform.machine(), "microseconds": {}}
    for size in SIZES:
        random = np.random.default_rng(0)
        outputs = torch.tensor(random.normal(size=(size, 2)))
        targets = torch.tensor(random.permutation(size) % 2)
        score, positive = (outputs[:, 1] - outputs[:, 0]).numpy(), targets.numpy()
        here = {"an epoch": microseconds(epoch_of(size), 20)}
        for name, function in THEIRS.items():
            here[name] = microseconds(partial(METRICS[name], outputs, targets), 200)
            here[f"{name}, scikit-learn"] = microseconds(partial(function, positive, score), 50)
        found["microseconds"][str(size)] = {name: round(value) for name, value in here.items()}
        print(size, found["microseconds"][str(size)], flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
