"""Losses and scores of the tasks, evaluation of a network on examples, and summaries over clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from polyfed.core.algorithm import Client, Loss, Task
from polyfed.core.evaluation.metrics import DEFAULT_METRICS, Metric, resolve_metrics
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.examples.pytree import call_network, logits_of
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.vectorized.deferred_calls import PredictCall, current_deferred_run, full_state

DEFAULT_METRIC: Mapping[Task, str] = DEFAULT_METRICS  # type: ignore[assignment]  # whose keys are those of Task
"""The score of each task where no metrics are asked for; higher is better, and it is the name of the column in tables."""

MetricValues = dict[str, float | None]


def loss_function(task: Task, label_smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss of a batch: cross-entropy, binary cross-entropy on logits, or half the mean squared error."""
    if task == "classification":
        return partial(F.cross_entropy, label_smoothing=label_smoothing)
    return F.binary_cross_entropy_with_logits if task == "multilabel" else _half_squared_error


def _half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * F.mse_loss(outputs, targets)


def predict(model: nn.Module, examples: Examples, batch_size: int = 128) -> Tensor:
    """Outputs (logits) of `model` in evaluation mode for all examples, in their order, float32 on the CPU, (n, outputs)."""
    model.eval()
    rows = torch.arange(len(examples), device=examples.device)
    outputs = []
    with torch.no_grad():  # not inference mode: a network that caches a tensor here may use it in training
        for batch in split_into_batches(rows, batch_size):
            x = to_preferred_memory_format(model, examples.batch(batch)[0])
            outputs.append(logits_of(call_network(model, x)).float().cpu())
    return torch.cat(outputs)


def predict_sets(model: nn.Module, sets: Sequence[Examples]) -> list[Tensor]:
    """`predict` for several sets of examples; where calls are gathered, together with other clients'."""
    if (deferred_run := current_deferred_run()) is not None:
        single_tensors = all(isinstance(examples.x, Tensor) for examples in sets)  # several parts are not stacked
        outputs = deferred_run.next_result(
            lambda: PredictCall(model, full_state(model), sets) if single_tensors else None
        )
        if isinstance(outputs, list):
            return outputs
    return [predict(model, examples) for examples in sets]


def compute_metrics(
    outputs: Tensor, targets: Tensor, task: Task, metrics: Sequence[Metric] = (), loss: Loss | None = None
) -> MetricValues:
    """The metrics and the mean loss ("loss") of these outputs; a value that is not defined or not finite is None.

    Args:
        outputs: of a network, float32 on the CPU, shape (n, ...).
        targets: of the same examples, shape (n, ...).
        task: whose loss it is, unless `loss` is given.
        metrics: in their order; none is the task's own.
        loss: that training minimises: (outputs, targets) -> a number.

    >>> compute_metrics(torch.eye(2), torch.tensor([0, 0]), "classification",
    ...                 resolve_metrics(["accuracy", "auc"], "classification"))
    {'accuracy': 0.5, 'auc': None, 'loss': 0.813...}
    """
    values = {metric.name: metric(outputs, targets) for metric in metrics or resolve_metrics(None, task)}
    with torch.no_grad():
        value = float((loss_function(task) if loss is None else loss)(outputs, targets))
    return {name: _finite_or_none(value) for name, value in {**values, "loss": value}.items()}


def evaluate(
    model: nn.Module, examples: Examples, task: Task, metrics: Sequence[Metric] = (), loss: Loss | None = None
) -> MetricValues:
    """The metrics and mean loss of `model` on `examples`; a value that is not defined or not finite is None. Without
    `metrics` the task's own: accuracy; AUC as the mean over the labels that occur both ways; coefficient of determination
    R².

    >>> even = Examples(torch.eye(2), torch.tensor([0, 1]))
    >>> evaluate(nn.Identity(), even, "classification")
    {'accuracy': 1.0, 'loss': 0.313...}
    """
    return compute_metrics(predict(model, examples), examples.labels.cpu(), task, metrics, loss)


def evaluate_client(
    model: nn.Module, client: Client, prefix: str = "", metrics: Sequence[Metric] = (), loss: Loss | None = None
) -> MetricValues:
    """Metrics of a network on all of the client's sets in one row: "accuracy", "val_accuracy", "global_accuracy", ...,
    each name after `prefix`."""
    return evaluate_client_with_outputs(model, client, metrics, prefix, loss)[0]


def evaluate_client_with_outputs(
    model: nn.Module, client: Client, metrics: Sequence[Metric] = (), prefix: str = "", loss: Loss | None = None
) -> tuple[MetricValues, dict[str, Tensor]]:
    """The same, and the outputs from which those on the client's own sets come: "test" and, if there is one, "val", each
    float32 on the CPU, shape (n, ...).

    Args:
        model, client, metrics, prefix: as above.
        loss: that training minimises, for outputs and targets on the CPU; None is the task's.
    """
    row: MetricValues = {}
    outputs_by_set: dict[str, Tensor] = {}
    sets = {"test": ("", client.test), "val": ("val_", client.val), "global": ("global_", client.global_test)}
    nonempty_sets = {name: (set_prefix, data) for name, (set_prefix, data) in sets.items() if data is not None}
    all_outputs = predict_sets(model, [data for _, data in nonempty_sets.values()])
    for (name, (set_prefix, data)), outputs in zip(nonempty_sets.items(), all_outputs, strict=True):
        row |= {
            f"{prefix}{set_prefix}{n}": v
            for n, v in compute_metrics(outputs, data.labels.cpu(), client.task, metrics, loss).items()
        }
        if name != "global":
            outputs_by_set[name] = outputs
    return row, outputs_by_set


def out_of_fold_outputs(build_network: Callable[[Client], nn.Module], client: Client) -> Tensor:
    """What networks that were fitted to validation examples make of others: outputs on all of the client's, in their order,
    float32 on the CPU, (n, ...).

    Args:
        build_network: makes the network of a client. It is called for the client with one half of its validation
            examples (None
            where that half is empty), and the network is used for the other half, before the next is made.
        client: with validation examples. Halves have like classes; rows of one group (`Examples.group`) stay together.
    """
    val = client.val
    assert val is not None  # the caller asks for nothing else
    labels = val.labels.cpu().numpy()
    fold_of_row: NDArray[np.int64] = np.zeros(len(val), dtype=np.int64)
    if val.group is not None:
        fold_of_row[:] = np.unique(val.column(val.group), return_inverse=True)[1] % 2
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
            outputs.append(predict(build_network(replace(client, val=fitting_examples)), val.select(rows[0])))
            places.append(rows[0].cpu())
    return torch.cat(outputs)[torch.cat(places).argsort()]


def split_metric_column(column: str, metrics: Sequence[Metric]) -> tuple[str, str] | None:
    """What comes before the metric in the name of a column, and the metric or "loss"; None for another column. Of two
    metrics that fit, the longer is meant.

    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> split_metric_column("val_balanced_accuracy", [METRICS["accuracy"], METRICS["balanced_accuracy"]])
    ('val_', 'balanced_accuracy')
    >>> split_metric_column("trained_loss", [METRICS["accuracy"]]), split_metric_column("train_loss", [METRICS["accuracy"]])
    (('trained_', 'loss'), None)
    """
    if column == "train_loss":  # of training, which no metric is
        return None
    for name in sorted((*(metric.name for metric in metrics), "loss"), key=len, reverse=True):
        if column == name or column.endswith(f"_{name}"):
            return column.removesuffix(name), name
    return None


def _finite_or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


def summarise_clients(
    clients: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Statistics over clients of each metric: mean, weighted mean (by training examples), standard deviation, minimum,
    10th and 90th percentile. Clients without a value for a metric do not count in it; without the weight of one that does,
    there is no weighted mean.

    >>> summarise_clients({"a": {"accuracy": 0.5}, "b": {"accuracy": 1.0}}, {"a": 1, "b": 3})["accuracy"]["weighted_mean"]
    0.875
    """
    names = sorted({name for metrics in clients.values() for name in metrics})
    summary = {}
    for name in names:
        ids = sorted(i for i, metrics in clients.items() if metrics.get(name) is not None)
        if ids:
            summary[name] = _statistics([clients[i][name] for i in ids], [weights.get(i) for i in ids])
    return summary


def _statistics(values: Sequence[float], weights: Sequence[float | None]) -> dict[str, float]:
    v = np.asarray(values, dtype=np.float64)
    has_weights = None not in weights
    return {
        "mean": float(v.mean()),
        **({"weighted_mean": float(np.average(v, weights=weights))} if has_weights else {}),  # type: ignore[arg-type]
        "std": float(v.std()),
        "min": float(v.min()),
        "p10": float(np.percentile(v, 10)),
        "p90": float(np.percentile(v, 90)),
    }
