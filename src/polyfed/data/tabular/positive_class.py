"""Turns a target into two classes by the option `positive`: a condition such as ">0", or several values such as
"1,2,3".
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.examples.text_columns import is_numeric_text

_CONDITION = re.compile(r"(>=|<=|!=|==|=|>|<)\s*(.+)")
_COMPARISONS: Mapping[str, tuple[Callable[[Any, Any], Any], str]] = {  # of numbers, and the sign of the opposite
    ">": (operator.gt, "<="), ">=": (operator.ge, "<"), "<": (operator.lt, ">="), "<=": (operator.le, ">"),
}  # fmt: skip


def is_condition_or_value_list(positive: str | None) -> bool:
    """Returns whether `positive` is a condition or a list of values, not one class's name.

    >>> [is_condition_or_value_list(text) for text in (">0", "= yes", "1,2,3", "yes", None)]
    [True, True, True, False, False]
    """
    return positive is not None and (_CONDITION.fullmatch(positive.strip()) is not None or "," in positive)


def split_by_positive(column: NDArray[Any], name: str, positive: str) -> tuple[NDArray[np.int64], tuple[str, str]]:
    """Returns each row's class (1 where `positive` holds, else 0) and the names of the two classes.

    Args:
        column: the target's cells as texts.
        name: of the target.
        positive: a comparison with a number (>, >=, <, <=), an equality with a value (=, !=), or values with commas.

    Raises:
        UserError: the target holds texts and `positive` compares numbers; a value that does not occur; or all rows are of
            one class.

    >>> split_by_positive(np.array(["0", "3", "1"]), "num", ">0")
    (array([0, 1, 1]), ('<=0', '>0'))
    >>> split_by_positive(np.array(["a", "b", "c"]), "stage", "b, c")[1]
    ('not b,c', 'b,c')
    """
    matched = _CONDITION.fullmatch(positive.strip())
    if matched is not None and matched[1] in _COMPARISONS:
        sign, bound = matched.groups()
        if not is_numeric_text(bound) or not all(map(is_numeric_text, column.tolist())):
            which = "its bound is not a number" if not is_numeric_text(bound) else f"target {name!r} holds texts"
            raise UserError(f"positive={positive!r} compares numbers, and {which}; give the positive values, 'b,c' say")
        compare, opposite = _COMPARISONS[sign]
        is_positive = np.asarray(compare(column.astype(np.float64), float(bound)))
        names = f"{opposite}{bound}", f"{sign}{bound}"
    else:
        sign, text = ("=", positive) if matched is None else matched.groups()
        values = [part.strip() for part in text.split(",") if part.strip()]
        occurring = set(column.tolist())
        if unknown := [value for value in values if value not in occurring]:
            raise UserError(
                f"positive={positive!r} names {unknown[0]!r}, which is not a value of target {name!r}; its values: "
                f"{', '.join(sorted(map(str, occurring))[:20])}"
            )
        is_positive = np.isin(column.astype(str), values)
        names = f"not {','.join(values)}", ",".join(values)
        if sign == "!=":
            is_positive, names = ~is_positive, (names[1], names[0])
    if is_positive.all() or not is_positive.any():
        raise UserError(
            f"positive={positive!r} holds for {'every' if is_positive.all() else 'no'} row of target {name!r}, and two "
            "classes need rows of both"
        )
    return is_positive.astype(np.int64), names
