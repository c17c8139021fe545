"""How often `polyfed compare --folds` says something false, and how often it says what is there.

    python benchmarks/verdicts_folds.py false [--repeats 400]      nothing differs: 4 to 160 sites, 12 to 200 examples
    python benchmarks/verdicts_folds.py trained [--repeats 400]    networks that are trained in each fold
    python benchmarks/verdicts_folds.py agree [--repeats 400]      methods that give nearly all examples the same answer
    python benchmarks/verdicts_folds.py numbers [--repeats 400]    the same with R², mean absolute error and C-index
    python benchmarks/verdicts_folds.py ratios [--repeats 400]     the same with other parts for training examples
    python benchmarks/verdicts_folds.py sites [--repeats 400]      sites that differ: the model over sites
    python benchmarks/verdicts_folds.py power [--repeats 400]      at the size of four hospitals, against resplit
    python benchmarks/verdicts_folds.py table                      benchmarks/results/verdicts_folds.md from all of them

Results are in benchmarks/results/verdicts_folds.json, a cell as soon as it is done; what is there is not repeated.

Predictions are drawn as in `verdicts.py`: each example has a difficulty that both methods share, one of its own for each
method, and one for each network; each network has luck of its own at each site, and at all sites together. A network is
that of one fold. `trained` draws features instead, and both methods are ridge regressions, trained in each fold on one half
of the features each: nothing differs in expectation over training examples, but for given ones something does. `agree`
has methods that differ on 1 to 10 % of the examples, on which either is as often right as the other. `numbers` predicts a
number as `trained` does, or the logarithm of a time that is cut off for about a third of the examples.
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from scipy import stats
from scipy.optimize import brentq

from polyfed.comparison.statistics.cross_validation import fold_differences as cross_validation
from polyfed.comparison.statistics.cross_validation.fold_differences import (
    TRAINING_VARIANCE_RATIO,
    difference_over_folds,
    estimate_clients_from_folds,
    estimate_mean_from_folds,
)
from polyfed.comparison.statistics.cross_validation.fold_evidence import describe_site_gains
from polyfed.comparison.statistics.cross_validation.fold_influence import score_folds
from polyfed.comparison.statistics.cross_validation.resplits import (
    ResplitDifferences,
    estimate_client_means_over_resplits,
)
from polyfed.comparison.statistics.mrmc import (
    estimate_client_means,
    estimate_mean_over_clients,
    estimate_variance_components,
)
from polyfed.comparison.statistics.random_effects import fit_random_effects
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.seeds import derive_seed

RESULTS = Path(__file__).parent / "results" / "verdicts_folds.json"
SCORES, FOLDS, LUCK = ("accuracy", "auc"), 5, 0.15
HOSPITALS = (303, 294, 123, 200)
EXAMPLE_VARIANCE = 1.2**2 + 2 * 0.7**2  # of a prediction, between examples


def deal(targets, rng):
    """The fold of each example, stratified."""
    fold, dealt = np.empty(len(targets), int), 0
    for label in (0, 1):
        rows = rng.permutation(np.flatnonzero(targets == label))
        fold[rows] = (np.arange(len(rows)) + dealt) % FOLDS
        dealt += len(rows)
    return fold


def two_outputs(values):
    return torch.from_numpy(np.stack([np.zeros_like(values), values], axis=-1))


def one_output(values):
    return torch.from_numpy(values[:, None])


def difference(score, targets, predictions, folds, num_folds=FOLDS, shape=two_outputs):
    """The difference of two methods at a site. `predictions` (repeats, 2, n), `folds` (repeats, n)."""
    rows = [np.flatnonzero(fold == k) for fold in folds for k in range(num_folds)]
    repeat = np.repeat(np.arange(len(folds)), num_folds)
    names, truth = np.arange(len(targets)), torch.from_numpy(targets)
    scored = [
        score_folds(METRICS[score], [shape(predictions[r, m, part]) for r, part in zip(repeat, rows, strict=True)],
                    [truth[part] for part in rows], [names[part] for part in rows], num_folds)
        for m in (0, 1)
    ]  # fmt: skip
    return None if None in scored else difference_over_folds(*scored)


class World:
    """Sites with their examples; `predict` draws what networks with luck predict."""

    def __init__(self, sizes, rng, gains=0.0, luck=LUCK, rare=None):
        self.rng, self.luck, self.sizes, self.runs = rng, luck, sizes, 0
        self.gains = np.broadcast_to(gains, len(sizes))
        self.base = rng.normal(0.8, 0.4, len(sizes))
        self.targets, self.parts = [], []
        for i, size in enumerate(sizes):
            share = 0.4 if rare is None else rare[i]
            targets = (rng.random(size) < share).astype(np.int64)
            targets[:2], targets[2:4] = 0, 1
            self.targets.append(targets)
            self.parts.append((rng.normal(0, 1.2, size), rng.normal(0, 0.7, (2, size))))

    def network(self):
        """The luck of a run, (2, sites)."""
        return self.rng.normal(0, self.luck / 2, (2, 1)) + self.rng.normal(0, self.luck, (2, len(self.sizes)))

    def predict(self, score, site, lucky, rows):
        """The outputs of both methods for the rows of a site, (2, rows)."""
        (shared, of_method), targets = self.parts[site], self.targets[site][rows]
        level = (self.base[site] + lucky[:, site] + np.array([self.gains[site], 0.0]))[:, None]
        sure = shared[rows] + of_method[:, rows] + self.rng.normal(0, 0.7, (2, len(rows)))
        return np.where(targets == 1, 1, -1) * (sure + level) if score == "accuracy" else sure + 1.3 * level * targets

    def cross_validate(self, score, repeats):
        """The differences of all sites."""
        folds = [[deal(targets, self.rng) for targets in self.targets] for _ in range(repeats)]
        outputs = [np.empty((repeats, 2, size)) for size in self.sizes]
        for r in range(repeats):
            for k in range(FOLDS):
                lucky = self.network()
                for i in range(len(self.sizes)):
                    rows = np.flatnonzero(folds[r][i] == k)
                    outputs[i][r][:, rows] = self.predict(score, i, lucky, rows)
        return [
            difference(score, self.targets[i], outputs[i], [fold[i] for fold in folds]) for i in range(len(self.sizes))
        ]

    def resplit(self, score, times, test=0.3):
        """The differences of all sites over random splits, as today."""
        values = np.empty((len(self.sizes), times))
        for t in range(times):
            lucky = self.network()
            for i, targets in enumerate(self.targets):
                classes = [self.rng.permutation(np.flatnonzero(targets == label)) for label in (0, 1)]
                rows = np.concatenate([of_class[: max(1, round(test * len(of_class)))] for of_class in classes])
                truth = torch.from_numpy(targets[rows])
                ours, theirs = (METRICS[score](two_outputs(one), truth) for one in self.predict(score, i, lucky, rows))
                values[i, t] = ours - theirs
        return values

    def true_gains(self, score):
        """The expected gain of each site."""
        lucky = 1.25 * self.luck**2
        if score == "accuracy":
            width = np.sqrt(EXAMPLE_VARIANCE + lucky)
            return stats.norm.cdf((self.base + self.gains) / width) - stats.norm.cdf(self.base / width)
        width = np.sqrt(2 * EXAMPLE_VARIANCE + 1.69 * lucky)
        return stats.norm.cdf(1.3 * (self.base + self.gains) / width) - stats.norm.cdf(1.3 * self.base / width)


def level_of(gain):
    """By how much a method's level is higher for a true mean gain of AUC."""
    base, width = np.random.default_rng(0).normal(0.8, 0.4, 4000), np.sqrt(2 * EXAMPLE_VARIANCE + 1.69 * 1.25 * LUCK**2)
    return brentq(
        lambda more: (stats.norm.cdf(1.3 * (base + more) / width) - stats.norm.cdf(1.3 * base / width)).mean() - gain,
        0,
        4,
    )


def linear_sites(score, sizes, repeats, rng, features, strength, penalty):
    """The differences of two ridge regressions, each on one half of the features; trained in each fold."""
    found, weights = [], np.full(2 * features, strength / np.sqrt(2 * features))
    for size in sizes:
        x = rng.normal(size=(size, 2 * features))
        targets = (rng.random(size) < 1 / (1 + np.exp(-2 * x @ weights))).astype(np.int64)
        targets[:2], targets[2:4] = 0, 1
        folds = [deal(targets, rng) for _ in range(repeats)]
        outputs = np.empty((repeats, 2, size))
        for r, fold in enumerate(folds):
            for k in range(FOLDS):
                train, wanted = fold != k, 2 * targets[fold != k] - 1.0
                for m, half in enumerate((slice(features), slice(features, None))):
                    z = x[train, half]
                    fitted = np.linalg.solve(z.T @ z + penalty * np.eye(features), z.T @ (wanted - wanted.mean()))
                    outputs[r, m, ~train] = x[~train, half] @ fitted + wanted.mean() * (score == "accuracy")
        found.append(difference(score, targets, outputs, folds))
    return found


def number_sites(score, sizes, repeats, rng, features):
    """The differences of two ridge regressions of a number or of a survival time, trained in each fold on one half of the
    features each."""
    differences, weights = [], np.full(2 * features, 1 / np.sqrt(2 * features))
    for size in sizes:
        x = rng.normal(size=(size, 2 * features))
        number = x @ weights + rng.normal(size=size)
        events, targets = np.ones(size, np.int64), number
        if score == "c_index":
            end = rng.normal(0.7, 1.4, size)
            events = (number <= end).astype(np.int64)
            events[:2], events[2:4] = 0, 1
            number = np.minimum(number, end)
            targets = np.stack([np.exp(number), events], axis=1)
        folds = [deal(events if score == "c_index" else np.arange(size) % 2, rng) for _ in range(repeats)]
        outputs = np.empty((repeats, 2, size))
        for r, fold in enumerate(folds):
            for k in range(FOLDS):
                train, middle = fold != k, number[fold != k].mean()
                for m, half in enumerate((slice(features), slice(features, None))):
                    z = x[train, half]
                    fitted = np.linalg.solve(z.T @ z + np.eye(features), z.T @ (number[train] - middle))
                    outputs[r, m, ~train] = x[~train, half] @ fitted + middle
        if score == "c_index":
            outputs = -outputs  # a risk is high where the time is short
        differences.append(difference(score, targets, outputs, folds, shape=one_output))
    return differences


def numbers(repeats):
    for score in ("r2", "mae", "c_index"):
        for sizes, name in (((12,) * 4, "4 sites, 12 examples"), ((40,) * 4, "4 sites, 40 examples"),
                            ((200,) * 4, "4 sites, 200 examples"), ((40,) * 20, "20 sites, 40 examples"),
                            ((40,) * 65, "65 sites, 40 examples"), (HOSPITALS, "four hospitals")):  # fmt: skip
            for times in (1, 2):
                for features in (3, 20):

                    def one(rng, score=score, sizes=sizes, times=times, features=features):
                        return said_falsely(number_sites(score, sizes, times, rng, features))

                    some = max(100, repeats * 4 // len(sizes))
                    count(f"{score}, {name}, {features} features, {times} x 5 folds", "numbers", some, one)


def is_false(estimate, truth=0.0):
    return estimate is not None and not estimate.low <= truth <= estimate.high


def count(name, kind, repeats, one):
    """A cell that is not there yet: the sums of what `one(rng)` returns, by name."""
    if name in kept().get(kind, {}):
        return
    rng, sums = np.random.default_rng(derive_seed(0, kind, name)), {}
    for _ in range(repeats):
        for what, value in one(rng).items():
            sums[what] = sums.get(what, 0) + float(value)
    content = kept()
    content.setdefault(kind, {})[name] = {"repeats": repeats, **{what: round(value, 3) for what, value in sums.items()}}
    RESULTS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(kind, name, content[kind][name], flush=True)


def kept():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def said_falsely(differences, truths=None):
    known = [k for k, one in enumerate(differences) if one is not None]
    if not known:
        return {"mean": 0, "sites": 0}
    there, truths = [differences[k] for k in known], np.zeros(len(differences)) if truths is None else truths
    sites = estimate_clients_from_folds(there)
    return {
        "mean": is_false(estimate_mean_from_folds(there), truths[known].mean()),
        "sites": any(is_false(one, truth) for one, truth in zip(sites, truths[known], strict=True)),
    }


def false(repeats):
    for score in SCORES:
        for sites, examples, times in (*((s, n, r) for s in (4, 20) for n in (12, 40, 200) for r in (1, 2)),
                                       (65, 40, 1), (160, 40, 1), (65, 12, 1), (160, 12, 1)):  # fmt: skip
            some = max(100, repeats * 20 // max(sites, 20))

            def one(rng, score=score, sites=sites, examples=examples, times=times):
                return said_falsely(World((examples,) * sites, rng).cross_validate(score, times))

            count(f"{score}, {sites} sites, {examples} examples, {times} x 5 folds", "false", some, one)
        count(f"{score}, four hospitals, 2 x 5 folds", "false", repeats,
              lambda rng, score=score: said_falsely(World(HOSPITALS, rng).cross_validate(score, 2)))  # fmt: skip


def trained(repeats):
    for score in SCORES:
        for sizes, name in (((40,) * 4, "4 sites, 40 examples"), ((200,) * 4, "4 sites, 200 examples"),
                            ((40,) * 20, "20 sites, 40 examples"), (HOSPITALS, "four hospitals")):  # fmt: skip
            for times in (1, 2):
                for features, strength, penalty in ((3, 1.0, 1.0), (10, 0.3, 1.0), (20, 1.0, 10.0)):

                    def one(rng, score=score, sizes=sizes, times=times, how=(features, strength, penalty)):
                        return said_falsely(linear_sites(score, sizes, times, rng, *how))

                    some = max(100, repeats * 4 // len(sizes))
                    how = f"{features} features, signal {strength}"
                    count(f"{score}, {name}, {how}, {times} x 5 folds", "trained", some, one)


def agree(repeats):
    cases = ((4, 12, 0.1), *((s, n, p) for s in (4, 20) for n in (40, 200) for p in (0.01, 0.03, 0.1)))
    for sites, examples, share_unlike in cases:
        some = max(100, repeats * 4 // sites)

        def one(rng, sites=sites, examples=examples, share_unlike=share_unlike):
            differences = [site_of_methods_that_agree(examples, share_unlike, rng) for _ in range(sites)]
            return {
                **said_falsely(differences),
                "width": np.mean([e.high - e.low for e in estimate_clients_from_folds(differences)]),
            }

        count(
            f"accuracy, {sites} sites, {examples} examples, {share_unlike:.0%} unlike, 1 x 5 folds", "agree", some, one
        )


def site_of_methods_that_agree(examples, share_unlike, rng):
    targets, is_right = np.zeros(examples, np.int64), np.tile(rng.random(examples) < 0.8, (2, 1))
    is_unlike = rng.random(examples) < share_unlike
    first_is_right = rng.random(examples) < 0.5
    is_right[:, is_unlike] = np.stack([first_is_right, ~first_is_right])[:, is_unlike]
    folds = rng.permutation(np.arange(examples) % FOLDS)[None]
    return difference("accuracy", targets, np.where(is_right, -1.0, 1.0)[None], folds)


def ratios(repeats):
    """The same with other parts for training examples: none, and that of Nadeau and Bengio."""
    for size in (40, 200):
        for features, strength, penalty in ((10, 0.3, 1.0), (20, 1.0, 10.0)):

            def one(rng, size=size, how=(features, strength, penalty)):
                differences, said = linear_sites("auc", (size,) * 4, 2, rng, *how), {}
                for ratio in (0.0, TRAINING_VARIANCE_RATIO, 1.25):
                    with patch.object(cross_validation, "TRAINING_VARIANCE_RATIO", ratio):
                        said |= {f"{what} {ratio}": value for what, value in said_falsely(differences).items()}
                return said

            name = f"auc, 4 sites, {size} examples, {features} features, signal {strength}, 2 x 5 folds"
            count(name, "ratios", repeats, one)


def with_sites(world, differences, score):
    """The model over sites."""
    truths = world.true_gains(score)
    gains, common = describe_site_gains(dict(enumerate(differences)))
    model = fit_random_effects(list(gains.values()), common)
    return model, truths


def sites(repeats):
    for number in (4, 20, 65, 160):
        for spread in (0.0, 0.3):
            some = max(100, repeats * 20 // max(number, 20))

            def one(rng, number=number, spread=spread):
                world = World((40,) * number, rng, rng.normal(0, spread, number) if spread else 0.0)
                differences = world.cross_validate("auc", 1)
                model, truths = with_sites(world, differences, "auc")
                missed = [is_false(site, truth) for site, truth in zip(model.sites, truths, strict=True)]
                return {
                    **said_falsely(differences, truths),
                    "mean of sites": is_false(model.mean),
                    "pooled": np.mean(missed),
                }

            count(f"{number} sites, 40 examples, sites differ by {spread}", "sites", some, one)

    def outlier(rng):
        gains = np.array([level_of(0.10)] * 3 + [0.0])
        world = World((200,) * 4, rng, gains)
        differences = world.cross_validate("auc", 2)
        model, _ = with_sites(world, differences, "auc")
        own = estimate_clients_from_folds(differences)
        return {"own": is_false(own[3]), "pooled": is_false(model.sites[3])}

    count("three of four sites gain 0.10, one nothing", "outlier", repeats, outlier)


def power(repeats):
    for what, rare in (("40 % positive", None), ("the hospitals' own shares", (0.46, 0.36, 0.935, 0.745))):
        for gain in (0.05, 0.10):
            level = level_of(gain)

            def world(rng, level=level, rare=rare):
                return World(HOSPITALS, rng, level, rare=rare)

            def said(mean, own):
                return {"mean": mean.low > 0, "sites": sum(one.low > 0 for one in own), "width": mean.high - mean.low}

            for times in (1, 2, 4):

                def folds(rng, times=times, world=world):
                    found = world(rng).cross_validate("auc", times)
                    return said(estimate_mean_from_folds(found), estimate_clients_from_folds(found))

                def splits(rng, times=times, world=world):
                    values = world(rng).resplit("auc", FOLDS * times)
                    mean = estimate_client_means_over_resplits([ResplitDifferences(values.mean(axis=0), 0.7, 0.3)])[0]
                    return said(
                        mean, estimate_client_means_over_resplits([ResplitDifferences(one, 0.7, 0.3) for one in values])
                    )

                name = f"gain {gain}, {what}, {FOLDS * times} runs"
                count(f"{name}: {times} x 5 folds", "power", repeats, folds)
                count(f"{name}: resplit {FOLDS * times}", "power", repeats, splits)

            def bound(rng, world=world):
                there = world(rng)
                there.luck = 0.0
                lucky = there.network()
                components = []
                for i, targets in enumerate(there.targets):
                    ours, theirs = there.predict("auc", i, lucky, np.arange(len(targets)))
                    truth = torch.from_numpy(targets)
                    components.append(
                        estimate_variance_components(METRICS["auc"], [two_outputs(ours)], [two_outputs(theirs)], truth)
                    )
                return said(estimate_mean_over_clients(components), estimate_client_means(components))

            count(f"gain {gain}, {what}: DeLong, networks fixed", "power", repeats, bound)


def share(counted, of):
    """A share with its exact interval (Clopper and Pearson 1934), in per cent."""
    found = stats.binomtest(round(counted), of).proportion_ci(0.95, method="exact")
    return f"{100 * counted / of:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def rows_of(kind, columns):
    """The lines of a table: a cell's name, its repeats, and what each function of `columns` says of it."""
    return [
        f"| {name} | {cell['repeats']} | {' | '.join(column(cell) for column in columns)} |"
        for name, cell in kept().get(kind, {}).items()
    ]


def header(*columns):
    return ["", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


def table():
    def shares(what):
        return lambda cell: share(cell[what], cell["repeats"])

    def percent(what, of=1):
        return lambda cell: f"{100 * cell[what] / cell['repeats'] / of:.1f}"

    lines = ["False sentences in per cent of comparisons, with a 95 % interval of that share.", ""]
    for kind, title in (
        ("false", "Simulated predictions"),
        ("trained", "Networks trained in each fold, over training examples"),
        ("numbers", "Numbers and times, networks trained in each fold"),
    ):
        lines += [f"## {title}", *header("case", "repeats", "about the mean", "about a site or more")]
        lines += [*rows_of(kind, [shares("mean"), shares("sites")]), ""]
    lines += [
        "## Methods that give nearly all examples the same answer",
        *header("case", "repeats", "about the mean", "about a site or more", "mean width of a site's interval"),
        *rows_of("agree", [shares("mean"), shares("sites"), lambda cell: f"{cell['width'] / cell['repeats']:.3f}"]),
        "",
    ]
    parts = (0.0, TRAINING_VARIANCE_RATIO, 1.25)
    lines += [
        "## The same by the part for training examples (0, polyfed's, and Nadeau and Bengio's)",
        *header("case", "repeats", *(f"{what}, {part}" for part in parts for what in ("mean", "sites"))),
        *rows_of("ratios", [shares(f"{what} {part}") for part in parts for what in ("mean", "sites")]),
        "",
        "## The model over sites",
        "",
        "Intervals that leave out the truth: of the mean of these sites, of the mean of sites like these (sites as units),",
        "of a site or more (its own), of a site on average (partial pooling).",
        *header("case", "repeats", "these sites", "sites like these", "own, a site or more", "pooled, on average"),
        *rows_of("sites", [shares("mean"), shares("mean of sites"), shares("sites"), percent("pooled")]),
        "",
        "The interval of a site that gains nothing, where the other three gain 0.10:",
        *header("case", "repeats", "own", "pooled"),
        *rows_of("outlier", [shares("own"), shares("pooled")]),
        "",
        "## Power at the size of four hospitals (303, 294, 123 and 200 examples), in per cent",
        *header("case", "repeats", "of the mean", "of each site", "mean width of the mean's interval"),
        *rows_of(
            "power", [percent("mean"), percent("sites", 4), lambda cell: f"{cell['width'] / cell['repeats']:.3f}"]
        ),
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "part", choices=("false", "trained", "agree", "numbers", "ratios", "sites", "power", "table")
    )
    arguments.add_argument("--repeats", type=int, default=400)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    np.seterr(divide="ignore", invalid="ignore")
    parts = {one.__name__: one for one in (false, trained, agree, numbers, ratios, sites, power)}
    table() if asked.part == "table" else parts[asked.part](asked.repeats)


if __name__ == "__main__":
    main()
