"""Fits logistic and ridge regression to one client's rows of numbers, with penalties chosen by cross-validation."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.evaluation.simple_model import Floats, SimpleModelInputs
from polyfed.core.seeds import derive_seed

LIBRARY = "scikit-learn"
_NEVER_SEEN = float(np.log(1e-6))  # log-probability of a class without an example at the client
_STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # values of C that cross-validation tries
_PENALTIES = np.logspace(-3, 4, 15)  # of ridge regression
_FOLDS = 5
_FEWEST = 20  # examples below which C is 1, without cross-validation
_TRIED_ON = 2000  # most examples on which C is chosen
_FEWEST_IN_CLASS = 3  # examples of a class below which cross-validation ignores the class
_PENALTIES_CHOSEN = 10  # most labels that each have a C of their own; with more, one C is chosen for all


def fit_logistic(table: SimpleModelInputs, outputs: int, seed: int) -> Floats:
    """Fits multinomial logistic regression to a client; returns test log-probabilities, (n, outputs)."""
    strength = _choose_regularisation(table, table.y, seed)
    return spread_to_all_classes(
        log_probabilities_of(_logistic_regression(table.fit, table.y, strength), table.test),
        np.unique(table.y),
        outputs,
    )


def _logistic_regression(x: Floats, y: NDArray[Any], strength: float) -> Any:
    """Fits a logistic regression with C = `strength`; returns None if there is only one class."""
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(y)) < 2:
        return None
    return LogisticRegression(C=strength, max_iter=500).fit(x, y)


def _choose_regularisation(table: SimpleModelInputs, y: NDArray[Any], seed: int) -> float:
    """Chooses C by the lowest log loss in cross-validation; 1 with few examples or a single class."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    rows = np.random.default_rng(seed).permutation(len(y))[:_TRIED_ON]
    classes, counts = np.unique(y[rows], return_counts=True)
    frequent = classes[counts >= _FEWEST_IN_CLASS]
    rows = rows[np.isin(y[rows], frequent)]
    if len(frequent) < 2 or len(rows) < _FEWEST:
        return 1.0
    x, y, groups = table.fit[rows], np.searchsorted(frequent, y[rows]), None
    number = min(_FOLDS, int(np.bincount(y).min()))
    cut: Any = StratifiedKFold(number, shuffle=True, random_state=seed % 2**32)
    if table.groups is not None:
        groups = table.groups[rows]
        number = min(number, len(np.unique(groups)))
        if number < 2:
            return 1.0
        cut = StratifiedGroupKFold(number, shuffle=True, random_state=seed % 2**32)
    folds = [
        (fit, held_out_rows)
        for fit, held_out_rows in cut.split(x, y, groups)
        if len(held_out_rows) and len(np.unique(y[fit])) == len(frequent)
    ]
    if not folds:
        return 1.0

    def loss(c: float) -> float:
        total = 0.0
        for fit, held_out in folds:
            model = LogisticRegression(C=c, max_iter=200).fit(x[fit], y[fit])
            total -= float(log_probabilities_of(model, x[held_out])[np.arange(len(held_out)), y[held_out]].sum())
        return total

    return min(_STRENGTHS, key=loss)


def fit_logistic_by_label(table: SimpleModelInputs, outputs: int, seed: int) -> Floats:
    """Fits a logistic regression for each label to a client; returns test logits, (n, labels).

    A label that is always or never present gets the logit of its share. With many labels, one C is chosen for all, on
    the label that splits the examples most evenly.
    """
    present = (table.y > 0).astype(np.int64)
    common = None
    if outputs > _PENALTIES_CHOSEN:
        even = int(np.abs(present.mean(axis=0) - 0.5).argmin())
        common = _choose_regularisation(table, present[:, even], derive_seed(seed, even))
    logits = np.tile(label_share_logits(table.y), (len(table.test), 1))
    for k in range(outputs):
        strength = _choose_regularisation(table, present[:, k], derive_seed(seed, k)) if common is None else common
        model = _logistic_regression(table.fit, present[:, k], strength)
        if model is not None:
            logits[:, k] = model.decision_function(table.test)
    return logits


def fit_ridge(table: SimpleModelInputs, outputs: int, seed: int) -> Floats:
    """Fits ridge regression to a client's data; returns predictions for test examples, (n, outputs)."""
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import GroupKFold

    y = table.y.astype(np.float64).reshape(len(table.y), outputs)
    if len(y) < 3:  # leave-one-out would fit a line through one point
        return np.tile(y.mean(axis=0), (len(table.test), 1))
    folds = None  # leave-one-out
    if table.groups is not None and (number := min(_FOLDS, len(np.unique(table.groups)))) > 1:
        folds = list(GroupKFold(number).split(table.fit, y, table.groups))
    model = RidgeCV(alphas=_PENALTIES, cv=folds, scoring=None if folds is None else "neg_mean_squared_error")
    return np.asarray(model.fit(table.fit, y).predict(table.test), dtype=np.float64).reshape(len(table.test), outputs)


# -- shared helpers -------------------------------------------------------------------------------------------------


def log_probabilities_of(model: Any, x: Floats) -> Floats:
    """Returns a fitted model's log-probability of each class for the inputs `x`, shape (n, classes).

    They are computed from the model's scores, since log(probability) may be infinite.
    """
    if model is None:
        return np.zeros((len(x), 1))
    scores = np.asarray(model.decision_function(x), dtype=np.float64)
    if scores.ndim == 1:
        scores = np.stack([np.zeros_like(scores), scores], axis=1)
    return np.asarray(torch.from_numpy(scores).log_softmax(1).numpy())


def spread_to_all_classes(log_probabilities: Floats, classes: NDArray[Any], outputs: int) -> Floats:
    """Places a client's class columns among all classes; absent ones get a very small probability."""
    table = np.full((len(log_probabilities), outputs), _NEVER_SEEN)
    table[:, classes] = log_probabilities
    return table


def label_share_logits(labels: NDArray[Any]) -> Floats:
    """Returns, for each label, the logit of the share of examples that have the label.

    Half a pseudo-example of either value keeps the logit finite.
    """
    positive = (labels > 0).sum(axis=0) + 0.5
    return np.asarray(np.log(positive) - np.log(len(labels) + 1 - positive))
