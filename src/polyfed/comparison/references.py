"""Scores that show whether a network is worth anything: a constant, simple models, and all data in one place.

For simulations: here all clients' examples are at hand.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.algorithms import Local
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation import predict
from polyfed.core.examples import Examples
from polyfed.core.scratch import new_module
from polyfed.core.seeds import derive
from polyfed.core.training import TAKEN_OVER, LocalTraining
from polyfed.data.joined import differ, joined
from polyfed.simulation import checks
from polyfed.simulation.federation import federate
from polyfed.simulation.runs.progress import Silent
from polyfed.simulation.tables import same_columns

Floats = NDArray[np.float64]
_NEVER_SEEN = math.log(1e-6)  # log-probability of a class that a client has no example of
_STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # values of C that cross-validation tries
_FOLDS = 5
_FEWEST = 20  # examples below which C is not chosen, but 1
_FEW = 1000  # examples below which there are fewer trees
_TRIED_ON = 2000  # examples, at most, on which C is chosen
_FEWEST_IN_CLASS = 3  # examples of a class below which it does not count when C is chosen
_ROUNDING = 1e-9  # of its mean, below which a feature does not vary
_TOO_MUCH = 10_000  # clients x outputs x features from which on trees take longer than half a minute


@final
@dataclass(frozen=True, eq=False)
class Reference:
    """What a model next to the methods says of each client's test examples.

    Args:
        name: "majority", "mean", "logistic_regression", "gradient_boosting", "ridge" or "pooled".
        sentence: what it is, in a plain sentence.
        outputs: client id -> outputs on its test examples in their order, float32, shape (n, outputs), as networks give
            them: logits for classes and labels, values for regression.

    Raises:
        UserError: outputs of another form, or not finite.
    """

    name: str
    sentence: str
    outputs: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for client, values in self.outputs.items():
            if values.dim() != 2 or values.dtype != torch.float32 or not bool(torch.isfinite(values).all()):
                raise UserError(
                    f"{self.name}: outputs for client {client!r} must be finite and float32, of shape (examples, outputs), "
                    f"got {values.dtype} {tuple(values.shape)}"
                )


def simple_references(clients: Sequence[Client], *, seed: int = 0) -> list[Reference]:
    """What needs no network: a constant, and simple models where every client's inputs are rows of numbers.

    Each client has its own, as if it were alone. The constant is the share of each class or label, or the mean, of its
    training examples. Simple models, all of scikit-learn, are fitted on its training and validation examples: logistic
    regression (one a label where there are several; its C by cross-validation) or ridge regression, on standardised inputs,
    and gradient-boosted trees (not for several labels, nor where they would take minutes).

    Args:
        clients: of one task. Classes are as many as the largest label of all clients asks for.
        seed: of cross-validation and trees.

    Returns:
        The constant first. Inputs that are no floats of shape (n, features), images and tokens for instance, or that are
        not finite, have the constant alone.

    Raises:
        UserError: no clients, an id twice, or several tasks.

    >>> from polyfed.testing import small_clients
    >>> [found.name for found in simple_references(small_clients())]
    ['majority', 'logistic_regression', 'gradient_boosting']
    """
    checks.check_clients(clients)
    task, outputs = clients[0].task, {c.id: checks.outputs_needed(c) for c in clients}
    if task == "classification":
        outputs = dict.fromkeys(outputs, max(outputs.values()))
    found = [_constant(clients, outputs)]
    tables = {c.id: table for c in clients if (table := _Table.of(c)) is not None}
    if len(tables) < len(clients):
        return found
    whose = "fitted by each client on its own training and validation examples"
    with _quiet():
        linear = {i: _LINEAR[task](table, outputs[i], derive(seed, "linear", i)) for i, table in tables.items()}
        name, words = ("ridge", "ridge") if task == "regression" else ("logistic_regression", "logistic")
        found.append(Reference(name, f"scikit-learn's {words} regression, {whose}", _float32(linear)))
        work = sum(outputs[i] * table.fit.shape[1] for i, table in tables.items())
        if task != "multilabel" and work <= _TOO_MUCH:
            trees = {i: _TREES[task](table, outputs[i], derive(seed, "trees", i)) for i, table in tables.items()}
            found.append(
                Reference("gradient_boosting", f"scikit-learn's gradient-boosted trees, {whose}", _float32(trees))
            )
    return found


def pooled_reference(
    clients: Sequence[Client], method: LocalTraining, *, rounds: int, seed: int, device: str = "auto"
) -> Reference | None:
    """All training examples in one place, which nobody could have: the score that a method can hope for. (No bound in the
    strict sense: clients that differ much may do better with networks of their own.)

    Each architecture is trained on the examples of all clients together, from the weights with which the clients' networks
    begin too, and each client's test examples go through its architecture's network as it is after the last round. This
    takes as long as `Local` does once for each architecture.

    Args:
        clients: of one task.
        method: whose local training is taken over. Where `local_steps` is given, there are as many times more steps as
            there are clients, so that each example is seen as often as by `Local`.
        rounds, seed, device: as for `federate`.

    Returns:
        None where there is no such thing: a client without a network, inputs of different form, several forms of labels,
        or a network without an output for a class that another client has.

    Raises:
        UserError: no clients, an id twice, several tasks, or a network that does not suit its data.
        ClientError: the training diverges.
    """
    checks.check_clients(clients)
    train = _together(clients)
    if train is None or any(client.model is None for client in clients):
        return None
    checks.check_models(clients)
    task, kinds = clients[0].task, checks.architectures(clients)
    of_kind = {kinds[c.id]: c for c in reversed(clients)}  # the first client of each
    one = train.select(torch.zeros(1, dtype=torch.int64, device=train.device))
    if task == "classification":
        networks = (new_module(c.model, seed=0).to(train.device) for c in of_kind.values() if c.model is not None)
        if any(predict(network, one).shape[1] <= int(train.labels.max()) for network in networks):
            return None
    shared = {field: getattr(method, field) for field in TAKEN_OVER} | {"patience": None}
    if method.local_steps is not None:
        shared["local_steps"] = method.local_steps * len(clients)
    everyone = [Client(kind, c.model, train, one, task=task, loss=c.loss) for kind, c in sorted(of_kind.items())]
    run = federate(
        everyone, Local(**shared), rounds=rounds, seed=seed, engine="inprocess", workers=0, device=device,
        evaluate_every=rounds, progress=Silent(),
    )  # fmt: skip
    models = {kind: run.model(kind) for kind in of_kind}
    outputs = {c.id: predict(models[kinds[c.id]], c.test.to(torch.device("cpu"))) for c in clients}
    told = (
        "the clients' networks, each trained on the training examples of all clients together, which nobody could have"
    )
    return Reference("pooled", told, outputs)


def _together(clients: Sequence[Client]) -> Examples | None:
    """All training examples as one set; None where they have not one form."""
    sets = [client.train for client in clients]
    first = sets[0]
    if any(s.device != first.device or s.augment != first.augment for s in sets[1:]):
        return None
    if any(not same_columns(first, other) for other in sets[1:]):  # of one width, but of another meaning
        return None
    if all(not differ(first, other) for other in sets[1:]):
        return joined(sets)
    ready = [Examples(*s.batch(torch.arange(len(s), device=s.device))) for s in sets]  # each by its own transform
    if first.augment is not None or any(differ(ready[0], other) for other in ready[1:]):
        return None
    return joined(ready)


# -- a constant -------------------------------------------------------------------------------------------------------


def _constant(clients: Sequence[Client], outputs: Mapping[str, int]) -> Reference:
    task = clients[0].task
    rows = {}
    for client in clients:
        labels = client.train.labels.cpu().numpy()
        if task == "classification":
            row = _log_shares(labels, outputs[client.id])
        elif task == "multilabel":
            row = _logit_shares(labels)
        else:
            row = labels.astype(np.float64).mean(axis=0)
        rows[client.id] = np.tile(row, (len(client.test), 1))
    whose = {"classification": "share of each class", "multilabel": "share of each label", "regression": "mean"}[task]
    told = f"the {whose} in the client's own training examples, whatever the input"
    return Reference("mean" if task == "regression" else "majority", told, _float32(rows))


def _log_shares(labels: NDArray[Any], classes: int) -> Floats:
    """One example more, spread over all classes, keeps the logarithm finite."""
    counts = np.bincount(labels, minlength=classes) + 1 / classes
    return np.asarray(np.log(counts / counts.sum()))


def _logit_shares(labels: NDArray[Any]) -> Floats:
    """Half an example more of either value, for the same reason."""
    positive = (labels > 0).sum(axis=0) + 0.5
    return np.asarray(np.log(positive) - np.log(len(labels) + 1 - positive))


def _float32(outputs: Mapping[str, Floats]) -> dict[str, Tensor]:
    return {client: torch.from_numpy(values.astype(np.float32)) for client, values in outputs.items()}


# -- simple models ----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class _Table:
    """A client's inputs, standardised by the examples for fitting: `fit` with the targets `y`, and `test`."""

    fit: Floats
    y: NDArray[Any]
    test: Floats

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
        return cls((fit - mean) / spread, np.concatenate(targets[:-1]), (test - mean) / spread)


@contextmanager
def _quiet() -> Iterator[None]:
    """One thread, as everywhere in a federation; and a fit that is stopped early is good enough for a yardstick."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn needs it

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _logistic(table: _Table, outputs: int, seed: int) -> Floats:
    model = _logistic_model(table.fit, table.y, seed)
    return _spread(_log_probabilities(model, table.test), np.unique(table.y), outputs)


def _logistic_model(x: Floats, y: NDArray[Any], seed: int) -> Any:
    """Logistic regression with the C of the least log loss in cross-validation; None where there is one class."""
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(y)) < 2:
        return None
    return LogisticRegression(C=_strength(x, y, seed), max_iter=500).fit(x, y)


def _strength(x: Floats, y: NDArray[Any], seed: int) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    kept = np.random.default_rng(seed).permutation(len(y))[:_TRIED_ON]
    classes, counts = np.unique(y[kept], return_counts=True)
    often = classes[counts >= _FEWEST_IN_CLASS]
    kept = kept[np.isin(y[kept], often)]
    if len(often) < 2 or len(kept) < _FEWEST:
        return 1.0
    x, y = x[kept], np.searchsorted(often, y[kept])
    cut = StratifiedKFold(min(_FOLDS, int(np.bincount(y).min())), shuffle=True, random_state=seed % 2**32)
    folds = list(cut.split(x, y))

    def loss(c: float) -> float:
        total = 0.0
        for fit, held_out in folds:
            model = LogisticRegression(C=c, max_iter=200).fit(x[fit], y[fit])
            total -= float(_log_probabilities(model, x[held_out])[np.arange(len(held_out)), y[held_out]].sum())
        return total

    return min(_STRENGTHS, key=loss)


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


def _labels(table: _Table, outputs: int, seed: int) -> Floats:
    """A logistic regression a label; the share of a label that is always or never there."""
    found = np.tile(_logit_shares(table.y), (len(table.test), 1))
    for k in range(outputs):
        model = _logistic_model(table.fit, (table.y[:, k] > 0).astype(np.int64), derive(seed, k))
        if model is not None:
            found[:, k] = model.decision_function(table.test)
    return found


def _ridge(table: _Table, outputs: int, seed: int) -> Floats:
    from sklearn.linear_model import RidgeCV

    y = table.y.astype(np.float64).reshape(len(table.y), outputs)
    if len(y) < 3:  # leaving one out leaves a line through one point
        return np.tile(y.mean(axis=0), (len(table.test), 1))
    model = RidgeCV(alphas=np.logspace(-3, 4, 15)).fit(table.fit, y)
    return np.asarray(model.predict(table.test), dtype=np.float64).reshape(len(table.test), outputs)


def _tree_values(table: _Table, outputs: int, seed: int) -> Floats:
    from sklearn.ensemble import HistGradientBoostingRegressor

    y = table.y.astype(np.float64).reshape(len(table.y), outputs)
    if len(y) < 3:
        return np.tile(y.mean(axis=0), (len(table.test), 1))
    models = (HistGradientBoostingRegressor(**_options(table, seed)).fit(table.fit, y[:, k]) for k in range(outputs))
    return np.stack([model.predict(table.test) for model in models], axis=1)


_LINEAR = {"classification": _logistic, "multilabel": _labels, "regression": _ridge}
_TREES = {"classification": _trees, "regression": _tree_values}
