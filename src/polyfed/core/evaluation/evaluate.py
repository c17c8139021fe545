"""Evaluates networks on examples: outputs, loss, metrics, and statistics of metrics over clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.evaluation.metric import Metric
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.examples.groups import number_units
from polyfed.core.examples.pytree import call_network, logits_of
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.tasks.task import Loss, Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.core.vectorized.deferred_calls import PredictCall, copy_all_parameters_and_buffers, current_deferred_run

MetricValues = dict[str, float | None]


def predict(model: nn.Module, examples: Examples, batch_size: int = 128) -> Tensor:
    """Returns a network's outputs (logits) for all examples, in their order; the network runs in evaluation mode.

    Float32 on the CPU, shape (n, outputs).
    """
    model.eval()
    rows = torch.arange(len(examples), device=examples.device)
    outputs = []
    with torch.no_grad():  # not inference mode: a network that caches a tensor here may use it in training
        for batch in split_into_batches(rows, batch_size):
            x = to_preferred_memory_format(model, examples.batch(batch)[0])
            outputs.append(logits_of(call_network(model, x)).float().cpu())
    return torch.cat(outputs)


def predict_sets(model: nn.Module, sets: Sequence[Examples]) -> list[Tensor]:
    """Returns a network's outputs for several sets of examples: a list with one tensor per set, each as from `predict`.

    Inside a deferred run they are computed together with those of other clients.
    """
    if (deferred_run := current_deferred_run()) is not None:
        single_tensors = all(isinstance(examples.x, Tensor) for examples in sets)  # several parts are not stacked
        outputs = deferred_run.replay_or_defer_next_call(
            lambda: PredictCall(model, copy_all_parameters_and_buffers(model), sets) if single_tensors else None
        )
        if isinstance(outputs, list):
            return outputs
    return [predict(model, examples) for examples in sets]


def compute_metrics(
    outputs: Tensor, targets: Tensor, task: Task | str, metrics: Sequence[Metric] = (), loss: Loss | None = None
) -> MetricValues:
    """Returns `{metric: value}` of outputs and the mean loss as "loss"; None for values that are not finite.

    Args:
        outputs: of a network, float32 on the CPU, shape (n, ...).
        targets: of the same examples, shape (n, ...).
        task: decides the loss, unless `loss` is given.
        metrics: in the order of the result; empty for the task's default metric.
        loss: the loss that training minimises: (outputs, targets) -> a number.

    >>> from polyfed.core.evaluation.metrics import resolve_metrics
    >>> compute_metrics(torch.eye(2), torch.tensor([0, 0]), "classification",
    ...                 resolve_metrics(["accuracy", "auc"], "classification"))
    {'accuracy': 0.5, 'auc': None, 'loss': 0.813...}
    """
    task = get_task(task)
    values = {metric.name: metric(outputs, targets) for metric in metrics or (task.default_metric,)}
    with torch.no_grad():
        value = float((task.loss if loss is None else loss)(outputs, targets))
    return {name: value if np.isfinite(value) else None for name, value in {**values, "loss": value}.items()}


def evaluate(model: nn.Module, examples: Examples, task: Task | str, loss: Loss | None = None) -> MetricValues:
    """Runs a network on examples; returns the task's default metric and "loss", None where not finite.

    >>> even = Examples(torch.eye(2), torch.tensor([0, 1]))
    >>> evaluate(nn.Identity(), even, "classification")
    {'accuracy': 1.0, 'loss': 0.313...}
    """
    network = get_task(task).prediction_network(model)
    return compute_metrics(predict(network, examples), examples.labels.cpu(), task, loss=loss)


def evaluate_client(model: nn.Module, client: Client, loss: Loss | None = None) -> MetricValues:
    """Returns the default metric and loss on a client's test, validation and global test examples.

    They are named "accuracy" (test), "val_accuracy", "global_accuracy" and so on.
    """
    return evaluate_client_with_outputs(model, client, loss=loss)[0]


def evaluate_client_with_outputs(
    model: nn.Module, client: Client, metrics: Sequence[Metric] = (), prefix: str = "", loss: Loss | None = None
) -> tuple[MetricValues, dict[str, Tensor]]:
    """Returns the metrics of `evaluate_client`, and the stored outputs on test and validation examples.

    The outputs have the keys "test" and, if there is such a set, "val"; each is float32 on the CPU, shape (n, ...).

    Args:
        model, client: as in `evaluate_client`.
        metrics: in the order of the result; empty for the task's default metric.
        prefix: stands before each name.
        loss: the loss that training minimises, for outputs and targets on the CPU; None for the task's.
    """
    row: MetricValues = {}
    outputs_by_set: dict[str, Tensor] = {}
    sets = {"test": ("", client.test), "val": ("val_", client.val), "global": ("global_", client.global_test)}
    nonempty_sets = {name: (set_prefix, data) for name, (set_prefix, data) in sets.items() if data is not None}
    network = client.task.prediction_network(model)
    all_outputs = predict_sets(network, [data for _, data in nonempty_sets.values()])
    for (name, (set_prefix, data)), outputs in zip(nonempty_sets.items(), all_outputs, strict=True):
        row |= {
            f"{prefix}{set_prefix}{n}": v
            for n, v in compute_metrics(outputs, data.labels.cpu(), client.task, metrics, loss).items()
        }
        if name != "global":
            outputs_by_set[name] = client.task.stored_outputs(outputs, data.labels.cpu(), metrics)
    return row, outputs_by_set


def out_of_fold_outputs(build_network: Callable[[Client], nn.Module], client: Client) -> Tensor:
    """Returns outputs for validation examples, each half by a network fitted without it (cross-fitting).

    Float32 on the CPU, shape (n, ...), in the order of the validation examples.

    Args:
        build_network: builds the network of a client. It is called for the client with one half of its validation examples
            (None if that half is empty); the network predicts the other half before the next call.
        client: has validation examples. Both halves have similar class frequencies; rows of one group (`Examples.group`)
            stay together.
    """
    val = client.val
    assert val is not None  # callers check this
    labels = client.task.strata(val.labels)
    fold_of_row: NDArray[np.int64] = np.zeros(len(val), dtype=np.int64)
    if val.group is not None:
        fold_of_row[:] = number_units(val) % 2
    else:
        fold_of_row[np.argsort(labels, kind="stable") if labels.ndim == 1 else np.arange(len(val))] = (
            np.arange(len(val)) % 2
        )
    outputs, places = [], []
    for fold in (0, 1):
        rows = [
            torch.from_numpy(np.flatnonzero(part)).to(val.device) for part in (fold_of_row == fold, fold_of_row != fold)
        ]
        if len(rows[0]):
            fitting_examples = val.select(rows[1]) if len(rows[1]) else None
            network = client.task.prediction_network(build_network(replace(client, val=fitting_examples)))
            outputs.append(predict(network, val.select(rows[0])))
            places.append(rows[0].cpu())
    return torch.cat(outputs)[torch.cat(places).argsort()]


def summarise_clients(
    clients: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Returns `{metric: {statistic: value}}`, the statistics of each metric over clients, such as mean and minimum.

    These are mean, mean weighted by `weights` (numbers of training examples), standard deviation, minimum, 10th and 90th
    percentile. A client without a value for a metric does not count in it; if the weight of a client with a value is
    missing, there is no weighted mean.

    >>> summarise_clients({"a": {"accuracy": 0.5}, "b": {"accuracy": 1.0}}, {"a": 1, "b": 3})["accuracy"]["weighted_mean"]
    0.875
    """
    names = sorted({name for metrics in clients.values() for name in metrics})
    summary = {}
    for name in names:
        ids = sorted(i for i, metrics in clients.items() if metrics.get(name) is not None)
        if ids:
            summary[name] = _summary_statistics([clients[i][name] for i in ids], [weights.get(i) for i in ids])
    return summary


def _summary_statistics(values: Sequence[float], weights: Sequence[float | None]) -> dict[str, float]:
    v = np.asarray(values, dtype=np.float64)
    has_weights = None not in weights
    p10, p90 = np.percentile(v, (10, 90))
    return {
        "mean": float(v.mean()),
        **({"weighted_mean": float(np.average(v, weights=weights))} if has_weights else {}),  # type: ignore[arg-type]
        "std": _standard_deviation(v),
        "min": float(v.min()),
        "p10": float(p10),
        "p90": float(p90),
    }


def _standard_deviation(values: NDArray[np.float64]) -> float:
    """Returns the standard deviation; the largest float where squares overflow, as of the metric of a diverged network."""
    with np.errstate(over="ignore"):
        return min(float(values.std()), float(np.finfo(np.float64).max))
