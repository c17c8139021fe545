"""Estimates confidence intervals of the difference of two methods from repeated k-fold cross-validation, in which each
repeat tests every example once.

Three things make a difference uncertain, and the variance is their sum:

- **test examples**: the sum of squared influences of the units (module `fold_influence`), averaged over repeats before they
  are squared, since the repeats test the same examples. For an AUC that is the variance of LeDell et al. (2015), for a mean
  that of Bayle et al. (2020), both consistent for networks trained on these examples.
- **seeds**, and what differs between the training sets of two folds: the variance between folds beyond that of their test
  examples, over the number of networks. All clients share the seed of a run, so that of a mean over clients is taken between
  the folds of that mean.
- **training examples**: folds share most of their training examples, so that no variance between folds shows their whole
  effect (Bengio and Grandvalet 2004). Nadeau and Bengio (2003) take it to be K/(K − 1) times the variance due to the test
  examples of one repeat. So it is here for scores without bounds, such as R². For scores between 0 and 1 that is more than
  is needed, and it is `TRAINING_VARIANCE_RATIO` times, which `benchmarks/verdicts_folds.py` chose: methods that differ by
  nothing but their training examples are then told apart in about 5 of 100 comparisons at worst.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
from numpy.typing import NDArray

from polyfed.comparison.statistics.cross_validation.fold_influence import FoldScores
from polyfed.comparison.statistics.estimate import ALPHA, Estimate, estimate_from_half_width, t_quantile
from polyfed.comparison.statistics.mrmc import degrees_of_freedom
from polyfed.comparison.statistics.pseudo_values.jackknife import FloatArray

TRAINING_VARIANCE_RATIO = 0.8
"""Variance due to training examples, by that due to the test examples of one repeat, for scores between 0 and 1."""


def training_variance_ratio(num_folds: int, is_bounded: bool) -> float:
    """Returns the variance due to training examples over that due to test examples of one repeat.

    >>> training_variance_ratio(5, is_bounded=False)
    1.25
    """
    return TRAINING_VARIANCE_RATIO if is_bounded else num_folds / (num_folds - 1)


@final
@dataclass(frozen=True, eq=False)
class FoldDifferences:
    """Holds a client's differences of two methods (or scores of one) from repeated cross-validation.

    Attributes:
        value: mean over repeats.
        folds: contribution of each fold, shape (R, K).
        influence: influence of each unit (example or group) within its fold, shape (R, G).
        classes: class of each unit, shape (G,).
        min_example_variance: lower bound of the variance due to test examples.
        is_bounded: True for differences of a score that lies between 0 and 1.
        is_share_of_examples: True for differences of a share of examples, where every unit is one example.
    """

    value: float
    folds: FloatArray
    influence: FloatArray
    classes: NDArray[np.int64]
    min_example_variance: float
    is_bounded: bool = True
    is_share_of_examples: bool = False

    @property
    def num_folds(self) -> int:
        """Returns K, the number of folds in one repeat of the cross-validation."""
        return int(self.folds.shape[1])

    @property
    def num_networks(self) -> int:
        """Returns the number of networks that each method trained: K folds times R repeats."""
        return int(self.folds.size)

    @property
    def example_variance(self) -> float:
        """Returns the part of the variance of the mean difference `value` that is due to the choice of test examples."""
        return float((self.influence.mean(axis=0) ** 2).sum()) + self.min_example_variance

    @property
    def repeat_variance(self) -> float:
        """Returns the part of the variance of a single repeat's difference that is due to the choice of test examples."""
        return float((self.influence**2).sum(axis=1).mean()) + self.min_example_variance

    @property
    def variance_due_to_examples(self) -> float:
        """Returns the part of the variance of `value` that is due to the choice of examples."""
        return self.example_variance + training_variance_ratio(self.num_folds, self.is_bounded) * self.repeat_variance

    @property
    def network_variance(self) -> float:
        """Returns the variance between folds' networks beyond that of test examples; it may be below 0."""
        between = float(self.folds.var(axis=1, ddof=1).mean())
        return between - self.num_folds * self.repeat_variance

    @property
    def network_degrees_of_freedom(self) -> int:
        """Returns the degrees of freedom of the estimate `network_variance`: R·(K − 1) for R repeats of K folds."""
        return int(self.folds.size - len(self.folds))

    @property
    def freedom(self) -> float:
        """Returns the degrees of freedom of the variance estimate `example_variance`.

        All examples of a share count, however few the methods differ on, since `min_example_variance` has two more on which
        they differ (Bonett and Price 2012).
        """
        if self.is_share_of_examples:
            return float(len(self.classes) - 1)
        return degrees_of_freedom(self.influence.mean(axis=0), self.classes)


def difference_over_folds(ours: FoldScores, theirs: FoldScores | None) -> FoldDifferences:
    """Returns the cross-validated difference of two methods, positive where `ours` is better.

    If `theirs` is None, it is the score of `ours`.
    """
    if theirs is None:
        values, folds, influence, sign = ours.values, ours.folds, ours.influence, 1.0
    else:
        sign = 1.0 if ours.metric.higher_is_better else -1.0
        values, folds = ours.values - theirs.values, ours.folds - theirs.folds
        influence = ours.influence - theirs.influence
    return FoldDifferences(
        sign * float(values.mean()),
        sign * folds,
        sign * influence,
        ours.classes,
        ours.min_example_variance,
        ours.metric.is_from_zero_to_one,
        ours.is_share_of_examples,
    )


def pooled_network_variance(clients: Sequence[FoldDifferences]) -> float:
    """Returns the clients' pooled estimate of the variance between folds' networks; at least 0.

    A few folds give a poor estimate at one client, so that clients pool it, weighed by the precision of their estimates.
    """
    weights = np.array([1 / client.repeat_variance if client.repeat_variance else 0.0 for client in clients])
    of_clients = np.array([client.network_variance for client in clients])
    return max(float(weights @ of_clients / weights.sum()), 0.0) if weights.sum() else 0.0


def estimate_clients_from_folds(
    clients: Sequence[FoldDifferences], *, num_tests: int = 1, alpha: float = ALPHA
) -> list[Estimate]:
    """Estimates each client's difference, with Bonferroni intervals for clients and `num_tests` methods.

    Args:
        clients: of the same runs, at least one.
        num_tests: how many methods have intervals for these clients.
        alpha: the share of comparisons in which one interval or more may miss the truth.
    """
    num_claims = len(clients) * num_tests
    common = pooled_network_variance(clients)

    def half_width(client: FoldDifferences, alpha: float) -> float:
        examples, networks, free = (
            client.variance_due_to_examples,
            client.num_networks,
            client.network_degrees_of_freedom,
        )
        claim = alpha / num_claims
        together = (
            t_quantile(claim, client.freedom) ** 2 * examples
            + t_quantile(claim, len(clients) * free) ** 2 * common / networks
        )
        alone = (
            t_quantile(alpha, client.freedom) ** 2 * examples
            + t_quantile(alpha, free) ** 2 * max(client.network_variance, 0.0) / networks
        )
        return math.sqrt(max(together, alone))

    return [
        estimate_from_half_width(client.value, client.value, partial(half_width, client), alpha) for client in clients
    ]


def estimate_mean_from_folds(
    clients: Sequence[FoldDifferences], *, num_tests: int = 1, alpha: float = ALPHA
) -> Estimate:
    """Estimates the mean difference over these very clients, with a confidence interval.

    Args:
        clients: of the same runs, at least one.
        num_tests: how many means have simultaneous intervals.
        alpha: the share of comparisons in which one of these may miss the truth.
    """
    parts = np.array([client.variance_due_to_examples for client in clients]) / len(clients) ** 2
    examples, free = float(parts.sum()), clients[0].network_degrees_of_freedom
    squares = sum(part**2 / client.freedom for part, client in zip(parts, clients, strict=True))
    freedom = examples**2 / squares if squares else 1.0
    networks = estimate_variance_between_fold_runs(clients)

    def half_width(alpha: float) -> float:
        claim = alpha / num_tests
        return math.sqrt(
            t_quantile(claim, freedom) ** 2 * examples
            + t_quantile(claim, free) ** 2 * networks / clients[0].num_networks
        )

    value = float(np.mean([client.value for client in clients]))
    return estimate_from_half_width(value, value, half_width, alpha)


def estimate_variance_between_fold_runs(clients: Sequence[FoldDifferences]) -> float:
    """Returns the variance of the mean over clients between folds, beyond that of test examples; at least 0."""
    means = np.mean([client.folds for client in clients], axis=0)
    noise = sum(client.repeat_variance for client in clients) / len(clients) ** 2
    return max(float(means.var(axis=1, ddof=1).mean()) - clients[0].num_folds * noise, 0.0)
