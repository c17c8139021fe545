"""How often an interval says that one of two equal methods is better, at sites of odd shapes and with other scores.

    python benchmarks/verdicts_shapes.py [--repeats 200] [--only WORD]    cells, into results/verdicts_shapes.json
    python benchmarks/verdicts_shapes.py searched [--repeats 120]        rates searched in folds, on random labels
    python benchmarks/verdicts_shapes.py table                            results/verdicts_shapes.md

As in `verdicts.py simulated`, two methods are drawn alike: nothing differs in expectation. Here sites have unequal sizes,
test sets of three to five rows, scores with heavy ties, few examples of a class, and patients of very different numbers of
rows who are right or wrong together. What is there is not repeated.

Searched: `pf.compare` with folds and a search of four rates. The validation examples of the search are test examples of
other folds, so that scores of what is chosen are too high, and more so for training alone, which has a rate for each site
(`fold_search.py`). With random labels, half of them of each class, the expected accuracy of each method is a half.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from scipy import stats

import polyfed as pf
from polyfed.comparison.statistics.estimate import CONFIDENCE_LEVEL
from polyfed.comparison.statistics.mrmc import (
    estimate_client_means,
    estimate_mean_over_clients,
    estimate_variance_components,
)
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.seeds import derive_seed

RESULTS = Path(__file__).parent / "results" / "verdicts_shapes.json"
SCORES = ("accuracy", "auc", "log_loss", "f1", "sensitivity_at_90", "balanced_accuracy", "r2", "mae", "c_index", "dice")
FEW_EVENTS = "120 patients, few events"
SHAPES = (
    "40 rows",
    "unequal sizes",
    "3 to 5 rows",
    "ties",
    "rare class",
    "40 patients",
    "12 unequal patients",
    "2 positives",
    "2 of a third class",
    "47 of 120 positive",
    FEW_EVENTS,
)
CLASS_SCORES = ("auc", "f1", "sensitivity_at_90", "balanced_accuracy")
SITES, SEEDS = (2, 10), (1, 3)
WITHOUT = {("r2", "rare class"), ("mae", "rare class"), ("dice", "rare class"), ("dice", "ties")}  # no such cells
REGRESSION, PER_ROW = ("r2", "mae"), ("accuracy", "log_loss", "mae", "dice")


def sizes_of(shape, rng, sites):
    """The number of rows of each site, and the patient of each row, or None."""
    if shape == "unequal sizes":
        return [int(n) for n in np.geomspace(8, 300, sites).round()], None
    if shape == "3 to 5 rows":
        return rng.integers(3, 6, sites).tolist(), None
    if shape in ("rare class", "ties", "2 positives", "2 of a third class"):
        return [60] * sites, None
    if shape == "47 of 120 positive":  # a class that nearly all of the 50 blocks of a jackknife have
        return [120] * sites, None
    if shape == "40 patients":  # of two rows each
        return [80] * sites, np.arange(80) // 2
    if shape == FEW_EVENTS:  # five or six
        return [240] * sites, np.arange(240) // 2
    if shape == "12 unequal patients":  # the first has half of the rows
        rows = np.array([60, 20, 10, 8, 6, 4, 3, 3, 2, 2, 1, 1])
        return [int(rows.sum())] * sites, np.repeat(np.arange(12), rows)
    return [40] * sites, None


def site_of(score, shape, size, patients, seeds, lucks, rng):
    """Outputs of two methods (2, seeds, rows, outputs) and the targets of a site."""
    unit = np.arange(size) if patients is None else patients
    share = 0.0 if patients is None else 0.8  # of the variance that a patient's rows have in common

    def noise(width, *first):
        common = rng.normal(0, 1, (*first, int(unit.max()) + 1))[..., unit]
        return width * (share**0.5 * common + (1 - share) ** 0.5 * rng.normal(0, 1, (*first, size)))

    sure = noise(1.2) + noise(0.7, 2, 1) + noise(0.7, 2, seeds)
    level = rng.normal(0.8, 0.4) + lucks + rng.normal(0, 0.15 if seeds > 1 else 0.0, (2, seeds, 1))
    if shape == "2 of a third class":
        targets = np.repeat([0, 1, 2], [29, 29, 2])
        both = np.stack([sure, noise(1.2) + noise(0.7, 2, 1) + noise(0.7, 2, seeds), np.zeros_like(sure)], axis=-1)
        return both + 1.3 * level[..., None] * np.eye(3)[targets], targets
    if score == "dice":  # of masks of 36 pixels
        masks = rng.random((size, 36)) < 0.4
        right = rng.normal(0, 1, (2, seeds, size, 36)) + (sure + level)[..., None]
        predicted = np.where(right > 0, masks, ~masks)
        logits = np.stack([np.where(predicted, -1.0, 1.0), np.where(predicted, 1.0, -1.0)], axis=3)
        return logits.reshape(2, seeds, size, 2, 6, 6), masks.reshape(size, 6, 6).astype(np.int64)
    if score in REGRESSION:
        targets = noise(1.0)
        if shape == "ties":
            targets = targets.round()
        wrong = 0.5 * sure * np.exp(-0.5 * (level - 0.8))
        found = targets + wrong
        return (found.round() if shape == "ties" else found)[..., None], targets[..., None]
    if score == "c_index":
        risk = rng.normal(0, 1, int(unit.max()) + 1)
        times = rng.exponential(np.exp(-risk)).clip(1e-3)[unit]
        censored = rng.exponential({"rare class": 0.15, FEW_EVENTS: 0.03}.get(shape, 1.0), len(risk))[unit]
        risk = risk[unit]
        happened = times <= censored
        found = level * risk + sure
        targets = np.stack([np.minimum(times, censored), happened], axis=1)
        return (found.round() if shape == "ties" else found)[..., None], targets
    positive = rng.random(int(unit.max()) + 1)[unit] < (0.07 if shape == "rare class" else 0.4)
    if shape in ("2 positives", "47 of 120 positive"):
        positive = np.arange(size) < int(shape.split()[0])
    if patients is not None:  # a tenth of a patient's rows differs
        positive = positive ^ (rng.random(size) < 0.1)
    right = (
        np.where(positive, 1, -1) * (sure + level)
        if score in ("accuracy", "log_loss")
        else sure + 1.3 * level * positive
    )
    if shape == "ties":
        right = right.round()
    return np.stack([np.zeros_like(right), right], axis=-1), positive.astype(np.int64)


def cell(score, shape, sites, seeds, repeats):
    rng = np.random.default_rng(derive_seed(0, score, shape, sites, seeds))
    counts = {"mean": 0, "sites": 0, "means": 0, "answered": 0}
    metric = METRICS[score]
    for _ in range(repeats):
        sizes, patients = sizes_of(shape, rng, sites)
        lucks = rng.normal(0, 0.075 if seeds > 1 else 0.0, (2, seeds, 1))
        parts = []
        for size in sizes:
            outputs, targets = site_of(score, shape, size, patients, seeds, lucks, rng)
            ours, theirs = torch.from_numpy(outputs)
            parts.append(
                estimate_variance_components(metric, list(ours), list(theirs), torch.from_numpy(targets), patients)
            )
        known = [part for part in parts if part is not None]
        if not known:
            continue
        limit = 1 - CONFIDENCE_LEVEL
        counts["means"] += 1
        counts["answered"] += len(known)
        counts["mean"] += estimate_mean_over_clients(known).p <= limit
        counts["sites"] += any(one.p <= limit for one in estimate_client_means(known))
    return {"repeats": repeats, **counts}


def searched_once(examples, seed):
    """Accuracies of training alone and FedAvg, the gain, and whether an answer is false, at three sites."""
    rng, clients = np.random.default_rng(derive_seed(1, examples, seed)), []
    for site in ("north", "south", "west"):
        x = torch.from_numpy(rng.normal(size=(examples, 10)).astype(np.float32))
        y = torch.from_numpy(rng.permutation(examples) % 2)  # stratified folds have the share of the site
        train, val, test = (
            slice(a, b)
            for a, b in ((0, 3 * examples // 5), (3 * examples // 5, 4 * examples // 5), (4 * examples // 5, None))
        )
        clients.append(
            pf.Client(site, lambda: torch.nn.Linear(10, 2), (x[train], y[train]), (x[test], y[test]), (x[val], y[val]))
        )
    results = pf.compare(
        clients, ["fedavg"], rounds=4, metrics=["accuracy"], tune={"lr": [0.01, 0.1, 1.0, 3.0]}, folds=5, engine="inprocess",
        parallel=1, references=False, quiet=True,
    ).results  # fmt: skip
    false = [answer["interval"] is not None and not answer["interval"][0] <= 0 <= answer["interval"][1]
             for answer in (results["mean_answer"], *results["answers"])]  # fmt: skip
    alone, together = (results["methods"][name]["statistics"]["mean"] for name in ("local", "fedavg"))
    return alone, together, false[0], any(false[1:])


def searched(repeats):
    for examples in (40, 120):
        name = f"searched rates, {examples} examples, 3 sites, 5 folds"
        if name in kept():
            continue
        runs = [searched_once(examples, seed) for seed in range(repeats)]
        alone, together = (np.array([run[k] for run in runs]) for k in (0, 1))
        content = {
            "repeats": repeats, "means": repeats, "mean": sum(run[2] for run in runs), "sites": sum(run[3] for run in runs),
            "percent": {
                label: [round(100 * float(values.mean()), 2), round(100 * float(values.std(ddof=1)) / repeats**0.5, 2)]
                for label, values in (("alone", alone), ("fedavg", together), ("gain", together - alone))
            },
        }  # fmt: skip
        RESULTS.write_text(json.dumps(kept() | {name: content}, indent=1, sort_keys=True) + "\n")
        print(name, content, flush=True)


def kept():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def run(repeats, only):
    for score in SCORES:
        for shape in SHAPES:
            for sites in SITES:
                for seeds in SEEDS:
                    name = f"{score}, {shape}, {sites} sites, {seeds} seeds"
                    if (
                        name in kept()
                        or only not in name
                        or (score, shape) in WITHOUT
                        or (shape == FEW_EVENTS and score != "c_index")
                        or (shape == "2 positives" and score not in CLASS_SCORES)
                        or (shape == "47 of 120 positive" and score not in ("f1", "balanced_accuracy"))
                        or (shape == "2 of a third class" and score not in ("auc", "balanced_accuracy"))
                    ):
                        continue
                    fewer = repeats if score in (*PER_ROW, "auc", "r2") else repeats // 4
                    content = kept() | {name: cell(score, shape, sites, seeds, fewer)}
                    RESULTS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
                    print(name, content[name], flush=True)


def share(count, of):
    """A share with its exact interval (Clopper and Pearson 1934), in per cent."""
    if not of:
        return "no answer"
    found = stats.binomtest(count, of).proportion_ci(0.95, method="exact")
    return f"{100 * count / of:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def table():
    lines = [
        "False sentences where nothing differs, in % of comparisons with a score, with a 95 % interval of that share.",
        "", "| case | comparisons | about the mean | about a site or more |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, found in sorted(kept().items()):
        of = found["means"]
        lines.append(f"| {name} | {of} | {share(found['mean'], of)} | {share(found['sites'], of)} |")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("part", nargs="?", choices=("cells", "searched", "table"), default="cells")
    arguments.add_argument("--repeats", type=int, default=200)
    arguments.add_argument("--only", default="", help="cells whose name has this word")
    options = arguments.parse_args()
    if options.part == "table":
        table()
    elif options.part == "searched":
        searched(options.repeats)
    else:
        run(options.repeats, options.only)


if __name__ == "__main__":
    main()
