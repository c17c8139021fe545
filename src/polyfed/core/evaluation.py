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
from polyfed.core.examples import Examples, split_rows
from polyfed.core.gathered import PredictCall, half, whole_state
from polyfed.core.inputs import call, logits_of
from polyfed.core.layout import arrange
from polyfed.core.metrics import DEFAULT, Metric, metrics_of

SCORE: Mapping[Task, str] = DEFAULT  # type: ignore[assignment]  # whose keys are those of Task
"""The score of each task where no metrics are asked for; higher is better, and it is the name of the column in tables."""

Metrics = dict[str, float | None]


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
        for batch in split_rows(rows, batch_size):
            x = arrange(model, examples.batch(batch)[0])
            outputs.append(logits_of(call(model, x)).float().cpu())
    return torch.cat(outputs)


def predict_all(model: nn.Module, sets: Sequence[Examples]) -> list[Tensor]:
    """`predict` for several sets of examples; where calls are gathered, together with other clients'."""
    if (waiting := half()) is not None:
        one = all(isinstance(examples.x, Tensor) for examples in sets)  # several parts are not stacked
        found = waiting.result(lambda: PredictCall(model, whole_state(model), sets) if one else None)
        if isinstance(found, list):
            return found
    return [predict(model, examples) for examples in sets]


def scores(
    outputs: Tensor, targets: Tensor, task: Task, metrics: Sequence[Metric] = (), loss: Loss | None = None
) -> Metrics:
    """The metrics and the mean loss ("loss") of these outputs; a value that is not defined or not finite is None.

    Args:
        outputs: of a network, float32 on the CPU, shape (n, ...).
        targets: of the same examples, shape (n, ...).
        task: whose loss it is, unless `loss` is given.
        metrics: in their order; none is the task's own.
        loss: that training minimises: (outputs, targets) -> a number.

    >>> scores(torch.eye(2), torch.tensor([0, 0]), "classification", metrics_of(["accuracy", "auc"], "classification"))
    {'accuracy': 0.5, 'auc': None, 'loss': 0.813...}
    """
    found = {metric.name: metric(outputs, targets) for metric in metrics or metrics_of(None, task)}
    with torch.no_grad():
        value = float((loss_function(task) if loss is None else loss)(outputs, targets))
    return {name: _finite(value) for name, value in {**found, "loss": value}.items()}


def evaluate(
    model: nn.Module, examples: Examples, task: Task, metrics: Sequence[Metric] = (), loss: Loss | None = None
) -> Metrics:
    """The metrics and mean loss of `model` on `examples`; a value that is not defined or not finite is None. Without
    `metrics` the task's own: accuracy; AUC as the mean over the labels that occur both ways; coefficient of determination
    R².

    >>> even = Examples(torch.eye(2), torch.tensor([0, 1]))
    >>> evaluate(nn.Identity(), even, "classification")
    {'accuracy': 1.0, 'loss': 0.313...}
    """
    return scores(predict(model, examples), examples.labels.cpu(), task, metrics, loss)


def client_metrics(
    model: nn.Module, client: Client, prefix: str = "", metrics: Sequence[Metric] = (), loss: Loss | None = None
) -> Metrics:
    """Metrics of a network on all of the client's sets in one row: "accuracy", "val_accuracy", "global_accuracy", ...,
    each name after `prefix`."""
    return client_scores(model, client, metrics, prefix, loss)[0]


def client_scores(
    model: nn.Module, client: Client, metrics: Sequence[Metric] = (), prefix: str = "", loss: Loss | None = None
) -> tuple[Metrics, dict[str, Tensor]]:
    """The same, and the outputs from which those on the client's own sets come: "test" and, if there is one, "val", each
    float32 on the CPU, shape (n, ...).

    Args:
        model, client, metrics, prefix: as above.
        loss: that training minimises, for outputs and targets on the CPU; None is the task's.
    """
    row: Metrics = {}
    kept: dict[str, Tensor] = {}
    sets = {"test": ("", client.test), "val": ("val_", client.val), "global": ("global_", client.global_test)}
    given = {name: (part, data) for name, (part, data) in sets.items() if data is not None}
    found = predict_all(model, [data for _, data in given.values()])
    for (name, (part, data)), outputs in zip(given.items(), found, strict=True):
        row |= {
            f"{prefix}{part}{n}": v for n, v in scores(outputs, data.labels.cpu(), client.task, metrics, loss).items()
        }
        if name != "global":
            kept[name] = outputs
    return row, kept


def out_of_fold(personal: Callable[[Client], nn.Module], client: Client) -> Tensor:
    """What networks that were fitted to validation examples make of others: outputs on all of the client's, in their order,
    float32 on the CPU, (n, ...).

    Args:
        personal: makes the network of a client. It is called for the client with one half of its validation examples (None
            where that half is empty), and the network is used for the other half, before the next is made.
        client: with validation examples. Halves have like classes; rows of one group (`Examples.group`) stay together.
    """
    val = client.val
    assert val is not None  # the caller asks for nothing else
    labels = val.labels.cpu().numpy()
    half: NDArray[np.int64] = np.zeros(len(val), dtype=np.int64)
    if val.group is not None:
        half[:] = np.unique(val.column(val.group), return_inverse=True)[1] % 2
    else:
        half[np.argsort(labels, kind="stable") if labels.ndim == 1 else np.arange(len(val))] = np.arange(len(val)) % 2
    found, places = [], []
    for which in (0, 1):
        rows = [torch.from_numpy(np.flatnonzero(part)).to(val.device) for part in (half == which, half != which)]
        if len(rows[0]):
            rest = val.select(rows[1]) if len(rows[1]) else None
            found.append(predict(personal(replace(client, val=rest)), val.select(rows[0])))
            places.append(rows[0].cpu())
    return torch.cat(found)[torch.cat(places).argsort()]


def split_name(column: str, metrics: Sequence[Metric]) -> tuple[str, str] | None:
    """What comes before the metric in the name of a column, and the metric or "loss"; None for another column. Of two
    metrics that fit, the longer is meant.

    >>> from polyfed.core.metrics import METRICS
    >>> split_name("val_balanced_accuracy", [METRICS["accuracy"], METRICS["balanced_accuracy"]])
    ('val_', 'balanced_accuracy')
    >>> split_name("trained_loss", [METRICS["accuracy"]]), split_name("train_loss", [METRICS["accuracy"]])
    (('trained_', 'loss'), None)
    """
    if column == "train_loss":  # of training, which no metric is
        return None
    for name in sorted((*(metric.name for metric in metrics), "loss"), key=len, reverse=True):
        if column == name or column.endswith(f"_{name}"):
            return column.removesuffix(name), name
    return None


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def summarise(clients: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Statistics over clients of each metric: mean, weighted mean (by training examples), standard deviation, minimum,
    10th and 90th percentile. Clients without a value for a metric do not count in it; without the weight of one that does,
    there is no weighted mean.

    >>> summarise({"a": {"accuracy": 0.5}, "b": {"accuracy": 1.0}}, {"a": 1, "b": 3})["accuracy"]["weighted_mean"]
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
    known = None not in weights
    return {
        "mean": float(v.mean()),
        **({"weighted_mean": float(np.average(v, weights=weights))} if known else {}),  # type: ignore[arg-type]
        "std": float(v.std()),
        "min": float(v.min()),
        "p10": float(np.percentile(v, 10)),
        "p90": float(np.percentile(v, 90)),
    }
