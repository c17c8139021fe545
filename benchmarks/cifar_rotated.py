"""BatchNorm under feature shift: CIFAR-10, ten clients whose images are rotated by 0, 90, 180 and 270 degrees in turn.

    python benchmarks/cifar_rotated.py --path FOLDER --out benchmarks/results/cifar_rotated.json

FOLDER holds CIFAR-10 as Parquet. IID classes, 2,000 training images a client (857 to test on, rotated alike), pFedLA's CIFAR
network with BatchNorm, 1 local epoch, batch 32, lr 0.05, 30 rounds. What differs is the treatment of norm layers: all of it
averaged (`fedavg`), statistics kept by the client (`fedavg buffers=local`), statistics and parameters kept (`fedbn`). Also
pFedLA with the statistics kept, which must not collapse.
"""

import argparse
import json
import statistics
from pathlib import Path

import polyfed as pf
from polyfed.algorithms import FedAvg, FedBN, Local, PFedLA
from polyfed.data import IID, SOURCES, Shift, Split, make_clients
from polyfed.models import ModelSpec

OPTIONS = {"lr": 0.05, "local_epochs": 1, "batch_size": 32}
METHODS = {
    "fedavg": FedAvg(**OPTIONS),
    "fedbn": FedBN(**OPTIONS),
    "pfedla": PFedLA(**OPTIONS),
    "fedavg buffers=local": FedAvg(buffers="local", **OPTIONS),
    "local": Local(**OPTIONS),
}
ROUNDS = 30


def clients_of(pool, seed):
    shifts = [Shift(rotation=angle) for angle in (0, 90, 180, 270)]
    split = Split(clients=10, examples_per_client=2000, test_fraction=0.3)
    data, _ = make_clients(pool, split, IID(), seed=seed, shifts=shifts)
    spec = ModelSpec("cnn_pfedla", {"batch_norm": True}, pool.input_shape, pool.num_outputs)
    return [pf.Client(d.id, spec, d.train, d.test) for d in data]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--methods", default=",".join(METHODS), help="some of them, separated by commas")
    parser.add_argument("--out")
    given = parser.parse_args()
    pool = SOURCES["cifar10"](path=given.path).load()
    results = {name: [] for name in given.methods.split(",")}
    for seed in range(given.seeds):
        clients = clients_of(pool, seed)
        for name in results:
            run = pf.federate(clients, METHODS[name], rounds=given.rounds, seed=seed, evaluate_every=10)
            curve = {r["round"]: round(r["summary"]["accuracy"]["mean"], 4) for r in run.history if r["summary"]}
            results[name].append({"curve": curve, "worst": run.history[-1]["summary"]["accuracy"]["min"]})
            print(f"seed {seed} {name:22} {' '.join(f'{v:.3f}' for v in curve.values())}", flush=True)
    for name, runs in results.items():
        last = [100 * run["curve"][given.rounds] for run in runs]
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        worst = 100 * statistics.mean(run["worst"] for run in runs)
        print(f"| `{name}` | {statistics.mean(last):.1f} ± {spread:.1f} | {worst:.1f} |")
    if given.out:
        Path(given.out).write_text(
            json.dumps({"seeds": given.seeds, "rounds": given.rounds, "methods": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
