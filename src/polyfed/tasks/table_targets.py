"""Infers from the target columns of a table which task they are for."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.examples.text_columns import check_whole_numbers_are_classes
from polyfed.core.tasks.task import Task
from polyfed.tasks.classification import Classification
from polyfed.tasks.multilabel import Multilabel
from polyfed.tasks.regression import Regression

TASK_WITH_EVENTS = "survival"
"""Name of the task of a table that names a column of events."""


def infer_table_task(names: Sequence[str], numbers: Mapping[str, NDArray[Any]] | None) -> Task:
    """Returns the task for the target columns of a table, judged by their names and values.

    Texts are classes, and so are up to 20 different whole numbers; numbers with a fraction are regression; several columns
    of 0 and 1 are labels, several others regression.

    Args:
        names: of the target columns.
        numbers: the values of each column; None if a column holds texts.

    Raises:
        UserError: several columns of texts, or more than 20 different whole numbers, which may be either.

    >>> str(infer_table_task(["age"], {"age": np.array([0.5, 1.0])})), str(infer_table_task(["diagnosis"], None))
    ('regression', 'classification')
    """
    if len(names) > 1:
        if numbers is None:
            raise UserError(f"several targets must be numbers, got {', '.join(names)}; give one")
        labels = all(np.isin(column, (0, 1)).all() for column in numbers.values())
        return Multilabel() if labels else Regression()
    if numbers is None:
        return Classification()
    column = numbers[names[0]]
    if not bool((column == np.floor(column)).all()):
        return Regression()
    check_whole_numbers_are_classes(len(np.unique(column)), names[0])
    return Classification()
