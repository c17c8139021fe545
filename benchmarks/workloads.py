"""The two workloads of the speed benchmarks, on Fashion-MNIST with the 582k-parameter CNN.

W1: 20 clients × 1,000 training images, all of them each round. W2: 100 clients × 100 training images, 10 a round. On top
each client has test images, 70/30 as everywhere: 429 and 43. Batch 32, lr 0.01, IID.
"""

import dataclasses
import platform
from pathlib import Path

import torch

import polyfed as pf
from polyfed.data import IID, SOURCES, Split, make_clients
from polyfed.models import ModelSpec

PATH = "/usr/share/datasets/fashion-mnist"  # Debian: apt-get install dataset-fashion-mnist
MODEL = ModelSpec("cnn_582k", {}, (1, 28, 28), 10)
METHOD = pf.algorithms.FedAvg(lr=0.01, batch_size=32, local_epochs=1)


@dataclasses.dataclass(frozen=True)
class Workload:
    name: str
    clients: int
    images: int
    clients_per_round: int | float


W1 = Workload("W1", 20, 1000, 1.0)
W2 = Workload("W2", 100, 100, 10)


def clients_of(workload, path=PATH):
    """polyfed clients of a workload, and the pool."""
    pool = SOURCES["fashion_mnist"](path=path).load()
    split = Split(clients=workload.clients, examples_per_client=workload.images, test_fraction=0.3)
    data, _ = make_clients(pool, split, IID(), seed=0)
    return [pf.Client(d.id, MODEL, d.train, d.test) for d in data], pool


def arrays_of(clients):
    """The same examples as plain float tensors, for the bare loop."""
    return [c.train.batch(torch.arange(len(c.train))) for c in clients]


def cpu_name():
    """The processor, as Linux calls it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
