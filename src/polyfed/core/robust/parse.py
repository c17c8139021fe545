"""Reads a rule of robust aggregation from a text, such as "clip:5" or "trimmed_mean:0.1"."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.robust.clip import Clip
from polyfed.core.robust.coordinatewise import Median, TrimmedMean
from polyfed.core.robust.geometric_median import GeometricMedian
from polyfed.core.robust.krum import Krum, MultiKrum
from polyfed.core.robust.rule import RobustRule

RULES: Mapping[str, type[RobustRule]] = {
    rule.word: rule for rule in (Clip, Median, TrimmedMean, Krum, MultiKrum, GeometricMedian)
}
_FORMS = {
    "clip": "'clip:5' (a norm) or 'clip:3x' (times the running median)",
    "median": "'median'",
    "trimmed_mean": "'trimmed_mean:0.2'",
    "krum": "'krum:1'",
    "multi_krum": "'multi_krum:1' or 'multi_krum:1,5'",
    "geometric_median": "'geometric_median:10'",
}


def parse_robust_rule(choice: str | RobustRule | None) -> RobustRule | None:
    """Returns the rule that a text names, with its numbers after a colon; None for None or "none".

    Raises:
        UserError: there is no such rule, or a number does not suit it.

    >>> parse_robust_rule("clip:2x"), parse_robust_rule("multi_krum:1,4"), parse_robust_rule("none")
    (Clip(max_norm=None, times_median=2.0), MultiKrum(liars=1, chosen=4), None)
    """
    if choice is None or isinstance(choice, RobustRule) or choice == "none":
        return None if isinstance(choice, str) else choice
    if not isinstance(choice, str):
        raise UserError(f"robust must be a rule such as 'clip' or Krum(liars=1), got {choice!r}")
    word, colon, rest = choice.partition(":")
    if word not in RULES:
        raise UserError(f"unknown rule robust={choice!r}; {did_you_mean(word, RULES)}")
    if not colon:
        return RULES[word]()
    fields = _read_numbers(word, rest)
    if fields is None:
        raise UserError(f"robust={choice!r} cannot be read; give {_FORMS[word]}")
    return RULES[word](**fields)


def _read_numbers(word: str, text: str) -> dict[str, Any] | None:
    """Returns the fields of a rule that the text after its name gives; None if it has another form."""
    if word == "clip":
        field, number = ("times_median", text[:-1]) if text.endswith("x") else ("max_norm", text)
        value = _parse_number(float, number)
        return None if value is None or math.isnan(value) else {field: value}
    if word == "trimmed_mean":
        share = _parse_number(float, text)
        return None if share is None else {"share": share}
    names = {"krum": ("liars",), "multi_krum": ("liars", "chosen"), "geometric_median": ("iterations",)}.get(word, ())
    numbers = [_parse_number(int, part) for part in text.split(",")]
    if None in numbers or len(numbers) > len(names):
        return None
    return dict(zip(names, numbers, strict=False))


def _parse_number(kind: Callable[[str], float], text: str) -> float | None:
    try:
        return kind(text)
    except ValueError:
        return None
