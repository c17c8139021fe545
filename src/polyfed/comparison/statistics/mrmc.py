"""Estimates confidence intervals of scores and of differences of two methods by multi-reader multi-case analysis, with
seeds as readers and test examples as cases.

The score of a method at a client varies with the training (the seed) and with the test examples, and every network is
scored on the same examples. In radiology this design is called multi-reader multi-case: seeds are the readers,
examples the cases, and both are random samples (Dorfman, Berbaum and Metz 1992; Hillis 2007). As there, each seed and
example has a jackknife pseudo-value of the difference of two methods (module `jackknife`), and the mean squares of
this S×n table separate the variance due to seeds from the variance due to examples:

    V_seeds = MS_seeds/(nS),  V_examples = max(MS_examples − MS_rest, 0)/(nS),  half-width² = t²·V_seeds + t'²·V_examples,

with the t quantiles of S − 1 seeds and of the examples. Weighing each variance by its own quantile (Graybill and Wang
1980; Burdick and Graybill 1992) holds the level where the approximate degrees of freedom that Hillis takes do not: with
three seeds, at the small levels that several sites need. With one seed V_examples = MS_examples/n, and nothing is known
of other seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.statistics.estimate import ALPHA, Estimate, estimate_from_half_width, t_quantile
from polyfed.comparison.statistics.pseudo_values.cluster_jackknife import (
    assign_group_numbers,
)
from polyfed.comparison.statistics.pseudo_values.jackknife import (
    FloatArray,
    example_class_of_each_pseudo_value,
    score_with_pseudo_values,
)
from polyfed.comparison.statistics.pseudo_values.least_variance import least_example_variance
from polyfed.core.evaluation.metric import Metric

_FEW_OF_CLASS = 6  # examples; with five and less, false answers were counted in benchmarks/verdicts_shapes.py


@final
@dataclass(frozen=True)
class VarianceComponents:
    """Holds a client's score or difference by seed, with its variances due to seeds and examples.

    Attributes:
        values: score or difference of each seed, shape (S,).
        centres: centres of the intervals, shape (S,): `values`, for shares shrunk a little by pseudo-examples.
        seed_variance: variance of the mean due to seeds, `residual_variance` subtracted.
        residual_variance: variance of the mean due to seeds and examples together (interaction).
        example_variance: variance of the mean due to examples.
        degrees_of_freedom: of `example_variance`.
        num_examples: number of test examples.
    """

    values: FloatArray
    centres: FloatArray
    seed_variance: float
    residual_variance: float
    example_variance: float
    degrees_of_freedom: float
    num_examples: int

    @property
    def mean(self) -> float:
        """Returns the mean over seeds of the scores, or of the differences of two methods."""
        return float(self.values.mean())

    @property
    def variance(self) -> float:
        """Returns the variance of the mean over seeds that is due to seeds and test examples together."""
        return max(self.seed_variance, 0.0) + self.residual_variance + self.example_variance


def estimate_variance_components(
    metric: Metric,
    outputs_by_seed: Sequence[Tensor],
    rival_outputs_by_seed: Sequence[Tensor] | None,
    targets: Tensor,
    groups: NDArray[Any] | None = None,
) -> VarianceComponents | None:
    """Splits the variance of a client's score or difference into that of seeds and of examples.

    None if a score is not defined.

    Args:
        metric: the metric. Differences are positive where the method is better than the rival, also for losses.
        outputs_by_seed: outputs of the method, one tensor per seed, each of shape (n, outputs).
        rival_outputs_by_seed: outputs of another method with the same seeds; None for the score of the method itself.
        targets: of the n examples.
        groups: of the n examples: those of equal value count as one, such as the recordings of a patient; None for none.

    Returns:
        None if a score is not defined, or is not once an example is left out: too few examples of a class for an AUC,
            say.

    >>> import torch
    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> targets = torch.tensor([0, 1] * 20)
    >>> right, wrong = torch.eye(2)[targets], torch.eye(2)[torch.zeros(40, dtype=torch.int64)]
    >>> estimate_variance_components(METRICS["accuracy"], [right], [wrong], targets).values
    array([0.5])
    """
    seed_scores = [
        None if outputs is None else score_seeds(metric, outputs, targets, groups)
        for outputs in (outputs_by_seed, rival_outputs_by_seed)
    ]
    if seed_scores[0] is None or (rival_outputs_by_seed is not None and seed_scores[1] is None):
        return None
    return variance_components_of_difference(seed_scores[0], seed_scores[1])


@final
@dataclass(frozen=True, eq=False)
class SeedScores:
    """Holds a method's scores at a client, one per seed, with test examples' pseudo-values.

    Attributes:
        metric: the metric.
        values: score of each seed, shape (S,).
        pseudo_values: jackknife pseudo-values, shape (S, n).
        classes: class of each pseudo-value, shape (n,).
        min_example_variance: lower bound of the variance due to examples.
        num_examples: number of test examples.
    """

    metric: Metric
    values: FloatArray
    pseudo_values: FloatArray
    classes: NDArray[np.int64]
    min_example_variance: float
    num_examples: int


def score_seeds(
    metric: Metric, outputs_by_seed: Sequence[Tensor], targets: Tensor, groups: NDArray[Any] | None = None
) -> SeedScores | None:
    """Returns a method's scores at a client from each seed's outputs; None if undefined.

    With `groups`, examples of equal value are one unit (module `cluster_jackknife`).
    """
    units = assign_group_numbers(groups, len(targets))
    pairs = [score_with_pseudo_values(metric, seed_outputs, targets, units) for seed_outputs in outputs_by_seed]
    defined = [pair for pair in pairs if pair is not None]
    if len(defined) < len(pairs):
        return None
    least = float(np.mean([least_example_variance(metric, outputs, targets, units) for outputs in outputs_by_seed]))
    values, table = np.array([score for score, _ in defined]), np.array([row for _, row in defined])
    size = len(targets) if units is None else int(units.max()) + 1
    return SeedScores(metric, values, table, example_class_of_each_pseudo_value(metric, targets, units), least, size)


def variance_components_of_difference(scores: SeedScores, rival_scores: SeedScores | None) -> VarianceComponents:
    """Estimates a difference's variances due to seeds and examples; positive if the first is better.

    If `rival_scores` is None, they are those of the score of the first method.
    """
    share = scores.metric.per_example is not None and scores.metric.unit == "%"
    if rival_scores is None:
        extra = (0.0, 0.0, 1.0, 1.0) if share else ()
        return _components_of_table(
            scores.values, scores.pseudo_values, scores.classes, extra, scores.min_example_variance, scores.num_examples
        )
    sign = 1.0 if scores.metric.higher_is_better else -1.0
    values, table = (
        sign * (scores.values - rival_scores.values),
        sign * (scores.pseudo_values - rival_scores.pseudo_values),
    )
    least = max(scores.min_example_variance, rival_scores.min_example_variance)
    return _components_of_table(values, table, scores.classes, (1.0, -1.0) if share else (), least, scores.num_examples)


def _components_of_table(
    values: FloatArray,
    table: FloatArray,
    classes: NDArray[np.int64],
    extra: Sequence[float],
    min_example_variance: float,
    num_examples: int,
) -> VarianceComponents:
    """Computes the variance components from the mean squares of a table of pseudo-values, S seeds by n examples.

    Shares get the pseudo-examples `extra`: for a difference, one that only one method has right and one that only the
    other has right (Bonett and Price 2012, after Agresti and Min 2005); for a score, two right and two wrong (Agresti
    and Coull 1998). Without them, few examples on which the methods always or never differ would give intervals of
    almost no width.

    """
    centres = values
    if extra:
        table = np.concatenate([table, np.tile(np.array(extra), (len(values), 1))], axis=1)
        centres = table.mean(axis=1)
    seeds, n = table.shape
    columns = table.mean(axis=0)
    centred = columns - columns.mean()
    of_examples = seeds * float((centred**2).sum()) / (n - 1)
    freedom = float(n - 1) if extra else degrees_of_freedom(centred, classes)
    if seeds == 1:
        return VarianceComponents(
            values, centres, 0.0, 0.0, max(of_examples / n, min_example_variance), freedom, num_examples
        )
    of_seeds = n * float(centres.var(ddof=1))
    residuals = table - table.mean(axis=1, keepdims=True) - centred
    of_rest = float((residuals**2).sum()) / ((seeds - 1) * (n - 1))
    scale = n * seeds
    examples = max((of_examples - of_rest) / scale, min_example_variance - of_rest / scale, 0.0)
    return VarianceComponents(
        values, centres, (of_seeds - of_rest) / scale, of_rest / scale, examples, freedom, num_examples
    )


def degrees_of_freedom(centred: FloatArray, classes: NDArray[np.int64]) -> float:
    """Returns the degrees of freedom of that part of a score's variance which is due to test examples.

    They are Welch's over classes, bounded by the number of examples that contribute less one: few contribute where two
    networks mostly agree ((Σ|c|)²/Σc² is their number if all contribute alike). If a class has fewer than `_FEW_OF_CLASS`
    examples, they bound them too: one of two classes by its number less one, one of several by Welch's formula for equal
    variances in all classes. The variance of so few may be estimated as next to nothing by chance, and the formula would
    then count the other classes alone.
    """
    squares = centred**2
    total = float(squares.sum())
    if total == 0:
        return float(len(centred) - 1)
    inverse = 0.0
    for name in np.unique(classes):
        inside = classes == name
        if (share := float(squares[inside].sum()) / total) > 0:
            inverse += share**2 / max(int(inside.sum()) - 1, 0.5)
    contributing = float(np.abs(centred).sum()) ** 2 / total
    _, counts = np.unique(classes, return_counts=True)
    bound = float(len(classes) - 1)
    if len(counts) > 1 and counts.min() < _FEW_OF_CLASS:
        shares = 1 / counts / (1 / counts).sum()
        bound = 1 // float((shares**2 / np.maximum(counts - 1, 0.5)).sum())
        bound = bound if len(counts) > 2 else float(counts.min() - 1)
    return max(min(1 / inverse, contributing - 1, bound), 0.5)


def estimate_client_means(components_by_client: Sequence[VarianceComponents], *, num_tests: int = 1) -> list[Estimate]:
    """Estimates clients' means over seeds, with Bonferroni intervals for clients and `num_tests` methods.

    A few seeds give a poor estimate of their variance. The clients therefore pool it, as in an analysis of variance; a
    client whose own seeds vary more uses its own variance. No interval is narrower than the client's own at the level
    of one test.

    Args:
        components_by_client: components of each client, at least one, with the same number of seeds each.
        num_tests: how many methods have intervals for these clients.
    """
    seeds, num_claims = len(components_by_client[0].values), len(components_by_client) * num_tests
    common = max(0.0, float(np.mean([site.seed_variance for site in components_by_client])))

    def half_width(site: VarianceComponents, alpha: float) -> float:
        claim_alpha = alpha / num_claims
        examples = t_quantile(claim_alpha, site.degrees_of_freedom) ** 2 * site.example_variance
        if seeds == 1:
            return math.sqrt(examples)
        variance = max(common, site.seed_variance) + site.residual_variance
        shared = t_quantile(claim_alpha, len(components_by_client) * (seeds - 1)) ** 2 * variance + examples
        single_claim = (
            t_quantile(alpha, seeds - 1) ** 2 * max(site.seed_variance + site.residual_variance, 0.0)
            + t_quantile(alpha, site.degrees_of_freedom) ** 2 * site.example_variance
        )
        return math.sqrt(max(shared, single_claim))

    return [
        estimate_from_half_width(site.mean, float(site.centres.mean()), partial(half_width, site), ALPHA)
        for site in components_by_client
    ]


def estimate_mean_over_clients(
    components_by_client: Sequence[VarianceComponents],
    *,
    num_tests: int = 1,
    alpha: float = ALPHA,
    population: int | None = None,
) -> Estimate:
    """Estimates the mean over clients, which are fixed or drawn from `population`, with an interval.

    The variance due to seeds is that of the means over clients, since one seed affects all clients.

    Args:
        components_by_client: components of each client, at least one, with the same number of seeds each.
        num_tests: how many means have simultaneous intervals.
        alpha: the share of comparisons in which one of these may miss the truth.
        population: N, where the n clients were drawn from N without replacement: the mean is then over all N, and the
            variance of the draw, (1 - n/N)·s²/n with the variance s² of the clients' values, is added.
    """
    means = np.array([site.centres for site in components_by_client]).mean(axis=0)
    seeds = len(means)
    examples = np.array([site.example_variance for site in components_by_client]) / len(components_by_client) ** 2
    total_variance = float(examples.sum())
    freedom = (
        total_variance**2
        / sum(v**2 / site.degrees_of_freedom for v, site in zip(examples, components_by_client, strict=True))
        if total_variance
        else 1.0
    )
    of_seeds = float(means.var(ddof=1)) / seeds if seeds > 1 else 0.0

    of_draw = _variance_of_draw([site.mean for site in components_by_client], population)

    def half_width(alpha: float) -> float:
        spread = t_quantile(alpha / num_tests, freedom) ** 2 * total_variance
        if of_draw == math.inf:
            return math.inf
        if of_draw:
            spread += t_quantile(alpha / num_tests, len(components_by_client) - 1) ** 2 * of_draw
        return math.sqrt(spread + (t_quantile(alpha / num_tests, seeds - 1) ** 2 * of_seeds if seeds > 1 else 0.0))

    value = float(np.mean([site.mean for site in components_by_client]))
    # As many pseudo-examples in all as one client has: those of every client would shift the mean of many small clients by
    # more than the width of its interval.
    return estimate_from_half_width(
        value, value + (float(means.mean()) - value) / len(components_by_client), half_width, alpha
    )


def _variance_of_draw(values: Sequence[float], population: int | None) -> float:
    """Returns the variance of the mean of values drawn without replacement from `population`; infinite for one value."""
    if population is None or len(values) == population:
        return 0.0
    return (1 - len(values) / population) * float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else math.inf


@final
class GainOverRival(NamedTuple):
    """Holds a gain over one rival, with an interval for it alone and one for all rivals at once.

    Attributes:
        alone: the estimate as if this were the only rival.
        simultaneous: the estimate with an interval that holds for all rivals together.
    """

    alone: Estimate
    simultaneous: Estimate


def estimate_gain_over_best_rival(gains_over_each_rival: Sequence[GainOverRival]) -> Estimate:
    """Estimates the gain over the best of several rivals, the smallest of the single gains.

    It is positive only if every gain is, so that the lower end needs no correction for the number of rivals (an
    intersection-union test, Berger 1982). The upper end does, since a single rival can decide it.

    Args:
        gains_over_each_rival: the gain over each rival; at least one.

    >>> large, unclear = Estimate(0.3, 0.1, 0.5, 0.01), Estimate(0.2, -0.1, 0.4, 0.3)
    >>> estimate_gain_over_best_rival([GainOverRival(large, large), GainOverRival(unclear, unclear)])
    Estimate(value=0.2, low=-0.1, high=0.4, p=0.3)
    """
    above = max(single.p if single.value > 0 else 1.0 for single, _ in gains_over_each_rival)
    below = min(joint.p if joint.value < 0 else 1.0 for _, joint in gains_over_each_rival)
    return Estimate(
        min(single.value for single, _ in gains_over_each_rival), min(single.low for single, _ in gains_over_each_rival),
        min(joint.high for _, joint in gains_over_each_rival), min(above, below),
    )  # fmt: skip
