"""Collects which examples of each client every fold of a cross-validation tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.plan import ComparisonPlan
from polyfed.data.partitioning.folds import Folds, unit_names


@final
@dataclass(frozen=True, eq=False)
class FoldTestTargets:
    """Holds each fold's test targets, and the unit (example or group) to which each belongs.

    Attributes:
        design: folds and repeats.
        targets: seed -> client id -> targets of the client's test examples.
        units: seed -> client id -> name of the unit (example or group) of each.
        totals: client id -> "test", the number of examples tested in all, and "rarest", those of the rarest class.
    """

    design: Folds
    targets: Mapping[int, Mapping[str, Tensor]]
    units: Mapping[int, Mapping[str, NDArray[np.str_]]]
    totals: Mapping[str, Mapping[str, Any]]


def collect_test_examples_of_folds(plan: ComparisonPlan) -> FoldTestTargets | None:
    """Collects the test examples of every fold of a cross-validation; None without folds."""
    if plan.folds is None:
        return None
    targets, units = dict[int, dict[str, Tensor]](), dict[int, dict[str, NDArray[np.str_]]]()
    for seed in plan.seeds:
        clients = plan.panel.select(plan.build_client_set(seed).clients)
        targets[seed] = {client.id: client.test.labels.cpu() for client in clients}
        units[seed] = {client.id: unit_names(client.test) for client in clients}
    totals = {}
    for client in clients:
        labels = torch.cat([targets[seed][client.id] for seed in plan.seeds[: plan.folds.number]])
        rarest = client.task.rarest_class(labels)
        groups = np.concatenate([units[seed][client.id] for seed in plan.seeds[: plan.folds.number]])
        totals[client.id] = {"test": len(labels), "rarest": None if rarest is None else list(rarest)}
        if client.test.group is not None:
            totals[client.id]["groups"] = [len(np.unique(groups))] * 2  # all are trained on, and all tested
    return FoldTestTargets(plan.folds, targets, units, totals)
