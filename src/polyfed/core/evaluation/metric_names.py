"""Names the metrics that polyfed's tasks have, without torch, so that the command line refuses other names at once."""

import re
from collections.abc import Iterable
from typing import Any

from polyfed.core.errors import UserError, did_you_mean

METRIC_NAMES = (
    "accuracy", "auc", "average_precision", "balanced_accuracy", "brier", "c_index", "dice", "document_perplexity", "ece",
    "f1", "forecast_mae", "forecast_rmse", "hd95", "iou", "log_loss", "mae", "mase", "perplexity", "r2", "rmse",
    "sensitivity_at_90", "token_accuracy", "uno_c_index",
)  # fmt: skip
"""Names the metrics of all tasks with their default options."""
_WITH_OPTIONS = re.compile(r"sensitivity_at_.+|(mae|rmse|mase)_at_\d+|entity_f1|integrated_brier")
_OTHER_NAMES = {
    "acc": "accuracy", "auroc": "auc", "rocauc": "auc", "rocaucscore": "auc", "f1score": "f1", "auprc": "average_precision",
    "prauc": "average_precision", "logloss": "log_loss", "crossentropy": "log_loss", "nll": "log_loss",
    "brierscore": "brier", "sensitivity": "sensitivity_at_90", "concordance": "c_index", "mse": "rmse", "r2score": "r2",
}  # fmt: skip
"""Name that a metric has elsewhere, in small letters and without "_" -> the nearest that there is here, for suggestions."""


def describe_unknown_metric(name: str, names: Iterable[str] = METRIC_NAMES) -> str:
    """Returns a sentence about a name that no metric has, with the nearest of `names`.

    >>> describe_unknown_metric("AUROC")[:47]
    "unknown metric 'AUROC'; did you mean auc? Choic"
    """
    nearest = _OTHER_NAMES.get(re.sub("[ _-]", "", name.lower()), name)
    return f"unknown metric {name!r}; {did_you_mean(nearest, names)}"


def check_metric_names(names: Iterable[Any]) -> None:
    """Raises a `UserError` about the first name that no metric of polyfed can have; `module:name` is a user's own."""
    for name in names:
        if isinstance(name, str) and ":" not in name and name not in METRIC_NAMES and not _WITH_OPTIONS.fullmatch(name):
            raise UserError(describe_unknown_metric(name))


def split_metric_column(column: str, metric_names: Iterable[str]) -> tuple[str, str] | None:
    """Splits a column's name into (prefix, metric or "loss"); None if it holds no metric.

    If two metrics match, the longer name counts.

    >>> split_metric_column("val_balanced_accuracy", ["accuracy", "balanced_accuracy"])
    ('val_', 'balanced_accuracy')
    >>> split_metric_column("trained_loss", ["accuracy"]), split_metric_column("train_loss", ["accuracy"])
    (('trained_', 'loss'), None)
    """
    if column == "train_loss":  # a value of training, not of an evaluation
        return None
    for name in sorted((*metric_names, "loss"), key=len, reverse=True):
        if column == name or column.endswith(f"_{name}"):
            return column.removesuffix(name), name
    return None
