"""Do adapters of different ranks collapse to the smallest rank? 20 rounds with each way to average them, on digits.

    python benchmarks/rank_collapse.py --out benchmarks/results/rank_collapse.json

Six sites share scikit-learn's digits (Dirichlet 1.0 over the ten classes) and train adapters of two frozen random layers,
and a classifier. Wu, Hu, Min and Wang (2026, arXiv 2602.13486) say that components beyond the smallest rank fade where
products of different ranks are averaged and cut by their singular values, since sites that lack them count in the mean.
Printed: the share of the squared singular values of the adapters' product beyond rank 2, after some rounds, and accuracy
after the last, mean over five seeds (of sites, draws and training) with the interval of 95 %.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.messages.lora import find_adapters
from polyfed.models.lora import add_lora
from polyfed.simulation.monitoring.progress import SilentProgress

SMALLEST, MIXED, SAME, ROUNDS, SEEDS = 2, (2, 2, 4, 8, 16, 16), (16,) * 6, 20, (0, 1, 2, 3, 4)
SHOWN = (1, 2, 5, 10, 20)
T_QUANTILE = 2.776  # of Student's t with four degrees of freedom, 97.5 %
CASES = {
    "`svd`, all of rank 16": ("svd", SAME),
    "`svd`, ranks 2 to 16": ("svd", MIXED),
    "`zero_pad`, ranks 2 to 16": ("zero_pad", MIXED),
    "`stack`, ranks 2 to 16": ("stack", MIXED),
}


def energy_beyond(state: Mapping[str, Any], rank: int) -> float:
    """The share of the squared singular values of the products B·A beyond a rank, over all adapters."""
    inside, total, model = 0.0, 0.0, state["model"]
    for pair in find_adapters(model):
        product = model[pair.product] if pair.product in model else model[pair.b] @ model[pair.a]
        squares = torch.linalg.svdvals(product.double()).square()
        inside, total = inside + float(squares[:rank].sum()), total + float(squares.sum())
    return 1 - inside / total if total else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Watched(Averaging):
    """FedAvg that notes after each round how much of the adapters lies beyond the smallest rank."""

    def analysis(self, server_state: Mapping[str, Any], client_ids: Sequence[str]) -> Mapping[str, float]:
        return {"energy": energy_beyond(server_state, SMALLEST)}


def network(rank: int) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)]
    return add_lora(nn.Sequential(*layers), rank, alpha=2.0 * rank, layers=["1", "3"], train=["5.*"])


FACTORIES = {rank: partial(network, rank) for rank in {*MIXED, *SAME}}


def play(mode: str, ranks: tuple[int, ...], seed: int) -> dict[str, Any]:
    pool = pf.data.sources.registry.SOURCES["digits"]().load()
    split = pf.data.Split(clients=len(ranks), test_fraction=0.4)
    parts, _ = pf.data.make_clients(pool, split, pf.data.Dirichlet(alpha=1.0), seed=seed)
    sites = [pf.Client(p.id, FACTORIES[rank], p.train, p.test) for p, rank in zip(parts, ranks, strict=True)]
    method = Watched(lr=0.05, batch_size=20, local_epochs=2, adapters=mode)
    run = pf.federate(
        sites, method, rounds=ROUNDS, seed=seed, workers=0, evaluate_every=ROUNDS, progress=SilentProgress()
    )
    energy = [round(record["analysis"]["energy"], 6) for record in run.history]
    return {"seed": seed, "accuracy": run.table()[-1]["accuracy"], "energy": energy}


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of the interval of 95 %, in per cent."""
    half = T_QUANTILE * statistics.stdev(values) / len(values) ** 0.5
    return f"{100 * statistics.mean(values):.1f} ± {100 * half:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, (mode, ranks) in CASES.items():
        found[name] = [play(mode, ranks, seed) for seed in SEEDS]
        shown = [f"{100 * statistics.mean(run['energy'][r - 1] for run in found[name]):.1f}" for r in SHOWN]
        print(f"| {name} | {' | '.join(shown)} | {interval([run['accuracy'] for run in found[name]])} |", flush=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
