"""Describes three kinds of entries of `comparison.json`: gains, numbers of tested examples, and the random-effects
model over sites."""

from typing import Required, TypedDict

Score = float | None
"""A score, or None where it is not defined."""
IntervalEnds = tuple[float, float] | None
"""The lowest and highest value."""


class GainEntry(TypedDict, total=False):
    """Holds a gain over one reference model, with the interval for this reference alone."""

    gain: Score
    interval: IntervalEnds
    gain_interval: IntervalEnds


class ClientTestCountsEntry(TypedDict, total=False):
    """Holds the number of a client's examples that all folds of one repeat test together."""

    test: Required[int]
    rarest: tuple[int, int] | None
    """Number of test examples of the rarest class, and that class; None for regression."""
    groups: tuple[int, int]
    """Numbers of groups (patients, say) that are trained on and tested, where examples have groups."""


class RandomEffectsGainEntry(TypedDict, total=False):
    """Holds a random-effects model of gains over the best alternative without federation."""

    over: Required[str]
    gain: Required[float]
    """Mean over sites like these."""
    interval: IntervalEnds
    """With sites as units."""
    p: float
    deviation: Required[float]
    """Standard deviation of the true gains between sites."""
    clients: Required[dict[str, GainEntry]]
    """Gains by partial pooling."""
    sentence: str
