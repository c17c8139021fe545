"""FLHA-GHN's two forms, polyfed's choices and as published, each at several rates: on networks with norm layers, where the
published form is better with few images, and on networks without.

    python benchmarks/flha_form.py --data.path /usr/share/datasets/fashion-mnist --out benchmarks/results/flha_form.json

"32 images" and "64 images" are the clients of recipe flha_table1 at scale cpu (`fashion_mnist-6.25` and `-12.5`), whose
four networks have BatchNorm, with seeds that the table does not have. Accuracy is on clients' own test images: they come
from the data set's training images, so that the table's common test set is not used for a choice. "no norm layers" are the
clients and small networks of heads.py, its validation images, seeds 0 and 1. Printed: mean accuracy over clients in percent,
one figure a seed; - is a run that diverged. What `--out` has is not repeated.
"""

import argparse
import json
import shutil
from pathlib import Path

import heads

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.cli.main import main as polyfed
from polyfed.simulation.runs.directory import read_metrics
from polyfed.simulation.runs.progress import Silent

SHARES = {"32 images": "fashion_mnist-6.25", "64 images": "fashion_mnist-12.5"}
FORMS = {
    "polyfed's": {},
    "published": {"normalise": False, "initialisation": "paper", "momentum": 0.0, "clip_norm": None},
    "published, momentum 0.9 and clipping": {"normalise": False, "initialisation": "paper"},
    "polyfed's, momentum 0": {"momentum": 0.0},
    "polyfed's, without normalise": {"normalise": False},
    "published, Kaiming's variance": {"normalise": False, "momentum": 0.0, "clip_norm": None},
}
RATES = {
    "32 images": {
        "polyfed's": (0.003, 0.01, 0.03, 0.1),
        "published": (0.009, 0.03, 0.1),
        "polyfed's, momentum 0": (0.1, 0.3),
        "published, momentum 0.9 and clipping": (0.003, 0.009),
    },
    "64 images": {
        "polyfed's": (0.01, 0.03, 0.1),
        "published": (0.009, 0.03, 0.1),
        "polyfed's, without normalise": (0.03, 0.1, 0.3, 1.0),
    },
}
WITHOUT = ("polyfed's", "polyfed's, momentum 0", "published", "published, Kaiming's variance")
RATES_WITHOUT = (0.003, 0.009, 0.03, 0.1, 0.3)
SEEDS, SEEDS_WITHOUT = (100, 101), (0, 1)


def trained(variant, form, lr, seed, given):
    """Mean accuracy over clients on their own test images; None where training diverged."""
    values = ["null" if value is None else str(value).lower() for value in FORMS[form].values()]
    out = Path(given.runs) / f"{variant}-{'-'.join(values) or 'default'}-{lr}-{seed}"
    if not (out / "done").exists():
        shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
        told = [
            word for field, value in zip(FORMS[form], values, strict=True) for word in (f"--algorithm.{field}", value)
        ]
        words = ["run", "flha_table1", "--scale", "cpu", "--variant", variant, "--baselines", "[]", "--quiet", *told,
                 "--data.path", given.path, "--algorithm.lr", str(lr), "--seed", str(seed), "--out", str(out)]  # fmt: skip
        if polyfed(words) != 0:
            return None
        (out / "done").touch()
    last = list(read_metrics(out / "metrics.jsonl"))[-1]["clients"].values()
    return sum(one["accuracy"] for one in last) / len(last)


def without_norm_layers(members, form, lr, seed):
    """The same on clients' validation images, of networks of convolutions and linear layers alone."""
    method = FLHAGHN(lr=lr, batch_size=50, **FORMS[form])
    try:
        run = pf.federate(members, method, rounds=heads.ROUNDS, seed=seed, evaluate_every=heads.ROUNDS, workers=0,
                          progress=Silent())  # fmt: skip
    except pf.ClientError:
        return None
    return run.table()[-1]["val_accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.path", dest="path", required=True)
    parser.add_argument("--runs", default="runs/flha_form")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    members = heads.clients(given.path, "small")
    jobs = [("no norm layers", form, lr) for form in WITHOUT for lr in RATES_WITHOUT]
    jobs += [(share, form, lr) for share in SHARES for form in RATES[share] for lr in RATES[share][form]]
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    for where, form, lr in jobs:
        if str(lr) in found.get(where, {}).get(form, {}):
            continue
        if where in SHARES:
            runs = [trained(SHARES[where], form, lr, seed, given) for seed in SEEDS]
        else:
            runs = [without_norm_layers(members, form, lr, seed) for seed in SEEDS_WITHOUT]
        found.setdefault(where, {}).setdefault(form, {})[str(lr)] = runs
        print(where, form, lr, *("-" if run is None else f"{100 * run:.1f}" for run in runs), sep=" | ", flush=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
