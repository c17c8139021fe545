"""What a search of rates in the first of five folds is worth where nothing can be learnt, for training alone and FedAvg.

    python benchmarks/fold_search.py [--draws 4000] [--rows 40] > benchmarks/results/fold_search.md

As in `verdicts_shapes.py searched`: three sites, ten random features, random labels of two classes, a linear network, four
rounds of one epoch, rates 0.01 to 3, a fifth of the rows for validation, five stratified folds. The choice is polyfed's: the
mean validation loss of the last three rounds, of all sites together for FedAvg, shrunk towards it for a site alone. Here all
draws are trained at once, as stacked matrices.
"""

import argparse

import torch

from polyfed.comparison.tuning.ranking import POOLED_LOSS_WEIGHT, SMOOTHED_ROUNDS

SITES, FOLDS, FEATURES, ROUNDS, BATCH, RATES = 3, 5, 10, 4, 32, (0.01, 0.1, 1.0, 3.0)


def deal_sets(labels, fold_of_row, k, rng):
    """Rows of the training, validation and test set of fold k, each (networks, rows)."""
    networks, rows = labels.shape
    tested = fold_of_row == k
    by_class = (100.0 * tested + labels + torch.rand(networks, rows, generator=rng)).argsort(1)[
        :, : rows - rows // FOLDS
    ]
    every_fourth = (torch.arange(by_class.shape[1]) + torch.randint(0, 4, (networks, 1), generator=rng)) % 4 == 0
    sets = by_class[~every_fourth], by_class[every_fourth], tested.nonzero()[:, 1]
    return [rows_of_set.view(networks, -1) for rows_of_set in sets]


def train(inputs, labels, start, rate, order, federated):
    """Yields the weights (networks, features + 1, 2) after each round."""
    weights = start.clone()
    for rows_of_round in order.unbind(1):
        for rows in rows_of_round.split(BATCH, 1):
            batch = inputs.gather(1, rows[..., None].expand(-1, -1, inputs.shape[2]))
            error = (batch @ weights).softmax(2) - torch.nn.functional.one_hot(labels.gather(1, rows), 2)
            weights = weights - rate * batch.transpose(1, 2) @ error / rows.shape[1]
        if federated:
            weights = weights.unflatten(0, (-1, SITES)).mean(1).repeat_interleave(SITES, 0)
        yield weights


def run_draws(rows, draws, alike, federated, rng):
    """Shares that are right and validation losses, each (folds, rates, networks)."""
    networks = draws * SITES
    features = torch.cat([torch.randn(networks, rows, FEATURES, generator=rng), torch.ones(networks, rows, 1)], 2)
    chance = torch.rand(networks, rows, generator=rng)
    labels = (chance.argsort(1) < rows // 2).long() if alike else (chance < 0.5).long()
    place = (labels + torch.rand(networks, rows, generator=rng)).argsort(1).argsort(1)
    right, losses = torch.empty(2, FOLDS, len(RATES), networks)
    for k in range(FOLDS):
        parts = deal_sets(labels, place % FOLDS, k, rng)
        data = [
            (features.gather(1, part[..., None].expand(-1, -1, FEATURES + 1)), labels.gather(1, part)) for part in parts
        ]
        (x, y), (x_val, y_val), (x_test, y_test) = data
        start = (torch.rand(draws, FEATURES + 1, 2, generator=rng) * 2 - 1) / FEATURES**0.5
        order = torch.rand(networks, ROUNDS, x.shape[1], generator=rng).argsort(2)
        for i, rate in enumerate(RATES):
            curve = []
            for weights in train(x, y, start.repeat_interleave(SITES, 0), rate, order, federated):
                loss = torch.nn.functional.cross_entropy(
                    (x_val @ weights).flatten(0, 1), y_val.flatten(), reduction="none"
                )
                curve.append(loss.view(networks, -1).mean(1))
            losses[k, i] = torch.stack(curve[-SMOOTHED_ROUNDS:]).mean(0)
            right[k, i] = ((x_test @ weights).argmax(2) == y_test).float().mean(1)
    together = losses.unflatten(2, (-1, SITES)).mean(3).repeat_interleave(SITES, 2)
    share = 0.0 if federated else y_val.shape[1] / (y_val.shape[1] + POOLED_LOSS_WEIGHT)
    return right, share * losses + (1 - share) * together


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--draws", type=int, default=4000)
    arguments.add_argument("--rows", type=int, default=40, help="of a site")
    options = arguments.parse_args()
    draws, rows = options.draws, options.rows
    print(
        "Per cent right on random labels, mean over three sites (standard error); the standard deviation of one draw.\n"
    )
    print("| rows | labels | method | no search, rate 1 | search in the first fold | search in each fold | one draw |")
    print("|---|---|---|---|---|---|---|")
    for alike in (True, False):
        for federated in (False, True):
            right, losses = run_draws(rows, draws, alike, federated, torch.Generator().manual_seed(1))
            chosen = losses.argmin(1, keepdim=True)
            picks = torch.full_like(chosen, RATES.index(1.0)), chosen[:1].expand_as(chosen), chosen
            scores = [100 * right.gather(1, pick).mean((0, 1)).view(draws, SITES).mean(1) for pick in picks]
            cells = [f"{score.mean():.2f} ({score.std() / draws**0.5:.2f})" for score in scores]
            names = (rows, "half of each class" if alike else "each by itself", "FedAvg" if federated else "alone")
            print("| " + " | ".join([*map(str, names), *cells, f"{scores[1].std():.1f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
