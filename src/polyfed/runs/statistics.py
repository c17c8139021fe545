"""Statistics of comparisons: intervals over seeds, tests over clients, what may be said in words. Numbers in, numbers out.

Seeds and clients answer different questions. An interval over seeds says what another seed would give with these clients;
a test over clients says whether a difference is more than the luck of a few of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, final

import numpy as np

from polyfed.seeds import numpy_generator

LEVEL = 0.95
MANY = 30
"""Values from which on an interval is bootstrapped. Below, the resamples of so few values vary too little: the bootstrap's
95 % interval holds the truth in 71 to 77 of 100 cases at 3 values and in 85 to 93 at 10 to 20, where Student's holds it in
88 to 96, the less the more skewed they are (`tests/runs/test_statistics.py` repeats the measurement)."""
FEWEST_EXAMPLES = 6
"""Test examples that must change sides for a client's verdict: with five, all to one side, a two-sided sign test gives
2·2⁻⁵ = 0.0625."""
_MANY_EQUAL = 4  # values that may be equal by chance as rarely as an interval may be wrong
_RESAMPLES = 9999
_EXACT = 13  # differences up to which a permutation test lists all 2ⁿ signs

Verdict = Literal["gains", "loses", "open"]


@final
@dataclass(frozen=True)
class Interval:
    """An interval, and how it was made."""

    low: float
    high: float
    by: Literal["t", "bootstrap"]


def interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """The interval of a mean, from independent values such as one a seed; None for fewer than two.

    Student's t below `MANY` values, the BCa bootstrap (Efron, 1987) from there on; its draws are always the same.

    >>> interval([0.80, 0.82, 0.84])
    Interval(low=0.770..., high=0.869..., by='t')
    >>> interval([0.80]) is None
    True
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    from scipy import stats  # imported late: it takes half a second, which other commands should not pay

    by: Literal["t", "bootstrap"] = "bootstrap" if len(x) >= MANY else "t"
    if np.ptp(x) == 0:
        return Interval(float(x[0]), float(x[0]), by)
    if by == "t":
        low, high = stats.t.interval(level, len(x) - 1, loc=x.mean(), scale=stats.sem(x))
    else:
        found = stats.bootstrap(
            (x,), np.mean, confidence_level=level, n_resamples=_RESAMPLES, method="BCa", random_state=numpy_generator(0)
        )
        low, high = found.confidence_interval
    return Interval(float(low), float(high), by)


def sure(values: Sequence[float]) -> bool:
    """Whether an interval of so many values tells how far they vary: two or three that are equal, as scores of few examples
    often are, have one without any width.

    >>> sure([0.02, 0.02]), sure([0.02, 0.03])
    (False, True)
    """
    return len(values) >= _MANY_EQUAL or bool(np.ptp(np.asarray(values)) > 0)


def paired_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test for pairs, one a client. Pairs without a difference say nothing and are
    dropped; exact up to 50 differences, or up to 13 if some are tied.

    >>> paired_p([0.9, 0.8, 0.7, 0.9, 0.8], [0.8, 0.6, 0.4, 0.5, 0.3])
    0.0625
    >>> paired_p([0.5, 0.5], [0.5, 0.5])
    1.0
    """
    # Rounded, so that differences of the same fractions count as the ties that they are.
    differences = np.round(np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64), 12)
    differences = differences[differences != 0]
    if len(differences) < 2:
        return 1.0
    from scipy import stats  # as above

    tied = len(np.unique(np.abs(differences))) < len(differences)
    listed = tied and len(differences) <= _EXACT
    method: Any = stats.PermutationMethod(n_resamples=2**_EXACT) if listed else "auto"
    return float(stats.wilcoxon(differences, method=method).pvalue)


def smallest_p(pairs: int) -> float:
    """The smallest p that `paired_p` can give for so many pairs: all differences to one side.

    >>> smallest_p(4), smallest_p(8)
    (0.125, 0.0078125)
    """
    return min(1.0, 2.0 * 0.5**pairs)


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Holm's (1979) correction: rejecting what is at most α afterwards makes one false rejection or more with probability
    at most α, whatever the dependence.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    corrected, least = dict.fromkeys(p_values, 0.0), 0.0
    for position, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        least = max(least, min(1.0, (len(p_values) - position) * p_values[key]))
        corrected[key] = least
    return corrected


@final
@dataclass(frozen=True)
class PValue:
    """A p as the test gives it, and after Holm's correction."""

    p: float
    holm: float


def against_one(scores: Mapping[str, Sequence[float]], one: str) -> dict[str, PValue]:
    """Every other method against one that was named beforehand (Local); corrected for their number.

    Args:
        scores: per method the clients' scores, in the same order.

    >>> against_one({"local": [0.5] * 6, "a": [0.6, 0.7, 0.8, 0.9, 0.6, 0.7], "b": [0.5] * 6}, "local")["a"]
    PValue(p=0.03125, holm=0.0625)
    """
    p_values = {name: paired_p(scores[name], scores[one]) for name in scores if name != one}
    corrected = holm(p_values)
    return {name: PValue(p, corrected[name]) for name, p in p_values.items()}


def against_best(scores: Mapping[str, Sequence[float]], best: str) -> dict[str, PValue]:
    """Every other method against the best. Which one that is, the same scores decide, so that the correction counts all
    pairs of methods: for as many as there are others alone, the winner's luck would count as evidence.

    >>> found = against_best({"a": [0.6, 0.7, 0.8], "b": [0.5, 0.5, 0.5], "c": [0.4, 0.3, 0.2]}, "a")
    >>> found["b"]
    PValue(p=0.25, holm=0.75)
    """
    p_values = {pair: paired_p(scores[pair[0]], scores[pair[1]]) for pair in combinations(scores, 2)}
    corrected = holm(p_values)
    return {
        other: PValue(p_values[pair], corrected[pair])
        for pair in p_values
        if best in pair
        for other in pair
        if other != best
    }


def verdict(gains: Sequence[float], test_examples: int | None = None) -> Verdict:
    """What may be said of one client's gains, one a seed: "gains" or "loses" only if their interval leaves out 0.

    The interval knows nothing of the luck of the test examples, which are the same for every seed. `test_examples`, their
    number, therefore asks for `FEWEST_EXAMPLES` among them that changed sides, which is the least that could be
    significant; None (a score that is no share of examples) does not ask.

    >>> verdict([0.04, 0.05, 0.06], 400), verdict([0.04, 0.05, 0.06], 40), verdict([-0.01, 0.02], 400)
    ('gains', 'open', 'open')
    """
    found = interval(gains)
    if found is None or not sure(gains) or found.low <= 0 <= found.high:
        return "open"
    if test_examples is not None and abs(float(np.mean(gains))) * test_examples < FEWEST_EXAMPLES - 1e-9:
        return "open"
    return "gains" if found.low > 0 else "loses"


@final
@dataclass(frozen=True)
class Point:
    """An evaluated round of a run: mean score over clients, and bytes and seconds spent up to it."""

    round: int
    score: float | None
    bytes: int
    seconds: float


def curve(history: Sequence[Mapping[str, Any]], score: str) -> list[Point]:
    """The evaluated rounds of a run from the objects of its `metrics.jsonl`. Seconds are those of clients and server: what
    evaluation takes is no cost of the method.

    >>> rounds = [{"round": t, "bytes_down_total": t, "bytes_up_total": t, "seconds_clients": 1.0, "seconds_server": 0.5,
    ...     "summary": {"accuracy": {"mean": t / 4}} if t == 2 else {}} for t in (1, 2)]
    >>> curve(rounds, "accuracy")
    [Point(round=2, score=0.5, bytes=4, seconds=3.0)]
    """
    points, seconds = [], 0.0
    for record in history:
        seconds += record["seconds_clients"] + record["seconds_server"]
        if record["summary"]:
            mean = record["summary"].get(score, {}).get("mean")
            moved = record["bytes_down_total"] + record["bytes_up_total"]
            points.append(Point(record["round"], mean, moved, round(seconds, 4)))
    return points


def within(points: Sequence[Point], kind: str, limit: float | None) -> Point | None:
    """The last evaluated round at which no more than `limit` bytes or seconds are spent; without a limit the last of all.

    >>> within([Point(1, 0.5, 10, 1.0), Point(2, 0.6, 20, 2.0)], "bytes", 15).round
    1
    """
    inside = [p for p in points if limit is None or getattr(p, kind) <= limit]
    return inside[-1] if inside else None


def first_reaching(points: Sequence[Point], target: float | None) -> Point | None:
    """The first evaluated round whose mean score is at least `target`.

    >>> first_reaching([Point(1, 0.5, 10, 1.0), Point(2, 0.6, 20, 2.0)], 0.55).bytes
    20
    """
    if target is None or not math.isfinite(target):
        return None
    return next((p for p in points if p.score is not None and p.score >= target), None)
