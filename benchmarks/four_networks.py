"""Two federations of unlike networks: a transformer, an LSTM, a GRU and a CNN over characters of the same tweets, and a
vision transformer, a ResNet, a ConvNeXt-like network and a CNN on CIFAR-10.

    python benchmarks/four_networks.py tweets --path DATA.parquet --out benchmarks/results/four_networks_tweets.json
    python benchmarks/four_networks.py cifar10 --path FOLDER --out benchmarks/results/four_networks_cifar10.json

With `--only fedproto,fedmd` these methods alone run, and join the results that are there.

Each client has its own examples: 2,000 tweets of Sentiment140 (CIFAR-10: 500 images) to train on, 200 to choose the
rate and 1,000 to score. A method's rate is the best of three by the mean validation accuracy of two seeds, and one more is
tried where the best is the smallest or the largest. Printed: accuracy of the last round, mean over clients ± standard
deviation over five seeds; the gain over training alone with its interval of 95 %, for new seeds and new test examples; kB
(2^10 bytes) each way of one client and round.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from heads import difference
from text_networks import LETTERS, Convolutional, Recurrent, Transformer, load_tweets
from torch import Tensor, nn

import polyfed as pf
from polyfed.core.algorithm import Algorithm
from polyfed.data.sources.published.vision import CIFAR10
from polyfed.simulation.monitoring.progress import SilentProgress

VAL, TEST, PUBLIC, ROUNDS = 200, 1000, 500, 12
TRAIN = {"tweets": 2000, "cifar10": 500}
RATES, BEYOND = (0.001, 0.003, 0.01), {0.001: 0.0003, 0.01: 0.03}
TUNING_SEEDS, SEEDS = (0, 1), (0, 1, 2, 3, 4)


class VisionTransformer(nn.Module):
    """Reads patches of 4x4 pixels by torch's transformer, with a class token and positions."""

    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token, self.positions = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(0.02 * torch.randn(1, 65, width)),
        )
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        out: Tensor = self.out(self.norm(self.encoder(x)[:, 0]))
        return out


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, two pointwise layers and a layer scale, around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.GroupNorm(1, width)
        self.wide, self.narrow = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(0.1 * torch.ones(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.narrow(nn.functional.gelu(self.wide(self.norm(self.depthwise(x)))))
        return out


def build_convnext(width: int = 24) -> nn.Module:
    stem = nn.Conv2d(3, width, 4, stride=4)
    return nn.Sequential(
        stem, ConvNeXtBlock(width), ConvNeXtBlock(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )


def build_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def build_resnet() -> nn.Module:
    return pf.models.ModelSpec("resnet18", {"width": 8, "norm": "group"}, (3, 32, 32), 10)()


NETWORKS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "tweets": {
        "transformer": Transformer, "lstm": lambda: Recurrent(nn.LSTM), "gru": lambda: Recurrent(nn.GRU),
        "cnn": Convolutional,
    },
    "cifar10": {"vit": VisionTransformer, "resnet": build_resnet, "convnext": build_convnext, "cnn": build_cnn},
}  # fmt: skip
SHARED = {
    "tweets": {"name": "lstm", "vocabulary": LETTERS},
    "cifar10": {"name": "resnet18", "width": 8, "norm": "group"},
}


def build_methods(federation: str) -> dict[str, Callable[[float], Algorithm]]:
    """Each method as a function of its rate; all train by Adam, one epoch a round."""
    a, training = pf.algorithms, {"local_epochs": 1, "optimizer": "adam", "batch_size": 32, "clip_norm": 1.0}
    aligned = {"eta0": 1.0, "rad_size": 128, "rad_batch": 32, "normalise": True}
    methods: dict[str, Callable[[float], Algorithm]] = {
        "local": lambda lr: a.Local(lr=lr, **training),
        "flha_ghn": lambda lr: a.FLHAGHN(lr=lr, **training),
        "flha_ghn head=factored": lambda lr: a.FLHAGHN(lr=lr, head="factored", **training),
        "flha_ghn head=lowrank": lambda lr: a.FLHAGHN(lr=lr, head="lowrank", **training),
        "flha_ghn kinds=paper": lambda lr: a.FLHAGHN(lr=lr, kinds="paper", **training),
        "fedhenn": lambda lr: a.FedHeNN(lr=lr, **aligned, **training),
        "fedhenn term=epoch": lambda lr: a.FedHeNN(lr=lr, term="epoch", **aligned, **training),
        "fml": lambda lr: a.FML(lr=lr, shared=SHARED[federation], **training),
        "fedproto": lambda lr: a.FedProto(lr=lr, **training),
        "fedmd": lambda lr: a.FedMD(lr=lr, **training),
    }
    if federation == "cifar10":
        del methods["fedproto"]  # needs representations of one width
    else:
        methods["flha_ghn tables=generated"] = lambda lr: a.FLHAGHN(lr=lr, tables="generated", **training)
    return methods


def load_images(path: str) -> tuple[Tensor, Tensor]:
    pool = CIFAR10(path).load().train
    return pool.x, pool.labels


def build_clients(federation: str, path: str) -> tuple[list[pf.Client], Tensor]:
    """The clients, and public examples for FedHeNN and FedMD."""
    x, y = load_tweets(path) if federation == "tweets" else load_images(path)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    sizes, clients = [TRAIN[federation], VAL, TEST], []
    for k, (name, build) in enumerate(NETWORKS[federation].items()):
        parts = order[k * sum(sizes) :][: sum(sizes)].split(sizes)
        train, val, test = ((x[rows], y[rows]) for rows in parts)
        clients.append(pf.Client(f"{k}-{name}", build, train, test, val))
    return clients, x[order[len(clients) * sum(sizes) :][:PUBLIC]]


def score(clients: list[pf.Client], public: Tensor, method: Algorithm, seed: int) -> tuple[dict[str, Any], Any]:
    """A run's accuracies and bytes, and its outputs by client."""
    extra = {"public": public} if "public_data" in method.requires else {}
    try:
        run = pf.federate(
            clients,
            method,
            rounds=ROUNDS,
            seed=seed,
            evaluate_every=ROUNDS,
            workers=0,
            progress=SilentProgress(),
            **extra,
        )
    except pf.ClientError as error:
        return {"seed": seed, "accuracy": 0.0, "val": 0.0, "failed": str(error)[:100]}, None
    *own, mean = run.table()
    record = {
        "seed": seed, "accuracy": mean["accuracy"], "val": mean["val_accuracy"],
        "clients": {row["client"]: row["accuracy"] for row in own},
        "kb": run.history[-1]["bytes_up_total"] / len(clients) / ROUNDS / 2**10,
    }  # fmt: skip
    return record, {client.id: run.predictions(client.id).outputs for client in clients}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("federation", choices=NETWORKS)
    parser.add_argument(
        "--path", required=True, help="a parquet file with columns text and label; the folder of CIFAR-10"
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", help="names of methods, with commas between them; they join the results in --out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clients, public = build_clients(options.federation, options.path)
    methods, alone = build_methods(options.federation), None
    results: dict[str, Any] = {}
    if options.only:
        results = json.loads(Path(options.out).read_text(encoding="utf-8"))
        local = methods["local"](results["local"]["lr"])
        alone = [score(clients, public, local, seed)[1] for seed in SEEDS]
        methods = {name: methods[name] for name in options.only.split(",")}
    print("| method | rate | accuracy | gain over training alone | kB each way |\n|---|---|---|---|---|")
    for name, build in methods.items():
        runs: dict[tuple[float, int], tuple[dict[str, Any], Any]] = {}

        def validation(lr: float, build: Any = build, runs: Any = runs) -> float:
            runs.update({(lr, seed): score(clients, public, build(lr), seed) for seed in TUNING_SEEDS})
            return statistics.mean(runs[lr, seed][0]["val"] for seed in TUNING_SEEDS)

        rates = {lr: validation(lr) for lr in RATES}
        if (outside := BEYOND.get(max(rates, key=rates.__getitem__))) is not None:
            rates[outside] = validation(outside)
        lr = max(rates, key=rates.__getitem__)
        final = [runs.get((lr, seed)) or score(clients, public, build(lr), seed) for seed in SEEDS]
        outputs = [one for _, one in final]
        gain = None if alone is None else difference(clients, outputs, alone)
        alone = outputs if alone is None else alone
        results[name] = {"lr": lr, "validation": rates, "runs": [record for record, _ in final], "gain": gain}
        values = [100 * record["accuracy"] for record, _ in final]
        shown = f"{gain['value']:+.1f} ({gain['low']:+.1f} to {gain['high']:+.1f})" if gain else ""
        print(
            f"| `{name}` | {lr:g} | {statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} | {shown} "
            f"| {final[0][0]['kb']:.0f} |",
            flush=True,
        )
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
