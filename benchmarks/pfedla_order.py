"""Whether it matters that pFedLA updates v and ψ with the θ_j from before the round (algorithm 1, lines 7 and 8).

    python benchmarks/pfedla_order.py --out benchmarks/results/pfedla_order.json

As printed, line 7 replaces the θ_j by what the clients have trained, and line 8 then updates v_i and ψ_i by eq. 10 and 11,
which have products of the θ_j with Δθ_i. The chain rule wants the θ_j of which θ̄_i was mixed, those of before line 7;
polyfed takes these. Here both are run in the two groups of `groups.py` (8 clients of digits, 40 rounds of 5 epochs).

Printed: accuracy in %, of θ̄_i and after local training, and the weight inside the own group, mean over seeds, and the
differences, printed order less chain rule, with Student's interval of 95 % over paired seeds.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from first_heads import difference
from groups import OPTIONS, ROUNDS, clients_of, weight_inside

import polyfed as pf
from polyfed.algorithms import PFedLA
from polyfed.algorithms.hypernetworks import pfedla
from polyfed.simulation.monitoring.progress import SilentProgress

CHAIN_RULE = pfedla.inner_products_with_updates
MEASURED = ("accuracy", "trained_accuracy", "inside")


def as_printed(models, served, replies, layers):
    """⟨θ_j^l, Δθ_i^l⟩ with the θ_j that have been trained, where all clients take part; (clients, layers, clients)."""
    total = torch.zeros(served.shape, dtype=torch.float64)
    for row, names in enumerate(layers.values()):
        before, after = (
            torch.stack([torch.cat([m[n].flatten() for n in names]) for m in one]) for one in (models, replies)
        )
        delta = after - served[:, row].to(before.dtype) @ before
        total[:, row] = (delta @ after.T).double()
    return total


def measured(seed, products):
    pfedla.inner_products_with_updates = products
    try:
        run = pf.federate(
            clients_of(seed, 8), PFedLA(**OPTIONS), rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, workers=0,
            progress=SilentProgress(),
        )  # fmt: skip
    finally:
        pfedla.inner_products_with_updates = CHAIN_RULE
    row = run.table()[-1]
    inside = statistics.mean(weight_inside(run).values())
    return {name: round(row[name], 5) for name in MEASURED[:2]} | {"inside": round(inside, 5)}


def pairs(by_seed):
    """Values of both ways over seeds, by what is measured."""
    return {name: [[one[way][name] for one in by_seed] for way in ("chain rule", "as printed")] for name in MEASURED}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--out", default="pfedla_order.json", help="results; seeds that are there are not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    file = Path(given.out)
    by_seed = json.loads(file.read_text())["seeds"] if file.exists() else []
    for seed in range(len(by_seed), given.seeds):
        by_seed.append({"chain rule": measured(seed, CHAIN_RULE), "as printed": measured(seed, as_printed)})
        gaps = {name: difference(*pair) for name, pair in pairs(by_seed).items()} if seed else {}
        file.write_text(
            json.dumps({**OPTIONS, "rounds": ROUNDS, "differences": gaps, "seeds": by_seed}, indent=1) + "\n"
        )
        print(f"seed {seed}: {by_seed[-1]}", flush=True)
    for name, pair in pairs(by_seed).items():
        chain, printed = (100 * statistics.fmean(values) for values in pair)
        print(f"{name}: {chain:.1f}, as printed {printed:.1f}, {difference(*pair)}")


if __name__ == "__main__":
    main()
