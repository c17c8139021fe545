"""The rate of pFedHN's hypernetwork (`hn_lr`) in FLHA-GHN's Table 1, heads by client as in the paper, and by architecture.

    python benchmarks/flha_pfedhn.py --data.path /usr/share/datasets/fashion-mnist

Clients are those of recipe flha_table1 at scale cpu, with seeds that the table does not have. Accuracy is on clients' own
test images, which come from the data set's training images: the table's common test set is not used for a choice. Written to
benchmarks/results/flha_pfedhn.json: mean accuracy over clients in percent, one figure a seed; null is a run that diverged.
What the file has is not repeated. "32 images, the table's seeds" is mean accuracy on the common test set, of the table's
own clients and seeds, with the rate that is better with 32 images than the recipe's.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import polyfed as pf
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.simulation.experiment import build_experiment, load_participants
from polyfed.simulation.monitoring.progress import SilentProgress

FILE = Path(__file__).parent / "results" / "flha_pfedhn.json"
SHARES = {"64 images": "fashion_mnist-12.5", "32 images": "fashion_mnist-6.25"}
RATES = {"client": (0.03, 0.1, 0.3, 0.01), "architecture": (0.03,)}
SEEDS, TABLE_SEEDS, BETTER_RATE = (100, 101), range(6), 0.1


def accuracy(variant, heads, hn_lr, seed, path, score="accuracy"):
    """Mean over clients after all rounds; None where training diverged."""
    words = ["--data.path", path, "--seed", str(seed)]
    config = read_recipe("flha_table1").configuration("cpu", variant)
    experiment = build_experiment(configuration_parser.parse_configuration(words, config, "flha_pfedhn.py"))
    method = dataclasses.replace(experiment.baselines["pfedhn"], heads=heads, hn_lr=hn_lr)
    rounds = experiment.settings.rounds
    try:
        run = pf.federate(
            load_participants(experiment).clients, method, rounds=rounds, seed=seed, evaluate_every=rounds, workers=0,
            progress=SilentProgress(),
        )  # fmt: skip
    except (pf.ClientError, pf.RoundError):
        return None
    return 100 * run.table()[-1][score]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.path", dest="path", required=True, metavar="FOLDER")
    path = parser.parse_args().path
    found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for seed in SEEDS:
        for images, variant in SHARES.items():
            for heads, rates in RATES.items():
                for rate in rates:
                    known = found.setdefault(images, {}).setdefault(heads, {}).setdefault(str(rate), {})
                    if str(seed) not in known:
                        known[str(seed)] = accuracy(variant, heads, rate, seed, path)
                        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                        print(images, heads, rate, seed, known[str(seed)], flush=True)
    of_table = found.setdefault("32 images, the table's seeds", {}).setdefault(str(BETTER_RATE), {})
    for seed in map(str, TABLE_SEEDS):
        if seed not in of_table:
            of_table[seed] = accuracy(SHARES["32 images"], "client", BETTER_RATE, int(seed), path, "global_accuracy")
            FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print("table", seed, of_table[seed], flush=True)


if __name__ == "__main__":
    main()
