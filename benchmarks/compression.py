"""What compressing messages costs in accuracy and saves in bytes.

    python benchmarks/compression.py --out benchmarks/results/compression.json

The federation of `polyfed run digits`: 8 clients with 40 of scikit-learn's handwritten digits each, in unequal
mixtures, its local training and its 20 rounds. FedAvg and pFedLA need one architecture, flha_arch1; FLHA-GHN has the
recipe's four. Accuracy is the mean over clients, on their own test digits. The seed draws first weights and batches;
clients are those of the recipe. Each way of compressing is beside the run of the same seed without. Megabytes are 2^20
bytes, for all clients together.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import polyfed as pf
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.simulation.experiment import build_experiment, load_participants

ONE = [{"name": "flha_arch1", "width": 8}]
TRAINING = ("lr", "local_epochs", "batch_size")
WAYS = {
    "none": {},
    "int8": {"compress": "int8"},
    "int8, both directions": {"compress": "int8", "compress_down": "int8"},
    "topk:0.1": {"compress": "topk:0.1"},
    "topk:0.01": {"compress": "topk:0.01"},
}


def experiment_of(models):
    """The recipe `digits` with other networks."""
    config = recipes.load_recipe_configuration("digits")
    config.pop("description")
    config["model"] = models or config["model"]
    return build_experiment(configuration_parser.parse_configuration([], config, "polyfed run"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found, began = {}, time.perf_counter()
    for name, models in {"fedavg": ONE, "pfedla": ONE, "flha_ghn": None}.items():
        rows = {way: {"accuracy": [], "megabytes_up": [], "megabytes_down": []} for way in WAYS}
        experiment = experiment_of(models)
        training = {field: getattr(experiment.algorithm, field) for field in TRAINING}
        clients = load_participants(experiment).clients
        for seed in range(given.seeds):
            for way, how in WAYS.items():
                method = pf.algorithms.get(name)(**training)
                run = pf.federate(clients, method, rounds=given.rounds, seed=seed, evaluate_every=given.rounds, **how)
                last, row = run.history[-1], rows[way]
                row["accuracy"].append(round(run.table()[-1]["accuracy"], 4))
                for side in ("up", "down"):
                    row[f"megabytes_{side}"].append(round(last[f"bytes_{side}_total"] / 2**20 / given.rounds, 4))
        for row in rows.values():
            base = rows["none"]["accuracy"]
            apart = [a - b for a, b in zip(row["accuracy"], base, strict=True)]
            row["mean"], row["difference"] = (
                round(statistics.mean(row["accuracy"]), 4),
                round(statistics.mean(apart), 4),
            )
        found[name] = rows
        for way, row in rows.items():
            sizes = f"{row['megabytes_up'][0]:7.3f} MB up, {row['megabytes_down'][0]:7.3f} down a round"
            print(f"{name:9} {way:22} {100 * row['mean']:5.1f} % ({100 * row['difference']:+.1f})  {sizes}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")
    if given.out:
        content = {"rounds": given.rounds, "seeds": given.seeds, "methods": found}
        given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
