"""How often the monitor of updates names a client: honest ones, which it should not, and one that lies.

    python benchmarks/monitor.py --out benchmarks/results/monitor.json

Federations: the four hospitals of UCI Heart Disease (a linear model and an MLP of 16, SGD at 0.05, 0.15 and 0.5, 60 rounds),
and ten clients of scikit-learn's digits (an MLP of 64-32-10, SGD at 0.1, two epochs a round, 40 rounds) dealt evenly, by
Dirichlet 0.3 and by Dirichlet 0.1. FedAvg, six seeds. One client lies, another with each seed: it sends minus its update or
−5 times it, from the first round or from round 15, or trains on swapped labels. Printed: the share of runs in which a
sentence of `metrics.jsonl` says that the liar pulls against the others, and that an honest client does, with exact intervals
of 95 % (Clopper and Pearson); the median of the rounds in which the liar is first named.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import attacks
from scipy.stats import binomtest
from torch.nn import Linear, ReLU, Sequential

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.algorithm import Message
from polyfed.data import Dirichlet
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.monitoring.progress import SilentProgress

SEEDS, RATES = range(100, 106), (0.05, 0.15, 0.5)
ATTACKS = {
    "nobody": (1.0, 0),
    "sign flip": (-1.0, 1),
    "-5 times": (-5.0, 1),
    "-5 times, late": (-5.0, 15),
    "labels": (1.0, 1),
}
SITES = ("Cleveland", "Hungary", "Switzerland", "VA")
run_honestly = InProcessEngine.run
attacks.SPLITS["hard"] = Dirichlet(0.1)


def multiply_updates_of(liar, factor, first_round):
    """`InProcessEngine.run`, with the liar's updates multiplied by a factor from a round on."""

    def run(engine, tasks):
        for result in run_honestly(engine, tasks):
            task = result.task
            if task.client == liar and task.round >= first_round and task.phase == "local" and result.reply is not None:
                start, reply = task.message.tensors["model"], result.reply
                model = {n: start[n] + factor * (t - start[n]) if t.is_floating_point() else t
                         for n, t in reply.tensors["model"].items()}  # fmt: skip
                result = dataclasses.replace(result, reply=Message({"model": model}, reply.scalars))
            yield result

    return run


def hospitals(network, seed):
    sites = pf.data.heart(seed=seed)
    n = sites.num_features
    makers = {"linear": lambda: Linear(n, 2), "mlp": lambda: Sequential(Linear(n, 16), ReLU(), Linear(16, 2))}
    return sites.build_clients(makers[network])


def first_rounds_named(clients, method, rounds, seed, liar, attack):
    """{client: the first round in which a sentence says that it pulls against the others}."""
    factor, first_round = ATTACKS[attack]
    if attack == "labels":
        labels = next(client for client in clients if client.id == liar).train.y
        labels.copy_(labels.max() - labels)
    InProcessEngine.run = multiply_updates_of(liar, factor, first_round) if factor != 1.0 else run_honestly
    try:
        run = pf.federate(clients, method, rounds=rounds, seed=seed, workers=0, evaluate_every=rounds, on_error="skip",
                          progress=SilentProgress())  # fmt: skip
    finally:
        InProcessEngine.run = run_honestly
    named = {}
    for record in run.history:
        for client in record["clients"]:
            if any(f"{client!r} pulls against" in sentence for sentence in record["warnings"]):
                named.setdefault(client, record["round"])
    return named


def rows(seed):
    """(federation, attack, first rounds, liar) of all runs with a seed."""
    for attack in ATTACKS:
        for network in ("linear", "mlp"):
            for rate in RATES:
                liar = SITES[seed % 4]
                named = first_rounds_named(hospitals(network, seed), FedAvg(lr=rate), 60, seed, liar, attack)
                yield f"hospitals, {network}", attack, named, liar
        for split in ("iid", "skewed", "hard"):
            clients = attacks.clients(split, seed, 0, None)
            liar = sorted(client.id for client in clients)[seed % len(clients)]
            method = FedAvg(lr=0.1, batch_size=16, local_epochs=2)
            yield f"digits, {split}", attack, first_rounds_named(clients, method, 40, seed, liar, attack), liar


def share(count, total):
    low, high = binomtest(count, total).proportion_ci()
    return {"runs": total, "named": count, "interval": [round(low, 3), round(high, 3)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out, cells = parser.parse_args().out, {}
    for seed in SEEDS:
        for federation, attack, named, liar in rows(seed):
            cells.setdefault((federation, attack), []).append((named, liar if attack != "nobody" else None))
        print(f"seed {seed}: done", flush=True)
    table = []
    for (federation, attack), runs in cells.items():
        rounds = [named[liar] for named, liar in runs if liar in named]
        honest = sum(any(client != liar for client in named) for named, liar in runs)
        row = {"federation": federation, "attack": attack, "honest": share(honest, len(runs))}
        if attack != "nobody":
            row |= {"liar": share(len(rounds), len(runs)), "round": statistics.median(rounds) if rounds else None}
        table.append(row)
        print(federation, "|", attack, "|", f"honest {honest} of {len(runs)}", "|", row.get("liar"), row.get("round"))
    out.write_text(json.dumps({"seeds": list(SEEDS), "cells": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
