"""Whether FedHeNN's lead over training alone at four sites with few digits holds for other sites.

    python benchmarks/alignment_digits.py [--deals 12] [--first 100] [--runs runs/alignment_digits]

Each deal gives the four sites, with their networks, other digits to train on and to test on, and other
public ones. Both methods have the rate, and are compared at the round, that was best on validation examples
(`pf.compare`), with one seed a deal. Student's t interval over the deals covers other sites that are dealt from these
1,797 digits. Prints it and writes benchmarks/results/alignment_digits.json. A deal that is finished is not repeated.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from papers_cells import interval
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential

import polyfed as pf

RESULTS = Path(__file__).parent / "results" / "alignment_digits.json"
PUBLIC = 447
SITES = {
    "north": (30, lambda: Sequential(Linear(64, 32), ReLU(), Linear(32, 10))),
    "south": (30, lambda: Sequential(Linear(64, 64), ReLU(), Linear(64, 10))),
    "east": (30, lambda: Sequential(Linear(64, 64), ReLU(), Linear(64, 32), ReLU(), Linear(32, 10))),
    "west": (60, lambda: Sequential(Linear(64, 128), ReLU(), Linear(128, 10))),
}


def dealt(deal):
    """The sites of a deal, and public digits of nobody. Deal 0 is the first that was tried."""
    images, digits = load_digits(return_X_y=True)
    rows = iter(np.random.default_rng(deal).permutation(len(digits)))

    def take(number):
        chosen = [next(rows) for _ in range(number)]
        return (images[chosen] / 16).astype("float32"), digits[chosen]

    clients = [
        pf.Client(name, network, train=take(number), test=take(300)) for name, (number, network) in SITES.items()
    ]
    return clients, take(PUBLIC)[0]


def compared(deal, runs):
    clients, public = dealt(deal)
    method = pf.algorithms.FedHeNN(
        eta0=1.0, rad_size=200, rad_batch=64, normalise=True, lr=0.1, batch_size=10, local_epochs=2
    )
    found = pf.compare(
        clients, {"fedhenn": method}, rounds=60, evaluate_every=5, public=public, seeds=[deal], references=False,
        out=runs / str(deal), quiet=True,
    )  # fmt: skip
    methods = found.results["methods"]
    runs_of = {name: next(iter(one["runs"].values())) for name, one in methods.items()}
    return {
        "deal": deal,
        "accuracy": {name: run["mean"] for name, run in runs_of.items()},
        "round": {name: run["round"] for name, run in runs_of.items()},
        "lr": {name: found.results["tuning"]["methods"][name]["chosen"]["lr"] for name in methods},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deals", type=int, default=12)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--runs", type=Path, default=Path("runs/alignment_digits"))
    given = parser.parse_args()
    known = json.loads(RESULTS.read_text(encoding="utf-8"))["deals"] if RESULTS.exists() else []
    deals = [one for one in known if given.first <= one["deal"] < given.first + given.deals]
    for deal in range(given.first, given.first + given.deals):
        if deal in {one["deal"] for one in deals}:
            continue
        deals.append(compared(deal, given.runs))
        gains = [one["accuracy"]["fedhenn"] - one["accuracy"]["local"] for one in deals]
        content = {"deals": deals, **interval(gains)}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(deal, deals[-1]["accuracy"], {key: content[key] for key in ("gain", "low", "high")}, flush=True)


if __name__ == "__main__":
    main()
