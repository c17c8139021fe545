"""Does pFedLA's hypernetwork learn who helps whom?

    python benchmarks/groups.py --out benchmarks/results/groups.json

Clients with handwritten digits (scikit-learn) in two groups; the second group's labels are shifted by one, so that the
groups contradict one another. All digits are used: with 8 clients about 120 to train on each, with `--clients 40` about 24.
40 rounds of 5 epochs, lr 0.05, batch 32. `hn_lr` is chosen by the mean accuracy on the clients' validation examples over
the seeds; the weight inside the own group (α summed over the members, mean over clients) and the accuracy on test examples
are printed for every rate.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, HeurPFedLA, Local, PFedLA
from polyfed.data import IID, SOURCES, Split, make_clients
from polyfed.models import ModelSpec

OPTIONS = {"lr": 0.05, "local_epochs": 5, "batch_size": 32}
RATES = (0.005, 0.05, 0.5, 2.0, 10.0)
ROUNDS = 40


def clients_of(seed, clients):
    """Clients 1, 3, 5, ... have every label shifted by one."""
    pool = SOURCES["digits"]().load()
    split = Split(clients=clients, test_fraction=0.3, val_fraction=0.15)
    data, _ = make_clients(pool, split, IID(), seed=seed)
    spec = ModelSpec("cnn_small", {}, pool.input_shape, pool.num_outputs)

    def shifted(part, by):
        return pf.Examples(part.x, (part.y + by) % pool.num_outputs, part.index, part.transform)

    return [
        pf.Client(d.id, spec, *(shifted(part, i % 2) for part in (d.train, d.test, d.val))) for i, d in enumerate(data)
    ]


def weight_inside(run):
    """α given to the own group, by layer, mean over clients."""
    analysis = run.federation.algorithm.analysis(run.last.state, sorted(run.federation.clients))
    alpha = analysis["alpha"]
    n = torch.arange(len(alpha))
    same = (n[:, None] - n[None, :]) % 2 == 0
    by_layer = (alpha * same[:, None, :]).sum(2).mean(0)
    return dict(zip(analysis["layers"], (round(float(w), 4) for w in by_layer), strict=True))


def measure(method, seeds, clients):
    found = {"accuracy": [], "val_accuracy": [], "weight_inside": []}
    for seed in seeds:
        run = pf.federate(clients_of(seed, clients), method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS)
        row = run.table()[-1]
        found["accuracy"].append(round(row["accuracy"], 4))
        found["val_accuracy"].append(round(row["val_accuracy"], 4))
        if isinstance(method, PFedLA | HeurPFedLA):
            found["weight_inside"].append(weight_inside(run))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out")
    given = parser.parse_args()
    methods = {"local": Local(**OPTIONS), "fedavg": FedAvg(**OPTIONS)}
    methods |= {f"pfedla hn_lr={rate}": PFedLA(hn_lr=rate, **OPTIONS) for rate in RATES}
    methods |= {f"heur_pfedla hn_lr={rate}": HeurPFedLA(hn_lr=rate, **OPTIONS) for rate in RATES[2:]}
    results = {}
    for name, method in methods.items():
        results[name] = found = measure(method, range(given.seeds), given.clients)
        inside = [statistics.mean(layers.values()) for layers in found["weight_inside"]]
        print(f"{name:24} val {statistics.mean(found['val_accuracy']):.3f}  test {statistics.mean(found['accuracy']):.3f}"
              + (f"  inside own group {' '.join(f'{w:.2f}' for w in inside)}" if inside else ""), flush=True)  # fmt: skip
    for kind in ("pfedla", "heur_pfedla"):
        names = [name for name in results if name.startswith(f"{kind} ")]
        best = max(names, key=lambda name: statistics.mean(results[name]["val_accuracy"]))
        print(f"chosen on validation: {best}")
        results[f"chosen for {kind}"] = best
    if given.out:
        Path(given.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
