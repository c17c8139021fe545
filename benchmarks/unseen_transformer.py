"""A new site whose transformer has a depth that no client had: its accuracy from generated weights and from its own draw.

    python benchmarks/unseen_transformer.py --path /usr/share/datasets/fashion-mnist \
        --out benchmarks/results/unseen_transformer.json

Three clients with vision transformers of 1, 2 and 4 blocks (patches of 7 pixels, width 32) and 500 images of Fashion-MNIST
each train FLHA-GHN for 12 rounds of one epoch. Then a site with 3 blocks and 500 images of its own gets generated weights.
It trains the whole network from them, and from its own draw, for 1 to 10 epochs with the same minibatches.

Each seed deals the images anew and draws all weights; all sites are scored on 1,000 images of their own. Rates are chosen
with two more seeds: the method's by the accuracy of its clients, that of each start by the new site's after one epoch.
Printed: accuracy in %, mean ± standard deviation over five seeds, and the difference with its interval of 95 %, Student's,
over paired seeds.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from first_heads import difference

import polyfed as pf
from polyfed.core.nn.module_cache import initial_state
from polyfed.data.sources.published.vision import FashionMNIST
from polyfed.models import ModelSpec
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.results.unseen_clients import training_curve

DEPTHS, UNSEEN_DEPTH, TRAIN, TEST, ROUNDS = (1, 2, 4), 3, 500, 1000, 12
RATES, SITE_RATES = (0.001, 0.003, 0.01), (0.0003, 0.001, 0.003, 0.01)
TUNING_SEEDS, SEEDS, EPOCHS = (100, 101), (0, 1, 2, 3, 4), (0, 1, 5, 10)
SIZES = {"patch": 7, "dim": 32, "mlp_dim": 64}
STARTS = ("generated", "draw")
TRAINING = {"optimizer": "adam", "batch_size": 32, "clip_norm": 1.0}


def build_sites(pool: Any, seed: int) -> list[pf.Client]:
    """The clients, and the new site last."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    sites = []
    for k, depth in enumerate((*DEPTHS, UNSEEN_DEPTH)):
        rows = order[k * (TRAIN + TEST) :][: TRAIN + TEST].split([TRAIN, TEST])
        network = ModelSpec("vit", {"depth": depth, **SIZES}, (1, 28, 28), 10)
        sites.append(pf.Client(f"{depth} blocks", network, *(pool.select(part) for part in rows)))
    return sites


def federate(clients: list[pf.Client], lr: float, seed: int) -> Any:
    method = pf.algorithms.FLHAGHN(lr=lr, **TRAINING)
    return pf.federate(
        clients, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, workers=0, progress=SilentProgress()
    )  # fmt: skip


def choose(scores: dict[float, list[float]]) -> float:
    return max(scores, key=lambda lr: statistics.mean(scores[lr]))


def train(site: pf.Client, start: Any, epochs: int, lr: float, seed: int) -> list[float]:
    """The new site's accuracy after 0, 1, ... epochs."""
    curve = training_curve(site, start, pf.algorithms.Local(**TRAINING), epochs, lr=lr, seed=seed, device="cpu")
    return [round(scores["accuracy"], 4) for scores in curve]


def start_site(site: pf.Client, run: Any, seed: int) -> tuple[Any, dict[str, Any]]:
    """What is generated for the new site, and both starts."""
    warm = run.warmstart(site.model, site.train, test=site.test, id=site.id)
    return warm, {"generated": warm.generated, "draw": initial_state(site.model, seed)}


def tune(pool: Any) -> dict[str, Any]:
    """The rates: `method`, and one for each start."""
    by_rate: dict[float, list[float]] = {lr: [] for lr in RATES}
    runs: dict[tuple[float, int], Any] = {}
    for seed in TUNING_SEEDS:
        *clients, _ = build_sites(pool, seed)
        for lr in RATES:
            runs[lr, seed] = federate(clients, lr, seed)
            by_rate[lr].append(runs[lr, seed].table()[-1]["accuracy"])
    lr = choose(by_rate)
    first: dict[str, dict[float, list[float]]] = {start: {rate: [] for rate in SITE_RATES} for start in STARTS}
    for seed in TUNING_SEEDS:
        *_, site = build_sites(pool, seed)
        _, starts = start_site(site, runs[lr, seed], seed)
        for start, weights in starts.items():
            for rate in SITE_RATES:
                first[start][rate].append(train(site, weights, 1, rate, seed)[1])
    rates = {"method": lr} | {start: choose(scores) for start, scores in first.items()}
    return {"rates": rates, "clients": by_rate, "one epoch": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="folder of Fashion-MNIST")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, pool = time.process_time(), FashionMNIST(options.path).load().train
    tuning = tune(pool)
    print("rates", tuning["rates"], flush=True)
    rows = []
    for seed in SEEDS:
        *clients, site = build_sites(pool, seed)
        run = federate(clients, tuning["rates"]["method"], seed)
        warm, starts = start_site(site, run, seed)
        row = {"seed": seed, "coverage": warm.coverage, "clients": run.table()[-1]["accuracy"],
               "head": warm.after["accuracy"]}  # fmt: skip
        for start, weights in starts.items():
            row[start] = train(site, weights, max(EPOCHS), tuning["rates"][start], seed)
        rows.append(row)
        print(f"seed {seed}: {time.process_time() - began:.0f} s", flush=True)
    gaps = {n: difference([r["draw"][n] for r in rows], [r["generated"][n] for r in rows]) for n in EPOCHS}
    content = {"tuning": tuning, "differences": gaps, "seeds": rows, "seconds": round(time.process_time() - began)}
    Path(options.out).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("| epochs | from generated weights | from its own draw | difference |\n|---|---|---|---|")
    for n, gap in gaps.items():
        cells = ([100 * row[start][n] for row in rows] for start in STARTS)
        shown = " | ".join(f"{statistics.mean(cell):.1f} ± {statistics.stdev(cell):.1f}" for cell in cells)
        print(f"| {n} | {shown} | {gap['value']:+.1f} ({gap['low']:+.1f} to {gap['high']:+.1f}) |")


if __name__ == "__main__":
    main()
