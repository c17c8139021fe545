"""Defines the prediction tasks, one per file, and their names in `REGISTRY`; a file contains everything that depends on
its task.

To add a task, write one file with a frozen dataclass on `Task`, and one line in `REGISTRY`. A user's own task needs neither:
clients take the object (`Client(task=MyTask())`), and files name its class, `module:Class`.
"""

from collections.abc import Mapping

from torch import Tensor

from polyfed.core.tasks.task import Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.tasks.classification import Classification
from polyfed.tasks.forecasting import Forecasting
from polyfed.tasks.multilabel import Multilabel
from polyfed.tasks.regression import Regression
from polyfed.tasks.segmentation import Segmentation
from polyfed.tasks.survival import Survival
from polyfed.tasks.table_targets import infer_table_task
from polyfed.tasks.tokens import Tokens

__all__ = [
    "REGISTRY",
    "Classification",
    "Forecasting",
    "Multilabel",
    "Regression",
    "Segmentation",
    "Survival",
    "Task",
    "Tokens",
    "get_task",
    "infer_table_task",
    "infer_task_of_targets",
]

REGISTRY: Mapping[str, type[Task]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "survival": Survival,
    "tokens": Tokens,
    "forecasting": Forecasting,
    "segmentation": Segmentation,
}


def infer_task_of_targets(targets: Tensor) -> Task:
    """Returns the most likely task of targets by type, shape and values, for files that name none.

    Args:
        targets: integers of shape (n,) for classes, floats of shape (n, outputs) for labels (all 0 or 1) or numbers.
    """
    if targets.dim() == 2:
        return Multilabel() if bool(((targets == 0) | (targets == 1)).all()) else Regression()
    return Classification() if targets.dim() == 1 and not targets.is_floating_point() else Regression()


def __dir__() -> list[str]:
    return sorted(__all__)
