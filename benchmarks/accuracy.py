"""Accuracy on workload W1 after 5 rounds: polyfed against the bare loop, fp32 and (where it runs) bf16, 3 seeds each.

    python benchmarks/accuracy.py --out benchmarks/results/accuracy.json

Both train on the same 20 × 1,000 images and are tested on the official 10,000 test images. They share no random stream:
they differ as two seeds differ, and the issue's bar is one point.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import bare
import torch
from workloads import METHOD, MODEL, PATH, W1, arrays_of, clients_of

import polyfed as pf
from polyfed.errors import UserError
from polyfed.scratch import new_module
from polyfed.training import check_precision

ROUNDS = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=PATH)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clients, pool = clients_of(W1, options.path)
    arrays = arrays_of(clients)
    x, y = pool.test.batch(torch.arange(len(pool.test)))
    methods = {"polyfed, fp32": METHOD}
    try:
        check_precision("bf16", torch.device("cpu"))
        methods["polyfed, bf16"] = dataclasses.replace(METHOD, precision="bf16")
    except UserError as error:
        print(error)
    found = {name: [] for name in ("bare loop", *methods)}
    for seed in range(options.seeds):
        torch.set_num_threads(1)
        model = new_module(MODEL, seed)
        bare.federate(model, arrays, ROUNDS, lr=0.01, batch_size=32, channels_last=True, seed=seed)
        found["bare loop"].append(bare.accuracy(model, x, y))
        for name, method in methods.items():
            run = pf.federate(clients, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS)
            found[name].append(bare.accuracy(run.model("client-000"), x, y))
        print({name: round(values[-1], 4) for name, values in found.items()}, flush=True)
    means = {name: statistics.mean(values) for name, values in found.items()}
    difference = means["polyfed, fp32"] - means["bare loop"]
    print(f"polyfed − bare loop: {100 * difference:+.2f} points")
    if options.out:
        options.out.write_text(json.dumps({"rounds": ROUNDS, "accuracy": found, "mean": means}, indent=1) + "\n")
    if abs(difference) > 0.01:
        raise SystemExit("more than one point apart")


if __name__ == "__main__":
    main()
