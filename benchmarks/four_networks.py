"""FLHA-GHN on text: four clients with a transformer, an LSTM, a GRU and a CNN over characters of the same tweets.

    python benchmarks/text_networks.py --path DATA --out benchmarks/results/text_networks.json

Each client has its own tweets of Sentiment140, 100 to train on, 50 to choose the rate and 400 to score. A method's rate is
the best of three by validation accuracy of seed 0. Printed: accuracy of the last round, mean over clients and seeds with the
interval of 95 % over seeds, and kB (2^10 bytes) each way of one client and round.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet
from torch import Tensor, nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedHeNN, FedProto, Local
from polyfed.core.algorithm import Algorithm
from polyfed.simulation.monitoring.progress import SilentProgress

TRAIN, VAL, TEST, ROUNDS, LENGTH, LETTERS = 100, 50, 400, 15, 80, 64
RATES, SEEDS = (0.01, 0.05, 0.25), (0, 1, 2, 3, 4)
WIDTH = 32
T_QUANTILE = 2.776  # of Student's t with four degrees of freedom, 97.5 %


class Recurrent(nn.Module):
    """Reads characters by a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.letters, self.layer = nn.Embedding(LETTERS, WIDTH), kind(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.letters(x))[0].mean(1))
        return out


class Convolutional(nn.Module):
    """Reads characters by convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.first = nn.Embedding(LETTERS, WIDTH), nn.Conv1d(WIDTH, WIDTH, 5, padding=2)
        self.second, self.out = nn.Conv1d(WIDTH, WIDTH, 5, padding=2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.letters(x).transpose(1, 2)
        out: Tensor = self.out(self.second(self.first(x).relu()).relu().mean(2))
        return out


class Transformer(nn.Module):
    """Reads characters by torch's transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS, WIDTH), nn.Parameter(0.02 * torch.randn(1, LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.letters(x) + self.positions).mean(1))
        return out


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer, "lstm": lambda: Recurrent(nn.LSTM), "gru": lambda: Recurrent(nn.GRU), "cnn": Convolutional,
}  # fmt: skip
METHODS: dict[str, Callable[[float], Algorithm]] = {
    "local": lambda lr: Local(lr=lr, batch_size=20),
    "flha_ghn": lambda lr: FLHAGHN(lr=lr, batch_size=20),
    "flha_ghn tables=generated": lambda lr: FLHAGHN(lr=lr, batch_size=20, tables="generated"),
    "flha_ghn kinds=paper": lambda lr: FLHAGHN(lr=lr, batch_size=20, kinds="paper"),
    "flha_ghn head=lowrank": lambda lr: FLHAGHN(lr=lr, batch_size=20, head="lowrank"),
    "fedproto": lambda lr: FedProto(lr=lr, batch_size=20),
    "fedhenn": lambda lr: FedHeNN(lr=lr, batch_size=20, eta0=1.0, rad_size=128, rad_batch=32, normalise=True),
}


def letters(text: str) -> list[int]:
    """The first characters of a tweet as numbers, 0 after its end."""
    known = "\x00abcdefghijklmnopqrstuvwxyz0123456789 .,!?'\"@#:;()-_/&*$%+="
    return [max(0, known.find(c)) for c in text.lower()[:LENGTH].ljust(LENGTH, "\x00")]


def members(texts: list[str], labels: Tensor) -> tuple[list[pf.Client], Tensor]:
    """The clients, and public examples for FedHeNN."""
    x = torch.tensor([letters(text) for text in texts])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    size, found = TRAIN + VAL + TEST, []
    for k, (name, build) in enumerate(NETWORKS.items()):
        parts = order[k * size :][:size].split([TRAIN, VAL, TEST])
        train, val, test = ((x[rows], labels[rows]) for rows in parts)
        found.append(pf.Client(f"{k}-{name}", build, train, test, val))
    return found, x[order[len(NETWORKS) * size :][:200]]


def score(clients: list[pf.Client], public: Tensor, method: Algorithm, seed: int) -> dict[str, Any]:
    extra = {"public": public} if "public_data" in method.requires else {}
    run = pf.federate(
        clients, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, workers=0, progress=SilentProgress(), **extra
    )
    *own, mean = run.table()
    return {
        "seed": seed, "accuracy": mean["accuracy"], "val": mean["val_accuracy"],
        "clients": {row["client"]: row["accuracy"] for row in own},
        "kb": run.history[-1]["bytes_up_total"] / len(clients) / ROUNDS / 2**10,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="a parquet file of Sentiment140, with columns text and label")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = parquet.read_table(options.path).to_pydict()
    clients, public = members(table["text"], (torch.tensor(table["label"]) > 0).long())
    results: dict[str, Any] = {}
    print("| method | rate | accuracy | kB each way |\n|---|---|---|---|")
    for name, build in METHODS.items():
        tried = {lr: score(clients, public, build(lr), SEEDS[0]) for lr in RATES}
        lr = max(tried, key=lambda rate: tried[rate]["val"])
        runs = [tried[lr], *(score(clients, public, build(lr), seed) for seed in SEEDS[1:])]
        results[name] = {"lr": lr, "tuning": {str(rate): one["val"] for rate, one in tried.items()}, "runs": runs}
        values = [100 * one["accuracy"] for one in runs]
        half = T_QUANTILE * statistics.stdev(values) / len(values) ** 0.5
        print(f"| `{name}` | {lr} | {statistics.mean(values):.1f} ± {half:.1f} | {runs[0]['kb']:.0f} |", flush=True)
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
