"""Holds the classes of tasks by name: those of polyfed, and a user's own."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

LOADED_TASK_CLASSES: WeakValueDictionary[str, type[Any]] = WeakValueDictionary()
"""The task classes that this process has loaded, by `task_class_path`."""


def registered_task_classes() -> Mapping[str, type[Any]]:
    """Returns the tasks of polyfed by name. Their package is above this one, and is imported at the first use only."""
    registry: Mapping[str, type[Any]] = import_module("polyfed.tasks").REGISTRY
    return registry


def task_class_path(task_class: type[Any]) -> str:
    """Returns the path by which files and messages name a user's task class, `module:Class`."""
    return f"{task_class.__module__}:{task_class.__qualname__}"
