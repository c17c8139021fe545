"""Fits gradient-boosted trees to one client's rows of numbers."""

from typing import Any

import numpy as np

from polyfed.core.evaluation.simple_model import Floats, SimpleModelInputs
from polyfed.tasks.simple_models.linear_models import label_share_logits, log_probabilities_of, spread_to_all_classes

_FEW = 1000  # examples below which there are fewer trees


def fit_trees(table: SimpleModelInputs, outputs: int, seed: int) -> Floats:
    """Fits gradient-boosted trees to a client's data; returns test log-probabilities, (n, outputs)."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    classes = np.unique(table.y)
    model = None
    if len(classes) > 1:
        model = HistGradientBoostingClassifier(**_tree_options(table, seed)).fit(table.fit, table.y)
    return spread_to_all_classes(log_probabilities_of(model, table.test), classes, outputs)


def _tree_options(table: SimpleModelInputs, seed: int) -> dict[str, Any]:
    """Returns the options of small gradient-boosted trees.

    Few examples get fewer trees, since more would only make them overconfident, and smaller leaves, a tenth of the
    examples: scikit-learn's 20 would leave 30 examples without any split.
    """
    number = len(table.fit)
    return {
        "max_iter": 50 if number < _FEW else 100, "max_leaf_nodes": 8, "min_samples_leaf": max(1, min(20, number // 10)),
        "early_stopping": False, "random_state": seed % 2**32,
    }  # fmt: skip


def fit_trees_by_label(table: SimpleModelInputs, outputs: int, seed: int) -> Floats:
    """Fits gradient-boosted trees for each label to a client's data; returns test logits, (n, labels)."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    present = (table.y > 0).astype(np.int64)
    logits = np.tile(label_share_logits(table.y), (len(table.test), 1))
    for k in range(outputs):
        if 0 < present[:, k].mean() < 1:
            model = HistGradientBoostingClassifier(**_tree_options(table, seed)).fit(table.fit, present[:, k])
            logits[:, k] = model.decision_function(table.test)
    return logits


def fit_regression_trees(table: SimpleModelInputs, outputs: int, seed: int) -> Floats:
    """Fits gradient-boosted trees for each target to a client; returns test predictions, (n, outputs)."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    y = table.y.astype(np.float64).reshape(len(table.y), outputs)
    if len(y) < 3:
        return np.tile(y.mean(axis=0), (len(table.test), 1))
    models = (
        HistGradientBoostingRegressor(**_tree_options(table, seed)).fit(table.fit, y[:, k]) for k in range(outputs)
    )
    return np.stack([model.predict(table.test) for model in models], axis=1)
