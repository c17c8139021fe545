"""FedHeNN's Tables 1 and 2 at the scale of one machine: does aligning representations help, and do they become alike?

    python benchmarks/alignment.py homo --path ../shared/data/cifar10 --out benchmarks/results/alignment_homo.json
    python benchmarks/alignment.py hetero --path ../shared/data/cifar10 --out benchmarks/results/alignment_hetero.json
    python benchmarks/alignment.py text --path ../shared/data/sentiment140-100k --out benchmarks/results/alignment_text.json

The settings are in `SETTINGS` below. A seed decides data, initial weights and batches. Further options are those of
`polyfed run`; `--methods` takes some of the methods, and an `--out` that is there keeps the others. `--eta0 0.1,1` adds
FedHeNN with other rates, to choose among them by the accuracy on validation examples.

Printed per method: accuracy on the clients' own test sets at the last round, mean over clients and seeds ± standard
deviation over seeds, of the personal and of the global model; mean CKA between any two clients' representations of 256 test
examples (unseen by all); MB (2^20 bytes) down and up of one client and round in which it takes part; seconds.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

import polyfed as pf
from polyfed.alignment import compute_representations
from polyfed.alignment.pairwise_cka import mean_pairwise_cka
from polyfed.cli.commands.options import configuration_parser
from polyfed.simulation import experiment as experiments
from polyfed.simulation.monitoring.progress import SilentProgress

IMAGES = {
    "data": {
        "name": "cifar10", "clients": 20, "examples_per_client": 200, "test_fraction": 0.3, "val_fraction": 0.1,
        "public_fraction": 0.02, "global_test": 256, "partition": {"name": "classes_per_client", "k": 2},
    },
    "rounds": 25, "clients_per_round": 0.5, "evaluate_every": 25, "checkpoint_every": 25,
}  # fmt: skip
LOCAL = {"lr": 0.02, "momentum": 0.5, "batch_size": 32, "local_epochs": 4}
ALIGN = {"eta0": 1.0, "rad_size": 500, "rad_batch": 64}
SETTINGS = {
    "homo": {
        **IMAGES,
        "model": {"name": "cnn_fedhenn_homo", "channels": [16, 16]},
        "algorithm": {"name": "fedhenn_homo", **LOCAL, **ALIGN},
        "baselines": ["local", "fedavg", "fedprox", "fedrep"],
    },
    "hetero": {
        **IMAGES,
        "model": [{"name": "cnn_fedhenn", "level": k, "channels": 16} for k in range(1, 6)],
        "algorithm": {"name": "fedhenn", **LOCAL, **ALIGN, "eta0": 0.1, "normalise": True, "rank": 64},
        "baselines": ["local"],
    },
    "text": {
        **IMAGES,
        "data": {
            "name": "sentiment140", "vocabulary_size": 5000, "clients": 20, "examples_per_client": 200,
            "test_fraction": 0.3, "val_fraction": 0.1, "public_fraction": 0.01,
            "partition": {"name": "dirichlet", "alpha": 1.0},
        },
        "model": [{"name": "lstm", "vocabulary": 5000, "num_layers": k} for k in (1, 2)],
        "algorithm": {"name": "fedhenn", **LOCAL, **ALIGN, "optimizer": "adam", "lr": 0.001, "eta0": 0.1, "normalise": True},
        "baselines": ["local"],
    },
}  # fmt: skip


def unseen(participants):
    """256 examples on which no client trains: of the common test set, or of all clients' own ones."""
    first = participants.clients[0]
    if first.global_test is not None:
        return first.global_test
    rows = torch.cat([c.test.index for c in participants.clients])
    return replace(first.test, index=rows[torch.linspace(0, len(rows) - 1, 256).long()])


def measure(method, experiment, participants):
    start = time.perf_counter()
    settings = experiment.settings
    run = pf.federate(
        participants.clients, method, rounds=settings.rounds, seed=settings.seed,
        clients_per_round=settings.clients_per_round,
        evaluate_every=settings.evaluate_every, public=participants.public, progress=SilentProgress(),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    mean, inputs = run.table()[-1], unseen(participants)
    parts = [compute_representations(run.model(client.id), inputs) for client in participants.clients]
    last = run.history[-1]
    told = sum(len([c for c in r["clients"].values() if "bytes_up" in c]) for r in run.history) * 2**20
    return {
        "accuracy": mean["accuracy"],
        "validation": mean["val_accuracy"],
        "global": mean.get("server_accuracy"),  # of `final`: the mean over all clients' latest, or the last cohort's
        "cohort": mean.get("cohort_accuracy"),  # the last cohort's, where that is not the result
        "cka": mean_pairwise_cka(parts),
        "mb_down": last["bytes_down_total"] / told,
        "mb_up": last["bytes_up_total"] / told,
        "seconds": seconds,
        "train_loss": [round(r["train_loss"], 4) for r in run.history],
    }


def percent(values):
    if None in values:  # a method without such a model
        return "-"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"


def printed(name, runs):
    cells = [name, *(percent([run[k] for run in runs]) for k in ("accuracy", "global", "cohort", "validation"))]
    cells += [f"{statistics.mean(run['cka'] for run in runs):.3f}"]
    cells += [f"{statistics.mean(run[k] for run in runs):.2f}" for k in ("mb_down", "mb_up")]
    cells += [f"{statistics.mean(run['seconds'] for run in runs):.0f}"]
    return f"| {' | '.join(cells)} |"


def methods_of(given, experiment):
    method = experiment.algorithm
    name = experiment.config["algorithm"]["name"]
    found = {**experiment.baselines, name: method}
    for eta0 in filter(None, given.eta0.split(",")):
        found[f"{name} eta0={eta0}"] = replace(method, eta0=float(eta0))
    if given.share and name == "fedhenn":
        found["fedhenn share=weights"] = replace(method, share="weights")
    return {name: m for name, m in found.items() if not given.methods or name in given.methods.split(";")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=sorted(SETTINGS))
    parser.add_argument("--path", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eta0", default="")
    parser.add_argument("--share", action="store_true", help="share=weights too")
    parser.add_argument("--methods", help="some of them, separated by semicolons")
    parser.add_argument("--out")
    given, further = parser.parse_known_args()
    before, results = {}, {}
    if given.out and Path(given.out).exists():
        before = json.loads(Path(given.out).read_text())["methods"]
    for seed in range(given.seeds):
        words = ["--seed", str(seed), "--data.path", given.path, *further]
        experiment = experiments.build_experiment(
            configuration_parser.parse_configuration(words, SETTINGS[given.setting], "alignment.py")
        )
        participants = experiments.load_participants(experiment)
        for name, method in methods_of(given, experiment).items():
            results.setdefault(name, []).append(measure(method, experiment, participants))
            print(printed(name, results[name]), flush=True)
            if given.out:  # what there is, should the rest be stopped
                head = {"setting": given.setting, "settings": SETTINGS[given.setting], "options": further}
                Path(given.out).write_text(json.dumps({**head, "methods": {**before, **results}}, indent=1) + "\n")
    print(
        "\n| method | personal | global | last cohort | validation | CKA | MB down | MB up | s |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for name, runs in results.items():
        print(printed(name, runs))


if __name__ == "__main__":
    main()
