"""Looks up metrics by the names that users and files give, and lists those that polyfed has.

A metric takes a network's outputs as it returns them and the targets of the same examples; one that is undefined for these
examples, such as the AUC of a single class, is NaN. The metrics of a task are declared by the task (`Task.metrics`).
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metric_names import describe_unknown_metric
from polyfed.core.io import trusted_code
from polyfed.core.io.values.keyword_names import check_can_be_called
from polyfed.core.tasks.task import Task, TaskSpec
from polyfed.core.tasks.task_lookup import get_task, registered_tasks


def resolve_metrics(choice: Any, task: Task | TaskSpec) -> tuple[Metric, ...]:
    """Returns the `Metric` objects for the user's choice of names; the first is the main metric.

    Args:
        choice: None for the task's default; or a list of names (built in, or `module:name` of the user's code), functions
            `f(outputs, targets) -> float` and `Metric` objects, or one of these. For a function higher values are better;
            give a `Metric` if they are not.
        task: whose metrics are chosen.

    Raises:
        UserError: an unknown name, a name twice, or a metric of another task.

    >>> [metric.name for metric in resolve_metrics(["auc", "brier"], "classification")]
    ['auc', 'brier']
    >>> resolve_metrics(None, "regression")[0].label
    'R²'
    """
    task = get_task(task)
    if strange := [metric for metric in task.metrics if not isinstance(metric, Metric)]:
        raise UserError(f"the task {task}: its metrics must be polyfed.Metric objects, got {strange[0]!r}")
    choices = list(choice) if isinstance(choice, Iterable) and not isinstance(choice, str) else [choice]
    if choice is None or not choices:
        return (task.default_metric,)
    resolved = [_resolve_metric(metric, task) for metric in choices]
    for metric in resolved:
        if not _metric_suits_task(metric, task):
            possible = sorted(metric.name for metric in task.metrics)
            raise UserError(
                f"{metric.name} is not a metric of a task of {task}; choose among {', '.join(possible)}, or give a function"
            )
    names = [metric.name for metric in resolved]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"metrics has {twice[0]!r} twice; give each a name of its own (polyfed.Metric)")
    return tuple(resolved)


def metric_by_name(name: str) -> Metric:
    """Returns polyfed's own metric of this name.

    Raises:
        UserError: there is no such metric; the message has the nearest names.

    >>> metric_by_name("sensitivity_at_95").label
    'sensitivity at 95 % specificity'
    """
    metric = _find_built_in(name)
    if metric is None:
        raise UserError(describe_unknown_metric(name))
    return metric


def _find_built_in(name: str) -> Metric | None:
    return next((metric for task in registered_tasks() if (metric := task.find_metric(name)) is not None), None)


def _metric_suits_task(metric: Metric, task: Task) -> bool:
    if task.find_metric(metric.name) == metric:
        return True
    return not is_built_in_metric(metric.name) and (not metric.tasks or task.name in metric.tasks)


def default_metric_names() -> tuple[str, ...]:
    """Returns the names of the tasks' default metrics, sought in files that name no main metric.

    >>> default_metric_names()[0]
    'accuracy'
    """
    return tuple(task.default_metric.name for task in registered_tasks())


def is_built_in_metric(name: str) -> bool:
    """Returns whether polyfed has a metric of this name, so that the user need not supply its function.

    >>> is_built_in_metric("auc"), is_built_in_metric("sensitivity_at_95"), is_built_in_metric("cost")
    (True, True, False)
    """
    return _find_built_in(name) is not None


def unpicklable_metric_error(metrics: Sequence[Metric]) -> str | None:
    """Returns a sentence that says why a metric cannot be pickled for another process; None if all metrics can be.

    >>> (unpicklable_metric_error([METRICS["auc"]]),
    ...  unpicklable_metric_error([Metric("mine", lambda outputs, targets: 0.0)])[:35])
    (None, "metric 'mine' cannot be sent to ano")
    """
    for metric in metrics:
        try:
            pickle.dumps(metric)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"metric {metric.name!r} cannot be sent to another process ({error})"
    return None


def _resolve_metric(choice: Any, task: Task) -> Metric:
    if isinstance(choice, Metric):
        # A resumed run would take the built-in metric of this name.
        metric_of_task = task.find_metric(choice.name)  # it may depend on the task's options
        if is_built_in_metric(choice.name) and choice not in (metric_of_task, metric_by_name(choice.name)):
            raise UserError(f"{choice.name!r} is the name of a built-in metric; give yours another name")
        return choice
    if isinstance(choice, str):
        if (obstacle := task.unavailable_metrics.get(choice)) is not None:
            raise UserError(obstacle)
        if ":" in choice:
            return _import_metric(choice, task)
        if (named := task.find_metric(choice) or _find_built_in(choice)) is None:
            raise UserError(describe_unknown_metric(choice, [metric.name for metric in task.metrics]))
        return named
    if not callable(choice):
        raise UserError(
            f"metrics must be names, functions f(outputs, targets) -> float or Metric objects, got {choice!r}"
        )
    name = getattr(choice, "__name__", type(choice).__name__)
    if name == "<lambda>":
        raise UserError("a metric needs a name; give polyfed.Metric('my_name', lambda outputs, targets: ...)")
    check_can_be_called(choice, 2, "a metric is called with the network's outputs and the targets")
    return _resolve_metric(Metric(name, choice, higher_is_better=bool(getattr(choice, "higher_is_better", True))), task)


def _import_metric(path: str, task: Task) -> Metric:
    """Imports a user's metric, a function f(outputs, targets) -> float or a `Metric`, by `module:name`."""
    obj, name = trusted_code.import_trusted_callable(path, "metric"), path.rpartition(":")[2].rpartition(".")[2]
    if isinstance(obj, Metric):
        return obj if obj.name == name else replace(obj, name=name, label=obj.label)
    return _resolve_metric(Metric(name, obj, higher_is_better=bool(getattr(obj, "higher_is_better", True))), task)


def metric_path_or_name(metric: Metric) -> str:
    """Returns the text that names a metric in a configuration: `module:name` if the metric was imported, else its name."""
    return (
        trusted_code.find_trusted_import_path(metric)
        or trusted_code.find_trusted_import_path(metric.function)
        or metric.name
    )


@final
class _BuiltInMetrics(Mapping[str, Metric]):
    """Maps names to the metrics that polyfed's tasks declare, which are gathered at the first look-up."""

    def __getitem__(self, name: str) -> Metric:
        return _gather_metrics()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_gather_metrics())

    def __len__(self) -> int:
        return len(_gather_metrics())


@cache
def _gather_metrics() -> Mapping[str, Metric]:
    return {metric.name: metric for task in registered_tasks() for metric in task.metrics}


METRICS: Mapping[str, Metric] = _BuiltInMetrics()
"""Built-in metrics by name; `metric_by_name` builds `sensitivity_at_95` and the like on demand."""
