"""Repeats the cross-validation of a comparison until its answer is decided, with error rates that allow for looking at
the results after each repeat.

The error rate is spent as O'Brien and Fleming's bounds do (Lan and DeMets 1983): little at the first looks, most at the
last. A look has what was not spent before, so that false answers over all looks together are no more than with one
(Bonferroni).
"""

import dataclasses
import math
from collections.abc import Callable
from statistics import NormalDist

from polyfed.comparison.plan import ComparisonPlan
from polyfed.comparison.statistics.estimate import ALPHA
from polyfed.comparison.storage.comparison import Comparison
from polyfed.comparison.storage.comparison_directory import DESCRIPTION, read_description
from polyfed.data.partitioning.folds import Folds


def error_rates_of_looks(looks: int) -> list[float]:
    """Returns the error rate of each look at growing results, which add up to `ALPHA`.

    >>> [round(rate, 3) for rate in error_rates_of_looks(4)]
    [0.0, 0.004, 0.014, 0.022]
    """
    normal = NormalDist()
    bound = normal.inv_cdf(1 - ALPHA / 2)
    spent = [2 * (1 - normal.cdf(bound / math.sqrt(look / looks))) for look in range(1, looks + 1)]
    return [now - before for before, now in zip([0.0, *spent], spent, strict=False)]


def run_until_decided(plan: ComparisonPlan, run: Callable[[ComparisonPlan], Comparison]) -> Comparison:
    """Runs a comparison; with `stop_when_decided`, repeats its folds until the mean's answer is decided.

    Finished runs are read by the next look if the comparison has a directory, and trained again otherwise.

    Args:
        plan: what is compared.
        run: runs a plan to its end.
    """
    if not plan.stop_when_decided or plan.folds is None or plan.forecast_only:
        return run(plan)
    number, most = plan.folds.number, plan.folds.repeats
    # A stopped comparison goes on with its last look: those before decided nothing.
    first = max(1, min(_count_stored_repeats(plan, number), most))
    for repeats, alpha in list(enumerate(error_rates_of_looks(most), start=1))[first - 1 :]:
        part = dataclasses.replace(
            plan,
            folds=Folds(number, repeats),
            seeds=plan.seeds[: number * repeats],
            stop_when_decided=False,
            alpha=alpha,
            most_repeats=most,
            is_later_look=repeats > first,
        )
        comparison = run(part)
        answer = comparison.results["mean_answer"]
        if answer is not None and answer["answer"] != "undecided":
            break
    return comparison


def _count_stored_repeats(plan: ComparisonPlan, num_folds: int) -> int:
    if plan.out is None or not (plan.out / DESCRIPTION).exists():
        return 0
    return len(read_description(plan.out).get("seeds") or ()) // num_folds
