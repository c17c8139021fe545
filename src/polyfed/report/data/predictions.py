"""Reads the predictions for test examples that the runs of a group (methods on the same data) stored, by method, seed
and client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.tasks.task import Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.report.data.binary_stats import BinaryPredictions
from polyfed.report.data.run_groups import MethodRuns, RunGroup
from polyfed.simulation.storage.directory import read_manifest
from polyfed.simulation.storage.predictions.prediction_store import FOLDER, Predictions, read_predictions
from polyfed.tasks import infer_task_of_targets

MAX_METHODS = 4  # that a reader can choose among: training alone and the leader first
_MANY_CLIENTS = 100  # clients from which only these two are read


@final
@dataclass(frozen=True, eq=False)
class BinaryClassOutput:
    """Names a yes/no question of a task, and the `column` of the network's output that answers it."""

    name: str
    column: int


@final
@dataclass(frozen=True, eq=False)
class GroupPredictions:
    """Holds stored test predictions by method, seed and client.

    Attributes:
        task: of the clients.
        methods: labels, the leader first.
        local_label: the label of training alone; None without it.
        seeds: that all of the methods have; of a comparison in folds the repeats, from 0.
        clients: with predictions of every method and seed, ascending.
        class_names: one a class or label.
        same_clients: whether a client has the same test examples in each seed.
        prediction_tables: by method, seed and client; of a comparison in folds those of all folds of a repeat together,
            so that each example is there once, predicted by a network that was not trained on it.
        notes: what is left out, sentences.
        same_order: whether these examples come in the same order, too.
        fold_of_rows: by seed (repeat) and client the fold of each example; empty without folds.
    """

    task: Task
    methods: tuple[str, ...]
    local_label: str | None
    seeds: tuple[int, ...]
    clients: tuple[str, ...]
    class_names: tuple[str, ...]
    same_clients: bool
    prediction_tables: Mapping[tuple[str, int, str], Predictions]
    notes: tuple[str, ...] = ()
    same_order: bool = True
    fold_of_rows: Mapping[tuple[int, str], NDArray[np.int64]] = field(default_factory=dict)

    @property
    def is_binary(self) -> bool:
        """Returns True if the task is a classification into exactly two classes."""
        return self.task.one_class_per_example and len(self.class_names) == 2

    @cached_property
    def binary_questions(self) -> tuple[BinaryClassOutput, ...]:
        """Returns one yes/no question per class or label; for two classes only that of the second."""
        columns = self.task.yes_no_columns(len(self.class_names))
        return tuple(BinaryClassOutput(self.class_names[k], k) for k in columns)

    def binary_predictions(
        self, method: str, seed: int, clients: Sequence[str], question: BinaryClassOutput
    ) -> BinaryPredictions:
        """Returns the clients' predicted probability of "yes", and whether it is true.

        Each client's examples are predicted by that client's own network.

        Examples with an output that is not finite are left out.
        """
        tables = [self.prediction_tables[method, seed, client] for client in clients]
        outputs, targets = torch.cat([p.outputs for p in tables]), torch.cat([p.targets for p in tables])
        finite_rows = torch.isfinite(outputs).all(1)
        score = self.task.to_predictions(outputs[finite_rows])[:, question.column]
        finite_targets = targets[finite_rows]
        positive = (
            finite_targets[:, question.column] > 0.5 if finite_targets.dim() == 2 else finite_targets == question.column
        )
        return score, np.asarray(positive.numpy(), dtype=np.bool_)

    @property
    def counted_seeds(self) -> str:
        """Returns in words what `seeds` are: "5 trainings", or of a comparison in folds "5 repeats of the folds"."""
        return f"{len(self.seeds)} {'repeats of the folds' if self.fold_of_rows else 'trainings'}"

    def groups(self, clients: Sequence[str], seed: int) -> NDArray[np.int64] | None:
        """Returns the group number (a patient's, say) of each test example; None if examples have none."""
        return _join_groups([self.prediction_tables[self.methods[0], seed, client] for client in clients])

    def groups_of_predictions(self, method: str, seed: int, clients: Sequence[str]) -> NDArray[np.int64] | None:
        """Returns the group number of each example of `binary_predictions`; None if examples have none."""
        tables = [self.prediction_tables[method, seed, client] for client in clients]
        groups = _join_groups(tables)
        if groups is None:
            return None
        is_finite = torch.isfinite(torch.cat([table.outputs for table in tables])).all(1).numpy()
        return np.asarray(groups[is_finite])

    def confusion_matrix(self, method: str, seed: int, clients: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Counts test examples by true class (rows) and most probable class (columns), shape (K, K)."""
        size = len(self.class_names)
        matrix = np.zeros((size, size), np.int64)
        for client in clients:
            table = self.prediction_tables[method, seed, client]
            finite_rows = torch.isfinite(table.outputs).all(1)
            np.add.at(matrix, (table.targets[finite_rows].numpy(), table.outputs[finite_rows].argmax(1).numpy()), 1)
        return matrix

    def column_names(self) -> list[str]:
        """Returns, sorted, the names of the test examples' further columns, such as "sex"."""
        return sorted({name for table in self.prediction_tables.values() for name in table.columns})

    def column_values(self, name: str, clients: Sequence[str], seed: int) -> list[Any]:
        """Returns a column's values ("sex", say) for the examples of `binary_predictions`.

        A client that lacks the column has None for each example.
        """
        cells: list[Any] = []
        for client in clients:
            table = self.prediction_tables[self.methods[0], seed, client]
            cells += list(table.columns.get(name, [None] * len(table.targets)))
        return cells


def _join_groups(tables: Sequence[Predictions]) -> NDArray[np.int64] | None:
    """Returns the groups of several clients' examples, with numbers that no two clients share; None without groups."""
    if all(table.groups is None for table in tables):
        return None
    joined, first = [], 0
    for table in tables:
        numbers = np.arange(len(table.targets)) if table.groups is None else table.groups
        joined.append(numbers + first)
        first += int(numbers.max(initial=0)) + 1
    return np.concatenate(joined)


def read_group_predictions(
    run_group: RunGroup, class_names: Sequence[str] | None = None
) -> tuple[GroupPredictions | None, str]:
    """Reads the test predictions of comparable runs at the rounds whose scores are shown.

    Returns the predictions and an empty text, or None and a sentence that says why there are no predictions.

    Args:
        run_group: as gathered.
        class_names: one a class or label; None numbers them.
    """
    shown_methods = methods_by_importance(run_group)[: 2 if len(run_group.clients) > _MANY_CLIENTS else MAX_METHODS]
    tables: dict[str, dict[tuple[int, str], Predictions]] = {}
    notes = []
    for method in shown_methods:
        client_tables, why = _predictions_of_method(method)
        if client_tables:
            tables[method.label] = client_tables
        if why:
            notes.append(why)
    if not tables:
        return None, _missing_predictions_reason(shown_methods, notes)
    common = set.intersection(*(set(client_tables) for client_tables in tables.values()))
    seeds = tuple(sorted({seed for seed, _ in common}))
    clients = tuple(sorted({c for _, c in common if all((s, c) in common for s in seeds)}))
    if not clients:
        return None, "No client has predictions of every method, so that there are no curves by example."
    if missing_count := len(run_group.clients) - len(clients):
        notes.append(
            f"{missing_count} of {len(run_group.clients)} clients have no predictions of every method and are left out."
        )
    kept_tables = {
        (m, s, c): client_tables[s, c] for m, client_tables in tables.items() for s in seeds for c in clients
    }
    return _group_predictions(run_group, kept_tables, tuple(tables), seeds, clients, class_names, notes)


def _missing_predictions_reason(methods: Sequence[MethodRuns], notes: Sequence[str]) -> str:
    folders = [run.folder for method in methods for run in method.runs if run.folder is not None]
    if not folders:
        return "The comparison was made without run directories, so that there are no predictions to draw curves of."
    if not any((folder / FOLDER).is_dir() for folder in folders):
        return "The runs kept no predictions, so that there are no curves by example and no subgroups."
    return f"There are no curves by example and no subgroups. {' '.join(notes)}"


def _group_predictions(
    run_group: RunGroup, tables: Mapping[tuple[str, int, str], Predictions], methods: tuple[str, ...],
    seeds: tuple[int, ...], clients: tuple[str, ...], class_names: Sequence[str] | None, notes: list[str],
) -> tuple[GroupPredictions | None, str]:  # fmt: skip
    first = next(iter(tables.values()))
    task = _stored_task(run_group) or infer_task_of_targets(first.targets)
    width, form = first.outputs.shape[1], _target_form(first)
    if any(t.outputs.shape[1] != width or _target_form(t) != form for t in tables.values()):
        return None, "The predictions of the runs are not of one form, so that there are no curves by example."
    names = [str(name) for name in class_names or ()]
    if len(names) != width:
        names = [str(k) for k in range(width)]
    names = [f"class {name}" if name.isdigit() and task.one_class_per_example else name for name in names]
    if first_nonfinite := sum(int((~torch.isfinite(t.outputs).all(1)).sum()) for t in tables.values()):
        notes.append(f"{first_nonfinite} predictions are not finite numbers (the training diverged) and are left out.")
    local_label = run_group.local_label if run_group.local_label in methods else None
    tables, seeds, fold_of_rows = _join_folds(tables, seeds, run_group.comparison_results)
    same_order = (run_group.same_clients or len(seeds) == 1) and all(
        torch.equal(tables[m, s, c].targets, tables[methods[0], seeds[0], c].targets) for m, s, c in tables
    )
    same_clients = same_order or (run_group.same_clients and bool(fold_of_rows))
    return GroupPredictions(
        task, methods, local_label, seeds, clients, tuple(names), same_clients, tables, tuple(notes), same_order,
        fold_of_rows,
    ), ""  # fmt: skip


def _join_folds(
    tables: Mapping[tuple[str, int, str], Predictions], seeds: tuple[int, ...], results: Mapping[str, Any]
) -> tuple[Mapping[tuple[str, int, str], Predictions], tuple[int, ...], dict[tuple[int, str], NDArray[np.int64]]]:
    """Puts the predictions of the folds of each repeat together, by method, repeat and client.

    Returns them with the numbers of the repeats and the fold of each example; without folds, or where runs are missing,
    the arguments and an empty dict.
    """
    num_folds, all_seeds = results.get("folds"), tuple(results.get("seeds") or ())
    if not num_folds or sorted(all_seeds) != sorted(seeds) or len(seeds) % num_folds:
        return tables, seeds, {}
    joined: dict[tuple[str, int, str], Predictions] = {}
    fold_of_rows: dict[tuple[int, str], NDArray[np.int64]] = {}
    for method, client in dict.fromkeys((method, client) for method, _, client in tables):
        for repeat in range(len(seeds) // num_folds):
            folds = [tables[method, s, client] for s in all_seeds[repeat * num_folds : (repeat + 1) * num_folds]]
            sizes = [len(fold.targets) for fold in folds]
            columns = {
                name: np.concatenate([fold.columns[name] for fold in folds])
                for name in folds[0].columns
                if all(name in fold.columns for fold in folds)
            }
            joined[method, repeat, client] = Predictions(
                folds[0].round,
                torch.cat([fold.outputs for fold in folds]),
                torch.cat([fold.targets for fold in folds]),
                columns,
                _join_groups(folds),
            )
            fold_of_rows[repeat, client] = np.repeat(np.arange(num_folds), sizes)
    return joined, tuple(range(len(seeds) // num_folds)), fold_of_rows


def _stored_task(run_group: RunGroup) -> Task | None:
    """Returns the task of the comparison or first run; None without one, or if its code is not trusted."""
    folders = (run.folder for method in run_group.methods for run in method.runs if run.folder is not None)
    folder = next(folders, None)
    spec = run_group.comparison_results.get("task") or (read_manifest(folder).get("task") if folder else None)
    try:
        return None if spec is None else get_task(spec)
    except UserError:
        return None


def _target_form(predictions: Predictions) -> tuple[Any, ...]:
    return (predictions.targets.is_floating_point(), *predictions.targets.shape[1:])


def methods_by_importance(run_group: RunGroup) -> list[MethodRuns]:
    """Returns the methods as the page orders and colours them.

    They are the best, training alone, the methods that the answers advise, and the next best.
    """
    advised = {
        answer.get("method")
        for answer in run_group.comparison_results.get("answers") or ()
        if isinstance(answer, Mapping)
    }
    ranked = sorted(run_group.methods, key=lambda x: (x.label not in advised, -run_group.ranking_key(x)))
    order = [method for method in (run_group.best_method_besides_local, run_group.local_method) if method is not None]
    return order + [method for method in ranked if method not in order]


def _predictions_of_method(method: MethodRuns) -> tuple[dict[tuple[int, str], Predictions], str]:
    client_tables = {}
    for run in method.runs:
        if run.folder is None or not (run.folder / FOLDER).is_dir():
            continue
        for client in run.score_by_client:
            try:
                client_tables[run.seed, client] = read_predictions(
                    run.folder, client, split="test", round=run.scored_round
                )
            except UserError as error:
                return {}, f"{method.label} has no curves: {error}."
    return client_tables, "" if client_tables else f"{method.label} has kept no predictions."
