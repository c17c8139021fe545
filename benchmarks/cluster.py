"""Seconds a round that an engine takes beside the clients' work: 20 small clients with hardly anything to do, two workers,
on the pool and on a Ray on this machine.

    python benchmarks/cluster.py --out benchmarks/results/cluster.json

Medians of the rounds after the second, engines in turn; "start" is what the run takes beside its rounds from the second on:
starting, the first round, the last evaluation, ending.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import ray
import torch
from speed import cpu_name

import polyfed as pf
from polyfed.models import ModelSpec

ENGINES = {"in process": {"engine": "inprocess"}, "pool": {"engine": "pool", "workers": 2},
           "ray": {"engine": "ray", "workers": 2}}  # fmt: skip


def clients(number=20, width=32):
    """Networks of 3,300 weights, ten examples each."""
    generator = torch.Generator().manual_seed(0)
    spec = ModelSpec("mlp", {"hidden": [64]}, (width,), 10)
    sets = [(torch.randn(10, width, generator=generator), torch.arange(10)) for _ in range(number)]
    return [pf.Client(f"c{k:02d}", spec, data, data) for k, data in enumerate(sets)]


def measure(options, rounds):
    began = time.perf_counter()
    run = pf.federate(clients(), pf.algorithms.FedAvg(batch_size=10), rounds=rounds, evaluate_every=10**6, **options)
    seconds = [record["seconds"] for record in run.history[:-1]]  # the last round is evaluated
    return {"round": statistics.median(seconds[2:]), "start": time.perf_counter() - began - sum(seconds[1:])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {name: [] for name in ENGINES}
    for _ in range(options.repeat):
        for name, engine in ENGINES.items():
            found[name].append(measure(engine, options.rounds))
            print(name, found[name][-1], flush=True)
    medians = {n: {key: statistics.median(f[key] for f in each) for key in each[0]} for n, each in found.items()}
    print(json.dumps(medians, indent=1))
    if options.out:
        host = {"cpu": cpu_name(), "torch": torch.__version__, "ray": ray.__version__}
        content = {"date": time.strftime("%Y-%m-%d"), "host": host, "seconds": medians, "all": found}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
