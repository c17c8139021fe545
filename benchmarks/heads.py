"""FLHA-GHN's heads: the paper's against factored ones, on the same clients, in three sizes of networks.

    python benchmarks/heads.py --path /usr/share/datasets/fashion-mnist --out benchmarks/results/heads.json

Six clients of 200 training, 50 validation and 250 test images of Fashion-MNIST, the same ones in every run, and four
convolutional networks, which share layer types. Their width decides how much the paper's heads send. In the last size it is
more than 50 MB, where the default, `head="auto"`, takes factored heads. Each head has its own rate, the best of 0.01, 0.03
and 0.1 by validation accuracy of seed 0; where that is the smallest or the largest, the next one outside is tried too. Then
three seeds.

Printed: accuracy of the last round, mean over clients ± standard deviation over seeds; the difference with its interval of
95 %, for new seeds and new test examples (`polyfed.comparison.statistics.mrmc`); MB (2^20 bytes) each way of one client
and round; processor seconds of a run, on one thread.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.comparison.statistics.mrmc import estimate_mean_over_clients, estimate_variance_components
from polyfed.core.evaluation.metrics import METRICS
from polyfed.data.sources.vision import FashionMNIST
from polyfed.simulation.monitoring.progress import SilentProgress

SIZES = {
    "small": (4, 32),
    "medium": (8, 128),
    "large": (16, 400),
}  # channels of the first layer, width of the hidden ones
HEADS, RATES, BEYOND = ("mlp", "factored"), (0.01, 0.03, 0.1), {0.01: 0.003, 0.1: 0.3}
CLIENTS, TRAIN, VAL, TEST = 6, 200, 50, 250
SEEDS, ROUNDS = (0, 1, 2), 20


def network(channels, hidden, *, deep, wide):
    layers = [nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(2 * channels, 2 * channels, 3, padding=1), nn.ReLU()] if deep else []
    layers += [nn.Flatten(), nn.Linear(98 * channels, hidden), nn.ReLU()]
    layers += [nn.Linear(hidden, hidden), nn.ReLU()] if wide else []
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


def clients(path, size):
    pool = FashionMNIST(path).load().train
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    found = []
    for k in range(CLIENTS):
        own = order[k * (TRAIN + VAL + TEST) :][: TRAIN + VAL + TEST]
        train, val, test = (pool.select(rows) for rows in own.split([TRAIN, VAL, TEST]))
        kind = {"deep": bool(k & 1), "wide": bool(k & 2)}
        found.append(pf.Client(f"client-{k}", lambda kind=kind: network(*SIZES[size], **kind), train, test, val))
    return found


def trained(members, head, lr, seed):
    start = time.process_time()
    method = FLHAGHN(head=head, lr=lr, schedule="cosine", batch_size=50)
    run = pf.federate(
        members, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, workers=0, progress=SilentProgress()
    )  # fmt: skip
    seconds, last = time.process_time() - start, run.history[-1]
    outputs = {client.id: run.predictions(client.id).outputs for client in members}
    mean = run.table()[-1]
    found = {
        "lr": lr, "seed": seed, "accuracy": mean["accuracy"], "val_accuracy": mean["val_accuracy"],
        "generated_accuracy": mean["generated_accuracy"], "seconds": round(seconds, 1),
        "mb": last["bytes_down_total"] / len(members) / ROUNDS / 2**20,
    }  # fmt: skip
    return found, outputs


def measured(members, head, told):
    """The runs of the tuning, and of the tuned rate by seed, with the outputs of the latter."""
    tuning, kept = {}, {}

    def attempt(lr):
        try:
            tuning[lr], kept[lr] = trained(members, head, lr, SEEDS[0])
        except pf.ClientError as error:  # it diverged
            tuning[lr] = {"lr": lr, "seed": SEEDS[0], "val_accuracy": 0.0, "failed": str(error)[:100]}
        told(f"  {head}, lr {lr}: {tuning[lr]['val_accuracy']:.3f} of validation")

    def best():
        return max(sorted(tuning), key=lambda lr: tuning[lr]["val_accuracy"])

    for lr in RATES:
        attempt(lr)
    if (outside := BEYOND.get(best())) is not None:
        attempt(outside)
    rate = best()
    runs, outputs = [tuning[rate]], [kept[rate]]
    for seed in SEEDS[1:]:
        one, found = trained(members, head, rate, seed)
        runs.append(one)
        outputs.append(found)
        told(f"  {head}, lr {rate}, seed {seed}: {one['accuracy']:.3f}, {one['seconds']} s")
    return list(tuning.values()), runs, outputs


def difference(members, factored, dense):
    """Of the mean over clients, in points: factored less the paper's."""
    sites = [
        estimate_variance_components(
            METRICS["accuracy"], [o[c.id] for o in factored], [o[c.id] for o in dense], c.test.labels
        )
        for c in members
    ]
    found = estimate_mean_over_clients([site for site in sites if site is not None])
    return {key: round(100 * getattr(found, key), 2) for key in ("value", "low", "high")}


def row(size, head, runs, gap=""):
    scores = [100 * run["accuracy"] for run in runs]
    mb, seconds = runs[0]["mb"], statistics.mean(run["seconds"] for run in runs)
    return (
        f"| {size} | `{head}` | {runs[0]['lr']:g} | {statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f} "
        f"| {gap} | {mb:.2f} | {seconds:.0f} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True)
    parser.add_argument("--out")
    parser.add_argument("--sizes", default=",".join(SIZES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    results, lines = {}, []
    if given.out and Path(given.out).exists():
        results = json.loads(Path(given.out).read_text())["sizes"]
    for size in given.sizes.split(","):
        members = clients(given.path, size)
        by_head = {head: measured(members, head, lambda text: print(text, flush=True)) for head in HEADS}
        gap = difference(members, by_head["factored"][2], by_head["mlp"][2])
        results[size] = {
            "channels": SIZES[size][0], "hidden": SIZES[size][1], "difference": gap, "load": os.getloadavg()[0],
            **{head: {"tuning": tuning, "runs": runs} for head, (tuning, runs, _) in by_head.items()},
        }  # fmt: skip
        lines.append(row(size, "mlp", by_head["mlp"][1]))
        shown = f"{gap['value']:+.1f} ({gap['low']:+.1f} to {gap['high']:+.1f})"
        lines.append(row(size, "factored", by_head["factored"][1], shown))
        print("\n".join(lines[-2:]), flush=True)
        if given.out:
            head = {"clients": CLIENTS, "train": TRAIN, "val": VAL, "test": TEST, "rounds": ROUNDS}
            Path(given.out).write_text(json.dumps({**head, "sizes": results}, indent=1) + "\n")
    print("\n| networks | head | lr | accuracy | factored less mlp | MB each way | s |\n" + "|---" * 7 + "|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
