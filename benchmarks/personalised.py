"""pFedLA's Table 1 at the scale of one machine: every method of a recipe on the same clients, several seeds.

    python benchmarks/personalised.py --variant fashion_mnist-10 --path /usr/share/datasets/fashion-mnist \
        --out benchmarks/results/personalised_fashion_mnist.json

The recipe `pfedla_table1` at scale `cpu`: see its `reduced` sentence. A seed decides partition, initial weights and batches.
Printed per method: accuracy at the last round, mean over clients, as mean ± standard deviation over seeds; the worst client
(mean over seeds); MB (2^20 bytes) down and up of one run; seconds a round. `paper` is Table 1's figure.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import polyfed as pf
from polyfed.algorithms import registry_name
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.recipes import load_recipe_configuration
from polyfed.simulation import experiment as experiments
from polyfed.simulation.monitoring.progress import SilentProgress

BESIDE = ("val_accuracy", "trained_accuracy", "server_accuracy")
PAPER = {  # Table 1, 10 clients
    "fashion_mnist-10": {
        "local": 85.83, "fedavg": 91.24, "per_fedavg": 93.63, "pfedme": 90.43, "pfedhn": 94.83, "fedrep": 93.17,
        "fedfomo": 86.17, "pfedla": 94.34, "heur_pfedla": 95.47,
    },
    "cifar10-10": {
        "local": 59.44, "fedavg": 48.57, "per_fedavg": 52.54, "pfedme": 53.73, "pfedhn": 46.98, "fedbn": 59.36,
        "fedrep": 58.01, "fedfomo": 59.37, "pfedla": 61.43, "heur_pfedla": 60.02,
    },
}  # fmt: skip


def experiment_of(given, seed):
    config = load_recipe_configuration("pfedla_table1", given.scale, given.variant)
    config.pop("description")
    words = ["--seed", str(seed), "--data.path", given.path, *given.options]
    return experiments.build_experiment(configuration_parser.parse_configuration(words, config, "personalised.py"))


def measure(method, experiment, clients):
    settings = experiment.settings
    start = time.perf_counter()
    run = pf.federate(
        clients, method, rounds=settings.rounds, seed=settings.seed, clients_per_round=settings.clients_per_round,
        evaluate_every=settings.evaluate_every, progress=SilentProgress(),
    )  # fmt: skip
    rows = run.table()
    last = run.history[-1]
    found = {
        "accuracy": rows[-1]["accuracy"],
        "worst": min(row["accuracy"] for row in rows[:-1]),
        "mb_down": last["bytes_down_total"] / 2**20,
        "mb_up": last["bytes_up_total"] / 2**20,
        "seconds": time.perf_counter() - start,
        "seconds_clients": statistics.mean(record["seconds_clients"] for record in run.history),
        "seconds_server": statistics.mean(record["seconds_server"] for record in run.history),
        "curve": {r["round"]: round(r["summary"]["accuracy"]["mean"], 4) for r in run.history if r["summary"]},
    }
    beside = {name: rows[-1][name] for name in BESIDE if name in rows[-1]}
    return {**found, **beside}


def printed(name, runs, paper):
    def mean(key):
        return statistics.mean(run[key] for run in runs)

    accuracies = [100 * run["accuracy"] for run in runs]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    names = [key for key in BESIDE if key in runs[0]]
    cells = (
        f"`{name}`",
        f"{statistics.mean(accuracies):.1f} ± {spread:.1f}",
        f"{100 * mean('worst'):.1f}",
        ", ".join(f"{key.partition('_')[0]} {100 * mean(key):.1f}" for key in names),
        f"{mean('mb_down'):.1f} + {mean('mb_up'):.1f}",
        f"{mean('seconds_clients'):.2f} + {mean('seconds_server'):.3f}",
        str(paper),
    )
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="fashion_mnist-10")
    parser.add_argument("--scale", default="cpu")
    parser.add_argument("--path", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", help="some of them, separated by commas")
    parser.add_argument("--out")
    given, given.options = parser.parse_known_args()
    results = {}
    for seed in range(given.seeds):
        experiment = experiment_of(given, seed)
        clients = experiments.load_participants(experiment).clients
        methods = {**experiment.baselines, registry_name(experiment.algorithm): experiment.algorithm}
        for name, method in methods.items():
            if given.methods is None or name in given.methods.split(","):
                results.setdefault(name, []).append(measure(method, experiment, clients))
                print(printed(name, results[name], ""), flush=True)
        if given.out:  # what there is, should the next seed be stopped
            head = {"variant": given.variant, "scale": given.scale, "options": given.options, "seeds": seed + 1}
            Path(given.out).write_text(json.dumps({**head, "methods": results}, indent=1) + "\n")
    print("\n| method | accuracy % | worst client | beside | MB down + up | s a round: clients + server | paper |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        print(printed(name, runs, PAPER.get(given.variant, {}).get(name, "")))


if __name__ == "__main__":
    main()
