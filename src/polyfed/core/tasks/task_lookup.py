"""Finds a task by its name."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.trusted_code import import_trusted_dataclass
from polyfed.core.tasks.task import Task, TaskSpec
from polyfed.core.tasks.task_registry import LOADED_TASK_CLASSES, registered_task_classes


def get_task(choice: Task | TaskSpec | Mapping[str, Any]) -> Task:
    """Returns the task for a name, a mapping of name and options, or a task itself.

    This is the only place where a name becomes a task. `polyfed.tasks` has the names; a user's task is named
    `module:Class`, which is imported only if this process trusts it or has loaded the class already.

    Args:
        choice: a name; a mapping with `name` and options; or a task, which is returned.

    Raises:
        UserError: an unknown name or option, or code that is not trusted.

    >>> get_task("regression").name, get_task("regression") == "regression"
    ('regression', True)
    """
    if isinstance(choice, Task):
        return choice
    options = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    name = options.pop("name", None)
    if not isinstance(name, str):
        cure = f", a class; give an object of it: {choice.__name__}()" if isinstance(choice, type) else ""
        raise UserError(f"a task is a name, an object of a class on polyfed.tasks.Task, or a mapping with a name, got "
                        f"{choice!r}{cure}")  # fmt: skip
    task_class: type[Task] | None = registered_task_classes().get(name) or LOADED_TASK_CLASSES.get(name)
    if task_class is None and ":" not in name:
        raise UserError(f"unknown task {name!r}; {did_you_mean(name, registered_task_classes())}")
    if task_class is None:
        task_class = import_trusted_dataclass(name, Task, "task")  # type: ignore[type-abstract]
    option_names = [f.name for f in fields(task_class)]
    if unknown := [key for key in options if key not in option_names]:
        hint = did_you_mean(str(unknown[0]), option_names) if option_names else "it has no options"
        raise UserError(f"the task {name} has no option {unknown[0]!r}; {hint}")
    try:
        return task_class(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"the task {name} cannot be made of the options {options}: {error}") from error


def has_elementwise_loss(task: Task) -> bool:
    """Returns whether a task can give its loss as the mean of single losses (it defines `Task.elementwise_loss`).

    >>> has_elementwise_loss(get_task("regression"))
    True
    """
    return type(task).elementwise_loss is not Task.elementwise_loss


def registered_tasks() -> tuple[Task, ...]:
    """Returns one object of each task class of polyfed, with default options."""
    return tuple(task_class() for task_class in registered_task_classes().values())
