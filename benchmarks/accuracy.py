"""Accuracy on workload W1 after 5 rounds: polyfed against the bare loop, fp32 and (where it runs) bf16, 3 seeds each.

    python benchmarks/accuracy.py --out benchmarks/results/accuracy.json

Both start from the same weights, train on the same 20 × 1,000 images and are tested on the official 10,000 test images.
Once the bare loop shuffles by itself: then the two differ as two seeds do, by points so early in training. Once it is given
polyfed's order of minibatches: then only rounding may differ, and more than half a point in any seed is an error.
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
from polyfed.core.errors import UserError
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.training.precision import check_precision

ROUNDS = 5
SAME_ORDER = "bare loop, polyfed's order of minibatches"


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
    found = {name: [] for name in ("bare loop", SAME_ORDER, *methods)}
    for seed in range(options.seeds):
        torch.set_num_threads(1)

        def same_order(number, client, examples, seed=seed):
            local = derive_seed(seed, number, clients[client].id, "local")
            return torch.randperm(examples, generator=torch_generator(derive_seed(local, "batches")))

        for name, shuffle in (("bare loop", None), (SAME_ORDER, same_order)):
            model = MODEL()
            model.load_state_dict(initial_state(MODEL, seed))
            bare.federate(model, arrays, ROUNDS, lr=0.01, batch_size=32, channels_last=True, seed=seed, shuffle=shuffle)
            found[name].append(bare.accuracy(model, x, y))
        for name, method in methods.items():
            run = pf.federate(clients, method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS)
            found[name].append(bare.accuracy(run.model("client-000"), x, y))
        print({name: round(values[-1], 4) for name, values in found.items()}, flush=True)
    means = {name: statistics.mean(values) for name, values in found.items()}
    apart = max(abs(a - b) for a, b in zip(found["polyfed, fp32"], found[SAME_ORDER], strict=True))
    print({name: round(mean, 4) for name, mean in means.items()})
    print(f"same order of minibatches: at most {100 * apart:.2f} points apart")
    if options.out:
        options.out.write_text(
            json.dumps(
                {"rounds": ROUNDS, "accuracy": found, "mean": means, "largest_difference_same_order": apart}, indent=1
            )
            + "\n"
        )
    if apart > 0.005:
        raise SystemExit("more than half a point apart")


if __name__ == "__main__":
    main()
