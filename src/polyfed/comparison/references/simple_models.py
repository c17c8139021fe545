"""Models that a site fits by itself in moments: logistic or ridge regression, and gradient-boosted trees, of scikit-learn.

They take what the site's network may take too, its training and validation examples, and choose their penalty by
cross-validation on these. None may take minutes: what is left out or bounded for that is told.
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
_NEVER_SEEN = float(np.log(1e-6))  # log-probability of a class that a client has no example of
_STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # values of C that cross-validation tries
_PENALTIES = np.logspace(-3, 4, 15)  # of ridge regression
_FOLDS = 5
_FEWEST = 20  # examples below which C is not chosen, but 1
_FEW = 1000  # examples below which there are fewer trees
_TRIED_ON = 2000  # examples, at most, on which C is chosen
_FEWEST_IN_CLASS = 3  # examples of a class below which it does not count when C is chosen
_ROUNDING = 1e-9  # of its mean, below which a feature does not vary
_TOO_MUCH = 10_000  # clients x outputs x features from which on trees take longer than half a minute
_LABELS = 200  # from which on a model a label takes minutes
_PENALTIES_CHOSEN = 10  # labels, at most, that each have a C of their own; of more, one is chosen for all
_EXAMPLES = 10_000  # of a client, at most, that are fitted
_NUMBERS = 20_000_000  # examples x features x outputs of a client, at most, that a line is fitted to


@final
@dataclass(frozen=True)
class FittedSimpleModels:
    """Simple models of all clients.

    Attributes:
        models: name -> the sentence about it, and by client its outputs on the test examples, shape (n, outputs), as
            networks give them.
        left_out: sentences on what was not fitted.
    """

    models: Mapping[str, tuple[str, Mapping[str, Floats]]]
    left_out: tuple[str, ...] = ()


def fit_simple_models(clients: list[Client], outputs: Mapping[str, int], seed: int) -> FittedSimpleModels:
    """Of each client, as if it were alone.

    Args:
        clients: of one task.
        outputs: of each client, how many its networks have.
        seed: of cross-validation, trees, and which examples are taken of too many.
    """
    task = clients[0].task
    lines, trees = _NAMES[task]
    tables = {c.id: table for c in clients if (table := _ClientInputs.from_client(c)) is not None}
    if len(tables) < len(clients):
        return FittedSimpleModels(
            {},
            (
                f"Inputs are not rows of finite numbers at every site, so that {lines} and {trees} alone "
                "are not among the alternatives.",
            ),
        )
    if task == "multilabel" and max(outputs.values()) > _LABELS:
        return FittedSimpleModels(
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
    return FittedSimpleModels(models, tuple(left_out))


@final
@dataclass(frozen=True, eq=False)
class _ClientInputs:
    """A client's inputs, standardised by the examples for fitting: `fit` with the targets `y`, and `test`; `groups` of the
    examples for fitting, whose rows stay together in cross-validation."""

    fit: Floats
    y: NDArray[Any]
    test: Floats
    groups: NDArray[Any] | None

    @classmethod
    def from_client(cls, client: Client) -> "_ClientInputs | None":
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
        """The same with so many examples for fitting, drawn at random."""
        if len(self.fit) <= number:
            return self
        rows = np.random.default_rng(seed).permutation(len(self.fit))[:number]
        return _ClientInputs(
            self.fit[rows], self.y[rows], self.test, None if self.groups is None else self.groups[rows]
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """One thread, as everywhere in a federation; and a fit that is stopped early is good enough for a yardstick."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn needs it

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


# -- lines ------------------------------------------------------------------------------------------------------------


def _fit_logistic(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    strength = _strength(table, table.y, seed)
    return _spread_to_all_classes(
        _log_probabilities(_logistic_regression(table.fit, table.y, strength), table.test), np.unique(table.y), outputs
    )


def _logistic_regression(x: Floats, y: NDArray[Any], strength: float) -> Any:
    """Logistic regression; None where there is one class."""
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(y)) < 2:
        return None
    return LogisticRegression(C=strength, max_iter=500).fit(x, y)


def _strength(table: _ClientInputs, y: NDArray[Any], seed: int) -> float:
    """The C of the least log loss in cross-validation; 1 with few examples, or of one class."""
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
    """A logistic regression a label; the share of a label that is always or never there. Of many labels, C is chosen for
    that which divides the examples most evenly."""
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
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import GroupKFold

    y = table.y.astype(np.float64).reshape(len(table.y), outputs)
    if len(y) < 3:  # leaving one out leaves a line through one point
        return np.tile(y.mean(axis=0), (len(table.test), 1))
    folds = None  # leaves one out
    if table.groups is not None and (number := min(_FOLDS, len(np.unique(table.groups)))) > 1:
        folds = list(GroupKFold(number).split(table.fit, y, table.groups))
    model = RidgeCV(alphas=_PENALTIES, cv=folds, scoring=None if folds is None else "neg_mean_squared_error")
    return np.asarray(model.fit(table.fit, y).predict(table.test), dtype=np.float64).reshape(len(table.test), outputs)


# -- trees ------------------------------------------------------------------------------------------------------------


def _fit_trees(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    from sklearn.ensemble import HistGradientBoostingClassifier

    classes = np.unique(table.y)
    model = None
    if len(classes) > 1:
        model = HistGradientBoostingClassifier(**_tree_options(table, seed)).fit(table.fit, table.y)
    return _spread_to_all_classes(_log_probabilities(model, table.test), classes, outputs)


def _tree_options(table: _ClientInputs, seed: int) -> dict[str, Any]:
    """Small trees, and few of them for few examples, on which more would only be surer of themselves. Leaves of a tenth of
    few examples: scikit-learn's 20 would leave 30 examples without any split."""
    number = len(table.fit)
    return {
        "max_iter": 50 if number < _FEW else 100, "max_leaf_nodes": 8, "min_samples_leaf": max(1, min(20, number // 10)),
        "early_stopping": False, "random_state": seed % 2**32,
    }  # fmt: skip


def _fit_trees_by_label(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    from sklearn.ensemble import HistGradientBoostingClassifier

    present = (table.y > 0).astype(np.int64)
    logits = np.tile(label_share_logits(table.y), (len(table.test), 1))
    for k in range(outputs):
        if 0 < present[:, k].mean() < 1:
            model = HistGradientBoostingClassifier(**_tree_options(table, seed)).fit(table.fit, present[:, k])
            logits[:, k] = model.decision_function(table.test)
    return logits


def _fit_regression_trees(table: _ClientInputs, outputs: int, seed: int) -> Floats:
    from sklearn.ensemble import HistGradientBoostingRegressor

    y = table.y.astype(np.float64).reshape(len(table.y), outputs)
    if len(y) < 3:
        return np.tile(y.mean(axis=0), (len(table.test), 1))
    models = (
        HistGradientBoostingRegressor(**_tree_options(table, seed)).fit(table.fit, y[:, k]) for k in range(outputs)
    )
    return np.stack([model.predict(table.test) for model in models], axis=1)


# -- what they share --------------------------------------------------------------------------------------------------


def _log_probabilities(model: Any, x: Floats) -> Floats:
    """Shape (n, classes that the model knows); from its scores, since logarithms of its probabilities may not be finite."""
    if model is None:
        return np.zeros((len(x), 1))
    scores = np.asarray(model.decision_function(x), dtype=np.float64)
    if scores.ndim == 1:
        scores = np.stack([np.zeros_like(scores), scores], axis=1)
    return np.asarray(torch.from_numpy(scores).log_softmax(1).numpy())


def _spread_to_all_classes(log_probabilities: Floats, classes: NDArray[Any], outputs: int) -> Floats:
    """The columns of a client's classes among those of all clients."""
    table = np.full((len(log_probabilities), outputs), _NEVER_SEEN)
    table[:, classes] = log_probabilities
    return table


def label_share_logits(labels: NDArray[Any]) -> Floats:
    """The logit of each label's share; half an example more of either value keeps it finite."""
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
