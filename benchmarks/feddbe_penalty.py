"""FedDBE by the strength κ of its penalty, on the leaderboard's federations of digits.

    python benchmarks/feddbe_penalty.py --out benchmarks/results/feddbe_penalty.json

For each κ the rate with the best mean validation accuracy after the last round of the first two seeds is taken, and runs
with all seeds. Printed: test accuracy, mean over clients and seeds, of each κ and of FedAvg chosen alike, and the gain over
FedAvg with its interval of 95 %, for new seeds and new test examples.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from heads import difference

import polyfed as pf
from polyfed.cli.commands.options import recipes
from polyfed.core.errors import ClientError
from polyfed.simulation.experiment import build_experiment, load_participants
from polyfed.simulation.monitoring.progress import SilentProgress

VARIANTS = ("digits-0.1", "rotations")
KAPPAS = (50.0, 5.0, 0.5)
RATES, TUNING_SEEDS, SEEDS = (0.06, 0.2), (0, 1), (0, 1, 2, 3, 4)
TRAINING = {"local_epochs": 2, "batch_size": 16}  # those of the recipe


def build_clients(variant):
    config = recipes.load_recipe_configuration("leaderboard", variant=variant)
    config |= {"algorithm": {"name": "fedavg"}, "baselines": []}
    return load_participants(build_experiment(config)).clients, config["rounds"]


def score(clients, rounds, method, seed):
    """Validation and test accuracy of a run, and its outputs by client; None for the outputs if it diverges."""
    try:
        run = pf.federate(
            clients, method, rounds=rounds, seed=seed, evaluate_every=rounds, workers=0, progress=SilentProgress()
        )
    except ClientError:
        return 0.0, 0.0, None
    mean = run.table()[-1]
    return mean["val_accuracy"], mean["accuracy"], {c.id: run.predictions(c.id).outputs for c in clients}


def choose_rate_and_run(clients, rounds, build):
    """The chosen rate, and the scores and outputs of all seeds with it."""
    runs = {(lr, seed): score(clients, rounds, build(lr), seed) for lr in RATES for seed in TUNING_SEEDS}
    rate = max(RATES, key=lambda lr: statistics.mean(runs[lr, seed][0] for seed in TUNING_SEEDS))
    return rate, [runs.get((rate, seed)) or score(clients, rounds, build(rate), seed) for seed in SEEDS]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    results = {}
    print(
        "| federation | method | rate | validation | accuracy | gain over FedAvg |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for variant in VARIANTS:
        clients, rounds = build_clients(variant)
        methods = {"fedavg": lambda lr: pf.algorithms.FedAvg(lr=lr, **TRAINING)} | {
            f"feddbe kappa={kappa:g}": lambda lr, kappa=kappa: pf.algorithms.FedDBE(lr=lr, kappa=kappa, **TRAINING)
            for kappa in KAPPAS
        }
        results[variant], averaged = {}, []
        for name, build in methods.items():
            rate, runs = choose_rate_and_run(clients, rounds, build)
            outputs = [run[2] for run in runs]
            averaged = averaged or outputs
            gain = difference(clients, outputs, averaged) if name != "fedavg" and None not in outputs else None
            validation, accuracy = ([round(100 * run[k], 2) for run in runs] for k in (0, 1))
            results[variant][name] = {"lr": rate, "validation": validation, "accuracy": accuracy, "gain": gain}
            shown = f"{gain['value']:+.1f} ({gain['low']:+.1f} to {gain['high']:+.1f})" if gain else ""
            print(
                f"| {variant} | `{name}` | {rate:g} | {statistics.mean(validation):.1f} | {statistics.mean(accuracy):.1f} "
                f"| {shown} |",
                flush=True,
            )
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
