"""The cases of a parametrised test that `make test` runs; CI runs all, which repeat it with more methods or options."""

import pytest


def few(cases, fast):
    """Returns all cases, those that are not in `fast` marked as thorough; a case is a value, or a tuple of values."""
    assert all(case in cases for case in fast), "a case that is to be fast is none of the cases"
    return [
        case if case in fast else pytest.param(*case if isinstance(case, tuple) else [case], marks=pytest.mark.thorough)
        for case in cases
    ]
