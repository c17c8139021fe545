"""What does pFedLA lose with `neighbours=k`, one hypernetwork for all clients and the models of k of them?

    python benchmarks/neighbours.py --out benchmarks/results/neighbours.json

The clients of `groups.py`: handwritten digits, every second client's labels shifted by one, here 16 clients with about 60
images to train on and a perceptron of 64 hidden units, which takes a third of the CNN's time. 40 rounds of 5 epochs. The
paper's form (16 hypernetworks, all clients' models) beside one hypernetwork with 8 and 4 neighbours. For each, `hn_lr` is
chosen from the same rates by the mean accuracy on the clients' validation examples over three seeds, and runs with five. The
intervals are of the differences to the paper's form in the same seeds, from Student's t. Clients are trained as one stacked
network (`engine="cohort"`). The output is written after each run, and what is there is not computed again.
"""

import argparse
import json
import statistics
from pathlib import Path

import groups
from scipy import stats

import polyfed as pf
from polyfed.algorithms import PFedLA
from polyfed.models import ModelSpec

CLIENTS, SEEDS, TUNING_SEEDS = 16, 5, 3
RATES = (10.0, 2.0, 50.0)
FORMS = {"paper": None, "k = 8": 8, "k = 4": 4}


def clients_of(seed):
    network = ModelSpec("mlp", {"hidden": [64]}, (1, 8, 8), 10)
    return [pf.Client(c.id, network, c.train, c.test, c.val) for c in groups.clients_of(seed, CLIENTS)]


def measure(found, neighbours, rate):
    """Adds the figures of the next seed."""
    seed = len(found.setdefault("accuracy", []))
    method = PFedLA(neighbours=neighbours, hn_lr=rate, **groups.OPTIONS)
    run = pf.federate(clients_of(seed), method, rounds=groups.ROUNDS, seed=seed, evaluate_every=groups.ROUNDS,
                      engine="cohort", workers=0, progress=False)  # fmt: skip
    row = run.table()[-1]
    found["accuracy"].append(round(row["accuracy"], 4))
    found.setdefault("val_accuracy", []).append(round(row["val_accuracy"], 4))
    inside = statistics.mean(groups.weight_inside(run).values())
    found.setdefault("weight_inside", []).append(round(inside, 4))
    found.setdefault("zero_rows", []).append(run.history[-1]["analysis"]["zero_rows"])


def difference(ours, theirs):
    """Mean and 95 % interval of the differences, in points."""
    points = [100 * (a - b) for a, b in zip(ours, theirs, strict=True)]
    half = stats.t.ppf(0.975, len(points) - 1) * statistics.stdev(points) / len(points) ** 0.5
    mean = statistics.mean(points)
    return [round(float(value), 2) for value in (mean, mean - half, mean + half)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    results = json.loads(out.read_text()) if out.exists() else {"rates": {}}

    def run_seeds(number, form, rate):
        found = results["rates"].setdefault(form, {}).setdefault(str(rate), {})
        while len(found.get("accuracy", [])) < number:
            measure(found, FORMS[form], rate)
            out.write_text(json.dumps(results, indent=1) + "\n")
        return found

    def validation(form, rate):
        return statistics.mean(run_seeds(TUNING_SEEDS, form, rate)["val_accuracy"][:TUNING_SEEDS])

    rate_of = {form: max(RATES, key=lambda rate: validation(form, rate)) for form in FORMS}
    papers = run_seeds(SEEDS, "paper", rate_of["paper"])["accuracy"]
    results["chosen"] = {}
    for form, rate in rate_of.items():
        found = run_seeds(SEEDS, form, rate)
        row = {name: round(statistics.mean(values), 4) for name, values in found.items()}
        against = {} if form == "paper" else {"points_over_paper": difference(found["accuracy"], papers)}
        results["chosen"][form] = {"hn_lr": rate, **row, **against}
        print(f"{form:8} hn_lr {rate:>5}  {row}  {against.get('points_over_paper', '')}")
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
