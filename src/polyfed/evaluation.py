"""Losses and scores of the tasks, evaluation of a network on examples, and summaries over clients."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.algorithm import Client, Task
from polyfed.data.examples import Examples, split_rows
from polyfed.layout import arrange

SCORE: Mapping[Task, str] = {"classification": "accuracy", "multilabel": "auc", "regression": "r2"}
"""The score of each task; higher is better, and it is the name of the column in tables."""

Metrics = dict[str, float | None]


def loss_function(task: Task, label_smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss of a batch: cross-entropy, binary cross-entropy on logits, or half the mean squared error."""
    if task == "classification":
        return partial(F.cross_entropy, label_smoothing=label_smoothing)
    return F.binary_cross_entropy_with_logits if task == "multilabel" else _half_squared_error


def _half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * F.mse_loss(outputs, targets)


def predict(model: nn.Module, examples: Examples, batch_size: int = 128) -> Tensor:
    """Outputs of `model` in evaluation mode for all examples, in their order, float32 on the CPU, shape (n, outputs)."""
    model.eval()
    rows = torch.arange(len(examples), device=examples.x.device)
    outputs = []
    with torch.no_grad():  # not inference mode: a network that caches a tensor here may use it in training
        for batch in split_rows(rows, batch_size):
            x = arrange(model, examples.batch(batch)[0])
            outputs.append(model(x).float().cpu())
    return torch.cat(outputs)


def evaluate(model: nn.Module, examples: Examples, task: Task) -> Metrics:
    """The task's score and mean loss of `model` on `examples`; a value that is not defined or not finite is None.

    Scores: accuracy; AUC as the mean over the labels that occur both ways; coefficient of determination R².

    >>> even = Examples(torch.eye(2), torch.tensor([0, 1]))
    >>> evaluate(nn.Identity(), even, "classification")
    {'accuracy': 1.0, 'loss': 0.313...}
    """
    outputs, targets = predict(model, examples), examples.labels.cpu()
    loss = float(loss_function(task)(outputs, targets))
    if task == "classification":
        score = float((outputs.argmax(1) == targets).double().mean())
    elif task == "multilabel":
        score = mean_auc(outputs, targets)
    else:
        spread = float(((targets - targets.mean(0)) ** 2).double().sum())
        score = 1 - float(((targets - outputs) ** 2).double().sum()) / spread if spread else float("nan")
    return {SCORE[task]: _finite(score), "loss": _finite(loss)}


def client_metrics(model: nn.Module, client: Client, prefix: str = "") -> Metrics:
    """Metrics of a network on all of the client's sets in one row: "accuracy", "val_accuracy", "balanced_accuracy", ...,
    each name after `prefix`."""
    sets = {"": client.test, "val_": client.val, "balanced_": client.balanced_test}
    return {
        f"{prefix}{part}{metric}": value
        for part, data in sets.items()
        if data is not None
        for metric, value in evaluate(model, data, client.task).items()
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def mean_auc(outputs: Tensor, targets: Tensor) -> float:
    """Mean over labels of the area under the ROC curve; labels with one value only are left out, NaN if all are.

    >>> mean_auc(torch.tensor([[0.1, 1.0], [0.9, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    1.0
    """
    from sklearn.metrics import roc_auc_score  # takes two seconds to import, which only multi-label tasks should pay

    if not bool(torch.isfinite(outputs).all()):
        return float("nan")
    both = [k for k in range(targets.shape[1]) if 0 < float(targets[:, k].sum()) < len(targets)]
    return float(np.mean([roc_auc_score(targets[:, k], outputs[:, k]) for k in both])) if both else float("nan")


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
