"""Checks before the first round that a method's robust rule suits the number of clients in a round."""

from typing import Any

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.core.robust.parse import parse_robust_rule


def check_robust_rule(algorithm: Algorithm[Any, Any], cohort_size: int) -> None:
    """Raises a `UserError` if a round has too few clients for the method's robust rule.

    Raises:
        UserError: the rule cannot combine so few replies, or protects nothing with them.
    """
    rule = parse_robust_rule(getattr(algorithm, "robust", None))
    if rule is not None and (flaw := rule.cohort_error(cohort_size)):
        raise UserError(f"{registry_name(algorithm)}: robust='{rule}' is not possible: {flaw}")
