"""Simulated time to a stated accuracy: synchronous rounds, FedBuff and FedAsync, with clients up to 20 times apart.

    python benchmarks/asynchronous.py [--seeds 6] [--processes 2] [--out benchmarks/results/asynchronous.json]

Fashion-MNIST (Debian: apt-get install dataset-fashion-mnist), 40 clients with 100 training images each, dealt by a Dirichlet
draw with alpha 0.3 over classes; a network of 64 hidden units, FedAvg, two local epochs. Speeds are drawn from
"uniform:1-20" examples a second, so that an update takes 10 to 200 simulated seconds. Ten clients are at work at once in
every run: the cohort of a synchronous round, and the concurrency of the others. A run ends when its simulated time is used
up; this time is the same for all rules.

Each rule has four trials of a search by validation accuracy at the end, on a seed of its own: the learning rate and, for
FedBuff, the server's rate, for FedAsync, the mixing share; for synchronous rounds four learning rates. Then each rule runs
with further seeds, which decide partition, initial weights, draws and speeds. The mean accuracy over clients on their test
images is looked at about every 40 simulated seconds (asynchronous), or after each round (synchronous). Where a run does not
reach the accuracy, its time counts as the whole budget, so that a ratio is a lower bound; how many do is stated. Intervals
are 95 % t-intervals over seeds: of the mean time, and of the logarithm of the ratio of two rules with the same seed.
"""

import argparse
import json
import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch

import polyfed as pf
from polyfed.data import SOURCES, Dirichlet, Split, make_clients
from polyfed.models import ModelSpec

RESULTS = Path(__file__).parent / "results" / "asynchronous.json"
PATH = "/usr/share/datasets/fashion-mnist"
CLIENTS, IMAGES, AT_WORK, BUFFER = 40, 100, 10, 5
SPEEDS = "uniform:1-20"
BUDGET = 1200.0  # simulated seconds
TARGETS = (0.65, 0.7, 0.75)
MODEL = ModelSpec("mlp", {"hidden": [64]}, (1, 28, 28), 10)
TUNING_SEED = 1000
SEARCH = {
    "synchronous": [{"lr": lr} for lr in (0.03, 0.05, 0.1, 0.2)],
    "fedbuff": [{"lr": lr, "server_lr": rate} for lr in (0.05, 0.1) for rate in (1.0, 2.0)],
    "fedasync": [{"lr": lr, "mixing": share} for lr in (0.05, 0.1) for share in (0.3, 0.6)],
}
ROUNDS = {"synchronous": 400, "fedbuff": 4000, "fedasync": 20000}
LOOK_EVERY = {"synchronous": 1, "fedbuff": 4, "fedasync": 20}
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # by number of seeds


class TimeIsUp(pf.Callback):
    """Ends a run once its simulated time is used up."""

    def on_round(self, record):
        return record["simulated_seconds"] < BUDGET


def clients_of(pool, seed):
    """The clients of one seed, with about 23 validation and 31 test images each."""
    split = Split(clients=CLIENTS, examples_per_client=IMAGES, test_fraction=0.2, val_fraction=0.15)
    data, _ = make_clients(pool, split, Dirichlet(alpha=0.3), seed=seed)
    return [pf.Client(d.id, MODEL, d.train, d.test, d.val) for d in data]


def play(rule, values, clients, seed):
    """A run of one rule; returns [simulated seconds, test accuracy, validation accuracy] of each look."""
    options = {}
    if rule == "fedbuff":
        options = {"asynchronous": pf.FedBuff(buffer=BUFFER, server_lr=values["server_lr"])}
    elif rule == "fedasync":
        options = {"asynchronous": pf.FedAsync(mixing=values["mixing"])}
    run = pf.federate(
        clients, pf.algorithms.FedAvg(lr=values["lr"], local_epochs=2, batch_size=20), rounds=ROUNDS[rule], seed=seed,
        clients_per_round=AT_WORK, speeds=SPEEDS, evaluate_every=LOOK_EVERY[rule], callbacks=[TimeIsUp()], workers=0,
        metrics=["accuracy"], quiet=True, **options,
    )  # fmt: skip
    return [
        [record["simulated_seconds"], record["summary"]["accuracy"]["mean"], record["summary"]["val_accuracy"]["mean"]]
        for record in run.history
        if record["summary"]
    ]


def seconds_to(looks, target):
    """Simulated seconds until the accuracy is reached; None if it never is."""
    return next((seconds for seconds, accuracy, _ in looks if seconds <= BUDGET and accuracy >= target), None)


def interval(values):
    """Mean and 95 % t-interval."""
    mean = statistics.fmean(values)
    half = T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return [mean, mean - half, mean + half]


@cache
def pool_of_images():
    return SOURCES["fashion_mnist"](path=PATH).load()


def job(rule, values, seed):
    """The looks of one run, and the CPU seconds that it took; called in a process of its own."""
    torch.set_num_threads(1)
    started = time.process_time()
    looks = play(rule, values, clients_of(pool_of_images(), seed), seed)
    seconds = time.process_time() - started
    print(rule, values, "seed", seed, "validation", round(last_accuracy(looks, 2), 4), f"{seconds:.0f} s", flush=True)
    return looks, seconds


def last_accuracy(looks, column):
    """Mean of the last five looks: one look is noisy."""
    return statistics.fmean(look[column] for look in looks[-5:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    pool_of_images()  # once, for all processes
    with ProcessPoolExecutor(options.processes, mp_context=get_context("fork")) as executor:
        tried = {
            rule: [executor.submit(job, rule, values, TUNING_SEED) for values in trials]
            for rule, trials in SEARCH.items()
        }
        scores = {rule: [last_accuracy(trial.result()[0], 2) for trial in trials] for rule, trials in tried.items()}
        chosen = {rule: SEARCH[rule][values.index(max(values))] for rule, values in scores.items()}
        played = {
            (rule, seed): executor.submit(job, rule, chosen[rule], seed)
            for seed in range(options.seeds)
            for rule in SEARCH
        }
        looks_by_run = {key: run.result()[0] for key, run in played.items()}
        finished = [*(trial for trials in tried.values() for trial in trials), *played.values()]
        cpu_seconds = sum(run.result()[1] for run in finished)
    searched = {
        rule: [
            {**values, "validation_accuracy": score} for values, score in zip(SEARCH[rule], scores[rule], strict=True)
        ]
        for rule in SEARCH
    }
    runs = {rule: {} for rule in SEARCH}
    for (rule, seed), looks in looks_by_run.items():
        runs[rule][seed] = {
            "to_target": {str(target): seconds_to(looks, target) for target in TARGETS},
            "final_accuracy": last_accuracy(looks, 1),
            "curve": [[round(look[0], 1), round(look[1], 4)] for look in looks[:: max(1, len(looks) // 40)]],
        }
    summary = {}
    for target in map(str, TARGETS):
        times = {rule: [run["to_target"][target] for run in by_seed.values()] for rule, by_seed in runs.items()}
        counted = {rule: [BUDGET if value is None else value for value in values] for rule, values in times.items()}
        summary[target] = {
            rule: {
                "reached": sum(value is not None for value in times[rule]),
                "seconds": interval(counted[rule]),
                "synchronous_over_this": [
                    math.exp(value)
                    for value in interval(
                        [math.log(a / b) for a, b in zip(counted["synchronous"], counted[rule], strict=True)]
                    )
                ],
            }
            for rule in SEARCH
        }
    final = {rule: interval([run["final_accuracy"] for run in by_seed.values()]) for rule, by_seed in runs.items()}
    content = {
        "budget_simulated_seconds": BUDGET, "clients": CLIENTS, "at_work": AT_WORK, "buffer": BUFFER, "speeds": SPEEDS,
        "seeds": options.seeds, "searched": searched, "chosen": chosen, "summary": summary, "final_accuracy": final,
        "runs": runs, "cpu_seconds": round(cpu_seconds),
    }  # fmt: skip
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps({"chosen": chosen, "summary": summary, "final": final}, indent=1))


if __name__ == "__main__":
    main()
