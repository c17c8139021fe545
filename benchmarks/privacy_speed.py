"""How much longer differentially private training takes than plain training: polyfed beside opacus, processor time.

    pip install opacus
    python benchmarks/privacy_speed.py --out benchmarks/results/privacy_speed.json

One epoch of 256 random images of 28×28 in minibatches of 32, in one thread: the CNN of 582,026 weights of W1, and a
multi-layer perceptron of 64 hidden units. Private training takes Poisson samples of 32 expected examples, clips at 1 and
adds noise with σ = 1. opacus does the same by `PrivacyEngine.make_private`, in two of its ways to compute gradients:
"hooks" (its default, a gradient of each example) and "ghost" (two backward passes). All take turns, and the least of the
repeats counts, since other processes slow some of them down. Factors are to polyfed's plain training.
"""

import argparse
import importlib.metadata
import json
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from workloads import cpu_name

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.training.loop import fit
from polyfed.models import ModelSpec

IMAGES, BATCH, RATE = 256, 32, 0.01
NETWORKS = {
    "cnn_582k": ModelSpec("cnn_582k", {}, (1, 28, 28), 10),
    "mlp": ModelSpec("mlp", {"hidden": (64,)}, (1, 28, 28), 10),
}
OPACUS_WAYS = ("hooks", "ghost")


def train_with_polyfed(network, x, y, privacy):
    """Returns a function that trains for one epoch."""
    client, module = pf.Client("a", network, (x, y), (x[:10], y[:10])), network()
    options = FedAvg(lr=RATE, batch_size=BATCH, privacy=privacy)
    return lambda: fit(module, client, options, lr=RATE, seed=0)


def train_with_opacus(network, x, y, way):
    """Returns a function that trains for one epoch."""
    from opacus import PrivacyEngine

    module, loss = network().train(), nn.CrossEntropyLoss()
    private = PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=RATE), criterion=loss, noise_multiplier=1.0,
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH),
        max_grad_norm=1.0, grad_sample_mode=way,
    )  # fmt: skip
    if way == "ghost":
        module, optimizer, loss, loader = private
    else:
        module, optimizer, loader = private

    def train():
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(module(inputs), targets).backward()
            optimizer.step()

    return train


def least_seconds(trainings, repeats):
    """Returns the least processor seconds of each training; they take turns."""
    least = {}
    for _ in range(repeats):
        for name, train in trainings.items():
            start = time.process_time()
            train()
            least[name] = min(least.get(name, float("inf")), time.process_time() - start)
    return least


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")  # opacus: that its random numbers are no secret, and of backward hooks
    x, y = torch.rand(IMAGES, 1, 28, 28), torch.arange(IMAGES) % 10
    results = {
        "processor": cpu_name(), "torch": torch.__version__, "opacus": importlib.metadata.version("opacus"),
        "repeats": options.repeats, "networks": {},
    }  # fmt: skip
    for name, network in NETWORKS.items():
        trainings = {
            "plain": train_with_polyfed(network, x, y, None),
            "private": train_with_polyfed(network, x, y, pf.Privacy(noise_multiplier=1.0, run_epochs=1)),
            **{f"opacus, {way}": train_with_opacus(network, x, y, way) for way in OPACUS_WAYS},
        }
        seconds = least_seconds(trainings, options.repeats)
        results["networks"][name] = {
            "weights": sum(p.numel() for p in network().parameters()),
            "processor seconds": {key: round(value, 4) for key, value in seconds.items()},
            "factor to plain": {key: round(value / seconds["plain"], 2) for key, value in seconds.items()},
        }
        print(name, json.dumps(results["networks"][name], indent=1), flush=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
