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
from polyfed.core.seeds import derive

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
class Fitted:
    """Simple models of all clients.

    Attributes:
        models: name -> the sentence about it, and by client its outputs on the test examples, shape (n, outputs), as
            networks give them.
        left_out: sentences on what was not fitted.
    """

    models: Mapping[str, tuple[str, Mapping[str, Floats]]]
    left_out: tuple[str, ...] = ()


def fit_simple_models(clients: list[Client], outputs: Mapping[str, int], seed: int) -> Fitted:
    """Of each client, as if it were alone.

    Args:
        clients: of one task.
        outputs: of each client, how many its networks have.
        seed: of cross-validation, trees, and which examples are taken of too many.
    """
    task = clients[0].task
    lines, trees = _NAMES[task]
    tables = {c.id: table for c in clients if (table := _Table.of(c)) is not None}
    if len(tables) < len(clients):
        return Fitted({}, (f"Inputs are not rows of finite numbers at every site, so that {lines} and {trees} alone "
                           "are not among the alternatives.",))  # fmt: skip
    if task == "multilabel" and max(outputs.values()) > _LABELS:
        return Fitted({}, (f"There are more than {_LABELS} labels, so that {lines} and {trees} alone, with a model a label, "
                           "are not among the alternatives.",))  # fmt: skip
    width = {i: table.fit.shape[1] for i, table in tables.items()}
    most = {i: max(_FEW, min(_EXAMPLES, _NUMBERS // (outputs[i] * max(width[i], 1)))) for i in tables}
    work = sum(outputs[i] * width[i] for i in tables)
    found: dict[str, tuple[str, Mapping[str, Floats]]] = {}
    left_out: list[str] = []
    with _quiet():
        for name, words, fits in ((_KEYS[task], lines, _LINES), ("gradient_boosting", trees, _TREES)):
            if fits is _TREES and work > _TOO_MUCH:
                left_out.append(f"Gradient boosting would take minutes for {work} features and outputs of all sites, and is "
                                "not among the alternatives.")  # fmt: skip
                continue
            bounds = most if fits is _LINES else dict.fromkeys(tables, _EXAMPLES)
            own = {i: table.at_most(bounds[i], derive(seed, "examples", i)) for i, table in tables.items()}
            purpose = "linear" if fits is _LINES else "trees"
            made = {i: fits[task](table, outputs[i], derive(seed, purpose, i)) for i, table in own.items()}
            fewer = any(len(own[i].fit) < len(tables[i].fit) for i in tables)
            bound = f", of these at most {max(len(table.fit) for table in own.values()):,}" if fewer else ""
            whose = f"fitted by each client on its own training and validation examples{bound}"
            found[name] = (f"scikit-learn's {words}, {whose}", made)
    return Fitted(found, tuple(left_out))


@final
@dataclass(frozen=True, eq=False)
class _Table:
    """A client's inputs, standardised by the examples for fitting: `fit` with the targets `y`, and `test`; `groups` of the
    examples for fitting, whose rows stay together in cross-validation."""

    fit: Floats
    y: NDArray[Any]
    test: Floats
    groups: NDArray[Any] | None

    @classmethod
    def of(cls, client: Client) -> "_Table | None":
        sets = [client.train, client.test] if client.val is None else [client.train, client.val, client.test]
        for one in sets:
            x = one.batch(torch.zeros(1, dtype=torch.int64, device=one.device))[0]
            if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
                return None
        inputs, targets = [], []
        for one in sets:
            x, y = one.batch(torch.arange(len(one), device=one.device))
            inputs.append(x.cpu().double().numpy())
            targets.append(y.cpu().numpy())
        fit, test = np.concatenate(inputs[:-1]), inputs[-1]
        if not (np.isfinite(fit).all() and np.isfinite(test).all()):
            return None
        mean, spread = fit.mean(axis=0), fit.std(axis=0)
        spread[spread <= _ROUNDING * np.abs(mean)] = 1.0
        names = [one.column(one.group) for one in sets[:-1] if one.group is not None]
        groups = np.concatenate(names) if len(names) == len(sets) - 1 else None
        return cls((fit - mean) / spread, np.concatenate(targets[:-1]), (test - mean) / spread, groups)

    def at_most(self, number: int, seed: int) -> "_Table":
        """The same with so many examples for fitting, drawn at random."""
        if len(self.fit) <= number:
            return self
        rows = np.random.default_rng(seed).permutation(len(self.fit))[:number]
        return _Table(self.fit[rows], self.y[rows], self.test, None if self.groups is None else self.groups[rows])


@contextmanager
def _quiet() -> Iterator[None]:
    """One thread, as everywhere in a federation; and a fit that is stopped early is good enough for a yardstick."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn needs it

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


# -- lines ------------------------------------------------------------------------------------------------------------


def _logistic(table: _Table, outputs: int, seed: int) -> Floats:
    strength = _strength(table, table.y, seed)
    return _spread(
        _log_probabilities(_logistic_model(table.fit, table.y, strength), table.test), np.unique(table.y), outputs
    )


def _logistic_model(x: Floats, y: NDArray[Any], strength: float) -> Any:
    """Logistic regression; None where there is one class."""
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(y)) < 2:
        return None
    return LogisticRegression(C=strength, max_iter=500).fit(x, y)


def _strength(table: _Table, y: NDArray[Any], seed: int) -> float:
    """The C of the least log loss in cross-validation; 1 with few examples, or of one class."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kept = np.random.default_rng(seed).permutation(len(y))[:_TRIED_ON]
    classes, counts = np.unique(y[kept], return_counts=True)
    often = classes[counts >= _FEWEST_IN_CLASS]
    kept = kept[np.isin(y[kept], often)]
    if len(often) < 2 or len(kept) < _FEWEST:
        return 1.0
    x, y, groups = table.fit[kept], np.searchsorted(often, y[kept]), None
    number = min(_FOLDS, int(np.bincount(y).min()))
    cut: Any = StratifiedKFold(number, shuffle=True, random_state=seed % 2**32)
    if table.groups is not None:
        groups = table.groups[kept]
        number = min(number, len(np.unique(groups)))
        if number < 2:
            return 1.0
        cut = StratifiedGroupKFold(number, shuffle=True, random_state=seed % 2**32)
    folds = [(fit, rest) for fit, rest in cut.split(x, y, groups) if len(rest) and len(np.unique(y[fit])) == len(often)]
    if not folds:
        return 1.0

    def loss(c: float) -> float:
        total = 0.0
        for fit, held_out in folds:
            model = LogisticRegression(C=c, max_iter=200).fit(x[fit], y[fit])
            total -= float(_log_probabilities(model, x[held_out])[np.arange(len(held_out)), y[held_out]].sum())
        return total

    return min(_STRENGTHS, key=loss)


def _labels(table: _Table, outputs: int, seed: int) -> Floats:
    """A logistic regression a label; the share of a label that is always or never there. Of many labels, C is chosen for
    that which divides the examples most evenly."""
    present = (table.y > 0).astype(np.int64)
    common = None
    if outputs > _PENALTIES_CHOSEN:
        even = int(np.abs(present.mean(axis=0) - 0.5).argmin())
        common = _strength(table, present[:, even], derive(seed, even))
    found = np.tile(logit_shares(table.y), (len(table.test), 1))
    for k in range(outputs):
        strength = _strength(table, present[:, k], derive(seed, k)) if common is None else common
        model = _logistic_model(table.fit, present[:, k], strength)
        if model is not None:
            found[:, k] = model.decision_function(table.test)
    return found


def _ridge(table: _Table, outputs: int, seed: int) -> Floats:
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


def _trees(table: _Table, outputs: int, seed: int) -> Floats:
    from sklearn.ensemble import HistGradientBoostingClassifier

    classes = np.unique(table.y)
    model = None
    if len(classes) > 1:
        model = HistGradientBoostingClassifier(**_options(table, seed)).fit(table.fit, table.y)
    return _spread(_log_probabilities(model, table.test), classes, outputs)


def _options(table: _Table, seed: int) -> dict[str, Any]:
    """Small trees, and few of them for few examples, on which more would only be surer of themselves. Leaves of a tenth of
    few examples: scikit-learn's 20 would leave 30 examples without any split."""
    number = len(table.fit)
    return {
        "max_iter": 50 if number < _FEW else 100, "max_leaf_nodes": 8, "min_samples_leaf": max(1, min(20, number // 10)),
        "early_stopping": False, "random_state": seed % 2**32,
    }  # fmt: skip


def _trees_of_labels(table: _Table, outputs: int, seed: int) -> Floats:
    from sklearn.ensemble import HistGradientBoostingClassifier

    present = (table.y > 0).astype(np.int64)
    found = np.tile(logit_shares(table.y), (len(table.test), 1))
    for k in range(outputs):
        if 0 < present[:, k].mean() < 1:
            model = HistGradientBoostingClassifier(**_options(table, seed)).fit(table.fit, present[:, k])
            found[:, k] = model.decision_function(table.test)
    return found


def _tree_values(table: _Table, outputs: int, seed: int) -> Floats:
    from sklearn.ensemble import HistGradientBoostingRegressor

    y = table.y.astype(np.float64).reshape(len(table.y), outputs)
    if len(y) < 3:
        return np.tile(y.mean(axis=0), (len(table.test), 1))
    models = (HistGradientBoostingRegressor(**_options(table, seed)).fit(table.fit, y[:, k]) for k in range(outputs))
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


def _spread(known: Floats, classes: NDArray[Any], outputs: int) -> Floats:
    """The columns of a client's classes among those of all clients."""
    table = np.full((len(known), outputs), _NEVER_SEEN)
    table[:, classes] = known
    return table


def logit_shares(labels: NDArray[Any]) -> Floats:
    """The logit of each label's share; half an example more of either value keeps it finite."""
    positive = (labels > 0).sum(axis=0) + 0.5
    return np.asarray(np.log(positive) - np.log(len(labels) + 1 - positive))


_Fit = Callable[[_Table, int, int], Floats]
_LINES: Mapping[Task, _Fit] = {"classification": _logistic, "multilabel": _labels, "regression": _ridge}
_TREES: Mapping[Task, _Fit] = {"classification": _trees, "multilabel": _trees_of_labels, "regression": _tree_values}
_KEYS: Mapping[Task, str] = {
    "classification": "logistic_regression",
    "multilabel": "logistic_regression",
    "regression": "ridge",
}
_NAMES: Mapping[Task, tuple[str, str]] = {
    task: (f"{name.replace('_regression', '')} regression", "gradient-boosted trees") for task, name in _KEYS.items()
}
