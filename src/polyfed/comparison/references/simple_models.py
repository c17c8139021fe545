"""Fits scikit-learn's simple models on each client's own data: logistic or ridge regression, and gradient-boosted
trees.

They use the examples that the client's network may use, for training and validation, and choose their penalty by
cross-validation on these. None may take minutes; models that would are left out or fitted to fewer examples, and the
results say so.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.algorithm import Client, Task
from polyfed.core.seeds import derive_seed

Floats = NDArray[np.float64]
_NEVER_SEEN = float(np.log(1e-6))  # log-probability of a class without an example at the client
_STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # values of C that cross-validation tries
_PENALTIES = np.logspace(-3, 4, 15)  # of ridge regression
_FOLDS = 5
_FEWEST = 20  # examples below which C is 1, without cross-validation
_FEW = 1000  # examples below which there are fewer trees
_TRIED_ON = 2000  # most examples on which C is chosen
_FEWEST_IN_CLASS = 3  # examples of a class below which cross-validation ignores the class
_ROUNDING = 1e-9  # spread relative to the mean below which a feature is constant
_TOO_MUCH = 10_000  # clients x outputs x features from which on trees take longer than half a minute
_LABELS = 200  # labels above which one model per label takes minutes
_PENALTIES_CHOSEN = 10  # most labels that each have a C of their own; with more, one C is chosen for all
_EXAMPLES = 10_000  # most examples of a client that are fitted
_NUMBERS = 20_000_000  # most examples x features x outputs of a client in a linear model


@final
@dataclass(frozen=True)
class SimpleModelOutputs:
    """Holds the outputs of every client's simple models on its test examples.

    Attributes:
        outputs_by_model: name -> (description, client id -> outputs on its test examples, shape (n, outputs), in the
            form of a network's).
        left_out_notes: sentences about models that were not fitted.
    """

    outputs_by_model: Mapping[str, tuple[str, Mapping[str, Floats]]]
    left_out_notes: tuple[str, ...] = ()


def fit_simple_models(clients: list[Client], outputs: Mapping[str, int], seed: int) -> SimpleModelOutputs:
    """Fits logistic or ridge regression, and gradient-boosted trees, on each client's own examples, and returns their
    outputs on the test examples.

    Args:
        clients: of one task.
        outputs: client id -> number of outputs of its networks.
        seed: of cross-validation, trees, and the draw of examples where there are too many.
    """
    task = clients[0].task
    lines, trees = _NAMES[task]
    tables = {c.id: table for c in clients if (table := _ClientInputs.from_client(c)) is not None}
    if len(tables) < len(clients):
        return SimpleModelOutputs(
            {},
            (
                f"Inputs are not rows of finite numbers at every site, so that {lines} and {trees} alone "
                "are not among the alternatives.",
            ),
        )
    if task == "multilabel" and max(outputs.values()) > _LABELS:
        return SimpleModelOutputs(
            {},
            (
                f"There are more than {_LABELS} labels, so that {lines} and {trees} alone, with a model a label, "
                "are not among the alternatives.",
            ),
        )
    width = {i: table.fit.shape[1] for i, table in tables.items()}
    max_examples = {i: max(_FEW, min(_EXAMPLES, _NUMBERS // (outputs[i] * max(width[i], 1)))) for i in tables}
    work = sum(outputs[i] * width[i] for i in tables)
    models: dict[str, tuple[str, Mapping[str, Floats]]] = {}
    left_out: list[str] = []
    with _quiet():
        for name, words, fits in ((_KEYS[task], lines, _LINES), ("gradient_boosting", trees, _TREES)):
            if fits is _TREES and work > _TOO_MUCH:
                left_out.append(f"Gradient boosting would take minutes for {work} features and outputs of all sites, and is "
                                "not among the alternatives.")  # fmt: skip
                continue
            bounds = max_examples if fits is _LINES else dict.fromkeys(tables, _EXAMPLES)
            bounded_tables = {
                i: table.subsample(bounds[i], derive_seed(seed, "examples", i)) for i, table in tables.items()
            }
            purpose = "linear" if fits is _LINES else "trees"
            client_outputs = {
                i: fits[task](table, outputs[i], derive_seed(seed, purpose, i)) for i, table in bounded_tables.items()
            }
            fewer = any(len(bounded_tables[i].fit) < len(tables[i].fit) for i in tables)
            bound = f", of these at most {max(len(table.fit) for table in bounded_tables.values()):,}" if fewer else ""
            whose = f"fitted by each client on its own training and validation examples{bound}"
            models[name] = (f"scikit-learn's {words}, {whose}", client_outputs)
    return SimpleModelOutputs(models, tuple(left_out))


@final
@dataclass(frozen=True, eq=False)
class _ClientInputs:
    """Holds a client's examples for simple models, with inputs standardised by the examples for fitting.

    Attributes:
        fit: inputs for fitting, shape (n, features).
        y: targets of these.
        test: inputs of the test examples.
        groups: group of each example for fitting; rows of a group stay together in cross-validation. None without groups.
    """

    fit: Floats
    y: NDArray[Any]
    test: Floats
    groups: NDArray[Any] | None

    @classmethod
    def from_client(cls, client: Client) -> "_ClientInputs | None":
        """Reads a client's training, validation and test examples; None if its inputs are not rows of finite numbers."""
        sets = [client.train, client.test] if client.val is None else [client.train, client.val, client.test]
        for part in sets:
            x = part.batch(torch.zeros(1, dtype=torch.int64, device=part.device))[0]
            if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
                return None
        inputs, targets = [], []
        for part in sets:
            x, y = part.batch(torch.arange(len(part), device=part.device))
            inputs.append(x.cpu().double().numpy())
            targets.append(y.cpu().numpy())
        fit, test = np.concatenate(inputs[:-1]), inputs[-1]
        if not (np.isfinite(fit).all() and np.isfinite(test).all()):
            return None
        mean, spread = fit.mean(axis=0), fit.std(axis=0)
        spread[spread <= _ROUNDING * np.abs(mean)] = 1.0
        names = [part.column(part.group) for part in sets[:-1] if part.group is not None]
        groups = np.concatenate(names) if len(names) == len(sets) - 1 else None
        return cls((fit - mean) / spread, np.concatenate(targets[:-1]), (test - mean) / spread, groups)

    def subsample(self, number: int, seed: int) -> "_ClientInputs":
        """Returns these inputs with at most `number` examples for fitting, drawn at random."""
        if len(self.fit) <= number:
            return self
        rows = np.random.default_rng(seed).permutation(len(self.fit))[:number]
        return _ClientInputs(
            self.fit[rows], self.y[rows], self.test, None if self.groups is None else self.groups[rows]
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Runs scikit-learn in one thread and without convergence warnings.

    One thread as everywhere in a federation; a fit that stops early is good enough for a reference.
    """
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn needs it

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


# -- linear models ----------------------------------------------------------------------------------------------------------


def _fit_logistic(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    """Fits a multinomial logistic regression; returns its log-probabilities for the test examples, shape (n, outputs)."""
    strength = _strength(table, table.y, seed)
    return _spread_to_all_classes(
        _log_probabilities(_logistic_regression(table.fit, table.y, strength), table.test), np.unique(table.y), outputs
    )


def _logistic_regression(x: Floats, y: NDArray[Any], strength: float) -> Any:
    """Fits a logistic regression with C = `strength`; returns None if there is only one class."""
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(y)) < 2:
        return None
    return LogisticRegression(C=strength, max_iter=500).fit(x, y)


def _strength(table: _ClientInputs, y: NDArray[Any], seed: int) -> float:
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
            total -= float(_log_probabilities(model, x[held_out])[np.arange(len(held_out)), y[held_out]].sum())
        return total

    return min(_STRENGTHS, key=loss)


def _fit_logistic_by_label(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    """Fits one logistic regression for each label; returns logits for the test examples, shape (n, labels).

    A label that is always or never present gets the logit of its share. With many labels, one C is chosen for all, on
    the label that splits the examples most evenly.
    """
    present = (table.y > 0).astype(np.int64)
    common = None
    if outputs > _PENALTIES_CHOSEN:
        even = int(np.abs(present.mean(axis=0) - 0.5).argmin())
        common = _strength(table, present[:, even], derive_seed(seed, even))
    logits = np.tile(label_share_logits(table.y), (len(table.test), 1))
    for k in range(outputs):
        strength = _strength(table, present[:, k], derive_seed(seed, k)) if common is None else common
        model = _logistic_regression(table.fit, present[:, k], strength)
        if model is not None:
            logits[:, k] = model.decision_function(table.test)
    return logits


def _fit_ridge(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    """Fits a ridge regression; returns its predictions for the test examples, shape (n, outputs)."""
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


# -- trees ------------------------------------------------------------------------------------------------------------


def _fit_trees(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    """Fits gradient-boosted trees; returns their log-probabilities for the test examples, shape (n, outputs)."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    classes = np.unique(table.y)
    model = None
    if len(classes) > 1:
        model = HistGradientBoostingClassifier(**_tree_options(table, seed)).fit(table.fit, table.y)
    return _spread_to_all_classes(_log_probabilities(model, table.test), classes, outputs)


def _tree_options(table: _ClientInputs, seed: int) -> dict[str, Any]:
    """Returns the options of small gradient-boosted trees.

    Few examples get fewer trees, since more would only make them overconfident, and smaller leaves, a tenth of the
    examples: scikit-learn's 20 would leave 30 examples without any split.
    """
    number = len(table.fit)
    return {
        "max_iter": 50 if number < _FEW else 100, "max_leaf_nodes": 8, "min_samples_leaf": max(1, min(20, number // 10)),
        "early_stopping": False, "random_state": seed % 2**32,
    }  # fmt: skip


def _fit_trees_by_label(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    """Fits gradient-boosted trees for each label; returns logits for the test examples, shape (n, labels)."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    present = (table.y > 0).astype(np.int64)
    logits = np.tile(label_share_logits(table.y), (len(table.test), 1))
    for k in range(outputs):
        if 0 < present[:, k].mean() < 1:
            model = HistGradientBoostingClassifier(**_tree_options(table, seed)).fit(table.fit, present[:, k])
            logits[:, k] = model.decision_function(table.test)
    return logits


def _fit_regression_trees(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    """Fits gradient-boosted trees for each target; returns predictions for the test examples, shape (n, outputs)."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    y = table.y.astype(np.float64).reshape(len(table.y), outputs)
    if len(y) < 3:
        return np.tile(y.mean(axis=0), (len(table.test), 1))
    models = (
        HistGradientBoostingRegressor(**_tree_options(table, seed)).fit(table.fit, y[:, k]) for k in range(outputs)
    )
    return np.stack([model.predict(table.test) for model in models], axis=1)


# -- shared helpers -------------------------------------------------------------------------------------------------


def _log_probabilities(model: Any, x: Floats) -> Floats:
    """Returns the log-probabilities of the model's classes, shape (n, classes).

    They are computed from the model's scores, since log(probability) may be infinite.
    """
    if model is None:
        return np.zeros((len(x), 1))
    scores = np.asarray(model.decision_function(x), dtype=np.float64)
    if scores.ndim == 1:
        scores = np.stack([np.zeros_like(scores), scores], axis=1)
    return np.asarray(torch.from_numpy(scores).log_softmax(1).numpy())


def _spread_to_all_classes(log_probabilities: Floats, classes: NDArray[Any], outputs: int) -> Floats:
    """Places the columns of a client's own classes among those of all clients; other classes get a very small
    probability."""
    table = np.full((len(log_probabilities), outputs), _NEVER_SEEN)
    table[:, classes] = log_probabilities
    return table


def label_share_logits(labels: NDArray[Any]) -> Floats:
    """Returns, for each label, the logit of the share of examples that have it.

    Half a pseudo-example of either value keeps the logit finite.
    """
    positive = (labels > 0).sum(axis=0) + 0.5
    return np.asarray(np.log(positive) - np.log(len(labels) + 1 - positive))


_Fit = Callable[[_ClientInputs, int, int], Floats]
_LINES: Mapping[Task, _Fit] = {
    "classification": _fit_logistic,
    "multilabel": _fit_logistic_by_label,
    "regression": _fit_ridge,
}
_TREES: Mapping[Task, _Fit] = {
    "classification": _fit_trees,
    "multilabel": _fit_trees_by_label,
    "regression": _fit_regression_trees,
}
_KEYS: Mapping[Task, str] = {
    "classification": "logistic_regression",
    "multilabel": "logistic_regression",
    "regression": "ridge",
}
_NAMES: Mapping[Task, tuple[str, str]] = {
    task: (f"{name.replace('_regression', '')} regression", "gradient-boosted trees") for task, name in _KEYS.items()
}
