"""What clipping, the monitor and private training cost in whole rounds of W1, in processor time.

    python benchmarks/round_cost.py --out benchmarks/results/round_cost.json        about 7 minutes of one quiet core
    python benchmarks/round_cost.py --workload W2 --repeats 1 --rounds 1 --out FILE    a trial of seconds

Runs of FedAvg on W1 or W2 (`workloads.py`) in one process with one thread take turns: with the plain mean, with
`robust="clip:3x"` (the default between sites), and with DP-SGD (σ = 1, clipped at 1). The first round of a run is left out,
since it prepares; of the others the least counts, since other processes slow some down. What the monitor and the bound take
is also timed within the rounds, call by call, since it is less than the difference of two rounds varies.
"""

import argparse
import contextlib
import dataclasses
import json
import time
from pathlib import Path
from unittest.mock import patch

import torch
from workloads import METHOD, PATH, W1, W2, clients_of, cpu_name

import polyfed as pf
from polyfed.algorithms.base import robust_sum
from polyfed.simulation.monitoring import update_norms
from polyfed.simulation.rounds.replies import reply_validation

TIMED = {
    "monitor: norms and sketches": (reply_validation, "measure_update"),
    "monitor: cosines": (update_norms, "cosines_to_mean"),
    "bound": (robust_sum, "clip_update"),
}
VARIANTS = {
    "plain": {}, "clip:3x": {"robust": "clip:3x"}, "private": {"privacy": pf.Privacy(noise_multiplier=1.0)},
}  # fmt: skip


class RoundTimes:
    """Measures the processor seconds of each round, and of the timed functions within it."""

    def __init__(self):
        self.rounds, self.parts = [], dict.fromkeys(TIMED, 0.0)
        self.start = time.process_time()

    def __call__(self, record):
        end = time.process_time()
        self.rounds.append((end - self.start, self.parts))
        self.start, self.parts = end, dict.fromkeys(TIMED, 0.0)

    def timed(self, name, call):
        def measured(*arguments, **options):
            start = time.process_time()
            result = call(*arguments, **options)
            self.parts[name] += time.process_time() - start
            return result

        return measured

    def watch(self):
        """Returns a context in which the functions are timed."""
        patches = contextlib.ExitStack()
        for name, (module, function) in TIMED.items():
            patches.enter_context(patch.object(module, function, self.timed(name, getattr(module, function))))
        return patches


def measure(workload, clients, fields, rounds):
    """The processor seconds of the cheapest round but the first, with those of its parts."""
    times = RoundTimes()
    with times.watch():
        pf.federate(
            clients, dataclasses.replace(METHOD, **fields), rounds=rounds + 2, workers=0, engine="inprocess", quiet=True,
            clients_per_round=workload.clients_per_round, evaluate_every=10**6, callbacks=[times],
        )  # fmt: skip
    return min(times.rounds[1:-1], key=lambda entry: entry[0])  # the last round is evaluated


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=PATH)
    parser.add_argument("--workload", default="W1", choices=["W1", "W2"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    workload = {"W1": W1, "W2": W2}[options.workload]
    clients, _ = clients_of(workload, options.path)
    least = {}
    for _ in range(options.repeats):
        for name, fields in VARIANTS.items():
            entry = measure(workload, clients, fields, options.rounds)
            least[name] = min(least.get(name, entry), entry, key=lambda pair: pair[0])
            print(name, f"{entry[0]:.2f} s", flush=True)
    plain, bounded = least["plain"][0], least["clip:3x"]
    results = {
        "workload": workload.name, "processor": cpu_name(), "torch": torch.__version__, "repeats": options.repeats,
        "processor seconds of a round": {name: round(seconds, 3) for name, (seconds, _) in least.items()},
        "monitor and bound in % of a round (goal 2)": {
            name: round(100 * seconds / bounded[0], 3) for name, seconds in bounded[1].items()
        },
        "private over plain (goal 2.5)": round(least["private"][0] / plain, 2),
    }  # fmt: skip
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
