"""Fits the simple models of a task, such as logistic regression and gradient-boosted trees, on each client's data only.

They use the examples that the client's network may use, for training and validation, and choose their penalty by
cross-validation on these. None may take minutes; models that would are left out or fitted to fewer examples, and the
results say so.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Client
from polyfed.core.evaluation.simple_model import Floats, SimpleModelInputs
from polyfed.core.examples.groups import replace_missing_groups
from polyfed.core.io.text.number_format import capitalize_first, join_with_and
from polyfed.core.seeds import derive_seed

_FEW = 1000  # examples of a client that are fitted in any case
_ROUNDING = 1e-9  # spread relative to the mean below which a feature is constant
_TOO_MUCH = 10_000  # clients x outputs x features from which on trees take longer than half a minute
_EXAMPLES = 10_000  # most examples of a client that are fitted
_NUMBERS = 20_000_000  # most examples x features x outputs of a client in a linear model


@final
@dataclass(frozen=True)
class SimpleModelOutputs:
    """Holds the outputs of every client's simple models, such as logistic regression, for the client's test examples.

    Attributes:
        outputs_by_model: name -> (description, client id -> outputs on its test examples, shape (n, outputs), in the
            form of a network's).
        left_out_notes: sentences about models that were not fitted.
    """

    outputs_by_model: Mapping[str, tuple[str, Mapping[str, Floats]]]
    left_out_notes: tuple[str, ...] = ()


def fit_simple_models(clients: list[Client], outputs: Mapping[str, int], seed: int) -> SimpleModelOutputs:
    """Fits the task's simple models on each client's examples; returns outputs for test examples.

    Args:
        clients: of one task.
        outputs: client id -> number of outputs of its networks.
        seed: of cross-validation, trees, and the draw of examples where there are too many.
    """
    task = clients[0].task
    simple_models = task.simple_models()
    if not simple_models:
        return SimpleModelOutputs(
            {}, (f"The task {task} has no simple models, so that none is among the alternatives.",)
        )
    tables = {c.id: table for c in clients if (table := _read_inputs(c)) is not None}
    if len(tables) < len(clients):
        labels = join_with_and([model.label for model in simple_models])
        note = f"Inputs are not rows of finite numbers at every site, so that {labels} alone are not among the alternatives."
        return SimpleModelOutputs({}, (note,))
    if obstacle := task.simple_models_obstacle(max(outputs.values())):
        return SimpleModelOutputs({}, (obstacle,))
    width = {i: table.fit.shape[1] for i, table in tables.items()}
    max_examples = {i: max(_FEW, min(_EXAMPLES, _NUMBERS // (outputs[i] * max(width[i], 1)))) for i in tables}
    work = sum(outputs[i] * width[i] for i in tables)
    models: dict[str, tuple[str, Mapping[str, Floats]]] = {}
    left_out: list[str] = []
    with _quiet_sklearn():
        for model in simple_models:
            if model.is_trees and work > _TOO_MUCH:
                left_out.append(f"Gradient boosting would take minutes for {work} features and outputs of all sites, and is "
                                "not among the alternatives.")  # fmt: skip
                continue
            bounds = dict.fromkeys(tables, _EXAMPLES) if model.is_trees else max_examples
            bounded_tables = {
                i: table.subsample(bounds[i], derive_seed(seed, "examples", i)) for i, table in tables.items()
            }
            purpose = "trees" if model.is_trees else "linear"
            try:
                client_outputs = {
                    i: model.fit(table, outputs[i], derive_seed(seed, purpose, i))
                    for i, table in bounded_tables.items()
                }
            except Exception as error:  # whatever a library or a user's task raises; the methods' runs are worth more
                left_out.append(
                    f"{capitalize_first(model.label)} could not be fitted at every site, and is not among the alternatives: "
                    f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}."
                )
                continue
            if not all(_are_float32(values) for values in client_outputs.values()):
                left_out.append(
                    f"{capitalize_first(model.label)} predicted what is not finite at some site, and is not among the "
                    "alternatives."
                )
                continue
            fewer = any(len(bounded_tables[i].fit) < len(tables[i].fit) for i in tables)
            bound = f", of these at most {max(len(table.fit) for table in bounded_tables.values()):,}" if fewer else ""
            whose = f"fitted by each client on its own training and validation examples{bound}"
            origin = f"{model.library}'s " if model.library else ""
            models[model.name] = (f"{origin}{model.label}, {whose}", client_outputs)
    return SimpleModelOutputs(models, tuple(left_out))


def fit_pooled_simple_models(
    clients: list[Client], num_outputs: int, seed: int
) -> dict[str, tuple[str, dict[str, Floats]]]:
    """Fits pooled simple models; returns `{name: (description, {client: test outputs})}`.

    Args:
        clients: of one task.
        num_outputs: of a network.
        seed: of cross-validation, and of the draw of examples where there are too many.

    Returns:
        Name -> (description, client id -> outputs on its test examples); empty if inputs are not rows of finite numbers of
        one length.
    """
    models = [model for model in clients[0].task.simple_models() if model.is_pooled_too]
    tables = [_read_rows(client) for client in clients] if models else []
    rows = [table for table in tables if table is not None]
    if not models or len(rows) < len(tables) or len({table.fit.shape[1] for table in rows}) > 1:
        return {}
    groups = [table.groups for table in rows if table.groups is not None]
    together = _standardise_rows(
        SimpleModelInputs(
            np.concatenate([table.fit for table in rows]),
            np.concatenate([table.y for table in rows]),
            np.concatenate([table.test for table in rows]),
            np.concatenate(groups) if len(groups) == len(rows) else None,
        )
    ).subsample(_EXAMPLES, derive_seed(seed, "pooled examples"))
    ends = np.cumsum([len(table.test) for table in rows])[:-1]
    models_by_name = {}
    with _quiet_sklearn():
        for model in models:
            try:
                outputs = np.split(model.fit(together, num_outputs, derive_seed(seed, "pooled")), ends)
            except Exception:  # as above; the sentence is there for the client's own
                continue
            if not all(map(_are_float32, outputs)):
                continue
            models_by_name[model.name] = (
                f"{model.label}, fitted to the examples of all clients together, which nobody could have",
                {client.id: values for client, values in zip(clients, outputs, strict=True)},
            )
    return models_by_name


def _are_float32(values: Floats) -> bool:
    """Returns whether all values are finite in 32 bits."""
    return bool(np.isfinite(values).all() and (np.abs(values) <= np.finfo(np.float32).max).all())


def _read_inputs(client: Client) -> SimpleModelInputs | None:
    """Reads a client's examples, with standardised inputs; None if these are not rows of finite numbers."""
    rows = _read_rows(client)
    return None if rows is None else _standardise_rows(rows)


def _standardise_rows(rows: SimpleModelInputs) -> SimpleModelInputs:
    mean, spread = rows.fit.mean(axis=0), rows.fit.std(axis=0)
    spread[spread <= _ROUNDING * np.abs(mean)] = 1.0
    return SimpleModelInputs((rows.fit - mean) / spread, rows.y, (rows.test - mean) / spread, rows.groups)


def _read_rows(client: Client) -> SimpleModelInputs | None:
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
    names = [part.column(part.group) for part in sets[:-1] if part.group is not None]
    groups = replace_missing_groups(np.concatenate(names)) if len(names) == len(sets) - 1 else None
    return SimpleModelInputs(fit, np.concatenate(targets[:-1]), test, groups)


@contextmanager
def _quiet_sklearn() -> Iterator[None]:
    """Runs scikit-learn in one thread and without convergence warnings.

    One thread as everywhere in a federation; a fit that stops early is good enough for a reference.
    """
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn needs it

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield
