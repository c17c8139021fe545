"""Determines the values that a search tries for a hyper-parameter: given values, multiples of the method's default, and
values beyond the edge of the grid."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from polyfed.comparison.tuning.optuna_search import SearchRange
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.number_checks import is_number
from polyfed.core.io.values.plain_values import to_plain_values

GRID = "grid"  # stands for the method's own value times each of the factors
FACTORS = (0.1, 0.3, 1, 3, 10)
EXTEND = "..."  # as the last value: the grid is extended beyond its edge
EXTENDED_GRID = f"{GRID},{EXTEND}"
EQUAL_FIELDS = ("local_epochs", "local_steps", "batch_size")
"""Fields that are the same in every method for an equal number of local steps."""
_LOSS = ("label_smoothing", "class_weights")  # fields that change the meaning of the loss
_EACH = "by_client"  # field of `local` with the choice of each client


def check_search_space(space: Mapping[str, Any], trials: int | None, field_names: Collection[str]) -> None:
    """Raises a `UserError` if a field cannot be searched, or not in this range.

    Args:
        space: field -> values, or a range as text.
        trials: runs of each method in a search by Optuna; None tries all combinations.
        field_names: the fields of all methods that are compared.
    """
    for name, values in space.items():
        if name in EQUAL_FIELDS:
            raise UserError(f"{name} cannot be searched: methods are compared with equal local training")
        if name in _LOSS:
            raise UserError(f"{name} cannot be searched: it changes the meaning of the loss that the search minimises; "
                            "compare methods with different values, each under its own label")  # fmt: skip
        if name == _EACH:
            raise UserError(f"{name} cannot be searched: it holds what each client has chosen; search the fields in it")
        if isinstance(values, str) and values not in (GRID, EXTENDED_GRID) and trials is None:
            raise UserError(f"the range {values!r} for {name} needs a number of runs a method, trials=20 (--trials 20), "
                            "or give the values to try")  # fmt: skip
        if name not in field_names:
            raise UserError(
                f"no method of the comparison has a field {name!r} to search; {did_you_mean(name, field_names)}"
            )
        _check_grid_can_be_extended(name, values, trials)


def resolve_search_values(method: object, name: str, values: Any) -> Any:
    """Returns the distinct values to try for a method's field; a range unchanged.

    Raises:
        UserError: multiples of a default are needed that is not positive.

    The mark `...`, which extends the grid, is left out.
    """
    if not isinstance(values, str):
        if not isinstance(values, Sequence):
            return values
        # Converts NumPy's numbers to Python's.
        written = [to_plain_values(value, f"tune[{name!r}]") for value in values]
        return [value for position, value in enumerate(written) if value not in (*written[:position], EXTEND)]
    if values not in (GRID, EXTENDED_GRID):
        return values
    default = getattr(method, name)
    if not is_number(default) or not default > 0:
        raise UserError(
            f"{name} of a method is {default!r}, which has no multiples to try; give the values to try for {name}"
        )
    around = [default * factor for factor in FACTORS]
    if isinstance(default, int):
        return sorted({max(1, round(value)) for value in around})
    return [float(f"{value:.4g}") for value in around]


def list_values_or_range_ends(name: str, values: Any) -> tuple[Any, ...]:
    """Returns all values of a list, or both ends of a range, to validate before the search.

    Raises:
        UserError: `values` is neither.
    """
    if isinstance(values, str):
        search_range = SearchRange.from_low_to_high(values)
        return search_range.low, search_range.high
    if not isinstance(values, Sequence) or not len(values):
        raise UserError(
            f"the values to try for {name} must be a list of at least one, or a range 'LOW..HIGH', got {values!r}"
        )
    return tuple(values)


def next_value_beyond_edge(values: Sequence[Any], best: Any, is_integer: bool) -> Any:
    """Returns the next value beyond those tried if `best` is at their edge; else None.

    It is as far from `best` as the neighbour of `best`, on a log scale.

    Args:
        values: the values tried so far.
        best: the best of them.
        is_integer: whether the field holds whole numbers.

    Returns:
        The next value; None if `best` is neither the smallest nor the largest, or the next value was tried already.

    >>> (next_value_beyond_edge([0.02, 0.05, 0.1], 0.1, False), next_value_beyond_edge([5, 1, 2], 5, True),
    ...  next_value_beyond_edge([5, 1, 2], 1, True))
    (0.2, 12, None)
    """
    ordered = sorted(values)
    if ordered[0] == ordered[-1] or best not in (ordered[0], ordered[-1]):
        return None
    value = best * best / (ordered[1] if best == ordered[0] else ordered[-2])
    further = max(1, round(value)) if is_integer else float(f"{value:.2g}")
    return None if further in values else further


def allows_values_beyond_listed(values: Any) -> bool:
    """Returns True if `values` contains the mark `...`, which allows the search to try values beyond the listed ones."""
    if isinstance(values, str):
        return values == EXTENDED_GRID
    return isinstance(values, Sequence) and any(isinstance(value, str) and value == EXTEND for value in values)


def _check_grid_can_be_extended(name: str, values: Any, trials: int | None) -> None:
    """Raises a `UserError` if a grid with `...` has other than positive numbers, or Optuna searches."""
    if not allows_values_beyond_listed(values):
        return
    if trials is not None:
        raise UserError(
            f"{name}: trials take a range, such as 0.001..0.3, or values without {EXTEND!r}, got {values!r}"
        )
    if isinstance(values, str):
        return
    *listed_values, last = (to_plain_values(value, f"tune[{name!r}]") for value in values)
    if (
        last != EXTEND
        or not all(is_number(value) and value > 0 for value in listed_values)
        or len(set(listed_values)) < 2
    ):
        how = f"{EXTEND!r} comes after two or more numbers above 0, such as 0.01,0.1,{EXTEND}"
        raise UserError(f"{name}: {how}, got {values!r}")
