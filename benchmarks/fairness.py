"""One model for all, judged by the worst client: q-FedAvg and AFL beside FedAvg, on digits.

    python benchmarks/fairness.py --out benchmarks/results/fairness.json

Eight clients share scikit-learn's digits (Dirichlet 0.5 over the ten classes). Two of them call a third of their digits
by the name of the next, which one model for all cannot fit as well. Every method has six settings to choose from, by the
worst client's validation accuracy with seed 0: FedAvg six rates, the others two rates and three of their own values.
Printed: accuracy of the worst client, and mean and standard deviation over clients, after 60 rounds, on test examples,
over five seeds (of clients, draws and training) with the interval of 95 %; and the worst client's difference to FedAvg's,
by seed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_collapse import interval

import polyfed as pf
from polyfed.algorithms import AFL, FedAvg, QFedAvg
from polyfed.core.algorithm import Algorithm
from polyfed.simulation.monitoring.progress import SilentProgress

CLIENTS, ODD, ROUNDS, SEEDS = 8, 2, 60, (0, 1, 2, 3, 4)
RATES = (0.1, 0.3)
SETTINGS: dict[str, dict[str, Callable[..., Algorithm]]] = {
    "fedavg": {f"lr {lr}": partial(FedAvg, lr=lr) for lr in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)},
    "qfedavg": {f"lr {lr}, q {q}": partial(QFedAvg, lr=lr, q=q) for lr in RATES for q in (0.5, 2.0, 5.0)},
    "afl": {f"lr {lr}, lambda_lr {g}": partial(AFL, lr=lr, lambda_lr=g) for lr in RATES for g in (0.02, 0.1, 0.5)},
}


def clients(seed: int) -> list[pf.Client]:
    """Eight clients, of which two call a third of their digits by the next digit's name."""
    pool = pf.data.sources.registry.SOURCES["digits"]().load()
    split = pf.data.Split(clients=CLIENTS, test_fraction=0.4, val_fraction=0.25)
    parts, _ = pf.data.make_clients(pool, split, pf.data.Dirichlet(alpha=0.5), seed=seed)
    network = pf.models.ModelSpec("mlp", {"hidden": (32,)}, pool.input_shape, 10)
    found = []
    for k, part in enumerate(parts):
        sets = [tuple(data.batch(torch.arange(len(data)))) for data in (part.train, part.test, part.val)]
        if k >= CLIENTS - ODD:
            sets = [(x, torch.where(y % 3 == 0, (y + 1) % 10, y)) for x, y in sets]
        found.append(pf.Client(part.id, network, *sets))
    return found


def score(build: Callable[..., Algorithm], seed: int) -> dict[str, Any]:
    begin = time.process_time()
    run = pf.federate(
        clients(seed), build(batch_size=32, weighted=False), rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, workers=0,
        progress=SilentProgress(),
    )  # fmt: skip
    rows = run.table()[:CLIENTS]
    return {
        "seed": seed, "worst": min(row["accuracy"] for row in rows), "val": min(row["val_accuracy"] for row in rows),
        "mean": statistics.mean(row["accuracy"] for row in rows),
        "spread": statistics.pstdev(row["accuracy"] for row in rows), "seconds": round(time.process_time() - begin, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        first = {setting: score(build, SEEDS[0]) for setting, build in settings.items()}
        chosen = max(first, key=lambda setting: first[setting]["val"])
        runs = [first[chosen], *(score(settings[chosen], seed) for seed in SEEDS[1:])]
        found[name] = {"chosen": chosen, "first": first, "runs": runs}
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        worst, mean, spread = ([run[key] for run in runs] for key in ("worst", "mean", "spread"))
        ahead = [run["worst"] - base["worst"] for run, base in zip(runs, found["fedavg"]["runs"], strict=True)]
        difference = "" if name == "fedavg" else interval(ahead)
        print(
            f"| `{name}` | {chosen} | {interval(worst)} | {interval(mean)} | {interval(spread)} | {difference} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
