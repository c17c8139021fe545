"""How much a site that trains alone loses by the rule with which its learning rate and round are chosen.

    python benchmarks/rate_choice.py [--repeats 150] [--out benchmarks/results/rate_choice.json]

Seven sites with 5 to 300 validation examples and four times as many for training; one has 18 with a single negative. Each
trains a network of 16 hidden units by SGD for 30 rounds, with seven rates. Where sites are alike, so is what they learn from
13 features; where they differ, labels are more or less certain, and the features' scale is 0.3, 1 or 3, so that the best
rates differ too. A rule's excess is the loss on 2,000 new examples at the rate and the round that it chose, less the lowest
at any rate and round, which only hindsight knows. A training that explodes counts as a loss of 10 an example.

Rules: "score", one rate for all by the mean over sites of the validation AUC, and its round, as polyfed chose before; "own",
the site's own validation loss; "pooled", the loss on all sites' validation examples, each counted once; "k", the own loss
drawn to the pooled loss, which counts as k examples (`ranking.shrink_client_loss_to_pooled_loss`); "one_se",
the smallest rate and
the first round within a standard error of the lowest own loss; "folds", five-fold cross-validation on the site's training
and validation examples.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from polyfed.comparison.tuning.ranking import (
    POOLED_LOSS_WEIGHT,
    lowest_smoothed_loss,
    shrink_client_loss_to_pooled_loss,
)

RESULTS = Path(__file__).parent / "results" / "rate_choice.json"
RATES = (0.003, 0.01, 0.03, 0.1, 0.33, 1.1, 3.6)
SITES = (5, 10, 18, 30, 60, 120, 300)  # validation examples; that of 18 has one negative
ROUNDS, HIDDEN, FEATURES, BATCH, TEST, FOLDS, WORST = 30, 16, 13, 32, 2000, 5, 10.0
WEIGHTS = (5, 10, 20, 50, 100)
RULES = ("score", "own", "pooled", *(f"k{k}" for k in WEIGHTS), "one_se", "folds")


def site(rng, number, differ):
    """Inputs and labels of one site: training, validation, test."""
    beta = rng.normal(0, 0.6, FEATURES)
    certain, scale = (rng.choice([0.5, 1.0, 2.0]), rng.choice([0.3, 1.0, 3.0])) if differ else (1.0, 1.0)
    shift = 2.6 + 0.5 * certain if number == 18 else 0.0  # most are ill

    def draw(size):
        x = rng.normal(size=(size, FEATURES))
        logit = certain * (x @ beta + 0.8 * x[:, 0] * x[:, 1]) + shift
        return scale * x, (rng.random(size) < 1 / (1 + np.exp(-logit))).astype(float)

    train, test = draw(4 * number), draw(TEST)
    val = draw(number)
    if number == 18:
        x, y = draw(400)
        rows = np.concatenate([np.flatnonzero(y == 0)[:1], np.flatnonzero(y == 1)[:17]])
        val = x[rows], y[rows]
    return train, val, test


def course(rng, train, sets):
    """Outputs of the networks on each of `sets` after each round, shape (rates, rounds, n)."""
    x, y = train
    r = len(RATES)
    first = rng.uniform(-1, 1, (FEATURES + 1, HIDDEN)) / np.sqrt(FEATURES)
    w, v = np.repeat(first[None], r, 0), np.repeat(rng.uniform(-1, 1, (1, HIDDEN + 1)) / np.sqrt(HIDDEN), r, 0)
    rate = np.array(RATES)[:, None]
    x = np.hstack([x, np.ones((len(x), 1))])
    sets = [np.hstack([s, np.ones((len(s), 1))]) for s in sets]
    found = [np.empty((r, ROUNDS, len(s))) for s in sets]

    def hidden(inputs):
        return np.maximum(inputs @ w, 0)  # (r, n, hidden)

    def outputs(h):
        return np.einsum("rnh,rh->rn", h, v[:, :-1]) + v[:, -1:]

    for t in range(ROUNDS):
        order = rng.permutation(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            h = hidden(x[rows])
            error = (1 / (1 + np.exp(-np.clip(outputs(h), -30, 30))) - y[rows]) / len(rows)
            back = error[:, :, None] * v[:, None, :-1] * (h > 0)
            v[:, :-1] -= rate * np.einsum("rn,rnh->rh", error, h)
            v[:, -1] -= rate[:, 0] * error.sum(1)
            w -= rate[:, :, None] * (x[rows].T @ back)
        for k, s in enumerate(sets):
            found[k][:, t] = outputs(hidden(s))
    return found


def losses(outputs, y):
    """Of each example."""
    outputs = np.nan_to_num(np.clip(outputs, -1e6, 1e6), nan=1e6)
    return np.minimum(np.logaddexp(0, outputs) - y * outputs, WORST)


def auc(outputs, y):
    pos, neg = outputs[..., y == 1], outputs[..., y == 0]
    if not pos.shape[-1] or not neg.shape[-1]:
        return None
    return (pos[..., :, None] > neg[..., None, :]).mean((-1, -2))


def folds(rng, x, y):
    """Mean loss of cross-validation, (rates, rounds)."""
    part = rng.permutation(len(y)) % FOLDS
    total = 0.0
    for k in range(FOLDS):
        out = course(rng, (x[part != k], y[part != k]), [x[part == k]])[0]
        total = total + losses(out, y[part == k]).sum(-1)
    return total / len(y)


def as_curve(values):
    return [(t, float(value)) for t, value in enumerate(values)]


def smoothed(table):
    """Each of the inner rounds as the mean of itself and its neighbours; the outer ones do not count."""
    inner = (table[..., :-2] + table[..., 1:-1] + table[..., 2:]) / 3
    return np.concatenate([np.full((*table.shape[:-1], 1), np.inf), inner, np.full((*table.shape[:-1], 1), np.inf)], -1)


def by_table(table):
    """Of each rate the round, and the rate."""
    found = smoothed(table)
    return found.argmin(-1), int(found.min(-1).argmin())


def by_drawn(own, number, pooled, weight):
    """The same by the functions that polyfed uses."""
    places = [
        lowest_smoothed_loss(shrink_client_loss_to_pooled_loss(dict(as_curve(o)), number, as_curve(p), weight))
        for o, p in zip(own, pooled, strict=True)
    ]
    return np.array([t for _, t in places]), int(np.argmin([loss for loss, _ in places]))


def one_se(each):
    """Of each rate the round, and the rate; `each` is the loss of each example, (rates, rounds, n)."""
    table = smoothed(each.mean(-1))
    j, t = np.unravel_index(table.argmin(), table.shape)
    most = table[j, t] + each[j, t].std(ddof=1) / np.sqrt(each.shape[-1])
    fits = (table <= most).any(-1)
    first = np.array(
        [int(np.argmax(row <= most)) if fit else int(row.argmin()) for row, fit in zip(table, fits, strict=True)]
    )
    return first, int(np.argmax(fits))


def repeat(rng, differ):
    """By rule and site the excess of the loss."""
    drawn_sites = [site(rng, number, differ) for number in SITES]
    runs = [course(rng, train, [val[0], test[0]]) for train, val, test in drawn_sites]
    each = [losses(out[0], val[1]) for out, (_, val, _) in zip(runs, drawn_sites, strict=True)]
    own = [values.mean(-1) for values in each]
    truth = [losses(out[1], test[1]).mean(-1) for out, (_, _, test) in zip(runs, drawn_sites, strict=True)]
    pooled = sum(n * table for n, table in zip(SITES, own, strict=True)) / sum(SITES)
    capped = sum(
        n * np.minimum(table, np.sort(table[:, 0])[(len(RATES) - 1) // 2]) for n, table in zip(SITES, own, strict=True)
    ) / sum(SITES)
    scores = [s for out, (_, val, _) in zip(runs, drawn_sites, strict=True) if (s := auc(out[0], val[1])) is not None]
    found = {rule: [] for rule in RULES}
    for k, number in enumerate(SITES):
        (x, y), (u, z), _ = drawn_sites[k]
        picks = {
            "score": by_table(-np.mean(scores, axis=0)),
            "own": by_table(own[k]),
            "pooled": by_table(pooled),
            **{f"k{w}": by_drawn(own[k], number, capped, w) for w in WEIGHTS},
            "one_se": one_se(each[k]),
            "folds": by_table(folds(rng, np.concatenate([x, u]), np.concatenate([y, z])))
            if number <= 60
            else by_table(own[k]),
        }
        for rule, (rounds, chosen) in picks.items():
            found[rule].append(float(truth[k][chosen, rounds[chosen]] - truth[k].min()))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=150)
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args()
    content = {"weight": POOLED_LOSS_WEIGHT, "rates": RATES, "sites": SITES, "repeats": options.repeats, "excess": {}}
    for name, differ in (("alike", False), ("different", True)):
        rng = np.random.default_rng(0)
        with np.errstate(over="ignore", invalid="ignore"):
            runs = [repeat(rng, differ) for _ in range(options.repeats)]
        table = {}
        print(f"\nsites that are {name}: excess of the loss, mean ± half of the 95 % interval")
        print("| rule | " + " | ".join(f"{n}" for n in SITES) + " | mean |\n|---|" + "---|" * (len(SITES) + 1))
        for rule in RULES:
            values = np.array([run[rule] for run in runs])
            values = np.hstack([values, values.mean(1, keepdims=True)])
            mean, half = values.mean(0), 1.96 * values.std(0, ddof=1) / np.sqrt(len(values))
            table[rule] = {"mean": mean.round(4).tolist(), "half": half.round(4).tolist()}
            print(f"| {rule} | " + " | ".join(f"{m:.3f} ± {h:.3f}" for m, h in zip(mean, half, strict=True)) + " |")
        content["excess"][name] = table
    Path(options.out).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
