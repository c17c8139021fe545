"""FLHA-GHN's forms: which graph, which start, and what polyfed adds, each at rates chosen for it, against other methods.

    python benchmarks/flha_form.py run rates --data.path /usr/share/datasets/fashion-mnist [--only PATTERN]
    python benchmarks/flha_form.py run table ...            at the rate that "rates" found best
    python benchmarks/flha_form.py run toggles ...          what polyfed adds, one choice at a time
    python benchmarks/flha_form.py run without ...
    python benchmarks/flha_form.py collect                  benchmarks/results/flha_form.json, and what is printed

"rates" and "table" are the clients of recipe flha_table1 at scale cpu (`fashion_mnist-25`, `-12.5` and `-6.25`), whose four
networks have BatchNorm. Rates are chosen with seeds that the table does not have, by accuracy on clients' own test images:
they come from the data set's training images, so that the table's common test set is not used for a choice. "table" has the
table's six seeds and its common test set, so that each seed is a pair with the other methods' runs in
results/papers/flha-table1.json: same data, same test images. "without" are the clients and small networks of heads.py,
which have no norm layers, its validation images, seeds 0 and 1.

Several processes can run at once, each with its own --only; what is finished is not repeated.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from statistics import fmean

import heads
from papers_cells import interval

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.cli.main import main as polyfed
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.storage.directory import read_metrics

RESULTS = Path(__file__).parent / "results"
SHARES = ("25", "12.5", "6.25")
PAPER = {"normalise": False, "initialisation": "paper", "momentum": 0.0, "clip_norm": None}
POLYFED = {"graph": "layers_and_norms"}
PAPERS_GRAPH = {"graph": "layers"}
FORMS = {
    "norms as nodes, polyfed's": POLYFED,
    "norms as nodes, the paper's": {**POLYFED, **PAPER},
    "norms as nodes, the paper's with small weights": {**POLYFED, **PAPER, "initialisation": "last_layer"},
    "paper's graph, polyfed's": PAPERS_GRAPH,
    "paper's graph, the paper's": {**PAPERS_GRAPH, **PAPER},
    "paper's graph, the paper's, with normalise": {**PAPERS_GRAPH, **PAPER, "normalise": True},
    "paper's graph, the paper's, with momentum": {**PAPERS_GRAPH, **PAPER, "momentum": 0.9},
    "paper's graph, the paper's, with clipping": {**PAPERS_GRAPH, **PAPER, "clip_norm": 5.0},
    "paper's graph, the paper's with small weights": {**PAPERS_GRAPH, **PAPER, "initialisation": "last_layer"},
}
# Rates of a form, best first guess first; at 25 % the paper's own diverges at 0.03.
RATES = {
    "paper's graph, the paper's": (0.009, 0.003, 0.02),
    "paper's graph, polyfed's": (0.03, 0.01, 0.1),
    "norms as nodes, the paper's": (0.009, 0.003, 0.02),
}
# Of the paper's own form, one choice at a time is polyfed's, at the rate of the paper's own form.
TOGGLES = ("with normalise", "with momentum", "with clipping")
WITHOUT = {
    "polyfed's": {},
    "polyfed's, momentum 0": {"momentum": 0.0},
    "the paper's": PAPER,
    "the paper's, clipping": {**PAPER, "clip_norm": 5.0},
    "the paper's, momentum and clipping": {**PAPER, "momentum": 0.9, "clip_norm": 5.0},
    "the paper's, normalise": {**PAPER, "normalise": True},
    "the paper's with small weights": {**PAPER, "initialisation": "last_layer"},
    "the paper's, variance of fan_in": {**PAPER, "initialisation": "kaiming"},
}
RATES_WITHOUT = (0.001, 0.003, 0.009, 0.03, 0.1)
SEEDS, TABLE_SEEDS, SEEDS_WITHOUT = (100, 101), (0, 1, 2, 3, 4, 5), (0, 1)


def jobs(part, runs):
    """(name of the result, where, form, rate, seed) of a part; of "table" and "toggles", those whose rate is chosen."""
    if part == "rates":
        rows = [(s, form, lr, seed) for s in SHARES for seed in SEEDS for form in RATES for lr in RATES[form]]
    elif part == "table":
        rows = [
            (share, form, chosen_rate(form, share, runs), seed)
            for share in SHARES
            for seed in TABLE_SEEDS
            for form in RATES
        ]
    elif part == "toggles":
        form = "paper's graph, the paper's"
        rows = [
            (share, f"{form}, {toggle}", chosen_rate(form, share, runs), seed)
            for share in ("25", "6.25")
            for seed in TABLE_SEEDS
            for toggle in TOGGLES
        ]
    else:
        rows = [
            ("no norm layers", form, lr, seed) for form in WITHOUT for lr in RATES_WITHOUT for seed in SEEDS_WITHOUT
        ]
    return [(f"{'table' if part == 'toggles' else part} {'; '.join(map(str, row))}", *row) for row in rows if row[2]]


def chosen_rate(form, share, runs):
    """The rate with the best mean accuracy over the seeds of "rates"; None until all of its rates have run.

    A run that diverged counts as 0.
    """
    means = {}
    for lr in RATES[form]:
        files = [runs / f"rates {share}; {form}; {lr}; {seed}.json" for seed in SEEDS]
        if not all(file.exists() for file in files):
            return None
        scores = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        means[lr] = fmean(0.0 if score is None else score["accuracy"] for score in scores)
    return max(means, key=means.__getitem__)


def words_of(value):
    return "null" if value is None else str(value).lower()


def trained(share, form, lr, seed, folder, path):
    """Mean accuracy over clients on their own and on the common test images; None where training diverged."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    words = ["run", "flha_table1", "--scale", "cpu", "--variant", f"fashion_mnist-{share}", "--baselines", "[]",
             "--workers", "0", "--quiet", "--data.path", path, "--algorithm.lr", str(lr), "--seed", str(seed),
             "--out", str(folder)]  # fmt: skip
    for field, value in FORMS[form].items():
        words += [f"--algorithm.{field}", words_of(value)]
    if polyfed(words) != 0:
        return None
    last = list(read_metrics(folder / "metrics.jsonl"))[-1]["clients"].values()
    shutil.rmtree(folder)
    return {key: fmean(one[key] for one in last) for key in ("accuracy", "global_accuracy")}


def trained_without(form, lr, seed, path):
    """The same on clients' validation images, of networks of convolutions and linear layers alone."""
    method = FLHAGHN(lr=lr, batch_size=50, **{"head": "auto", **WITHOUT[form]})
    try:
        run = pf.federate(heads.clients(path, "small"), method, rounds=heads.ROUNDS, seed=seed, workers=0,
                          evaluate_every=heads.ROUNDS, progress=SilentProgress())  # fmt: skip
    except pf.ClientError:
        return None
    return {"val_accuracy": run.table()[-1]["val_accuracy"]}


def run(part, only, runs, path):
    """One result file for each job of the part whose name fits."""
    for name, where, form, lr, seed in jobs(part, runs):
        file = runs / f"{name}.json"
        if file.exists() or not re.search(only, name):
            continue
        if part == "without":
            score = trained_without(form, lr, seed, path)
        else:
            score = trained(where, form, lr, seed, runs / name, path)
        file.write_text(json.dumps(score), encoding="utf-8")
        print(name, score, flush=True)


def collect(runs, file):
    """What the runs gave joins what the file has, and differences from other methods in the same seeds are made anew."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for part in ("rates", "table", "toggles", "without"):
        for name, where, form, lr, seed in jobs(part, runs):
            score = runs / f"{name}.json"
            if score.exists():
                one = json.loads(score.read_text(encoding="utf-8"))
                key = {"rates": "accuracy", "without": "val_accuracy"}.get(part, "global_accuracy")
                at = (
                    found.setdefault("table" if part == "toggles" else part, {})
                    .setdefault(where, {})
                    .setdefault(form, {})
                    .setdefault(str(lr), {})
                )
                at[str(seed)] = None if one is None else 100 * one[key]
    others = measured()
    found["differences"] = {
        f"{share} %": {
            f"{form} at {lr}": {
                other: {"seeds": len(both), **interval([seeds[s] - others[share][other][s] for s in both])}
                for other in others[share]
                if (both := [s for s in seeds if seeds[s] is not None and s in others[share][other]])
            }
            for form, rates in forms.items()
            for lr, seeds in rates.items()
        }
        for share, forms in found.get("table", {}).items()
    }
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for share, forms in found["differences"].items():
        for form, rows in forms.items():
            for other, row in rows.items():
                low, high = (f"{row[end]:+.1f}" if row[end] is not None else "" for end in ("low", "high"))
                print(share, form, other, row["seeds"], f"{row['gain']:+.1f}", low, high, sep=" | ")


def measured():
    """share -> method -> seed -> mean accuracy over the four architectures, of the runs behind docs/results.md."""
    by_share = {share: {} for share in SHARES}
    for table in ("flha-table1", "flha-table1_forms"):
        cells = json.loads((RESULTS / "papers" / f"{table}.json").read_text(encoding="utf-8"))["cells"]
        for share, methods in by_share.items():
            for row in dict.fromkeys(cell["row"] for cell in cells if cell["row"].startswith(f"{share} %")):
                ours = [cell["seeds"] for cell in cells if cell["row"] == row]
                methods[row.split(", ")[1]] = {seed: fmean(one[seed] for one in ours) for seed in ours[0]}
    return by_share


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("run", "collect"))
    parser.add_argument("part", nargs="?", choices=("rates", "table", "toggles", "without"))
    parser.add_argument("--data.path", dest="path")
    parser.add_argument("--only", default="")
    parser.add_argument("--runs", type=Path, default=Path("runs/flha_form"))
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    if given.step == "run":
        run(given.part, given.only, given.runs, given.path)
    else:
        collect(given.runs, RESULTS / "flha_form.json")


if __name__ == "__main__":
    main()
