"""Says how many runs and searches an audit may have; the command line asks it before torch is imported."""

from typing import Any

from polyfed.core.io.values.number_checks import MAX_RUNS, check_whole_number

FEWEST_RUNS = 4


def check_audit_effort(runs: Any, iterations: Any, restarts: Any) -> None:
    """Raises a `UserError` if a number of runs, iterations or restarts is out of its range.

    >>> check_audit_effort(2, 300, 2)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: runs of an audit must be a whole number of at least 4, got 2
    """
    check_whole_number("runs of an audit", runs, FEWEST_RUNS, MAX_RUNS)
    check_whole_number("iterations of an audit", iterations, 0)
    check_whole_number("restarts of an audit", restarts, 1)
