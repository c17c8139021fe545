"""Finds the test sets on which a score is not defined, whatever a network predicts: an AUC without two classes, a C-index
without an event."""

import math
from collections.abc import Sequence

import torch

from polyfed.core.algorithm import Client
from polyfed.core.evaluation.metric import Metric
from polyfed.core.io.text.site_words import name_sites
from polyfed.core.tasks.task import Task


def explain_undefined_score(metric: Metric, clients: Sequence[Client]) -> str:
    """Returns why a score is not defined at some clients, as the end of a sentence; empty if no test examples are why.

    >>> import torch
    >>> from polyfed.core.evaluation.metrics import metric_by_name
    >>> alone = Client("a", lambda: torch.nn.Linear(2, 2), *[(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))] * 2)
    >>> explain_undefined_score(metric_by_name("auc"), [alone])
    ': the test examples of a are all of one class'
    """
    if not clients or not (missing := list_clients_without_score(metric, clients)):
        return ""
    why = clients[0].task.describe_rarest(0, "", 0)
    return f": the test examples of {name_sites(missing)} are {why}"


def list_clients_without_score(metric: Metric, clients: Sequence[Client]) -> list[str]:
    """Returns the ids of the clients on whose test examples the metric is not defined, whatever a network predicts.

    >>> from polyfed.core.evaluation.metrics import metric_by_name
    >>> from polyfed.testing import small_clients
    >>> list_clients_without_score(metric_by_name("auc"), small_clients(2))
    []
    """
    task = clients[0].task
    if not task.rarest_limits_score or metric.per_example is not None or metric not in task.metrics:
        return []
    return [client.id for client in clients if not _is_defined(metric, task, client.test.labels.cpu())]


def _is_defined(metric: Metric, task: Task, targets: torch.Tensor) -> bool:
    num_outputs = max(task.num_outputs(targets), 2 if task.outputs_are_classes else 1)
    outputs = torch.randn(len(targets), num_outputs, generator=torch.Generator().manual_seed(0))
    return math.isfinite(metric(outputs, targets))
