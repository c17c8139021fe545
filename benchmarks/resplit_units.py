"""How often intervals of `resplit` hold where a site has few patients.

    python benchmarks/resplit_units.py > benchmarks/results/resplit_units.md          # about 10 seconds

Two methods do not differ: each patient of a site has a difference of its own, drawn around 0, and that of a split is the
mean over the patients of its test set, drawn at random, 30 % of all. This is the hardest case: splits differ in nothing but
in who is tested. An interval of level 95 % should contain 0 in 95 % of draws.
"""

import math

import numpy as np

from polyfed.comparison.statistics.cross_validation.resplits import ResplitDifferences
from polyfed.comparison.statistics.estimate import t_quantile

DRAWS, ALPHA = 4000, 0.05


def draw_differences(sites, patients, splits, rng):
    """Returns the mean difference over sites of each split, (DRAWS, splits), and the patients in a test set."""
    num_test, values = max(1, round(0.3 * patients)), np.zeros((DRAWS, splits))
    for _ in range(sites):
        gains = rng.normal(size=(DRAWS, patients))
        for split in range(splits):
            tested = np.argsort(rng.random((DRAWS, patients)), axis=1)[:, :num_test]
            values[:, split] += np.take_along_axis(gains, tested, axis=1).mean(axis=1) / sites
    return values, num_test


def share_that_holds(values, num_train, num_test, num_units):
    """Returns the share of intervals that contain 0, among those that have a width."""
    example = ResplitDifferences(list(values[0]), num_train, num_test, num_units)
    width = t_quantile(ALPHA, example.degrees_of_freedom) * math.sqrt(1 / values.shape[1] + num_test / num_train)
    spread = values.std(axis=1, ddof=1)
    return float((np.abs(values.mean(axis=1)) <= width * spread)[spread > 1e-6].mean())


def main():
    rng = np.random.default_rng(0)
    print(
        f"Shares of {DRAWS:,} intervals that contain the true difference, 95 % wanted (`benchmarks/resplit_units.py`).\n"
    )
    print("| sites | patients a site | splits | K − 1 degrees of freedom | those of polyfed |\n|---|---|---|---|---|")
    for sites, patients in ((1, 2), (1, 3), (1, 4), (1, 6), (1, 12), (1, 19), (1, 20), (1, 50), (3, 2), (3, 4), (8, 3)):
        for splits in (3, 10, 30):
            values, num_test = draw_differences(sites, patients, splits, rng)
            sizes = patients - num_test, num_test
            before, now = (share_that_holds(values, *sizes, n) for n in (math.inf, sites * patients - sites + 1))
            print(f"| {sites} | {patients} | {splits} | {100 * before:.1f} % | {100 * now:.1f} % |")


if __name__ == "__main__":
    main()
