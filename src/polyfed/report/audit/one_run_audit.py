"""Bounds ε of differentially private training from below, by one training with canaries.

Each of many canaries is a training example with probability 1/2, independently. Somebody who sees what training releases
guesses of some of them whether they were. The more guesses are right, the larger ε must be (Steinke, Nasr and Jagielski
2023, "Privacy Auditing with One (1) Training Run").
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from polyfed.core.errors import UserError

_BISECTION_STEPS = 40
_LARGEST_EPSILON = 100.0


def epsilon_lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Returns a bound from below on ε of the training that so many right guesses show, with this confidence.

    If training is (ε, δ)-differentially private under adding or removing one example, guesses are right with at most the
    probability of `p_value_of_guesses`. The bound is the largest ε at which that is below 1 − confidence; 0 if there is
    none.

    Args:
        canaries: m, number of canaries, each included by a fair coin of its own.
        guesses: r, how many were guessed; it must be decided before the result is known.
        correct: v, how many guesses were right.
        delta: δ of the training.
        confidence: how often the bound holds, at least.

    Raises:
        UserError: numbers that cannot be.

    >>> round(epsilon_lower_bound(canaries=1000, guesses=100, correct=100, delta=0.0), 2)
    3.49
    """
    if not 0 <= correct <= guesses <= canaries or not guesses:
        raise UserError(f"of {canaries} canaries {guesses} are guessed and {correct} right, which cannot be")
    if not 0 < confidence < 1:
        raise UserError(f"confidence must be above 0 and below 1, got {confidence!r}")
    low, high = 0.0, _LARGEST_EPSILON
    if p_value_of_guesses(canaries, guesses, correct, low, delta) >= 1 - confidence:
        return 0.0
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        is_ruled_out = p_value_of_guesses(canaries, guesses, correct, middle, delta) < 1 - confidence
        low, high = (middle, high) if is_ruled_out else (low, middle)
    return low


def p_value_of_guesses(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Returns an upper bound on the probability of so many right guesses, if training is (ε, δ)-differentially private.

    Without δ the number of right guesses is at most binomial, each right with e^ε/(e^ε + 1). δ adds at most
    2mδ·max_i P[v − i ≤ binomial < v]/i (their theorem 5.2 and appendix D).

    >>> p_value_of_guesses(10, 1, 1, 0.0, 0.0)
    0.5
    """
    success = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, success))
    if not delta or not correct:
        return min(1.0, tail)
    steps = np.arange(1, correct + 1)
    below = np.cumsum(binom.pmf(correct - steps, guesses, success))  # P[v − i ≤ binomial < v]
    return min(1.0, tail + 2 * canaries * delta * float((below / steps).max()))


def count_right_guesses(scores: NDArray[np.float64], included: NDArray[np.bool_], guesses: int) -> int:
    """Counts right guesses if the highest scores are taken for included, as many lowest for left out.

    Args:
        scores: of each canary, shape (m,).
        included: which were training examples, shape (m,).
        guesses: how many are guessed, an even number; the others are left open.

    >>> count_right_guesses(np.array([3.0, 0.1, 0.2, -2.0]), np.array([True, True, False, False]), 2)
    2
    """
    if guesses % 2 or not 0 < guesses <= len(scores):
        raise UserError(f"guesses must be an even number from 2 to the {len(scores)} canaries, got {guesses}")
    order = np.argsort(scores, kind="stable")
    half = guesses // 2
    return int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
