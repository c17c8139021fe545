"""Computes the smallest gain that a comparison is likely to decide, from variances that a short pilot shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from polyfed.comparison.statistics.cross_validation.fold_differences import FoldDifferences, training_variance_ratio
from polyfed.comparison.statistics.estimate import ALPHA, t_quantile

POWER = 0.8
_Z_POWER = 0.8416  # the standard normal quantile of POWER
_MANY = 1000  # degrees of freedom of the examples: hundreds, mostly


@final
@dataclass(frozen=True)
class PilotVariances:
    """Holds the variances of a difference, estimated from two networks of each method.

    Attributes:
        examples: for each client, the variance between examples that networks of other seeds share.
        residuals: for each client, the variance between examples that is another with each network.
        networks: the variance of the mean over clients between networks.
        networks_of_client: the variance of one client's difference between networks, pooled over clients.
        is_bounded: True for differences of a score that lies between 0 and 1.
    """

    examples: tuple[float, ...]
    residuals: tuple[float, ...]
    networks: float
    networks_of_client: float
    is_bounded: bool = True


@final
@dataclass(frozen=True)
class ComparisonDesign:
    """Describes the design of a comparison: how many runs each method has, and on how many examples they are tested.

    Attributes:
        kind: "seeds" (the same test examples with each seed), "resplit" or "folds".
        runs: of each method.
        folds: of a repeat; the number of runs for other kinds.
        units: for each client, how many examples (or groups) it has, those for training included.
        tested: for each client, how many of them a run tests.
    """

    kind: str
    runs: int
    folds: int
    units: tuple[int, ...]
    tested: tuple[int, ...]


def estimate_pilot_variances(differences: Sequence[FoldDifferences]) -> PilotVariances:
    """Estimates a difference's variances from two networks of each method on the same examples.

    Args:
        differences: for each client, with the two networks as two repeats of one fold.
    """
    examples, residuals = [], []
    for client in differences:
        units = client.influence.shape[1]
        residual = max(2 * units * (client.repeat_variance - client.example_variance), 0.0)
        residuals.append(residual)
        examples.append(max(units * client.repeat_variance - residual, 0.0))
    noise = [residual / client.influence.shape[1] for residual, client in zip(residuals, differences, strict=True)]
    folds = np.array([client.folds[:, 0] for client in differences])
    networks = max(float(folds.mean(axis=0).var(ddof=1)) - sum(noise) / len(noise) ** 2, 0.0)
    # A mean varies no more than the clients do, whatever two networks show.
    of_client = max(float(folds.var(axis=1, ddof=1).mean()) - sum(noise) / len(noise), networks)
    return PilotVariances(tuple(examples), tuple(residuals), networks, of_client, differences[0].is_bounded)


def smallest_decidable_gain(pilot: PilotVariances, design: ComparisonDesign) -> tuple[float, float]:
    """Returns the smallest gains decided with probability `POWER`: of the mean, and at a typical client.

    The mean needs the larger gain only where the score of a few clients is far more uncertain than the others'. As in
    `estimate_clients_from_folds`, no client's interval is narrower than that of the client alone.

    >>> pilot = PilotVariances((0.2, 0.2), (0.05, 0.05), 0.0, 0.0)
    >>> once, twice = (ComparisonDesign("folds", runs, 5, (200, 200), (40, 40)) for runs in (5, 10))
    >>> smallest_decidable_gain(pilot, once)[0] > smallest_decidable_gain(pilot, twice)[0]
    True
    """
    variances = [_client_variance(pilot, design, k) for k in range(len(design.units))]
    num_clients = len(variances)
    repeats = max(design.runs // design.folds, 1)
    free = max(design.runs - (repeats if design.kind == "folds" else 1), 1)
    of_examples = free if design.kind == "resplit" else _MANY

    def half_width(examples: float, networks: float, alpha: float, free: int) -> float:
        return math.sqrt(t_quantile(alpha, of_examples) ** 2 * examples + t_quantile(alpha, free) ** 2 * networks)

    examples, networks = sum(variances) / num_clients**2, pilot.networks * _network_factor(design)
    mean = half_width(examples, networks, ALPHA, free) + _Z_POWER * math.sqrt(examples + networks)
    examples, networks = float(np.median(variances)), pilot.networks_of_client * _network_factor(design)
    together = half_width(examples, networks, ALPHA / num_clients, num_clients * free)
    alone = half_width(examples, networks, ALPHA, free)
    return mean, max(together, alone) + _Z_POWER * math.sqrt(examples + networks)


def factor_of_examples_to_decide(gain: float, interval: tuple[float, float]) -> float:
    """Returns how many times as many examples decide a gain with probability `POWER`, if it is as large as estimated.

    An interval narrows with the root of the number of examples, as far as these and not the networks make it wide.

    >>> round(factor_of_examples_to_decide(0.1, (-0.1, 0.3)), 1)
    7.9
    """
    half_width = (interval[1] - interval[0]) / 2
    return (half_width * (1 + _Z_POWER / t_quantile(ALPHA, _MANY)) / gain) ** 2


def _client_variance(pilot: PilotVariances, design: ComparisonDesign, k: int) -> float:
    examples, residual = pilot.examples[k], pilot.residuals[k]
    if design.kind == "folds":
        units, repeats = design.units[k], max(design.runs // design.folds, 1)
        ratio = training_variance_ratio(design.folds, pilot.is_bounded)
        return (examples + residual / repeats + ratio * (examples + residual)) / units
    if design.kind == "resplit":
        return (examples + residual) / design.tested[k] * (1 / design.runs + _tested_per_trained_unit(design, k))
    return (examples + residual / design.runs) / design.tested[k]


def _network_factor(design: ComparisonDesign) -> float:
    return 1 / design.runs + (_tested_per_trained_unit(design, 0) if design.kind == "resplit" else 0.0)


def _tested_per_trained_unit(design: ComparisonDesign, k: int) -> float:
    return design.tested[k] / max(design.units[k] - design.tested[k], 1)
