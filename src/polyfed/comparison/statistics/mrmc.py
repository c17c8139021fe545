"""How sure a difference of scores is on examples that nobody has seen: networks of several seeds on the same examples.

The score of a method at a site varies with the training (the seed) and with the test examples, and every network is
scored on the same examples. In radiology this plan is called multi-reader multi-case: seeds are the readers, examples the
cases, and both stand for many others (Dorfman, Berbaum and Metz 1992; Hillis 2007). As there, each seed and example has a
jackknife pseudo-value of the difference of two methods (module `influence`), and the mean squares of this S×n table
separate the variance of the seeds from that of the examples:

    V_seeds = MS_seeds/(nS),  V_examples = max(MS_examples − MS_rest, 0)/(nS),  half-width² = t²·V_seeds + t'²·V_examples,

with the t quantiles of S − 1 seeds and of the examples. Weighing each variance by its own quantile (Graybill and Wang
1980; Burdick and Graybill 1992) holds the level where the approximate degrees of freedom that Hillis takes do not: with
three seeds, at the small levels that several sites need. With one seed V_examples = MS_examples/n, and nothing is known
of other seeds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.statistics.jackknife import Values, classes_of_pseudo_values, jackknife_pseudo_values
from polyfed.comparison.statistics.nadeau_bengio import corrected_variance
from polyfed.core.evaluation.metrics import Metric
from polyfed.core.evaluation.score_functions import binary_problems

CONFIDENCE_LEVEL = 0.95
ALPHA = 0.04
"""The share of false claims that intervals are made for, a little below 1 − LEVEL, because t quantiles of discrete and
skewed scores are approximations: `benchmarks/verdicts.py` measures that 1 − LEVEL holds."""


@final
@dataclass(frozen=True)
class VarianceComponents:
    """What is known of one site: the value, and the parts of its variance.

    Attributes: `values`, the score or difference of each seed, shape (S,); `centres`, what intervals are around: the same,
    but drawn in a little for shares; `seed_variance`, the seeds' variance of their mean less the `residual_variance`,
    which is that of seeds and examples together; `example_variance`, the examples' variance of the mean;
    `degrees_of_freedom`, its degrees of freedom; `num_examples` of examples.
    """

    values: Values
    centres: Values
    seed_variance: float
    residual_variance: float
    example_variance: float
    degrees_of_freedom: float
    num_examples: int

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(self.values.mean())


@final
@dataclass(frozen=True)
class Estimate:
    """A value with its interval, and the two-sided p for 0: the smallest share of false claims at which the interval leaves
    out 0, after the correction for all that is said at once."""

    value: float
    low: float
    high: float
    p: float


def estimate_variance_components(
    metric: Metric, ours: Sequence[Tensor], theirs: Sequence[Tensor] | None, targets: Tensor
) -> VarianceComponents | None:
    """Of one site.

    Args:
        metric: what is scored. Differences are positive where `ours` is better, also for losses.
        ours: outputs of one method, one tensor a seed, each of shape (n, outputs).
        theirs: those of the method it is compared with, by the same seeds; None for the score of `ours` itself.
        targets: of the n examples.

    Returns:
        None where a score is not defined, or that without one example: too few of a class for an AUC, say.

    >>> import torch
    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> targets = torch.tensor([0, 1] * 20)
    >>> right, wrong = torch.eye(2)[targets], torch.eye(2)[torch.zeros(40, dtype=torch.int64)]
    >>> estimate_variance_components(METRICS["accuracy"], [right], [wrong], targets).values
    array([0.5])
    """
    seed_scores = [None if outputs is None else score_seeds(metric, outputs, targets) for outputs in (ours, theirs)]
    if seed_scores[0] is None or (theirs is not None and seed_scores[1] is None):
        return None
    return difference_components(seed_scores[0], seed_scores[1])


@final
@dataclass(frozen=True, eq=False)
class SeedScores:
    """The networks of one method on the examples of one site.

    Attributes: `metric`; `values`, the score of each seed, shape (S,); `pseudo_values`, the pseudo-values, shape (S,
    n); `classes` of the n; `min_example_variance`, what the examples' variance is at least; `num_examples` of examples.
    """

    metric: Metric
    values: Values
    pseudo_values: Values
    classes: NDArray[np.int64]
    min_example_variance: float
    num_examples: int


def score_seeds(metric: Metric, outputs: Sequence[Tensor], targets: Tensor) -> SeedScores | None:
    """The networks of all seeds, from their outputs; None where a score is not defined, as for
    `estimate_variance_components`."""
    pairs = [jackknife_pseudo_values(metric, seed_outputs, targets) for seed_outputs in outputs]
    defined = [pair for pair in pairs if pair is not None]
    if len(defined) < len(pairs):
        return None
    least = _min_auc_variance(outputs[0], targets) if metric.name == "auc" else 0.0
    values, table = np.array([score for score, _ in defined]), np.array([row for _, row in defined])
    return SeedScores(metric, values, table, classes_of_pseudo_values(metric, targets), least, len(targets))


def difference_components(ours: SeedScores, theirs: SeedScores | None) -> VarianceComponents:
    """Of two methods on the same examples, positive where `ours` is better; of None, the score of
    `ours` itself."""
    share = ours.metric.per_example is not None and ours.metric.unit == "%"
    if theirs is None:
        extra = (0.0, 0.0, 1.0, 1.0) if share else ()
        return _components_of_table(
            ours.values, ours.pseudo_values, ours.classes, extra, ours.min_example_variance, ours.num_examples
        )
    sign = 1.0 if ours.metric.higher_is_better else -1.0
    values, table = sign * (ours.values - theirs.values), sign * (ours.pseudo_values - theirs.pseudo_values)
    return _components_of_table(
        values, table, ours.classes, (1.0, -1.0) if share else (), ours.min_example_variance, ours.num_examples
    )


def _min_auc_variance(outputs: Tensor, targets: Tensor) -> float:
    """The variance that an AUC of m positive and q negative examples has at least, 1/(4mq): where both networks order all
    examples rightly the pseudo-values do not vary at all, and the next example may yet be ordered wrongly."""
    sizes = [(int(positive.sum()), int((~positive).sum())) for _, positive in binary_problems(outputs, targets)]
    return float(np.mean([1 / (4 * m * q) for m, q in sizes])) / len(sizes)


def _components_of_table(
    values: Values,
    table: Values,
    classes: NDArray[np.int64],
    extra: Sequence[float],
    min_example_variance: float,
    num_examples: int,
) -> VarianceComponents:
    """The mean squares of the table of S seeds and n pseudo-values; `min_example_variance` is what the examples' variance
    is at least.

    Shares get pseudo-examples, `extra`: one that only the one method had right and one that only the other had (Bonett
    and Price 2012, after Agresti and Min 2005), or two right and two wrong (Agresti and Coull 1998). Without them, a few
    examples of which none or all change sides have intervals of hardly any width.
    """
    centres = values
    if extra:
        table = np.concatenate([table, np.tile(np.array(extra), (len(values), 1))], axis=1)
        centres = table.mean(axis=1)
    seeds, n = table.shape
    columns = table.mean(axis=0)
    centred = columns - columns.mean()
    of_examples = seeds * float((centred**2).sum()) / (n - 1)
    freedom = float(n - 1) if extra else _degrees_of_freedom(centred, classes)
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


def _degrees_of_freedom(centred: Values, classes: NDArray[np.int64]) -> float:
    """Degrees of freedom of the examples' variance: Welch's over classes, and fewer than the examples that contribute, of
    which there are few where two networks mostly agree ((Σ|c|)²/Σc² is their number if they contribute alike)."""
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
    return max(min(1 / inverse, contributing - 1), 0.5)


def _t_quantile(alpha: float, freedom: float) -> float:
    from scipy.special import stdtrit  # the t quantile; scipy.stats would take half a second to import

    return float(stdtrit(freedom, 1 - alpha / 2))


def estimate_by_client(sites: Sequence[VarianceComponents], *, tests: int = 1, alpha: float = ALPHA) -> list[Estimate]:
    """Of each site, with intervals that hold for all sites and `tests` methods together (Bonferroni).

    Few seeds tell little of their variance. Sites share what is known of it, as an analysis of variance does; one whose own
    seeds vary more counts with its own variance; and none is further from 0 than its own seeds alone show at the level of a
    single claim.

    Args:
        sites: at least one, with the same number of seeds each.
        tests: how many methods have intervals for these sites.
        alpha: the share of comparisons in which one interval or more may be wrong.
    """
    seeds, num_claims = len(sites[0].values), len(sites) * tests
    common = max(0.0, float(np.mean([site.seed_variance for site in sites])))

    def half_width(site: VarianceComponents, alpha: float) -> float:
        claim_alpha = alpha / num_claims
        examples = _t_quantile(claim_alpha, site.degrees_of_freedom) ** 2 * site.example_variance
        if seeds == 1:
            return math.sqrt(examples)
        variance = max(common, site.seed_variance) + site.residual_variance
        shared = _t_quantile(claim_alpha, len(sites) * (seeds - 1)) ** 2 * variance + examples
        single_claim = (
            _t_quantile(alpha, seeds - 1) ** 2 * max(site.seed_variance + site.residual_variance, 0.0)
            + _t_quantile(alpha, site.degrees_of_freedom) ** 2 * site.example_variance
        )
        return math.sqrt(max(shared, single_claim))

    return [_build_estimate(site.mean, float(site.centres.mean()), partial(half_width, site), alpha) for site in sites]


def estimate_mean(sites: Sequence[VarianceComponents], *, tests: int = 1, alpha: float = ALPHA) -> Estimate:
    """Of the mean over these sites, which stand for themselves. What seeds do is seen on the means of the sites, since one
    seed reaches all of them.

    Args:
        sites: at least one, with the same number of seeds each.
        tests: how many means there are intervals for.
        alpha: the share of comparisons in which one of these may be wrong.
    """
    means = np.array([site.centres for site in sites]).mean(axis=0)
    seeds = len(means)
    examples = np.array([site.example_variance for site in sites]) / len(sites) ** 2
    total_variance = float(examples.sum())
    freedom = (
        total_variance**2 / sum(v**2 / site.degrees_of_freedom for v, site in zip(examples, sites, strict=True))
        if total_variance
        else 1.0
    )
    of_seeds = float(means.var(ddof=1)) / seeds if seeds > 1 else 0.0

    def half_width(alpha: float) -> float:
        spread = _t_quantile(alpha / tests, freedom) ** 2 * total_variance
        return math.sqrt(spread + (_t_quantile(alpha / tests, seeds - 1) ** 2 * of_seeds if seeds > 1 else 0.0))

    value = float(np.mean([site.mean for site in sites]))
    # As many pseudo-examples in all as one site has: those of every site would move a mean of many small ones by more than
    # its interval is wide.
    return _build_estimate(value, value + (float(means.mean()) - value) / len(sites), half_width, alpha)


def combine_gains_over_rivals(gains: Sequence[tuple[Estimate, Estimate]]) -> Estimate:
    """The gain over the best of several rivals, which is the least of the gains over each.

    It is above 0 only if each is, so that the lower end needs no correction for the number of rivals (an intersection-union
    test, Berger 1982); the upper end, which one rival alone can decide, does.

    Args:
        gains: over each rival, at least one: its estimate as if it were the only rival, and one that holds for all of them
            together.

    >>> one, other = Estimate(0.3, 0.1, 0.5, 0.01), Estimate(0.2, -0.1, 0.4, 0.3)
    >>> combine_gains_over_rivals([(one, one), (other, other)])
    Estimate(value=0.2, low=-0.1, high=0.4, p=0.3)
    """
    above = max(single.p if single.value > 0 else 1.0 for single, _ in gains)
    below = min(joint.p if joint.value < 0 else 1.0 for _, joint in gains)
    return Estimate(
        min(single.value for single, _ in gains), min(single.low for single, _ in gains),
        min(joint.high for _, joint in gains), min(above, below),
    )  # fmt: skip


def score_interval(
    metric: Metric, outputs: Sequence[Tensor], targets: Tensor, level: float = CONFIDENCE_LEVEL
) -> tuple[float, float, float] | None:
    """The score of one method on these examples, the mean over seeds, and the two ends of its interval by itself.

    Args:
        metric, targets: as for `estimate_variance_components`.
        outputs: one tensor a seed.
        level: how often such an interval holds the truth.

    Returns:
        None where the score or its variance is not defined.
    """
    return _interval_of_one(estimate_variance_components(metric, outputs, None, targets), level)


def gain_interval(
    metric: Metric, ours: Sequence[Tensor], theirs: Sequence[Tensor], targets: Tensor, level: float = CONFIDENCE_LEVEL
) -> tuple[float, float, float] | None:
    """As `score_interval`, for the difference of two methods on the same examples; positive where `ours`
    is better."""
    return _interval_of_one(estimate_variance_components(metric, ours, theirs, targets), level)


def _interval_of_one(components: VarianceComponents | None, level: float) -> tuple[float, float, float] | None:
    if components is None:
        return None
    estimate = estimate_mean([components], alpha=(1 - level) * ALPHA / (1 - CONFIDENCE_LEVEL))
    return (estimate.value, estimate.low, estimate.high) if math.isfinite(estimate.low) else None


@final
@dataclass(frozen=True)
class ResplitDifferences:
    """Differences of one site (or their mean) from data that were dealt again for each.

    Attributes: `values`, one a dealing, at least two; `num_train` and `num_test`, how many examples each dealing gave
    to training and to the test, or any numbers of that ratio.
    """

    values: Sequence[float]
    num_train: float
    num_test: float

    @property
    def mean_variance_factor(self) -> float:
        """The variance of the mean, for differences of variance 1: 1/K + test/train."""
        return corrected_variance(self.values, self.num_train, self.num_test) / self.variance if self.variance else 0.0

    @property
    def variance(self) -> float:
        """The variance of the differences."""
        return float(np.var(self.values, ddof=1))


def estimate_from_resplits(
    sites: Sequence[ResplitDifferences], *, tests: int = 1, alpha: float = ALPHA
) -> list[Estimate]:
    """From data that were dealt again: Student's interval with the variance of Nadeau and Bengio (2003), which corrects for
    the examples that the dealings share. As in `estimate_by_client`, few dealings share what is known of their variance.

    Args:
        sites: at least one, with the same number of dealings each.
        tests: how many methods have intervals for these sites.
        alpha: the share of comparisons in which one interval or more may be wrong.
    """
    free, num_claims = len(sites[0].values) - 1, len(sites) * tests
    common = float(np.mean([site.variance for site in sites]))

    def half_width(site: ResplitDifferences, alpha: float) -> float:
        together = _t_quantile(alpha / num_claims, len(sites) * free) ** 2 * max(common, site.variance)
        return math.sqrt(site.mean_variance_factor * max(together, _t_quantile(alpha, free) ** 2 * site.variance))

    means = [float(np.mean(site.values)) for site in sites]
    return [
        _build_estimate(mean, mean, partial(half_width, site), alpha) for mean, site in zip(means, sites, strict=True)
    ]


def _build_estimate(value: float, centre: float, half_width: Callable[[float], float], alpha: float) -> Estimate:
    width = half_width(alpha)
    if width == 0:  # differences that are all equal say nothing of how far they vary
        return Estimate(value, -math.inf, math.inf, 1.0)
    # Shares are moved towards the middle for their interval, which must still hold what was seen.
    level = _level_touching_zero(centre, half_width) if value * centre > 0 else 1.0
    low, high = min(centre - width, value), max(centre + width, value)
    return Estimate(value, low, high, min(1.0, level * (1 - CONFIDENCE_LEVEL) / alpha))


def _level_touching_zero(centre: float, half_width: Callable[[float], float]) -> float:
    """The share of false claims at which the interval just touches 0, by bisection: widths fall as it rises."""
    if abs(centre) <= half_width(1.0):
        return 1.0
    low, high = -40.0, 0.0  # logarithms
    for _ in range(50):
        middle = (low + high) / 2
        if half_width(math.exp(middle)) >= abs(centre):
            low = middle
        else:
            high = middle
    return math.exp(high)
