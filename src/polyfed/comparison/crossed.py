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

from polyfed.comparison.influence import Values, pseudo_values, strata
from polyfed.comparison.resampled import corrected_variance
from polyfed.core.metrics import Metric, binary_columns

LEVEL = 0.95
ALPHA = 0.04
"""The share of false claims that intervals are made for, a little below 1 − LEVEL, because t quantiles of discrete and
skewed scores are approximations: `benchmarks/verdicts.py` measures that 1 − LEVEL holds."""


@final
@dataclass(frozen=True)
class Parts:
    """What is known of one site: the value, and the parts of its variance.

    Attributes: `values`, the score or difference of each seed, shape (S,); `centres`, what intervals are around: the same,
    but drawn in a little for shares; `seeds`, the seeds' variance of their mean less the `rest`, which is that of seeds and
    examples together; `examples`, the examples' variance of the mean; `freedom`, its degrees of freedom; `number` of
    examples.
    """

    values: Values
    centres: Values
    seeds: float
    rest: float
    examples: float
    freedom: float
    number: int

    @property
    def value(self) -> float:
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


def parts(metric: Metric, ours: Sequence[Tensor], theirs: Sequence[Tensor] | None, targets: Tensor) -> Parts | None:
    """Of one site.

    Args:
        metric: what is scored. Differences are positive where `ours` is better, also for losses.
        ours: outputs of one method, one tensor a seed, each of shape (n, outputs).
        theirs: those of the method it is compared with, by the same seeds; None for the score of `ours` itself.
        targets: of the n examples.

    Returns:
        None where a score is not defined, or that without one example: too few of a class for an AUC, say.

    >>> import torch
    >>> from polyfed.core.metrics import METRICS
    >>> targets = torch.tensor([0, 1] * 20)
    >>> right, wrong = torch.eye(2)[targets], torch.eye(2)[torch.zeros(40, dtype=torch.int64)]
    >>> parts(METRICS["accuracy"], [right], [wrong], targets).values
    array([0.5])
    """
    found = [None if outputs is None else scored(metric, outputs, targets) for outputs in (ours, theirs)]
    if found[0] is None or (theirs is not None and found[1] is None):
        return None
    return difference(found[0], found[1])


@final
@dataclass(frozen=True, eq=False)
class Scored:
    """The networks of one method on the examples of one site.

    Attributes: `metric`; `values`, the score of each seed, shape (S,); `table`, the pseudo-values, shape (S, n); `classes`
    of the n; `least`, what the examples' variance is at least; `number` of examples.
    """

    metric: Metric
    values: Values
    table: Values
    classes: NDArray[np.int64]
    least: float
    number: int


def scored(metric: Metric, outputs: Sequence[Tensor], targets: Tensor) -> Scored | None:
    """The networks of all seeds, from their outputs; None where a score is not defined, as for `parts`."""
    found = [pseudo_values(metric, one, targets) for one in outputs]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    least = _least_of_auc(outputs[0], targets) if metric.name == "auc" else 0.0
    values, table = np.array([score for score, _ in known]), np.array([row for _, row in known])
    return Scored(metric, values, table, strata(metric, targets), least, len(targets))


def difference(ours: Scored, theirs: Scored | None) -> Parts:
    """Of two methods on the same examples, positive where `ours` is better; of None, the score of
    `ours` itself."""
    share = ours.metric.parts is not None and ours.metric.unit == "%"
    if theirs is None:
        extra = (0.0, 0.0, 1.0, 1.0) if share else ()
        return _parts(ours.values, ours.table, ours.classes, extra, ours.least, ours.number)
    sign = 1.0 if ours.metric.higher_is_better else -1.0
    values, table = sign * (ours.values - theirs.values), sign * (ours.table - theirs.table)
    return _parts(values, table, ours.classes, (1.0, -1.0) if share else (), ours.least, ours.number)


def _least_of_auc(outputs: Tensor, targets: Tensor) -> float:
    """The variance that an AUC of m positive and q negative examples has at least, 1/(4mq): where both networks order all
    examples rightly the pseudo-values do not vary at all, and the next example may yet be ordered wrongly."""
    sizes = [(int(positive.sum()), int((~positive).sum())) for _, positive in binary_columns(outputs, targets)]
    return float(np.mean([1 / (4 * m * q) for m, q in sizes])) / len(sizes)


def _parts(
    values: Values, table: Values, classes: NDArray[np.int64], extra: Sequence[float], least: float, number: int
) -> Parts:
    """The mean squares of the table of S seeds and n pseudo-values; `least` is what the examples' variance is at least.

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
    freedom = float(n - 1) if extra else _freedom(centred, classes)
    if seeds == 1:
        return Parts(values, centres, 0.0, 0.0, max(of_examples / n, least), freedom, number)
    of_seeds = n * float(centres.var(ddof=1))
    rest = table - table.mean(axis=1, keepdims=True) - centred
    of_rest = float((rest**2).sum()) / ((seeds - 1) * (n - 1))
    scale = n * seeds
    examples = max((of_examples - of_rest) / scale, least - of_rest / scale, 0.0)
    return Parts(values, centres, (of_seeds - of_rest) / scale, of_rest / scale, examples, freedom, number)


def _freedom(centred: Values, classes: NDArray[np.int64]) -> float:
    """Degrees of freedom of the examples' variance: Welch's over classes, and fewer than the examples that contribute, of
    which there are few where two networks mostly agree ((Σ|c|)²/Σc² is their number if they contribute alike)."""
    squares = centred**2
    whole = float(squares.sum())
    if whole == 0:
        return float(len(centred) - 1)
    inverse = 0.0
    for name in np.unique(classes):
        inside = classes == name
        if (share := float(squares[inside].sum()) / whole) > 0:
            inverse += share**2 / max(int(inside.sum()) - 1, 0.5)
    contributing = float(np.abs(centred).sum()) ** 2 / whole
    return max(min(1 / inverse, contributing - 1), 0.5)


def _t(alpha: float, freedom: float) -> float:
    from scipy.special import stdtrit  # the t quantile; scipy.stats would take half a second to import

    return float(stdtrit(freedom, 1 - alpha / 2))


def of_sites(sites: Sequence[Parts], *, tests: int = 1, alpha: float = ALPHA) -> list[Estimate]:
    """Of each site, with intervals that hold for all sites and `tests` methods together (Bonferroni).

    Few seeds tell little of their variance. Sites share what is known of it, as an analysis of variance does; one whose own
    seeds vary more counts with its own variance; and none is further from 0 than its own seeds alone show at the level of a
    single claim.

    Args:
        sites: at least one, with the same number of seeds each.
        tests: how many methods have intervals for these sites.
        alpha: the share of comparisons in which one interval or more may be wrong.
    """
    seeds, many = len(sites[0].values), len(sites) * tests
    common = max(0.0, float(np.mean([site.seeds for site in sites])))

    def half(site: Parts, alpha: float) -> float:
        each = alpha / many
        examples = _t(each, site.freedom) ** 2 * site.examples
        if seeds == 1:
            return math.sqrt(examples)
        variance = max(common, site.seeds) + site.rest
        shared = _t(each, len(sites) * (seeds - 1)) ** 2 * variance + examples
        own = (
            _t(alpha, seeds - 1) ** 2 * max(site.seeds + site.rest, 0.0) + _t(alpha, site.freedom) ** 2 * site.examples
        )
        return math.sqrt(max(shared, own))

    return [_estimate(site.value, float(site.centres.mean()), partial(half, site), alpha) for site in sites]


def of_mean(sites: Sequence[Parts], *, tests: int = 1, alpha: float = ALPHA) -> Estimate:
    """Of the mean over these sites, which stand for themselves. What seeds do is seen on the means of the sites, since one
    seed reaches all of them.

    Args:
        sites: at least one, with the same number of seeds each.
        tests: how many means there are intervals for.
        alpha: the share of comparisons in which one of these may be wrong.
    """
    means = np.array([site.centres for site in sites]).mean(axis=0)
    seeds = len(means)
    examples = np.array([site.examples for site in sites]) / len(sites) ** 2
    whole = float(examples.sum())
    freedom = whole**2 / sum(v**2 / site.freedom for v, site in zip(examples, sites, strict=True)) if whole else 1.0
    of_seeds = float(means.var(ddof=1)) / seeds if seeds > 1 else 0.0

    def half(alpha: float) -> float:
        spread = _t(alpha / tests, freedom) ** 2 * whole
        return math.sqrt(spread + (_t(alpha / tests, seeds - 1) ** 2 * of_seeds if seeds > 1 else 0.0))

    value = float(np.mean([site.value for site in sites]))
    # As many pseudo-examples in all as one site has: those of every site would move a mean of many small ones by more than
    # its interval is wide.
    return _estimate(value, value + (float(means.mean()) - value) / len(sites), half, alpha)


def least(gains: Sequence[tuple[Estimate, Estimate]]) -> Estimate:
    """The gain over the best of several rivals, which is the least of the gains over each.

    It is above 0 only if each is, so that the lower end needs no correction for the number of rivals (an intersection-union
    test, Berger 1982); the upper end, which one rival alone can decide, does.

    Args:
        gains: over each rival, at least one: its estimate as if it were the only rival, and one that holds for all of them
            together.

    >>> one, other = Estimate(0.3, 0.1, 0.5, 0.01), Estimate(0.2, -0.1, 0.4, 0.3)
    >>> least([(one, one), (other, other)])
    Estimate(value=0.2, low=-0.1, high=0.4, p=0.3)
    """
    above = max(single.p if single.value > 0 else 1.0 for single, _ in gains)
    below = min(joint.p if joint.value < 0 else 1.0 for _, joint in gains)
    return Estimate(
        min(single.value for single, _ in gains), min(single.low for single, _ in gains),
        min(joint.high for _, joint in gains), min(above, below),
    )  # fmt: skip


def score_interval(
    metric: Metric, outputs: Sequence[Tensor], targets: Tensor, level: float = LEVEL
) -> tuple[float, float, float] | None:
    """The score of one method on these examples, the mean over seeds, and the two ends of its interval by itself.

    Args:
        metric, targets: as for `parts`.
        outputs: one tensor a seed.
        level: how often such an interval holds the truth.

    Returns:
        None where the score or its variance is not defined.
    """
    return _alone(parts(metric, outputs, None, targets), level)


def gain_interval(
    metric: Metric, ours: Sequence[Tensor], theirs: Sequence[Tensor], targets: Tensor, level: float = LEVEL
) -> tuple[float, float, float] | None:
    """As `score_interval`, for the difference of two methods on the same examples; positive where `ours`
    is better."""
    return _alone(parts(metric, ours, theirs, targets), level)


def _alone(found: Parts | None, level: float) -> tuple[float, float, float] | None:
    if found is None:
        return None
    one = of_mean([found], alpha=(1 - level) * ALPHA / (1 - LEVEL))
    return (one.value, one.low, one.high) if math.isfinite(one.low) else None


@final
@dataclass(frozen=True)
class Dealt:
    """Differences of one site (or their mean) from data that were dealt again for each.

    Attributes: `values`, one a dealing, at least two; `train` and `test`, how many examples each dealing gave to training
    and to the test, or any numbers of that ratio.
    """

    values: Sequence[float]
    train: float
    test: float

    @property
    def shared(self) -> float:
        """The variance of the mean, for differences of variance 1: 1/K + test/train."""
        return corrected_variance(self.values, self.train, self.test) / self.spread if self.spread else 0.0

    @property
    def spread(self) -> float:
        """The variance of the differences."""
        return float(np.var(self.values, ddof=1))


def of_splits(sites: Sequence[Dealt], *, tests: int = 1, alpha: float = ALPHA) -> list[Estimate]:
    """From data that were dealt again: Student's interval with the variance of Nadeau and Bengio (2003), which corrects for
    the examples that the dealings share. As in `of_sites`, few dealings share what is known of their variance.

    Args:
        sites: at least one, with the same number of dealings each.
        tests: how many methods have intervals for these sites.
        alpha: the share of comparisons in which one interval or more may be wrong.
    """
    free, many = len(sites[0].values) - 1, len(sites) * tests
    common = float(np.mean([site.spread for site in sites]))

    def half(site: Dealt, alpha: float) -> float:
        together = _t(alpha / many, len(sites) * free) ** 2 * max(common, site.spread)
        return math.sqrt(site.shared * max(together, _t(alpha, free) ** 2 * site.spread))

    means = [float(np.mean(site.values)) for site in sites]
    return [_estimate(mean, mean, partial(half, site), alpha) for mean, site in zip(means, sites, strict=True)]


def _estimate(value: float, centre: float, half: Callable[[float], float], alpha: float) -> Estimate:
    width = half(alpha)
    if width == 0:  # differences that are all equal say nothing of how far they vary
        return Estimate(value, -math.inf, math.inf, 1.0)
    # Shares are moved towards the middle for their interval, which must still hold what was seen.
    level = _level(centre, half) if value * centre > 0 else 1.0
    low, high = min(centre - width, value), max(centre + width, value)
    return Estimate(value, low, high, min(1.0, level * (1 - LEVEL) / alpha))


def _level(centre: float, half: Callable[[float], float]) -> float:
    """The share of false claims at which the interval just touches 0, by bisection: widths fall as it rises."""
    if abs(centre) <= half(1.0):
        return 1.0
    low, high = -40.0, 0.0  # logarithms
    for _ in range(50):
        middle = (low + high) / 2
        if half(math.exp(middle)) >= abs(centre):
            low = middle
        else:
            high = middle
    return math.exp(high)
