"""Chooses the bound on the norm of a site's update with which a deployment runs."""

import contextlib
import dataclasses
from typing import Any, Literal, NamedTuple, final

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_positive_number
from polyfed.simulation.rounds.replies.secure_aggregation import uses_default_mean

MaxUpdateNorm = float | Literal["auto", "off"]
BOUND_WORDS = ("auto", "off")
TIMES_MEDIAN = 3.0
"""The bound of "auto", in running medians of the norms of updates."""


@final
class BoundedMethod(NamedTuple):
    """Holds a method with the bound of a deployment, and a sentence for the log that says what the bound is."""

    algorithm: Algorithm[Any, Any]
    sentence: str


def parse_max_update_norm(value: Any) -> MaxUpdateNorm:
    """Returns one of the words, or a positive number, also from its text.

    Raises:
        UserError: the value is neither.

    >>> parse_max_update_norm("auto"), parse_max_update_norm("2.5")
    ('auto', 2.5)
    """
    if isinstance(value, str) and value not in BOUND_WORDS:  # Flower replaces a text by a text only
        with contextlib.suppress(ValueError):
            value = float(value)
    if value not in BOUND_WORDS and not is_positive_number(value):
        raise UserError(
            f"max-update-norm must be auto, a positive number, or off, got {value!r}; auto is {TIMES_MEDIAN:g} times the "
            "running median of the norms, and off leaves updates without a bound"
        )
    limit: MaxUpdateNorm = value
    return limit


def bound_updates(algorithm: Algorithm[Any, Any], max_update_norm: MaxUpdateNorm, *, secure: bool) -> BoundedMethod:
    """Returns the method of a deployment with its bound on updates, `robust="clip:..."`, if it can have one.

    A method with a rule of its own (`algorithm.robust`) keeps it.

    Args:
        algorithm: the method as configured.
        max_update_norm: the setting: a norm; "auto", a multiple of the running median of the norms; or "off".
        secure: whether the run uses secure sums, in which each site limits its own update.

    Raises:
        UserError: a number is given, and the method has another rule, or cannot be bounded.

    >>> from polyfed.algorithms import FedAMP, FedAvg
    >>> bound_updates(FedAvg(), "auto", secure=False).algorithm.robust
    'clip:3.0x'
    >>> bound_updates(FedAMP(), "auto", secure=False).sentence
    "updates have no bound: fedamp's server does more with replies than to take their mean"
    """
    rule = getattr(algorithm, "robust", None)
    is_number = not isinstance(max_update_norm, str)
    if rule is not None:
        if is_number:
            raise UserError(
                f"max-update-norm = {max_update_norm!r} and algorithm.robust = {rule!r} are two rules; leave one of them out"
            )
        return BoundedMethod(algorithm, f"replies are combined by robust = {rule!r}")
    if max_update_norm == "off":
        return BoundedMethod(
            algorithm, "updates have no bound: max-update-norm is off, so one site can outweigh all others"
        )
    name = registry_name(algorithm)
    if not uses_default_mean(algorithm):
        reason = f"{name}'s server does more with replies than to take their mean"
    elif algorithm.adapters is not None:
        reason = "adapters of several ranks are combined by algorithm.adapters"
    else:
        bound = f"{float(max_update_norm)!r}" if is_number else f"{TIMES_MEDIAN!r}x"
        bounded = dataclasses.replace(algorithm, robust=f"clip:{bound}")
        limit = (
            f"a norm of {max_update_norm:g}"
            if is_number
            else f"{TIMES_MEDIAN:g} times the running median of their norms"
        )
        who = "each site limits its update" if secure else "updates are limited"
        return BoundedMethod(bounded, f"{who} to {limit} (max-update-norm)")
    if is_number:
        raise UserError(f"max-update-norm = {max_update_norm!r} is not possible: {reason}")
    return BoundedMethod(algorithm, f"updates have no bound: {reason}")
