"""Scores every client's model on every other client's test examples, with confidence intervals: which model works well
for which client.

Row and column of the matrix are "model of" and "patients of". Each model prepares the other client's raw examples as its
own: the rows of a table are scaled and encoded by the statistics of the model's client. Where that is not possible, a cell
says why.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.algorithm import Client
from polyfed.core.errors import ClientError, UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.examples.groups import number_units
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.tasks.task import Task
from polyfed.simulation.checks.clients.undefined_scores import explain_undefined_score
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.devices import choose_device
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.results.across_sites.cross_site_scores import LEVEL, CrossSiteCell, CrossSiteScores
from polyfed.simulation.results.across_sites.other_clients_examples import (
    IncompatibleExamplesError,
    adapt_test_examples_to_model_of,
)
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint

_MAX_GROUPS = 50  # groups of examples that are left out in turn
_MANY_CELLS, _FEW_GROUPS = 400, 10
_MIN_OF_CLASS = 5  # test examples of the rarest class, below which a ranking has no interval


@exclusive_single_torch_thread_with_grad()
def compute_cross_site(federation: Federation, checkpoint: Checkpoint) -> CrossSiteScores:
    """Scores every client's model of a checkpoint on every client's test examples.

    Raises:
        UserError: the clients are not in this process.
    """
    clients = dict(federation.clients)
    if not clients:
        raise UserError(
            "cross_site scores every site's model at every other site, so that models travel between sites; it is for "
            "simulations: between real sites each site's model and test examples stay there"
        )
    metrics = federation.metrics
    groups = _MAX_GROUPS if len(clients) ** 2 <= _MANY_CELLS else _FEW_GROUPS
    pseudo_values: dict[tuple[str, str, str], _ScoreWithPseudoValues | str] = {}
    for task in _export_tasks(federation, checkpoint):
        owner = clients[task.client]
        engine = InProcessEngine(federation.algorithm, [owner], choose_device(federation.settings.device), metrics)
        for client in clients.values():
            outcome = _outputs_or_reason(engine, task, owner, client)
            for metric in metrics:
                key = (metric.name, owner.id, client.id)
                if isinstance(outcome, str):
                    pseudo_values[key] = outcome
                else:
                    pseudo_values[key] = _score_with_pseudo_values(
                        metric, client.task, *outcome, number_units(client.test), groups
                    )
    num_differences = max(len(clients) * (len(clients) - 1), 1)
    cells = tuple(
        _build_cell(metric, owner, client, pseudo_values, num_differences)
        for metric in metrics
        for owner in clients.values()
        for client in clients.values()
    )
    return CrossSiteScores(tuple(clients), tuple(metric.describe() for metric in metrics), cells, checkpoint.round)


def _export_tasks(federation: Federation, checkpoint: Checkpoint) -> Iterator[ClientTask]:
    for block in federation.build_task_blocks("export", list(federation.clients), checkpoint.round, checkpoint):
        yield from block


def _outputs_or_reason(
    engine: InProcessEngine, task: ClientTask, owner: Client, client: Client
) -> tuple[Tensor, Tensor] | str:
    """Returns the owner's outputs for another client's test examples and the targets, or why there are none."""
    try:
        examples, convert = adapt_test_examples_to_model_of(owner, client)
        outputs = engine.predict(task, examples)
        return convert(outputs), client.test.labels.cpu()
    except IncompatibleExamplesError as reason:
        return str(reason)
    except ClientError as error:
        if owner is client:
            raise
        return f"the model of {owner.id} fails on the examples of {client.id}: {error.reason}"


@final
@dataclass(frozen=True, eq=False)
class _ScoreWithPseudoValues:
    """Holds a score and its jackknife pseudo-values, one per left out group; None if a group cannot be left out."""

    value: float
    pseudo_values: NDArray[np.float64] | None
    examples: int


def _score_with_pseudo_values(
    metric: Metric, task: Task, outputs: Tensor, targets: Tensor, units: NDArray[np.int64], max_groups: int
) -> _ScoreWithPseudoValues:
    """Returns the score, and its pseudo-values from leaving out one group of units at a time."""
    value = float(metric(outputs, targets))
    num_units = int(units.max()) + 1
    size = min(num_units, max_groups)
    group_of_unit, strata = np.arange(num_units) % size, task.strata(targets)
    if num_units == len(targets) > size and strata.ndim == 1:  # each group has its share of the classes
        order = np.argsort(strata, kind="stable")
        group_of_unit = np.empty(num_units, dtype=np.int64)
        group_of_unit[order] = np.arange(num_units) % size
    group = group_of_unit[units]
    pseudo_values = None
    if size > 1 and math.isfinite(value) and not _has_rare_class(metric, task, targets):
        left_out = []
        for k in range(size):
            remaining = torch.from_numpy(np.flatnonzero(group != k))
            left_out.append(size * value - (size - 1) * float(metric(outputs[remaining], targets[remaining])))
        pseudo_values = np.asarray(left_out) if bool(np.isfinite(left_out).all()) else None
    return _ScoreWithPseudoValues(value, pseudo_values, len(targets))


def _has_rare_class(metric: Metric, task: Task, targets: Tensor) -> bool:
    """Returns whether a score of classes or events rests on so few of one that it has no interval."""
    if metric.per_example is not None or not task.rarest_limits_score:
        return False
    rarest = task.rarest_class(targets)
    return rarest is not None and 0 < rarest[0] < _MIN_OF_CLASS


def _build_cell(
    metric: Metric,
    owner: Client,
    client: Client,
    scores: Mapping[tuple[str, str, str], _ScoreWithPseudoValues | str],
    num_differences: int,
) -> CrossSiteCell:
    cell = CrossSiteCell(owner.id, client.id, metric.name, examples=len(client.test))
    score, own_score = scores[metric.name, owner.id, client.id], scores[metric.name, client.id, client.id]
    if isinstance(score, str):
        return replace(cell, reason=score)
    if not math.isfinite(score.value):
        why = explain_undefined_score(metric, [client])
        return replace(cell, reason=f"{metric.label} is not defined for the test examples of {client.id}{why}")
    low, high = _confidence_interval(score.value, score.pseudo_values)
    if low is not None and high is not None and metric.is_from_zero_to_one:
        low, high = max(low, 0.0), min(high, 1.0)
    cell = replace(cell, value=score.value, low=low, high=high)
    if owner is client or isinstance(own_score, str) or not math.isfinite(own_score.value):
        return cell
    difference = score.value - own_score.value
    pairs = None
    if score.pseudo_values is not None and own_score.pseudo_values is not None:
        pairs = score.pseudo_values - own_score.pseudo_values
    low, high = _confidence_interval(difference, pairs, num_differences)
    return replace(cell, difference=difference, difference_low=low, difference_high=high)


def _confidence_interval(
    value: float, pseudo_values: NDArray[np.float64] | None, num_claims: int = 1
) -> tuple[float | None, float | None]:
    """Returns value ± t·s/√g of g pseudo-values, for `num_claims` at once; None if they do not vary.

    The correction for several claims is Bonferroni's. Values that do not vary say nothing.
    """
    if pseudo_values is None:
        return None, None
    from scipy.stats import t  # takes half a second to import

    error = float(pseudo_values.std(ddof=1)) / math.sqrt(len(pseudo_values))
    if error <= 1e-12:
        return None, None
    half = float(t.ppf(1 - (1 - LEVEL) / (2 * num_claims), len(pseudo_values) - 1)) * error
    return value - half, value + half
