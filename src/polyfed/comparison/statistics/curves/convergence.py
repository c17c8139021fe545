"""Judges whether a training run was long enough, that is, whether its loss had stopped falling at the end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from polyfed.comparison.tuning.grid import next_value_beyond_edge
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.core.io.values.number_checks import is_number

MIN_EVALUATED_ROUNDS = 6
"""Evaluated rounds below which convergence is not judged."""
_WAY_OUT = f"it takes at least {MIN_EVALUATED_ROUNDS}: give more rounds, or evaluate every round"
_WINDOW = 4  # fewest evaluated rounds in the last part of a curve
_LEVEL = 0.05  # of the one-sided test
_SHARE = 0.05  # share of the whole fall below which a fall at the end is negligible
_NEAR = 3  # rounds of the moving average, since a single one may be low by chance
_ROUNDING = 1e-9  # share of the loss below which a change is rounding error


@final
@dataclass(frozen=True)
class ConvergenceResult:
    """Holds whether a loss had stopped falling (None if not judged), and a sentence about it.

    Attributes:
        converged: None where it cannot be judged.
        sentence: the same for users.
        evaluated_rounds: the number of rounds with a finite loss in every run.
    """

    converged: bool | None
    sentence: str
    evaluated_rounds: int


def judge_convergence(
    curves: Sequence[Sequence[tuple[int, float]]], loss_name: str = "validation loss", advice: str = "give more rounds"
) -> ConvergenceResult:
    """Judges by a line through the last rounds whether runs' mean loss had stopped falling.

    The loss is the mean over the runs, at the rounds at which every run has a finite value. It still fell if all of
    these hold:

    - A least-squares line through the last third of the evaluated rounds (at least four) has a negative slope, by Student's
      t-test at the one-sided 5 % level.
    - That line falls by more than 5 % of the way from the first to the lowest value.
    - It ends below the lowest mean of three neighbouring rounds before. A loss that falls back after a rise is not on its
      way to a better value. (A loss that only rose until then passes this test.)

    Args:
        curves: (round, loss) pairs of each run; values that are not finite are skipped.
        loss_name: the name of the loss in the sentence.
        advice: what the sentence suggests if the loss still fell.

    Returns:
        The judgement; `converged` is None with fewer than `MIN_EVALUATED_ROUNDS` common rounds.

    >>> judge_convergence([[(t, 0.9**t) for t in range(1, 21)]], "loss").sentence
    'the loss still fell at round 20: by 14 % of its whole fall over the last 7 evaluated rounds; give more rounds'
    >>> judge_convergence([[(t, 0.2**t) for t in range(1, 21)]]).converged
    True
    """
    rounds, mean = _mean_curve(curves)
    if len(rounds) < MIN_EVALUATED_ROUNDS:
        few = f"whether the {loss_name} still fell cannot be judged from {count_with_noun(len(rounds), 'evaluated round')}"
        return ConvergenceResult(None, f"{few}; {_WAY_OUT}", len(rounds))
    last, size = int(rounds[-1]), max(_WINDOW, math.ceil(len(rounds) / 3))
    fall, end, p = _estimate_fall(rounds[-size:], mean[-size:])
    total_fall = float(mean[0] - mean.min())
    if (
        end < _lowest_moving_average(mean[:-size])
        and fall > max(_SHARE * total_fall, _ROUNDING * float(np.abs(mean).max()))
        and p < _LEVEL
    ):
        how_much = f"by {100 * fall / total_fall:.0f} % of its whole fall" if total_fall > 0 else "after it had risen,"
        return ConvergenceResult(
            False,
            f"the {loss_name} still fell at round {last}: {how_much} over the last {size} evaluated rounds; {advice}",
            len(rounds),
        )
    lowest = int(rounds[int(mean.argmin())])
    since = "" if lowest > rounds[-size - 1] else f"; it was lowest at round {lowest}"
    return ConvergenceResult(True, f"the {loss_name} no longer fell at round {last}{since}", len(rounds))


def describe_too_few_rounds(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says of convergence entries in `comparison.json` that some have too few rounds; empty if all could be judged.

    >>> describe_too_few_rounds([{"converged": True, "evaluated_rounds": 9}, {"converged": None, "evaluated_rounds": 3}])
    ['too few evaluated rounds (3 of at least 6)']
    """
    fewest = min((entry["evaluated_rounds"] for entry in entries if entry["converged"] is None), default=None)
    return [] if fewest is None else [f"too few evaluated rounds ({fewest} of at least {MIN_EVALUATED_ROUNDS})"]


def advice_if_loss_still_falls(tuning_entry: Mapping[str, Any] | None) -> str:
    """Returns advice for a loss that still fell: more rounds, or first search the rate.

    More rounds help if the search tried a larger learning rate and it did worse. Otherwise the learning rate may be
    too small, and the advice is to search it first.

    Args:
        tuning_entry: the search result of the method, as in `comparison.json`; None if the method was not searched.

    >>> advice_if_loss_still_falls(None)
    "the learning rate was not searched: search it (tune='auto', --tune auto), then give more rounds if that does not help"
    >>> tried = [{"fields": {"lr": 0.1}}, {"fields": {"lr": 0.3}}]
    >>> advice_if_loss_still_falls({"chosen": {"lr": 0.1}, "tried": tried})
    'larger learning rates did worse in the search: give more rounds'
    """
    rates = [rate for entry in (tuning_entry or {}).get("tried", ()) if is_number(rate := entry["fields"].get("lr"))]
    if tuning_entry is None or not rates:
        return (
            "the learning rate was not searched: search it (tune='auto', --tune auto), then give more rounds if that does "
            "not help"
        )
    best = [entry["lr"] for entry in (tuning_entry.get("by_client") or {}).values()] or [
        tuning_entry["chosen"].get("lr")
    ]
    if max(rates) in best:
        beyond = next_value_beyond_edge(rates, max(rates), is_integer=False) or max(rates)
        return (
            f"no learning rate above its {max(rates):g} was tried: search larger ones "
            f"(tune={{'lr': [{max(rates):g}, {beyond:g}, '...']}}, --tune lr={max(rates):g},{beyond:g},...), then give more "
            "rounds if that does not help"
        )
    return "larger learning rates did worse in the search: give more rounds"


def _lowest_moving_average(before: NDArray[np.float64]) -> float:
    """Returns the lowest mean of three successive losses; infinity if the first loss is the lowest."""
    if int(before.argmin()) == 0:
        return math.inf
    near = min(_NEAR, len(before))
    return float(np.convolve(before, np.full(near, 1 / near), "valid").min())


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the rounds at which every run has a finite loss, and the mean loss over the runs at each."""
    finite = [{number: value for number, value in curve if math.isfinite(value)} for curve in curves]
    common = sorted(set.intersection(*map(set, finite))) if finite else []
    values = [np.mean([values[number] for values in finite]) for number in common]
    return np.asarray(common, dtype=np.float64), np.asarray(values, dtype=np.float64)


def _estimate_fall(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float]:
    """Fits a line; returns its fall over all x, its last value, and the one-sided p-value of a fall."""
    from scipy import stats  # imported late: other commands should not pay its half second

    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    residuals = y - y.mean() - slope * centred
    error = math.sqrt(float(residuals @ residuals) / (len(x) - 2) / spread)
    # If the line fits exactly, any slope but 0 is certain.
    p = float(stats.t.cdf(slope / error, len(x) - 2)) if error > 0 else float(slope >= 0)
    return -slope * float(x[-1] - x[0]), float(y.mean() + slope * centred[-1]), p
