"""FLHA-GHN's Table 1 at the scale of one machine: a graph hypernetwork against training alone, distillation and pFedHN.

    python benchmarks/architectures.py --variant fashion_mnist-12.5 --path /usr/share/datasets/fashion-mnist \
        --out benchmarks/results/architectures_fashion_mnist-12.5.json

The recipe `flha_table1` (or `--recipe`) at scale `cpu`: see its `reduced` sentence. A seed decides partition, initial
weights and batches. `--also "flha_ghn head=factored"` adds a method of the recipe with other fields, `--upper` the upper
bound, FedAvg with everyone on Arch 0. Further options are those of `polyfed run`. An `--out` that is there keeps the
methods that are not measured again.

Printed per method: accuracy on the common test set at the last round for each architecture, the mean over seeds, and the
mean over architectures ± standard deviation over seeds; MB (2^20 bytes) down and up of one client and round; seconds.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import yaml

import polyfed as pf
from polyfed.algorithms import name_of
from polyfed.cli.commands import options
from polyfed.cli.commands.recipes import load_recipe
from polyfed.simulation import experiment as experiments
from polyfed.simulation.runs.progress import Silent

UPPER = "upper bound"


def experiment_of(recipe, given, seed):
    config = load_recipe(recipe, given.scale, given.variant)
    config.pop("description")
    words = ["--seed", str(seed), "--data.path", given.path, *given.options]
    return experiments.from_config(options.parse(words, config, "architectures.py"))


def measure(method, experiment, clients):
    start = time.perf_counter()
    settings = experiment.settings
    run = pf.federate(
        clients, method, rounds=settings.rounds, seed=settings.seed, evaluate_every=settings.evaluate_every,
        progress=Silent(),
    )  # fmt: skip
    *rows, mean = run.table()
    by_network = {}
    for client, row in zip(clients, rows, strict=True):
        arguments = {k: v for k, v in client.model.arguments.items() if k not in ("width", "norm", "stem")}
        name = " ".join([client.model.name, *(f"{k}={v}" for k, v in arguments.items())])
        by_network.setdefault(name, []).append(row["global_accuracy"])
    last, told = run.history[-1], len(clients) * len(run.history) * 2**20
    return {
        "networks": {name: statistics.mean(values) for name, values in by_network.items()},
        "accuracy": mean["global_accuracy"],
        "own_test": mean["accuracy"],
        "beside": {
            k: v for k, v in mean.items() if k.endswith("accuracy") and k not in ("accuracy", "global_accuracy")
        },
        "mb_down": last["bytes_down_total"] / told,
        "mb_up": last["bytes_up_total"] / told,
        "seconds": time.perf_counter() - start,
        "curve": {r["round"]: round(r["summary"]["global_accuracy"]["mean"], 4) for r in run.history if r["summary"]},
        "train_loss": [round(r["train_loss"], 4) for r in run.history],
    }


def printed(name, runs):
    accuracies = [100 * run["accuracy"] for run in runs]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    cells = [name, *(f"{100 * statistics.mean(r['networks'][n] for r in runs):.1f}" for n in runs[0]["networks"])]
    cells += [f"{statistics.mean(accuracies):.1f} ± {spread:.1f}"]
    cells += [f"{statistics.mean(r[k] for r in runs):.2f}" for k in ("mb_down", "mb_up")]
    cells += [f"{statistics.mean(r['seconds'] for r in runs):.0f}"]
    return f"| {' | '.join(cells)} |"


def methods_of(given, experiment):
    """Name -> method, in the order of the paper's table."""
    found = {**experiment.baselines, name_of(experiment.algorithm): experiment.algorithm}
    for wish in given.also:
        name, *pairs = wish.split()
        found[wish] = replace(found[name], **{k: yaml.safe_load(v) for k, v in (pair.split("=") for pair in pairs)})
    return {name: method for name, method in found.items() if not given.methods or name in given.methods.split(";")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="flha_table1")
    parser.add_argument("--variant", default="fashion_mnist-12.5")
    parser.add_argument("--scale", default="cpu")
    parser.add_argument("--path", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", help="some of them, separated by semicolons")
    parser.add_argument("--also", action="append", default=[])
    parser.add_argument("--upper", action="store_true")
    parser.add_argument("--out")
    given, given.options = parser.parse_known_args()
    results, before = {}, {}
    if given.out and Path(given.out).exists():
        before = json.loads(Path(given.out).read_text())["methods"]
    for seed in range(given.seeds):
        experiment = experiment_of(given.recipe, given, seed)
        clients = experiments.participants(experiment).clients
        todo = {name: (method, experiment, clients) for name, method in methods_of(given, experiment).items()}
        if given.upper:
            upper = experiment_of("flha_upper_bound", given, seed)
            todo = {UPPER: (upper.algorithm, upper, experiments.participants(upper).clients), **todo}
        for name, task in todo.items():
            results.setdefault(name, []).append(measure(*task))
            print(printed(name, results[name]), flush=True)
            if given.out:  # what there is, should the rest be stopped
                head = {key: getattr(given, key) for key in ("recipe", "variant", "scale", "options")}
                Path(given.out).write_text(json.dumps({**head, "methods": {**before, **results}}, indent=1) + "\n")
    networks = list(results[next(iter(results))][0]["networks"])
    print(f"\n| method | {' | '.join(networks)} | mean | MB down | MB up | s |")
    print("|---" * (len(networks) + 5) + "|")
    for name, runs in results.items():
        print(printed(name, runs))


if __name__ == "__main__":
    main()
