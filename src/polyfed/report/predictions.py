"""The predictions behind a setting's scores: of each method, seed and client those of its test examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Task
from polyfed.core.errors import UserError
from polyfed.core.metrics import probabilities
from polyfed.report.gathering import Line, Setting
from polyfed.report.roc import Part
from polyfed.simulation.runs.predictions import FOLDER, Predictions, read

METHODS = 4  # that a reader can choose among: training alone and the leader first
_MANY = 100  # clients from which only these two are read


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """A question of yes or no in the task: a class against the others, or a label. `column` of the outputs."""

    name: str
    column: int


@final
@dataclass(frozen=True, eq=False)
class Outcomes:
    """What was predicted.

    Attributes:
        task: "classification", "multilabel" or "regression".
        methods: labels, the leader first.
        reference: the label of training alone; None without it.
        seeds: that all of the methods have.
        clients: with predictions of every method and seed, ascending.
        class_names: one a class or label.
        same_clients: whether a client has the same test examples in each seed.
        tables: by method, seed and client.
        notes: what is left out, sentences.
    """

    task: Task
    methods: tuple[str, ...]
    reference: str | None
    seeds: tuple[int, ...]
    clients: tuple[str, ...]
    class_names: tuple[str, ...]
    same_clients: bool
    tables: Mapping[tuple[str, int, str], Predictions]
    notes: tuple[str, ...] = ()

    @property
    def binary(self) -> bool:
        """Whether the task is one of two classes."""
        return self.task == "classification" and len(self.class_names) == 2

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """Questions of yes or no: of two classes one, whether it is the second; else one a class or label."""
        if self.task == "regression":
            return ()
        columns = [1] if self.binary else range(len(self.class_names))
        return tuple(Problem(self.class_names[k], k) for k in columns)

    def part(self, method: str, seed: int, clients: Sequence[str], problem: Problem) -> Part:
        """Probabilities and truths of all test examples of these clients together, each by its own network. Examples
        whose output is not finite are left out."""
        found = [self.tables[method, seed, client] for client in clients]
        outputs, targets = torch.cat([p.outputs for p in found]), torch.cat([p.targets for p in found])
        sound = torch.isfinite(outputs).all(1)
        score = probabilities(outputs[sound], self.task)[:, problem.column]
        known = targets[sound]
        positive = known[:, problem.column] > 0.5 if known.dim() == 2 else known == problem.column
        return score, np.asarray(positive.numpy(), dtype=np.bool_)

    def confusion(self, method: str, seed: int, clients: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Test examples by true class (rows) and most probable class (columns), shape (K, K)."""
        size = len(self.class_names)
        found = np.zeros((size, size), np.int64)
        for client in clients:
            table = self.tables[method, seed, client]
            sound = torch.isfinite(table.outputs).all(1)
            np.add.at(found, (table.targets[sound].numpy(), table.outputs[sound].argmax(1).numpy()), 1)
        return found

    def columns(self) -> list[str]:
        """Further columns of the examples, such as "sex", ascending."""
        return sorted({name for table in self.tables.values() for name in table.columns})

    def values(self, name: str, clients: Sequence[str], seed: int) -> list[Any]:
        """A column of the test examples of clients, in the order of `part`; None where a client has none."""
        found: list[Any] = []
        for client in clients:
            table = self.tables[self.methods[0], seed, client]
            found += list(table.columns.get(name, [None] * len(table.targets)))
        return found


def read_outcomes(setting: Setting, class_names: Sequence[str] | None = None) -> tuple[Outcomes | None, str]:
    """The predictions of the runs of a setting at the rounds whose scores are shown; or None, and a sentence why.

    Args:
        setting: as gathered.
        class_names: one a class or label; None numbers them.
    """
    chosen = _chosen(setting)
    tables: dict[str, dict[tuple[int, str], Predictions]] = {}
    notes = []
    for line in chosen:
        found, why = _of_line(line)
        if found:
            tables[line.label] = found
        if why:
            notes.append(why)
    if not tables:
        return None, _why_none(chosen, notes)
    common = set.intersection(*(set(found) for found in tables.values()))
    seeds = tuple(sorted({seed for seed, _ in common}))
    clients = tuple(sorted({c for _, c in common if all((s, c) in common for s in seeds)}))
    if not clients:
        return None, "No client has predictions of every method, so that there are no curves by example."
    if left := len(setting.clients) - len(clients):
        notes.append(f"{left} of {len(setting.clients)} clients have no predictions of every method and are left out.")
    kept_tables = {(m, s, c): found[s, c] for m, found in tables.items() for s in seeds for c in clients}
    return _outcomes(setting, kept_tables, tuple(tables), seeds, clients, class_names, notes)


def _why_none(lines: Sequence[Line], notes: Sequence[str]) -> str:
    folders = [run.folder for line in lines for run in line.runs if run.folder is not None]
    if not folders:
        return "The comparison was made without run directories, so that there are no predictions to draw curves of."
    if not any((folder / FOLDER).is_dir() for folder in folders):
        return "The runs kept no predictions, so that there are no curves by example and no subgroups."
    return f"There are no curves by example and no subgroups. {' '.join(notes)}"


def _outcomes(
    setting: Setting, tables: Mapping[tuple[str, int, str], Predictions], methods: tuple[str, ...],
    seeds: tuple[int, ...], clients: tuple[str, ...], class_names: Sequence[str] | None, notes: list[str],
) -> tuple[Outcomes | None, str]:  # fmt: skip
    first = next(iter(tables.values()))
    task = _task(first.targets)
    width = first.outputs.shape[1]
    if any(t.outputs.shape[1] != width or _task(t.targets) != task for t in tables.values()):
        return None, "The predictions of the runs are not of one form, so that there are no curves by example."
    names = [str(name) for name in class_names or ()]
    if len(names) != width:
        names = [str(k) for k in range(width)]
    names = [f"class {name}" if name.isdigit() and task == "classification" else name for name in names]
    if lost := sum(int((~torch.isfinite(t.outputs).all(1)).sum()) for t in tables.values()):
        notes.append(f"{lost} predictions are not finite numbers (the training diverged) and are left out.")
    same = (setting.same_clients or len(seeds) == 1) and all(
        torch.equal(tables[m, s, c].targets, tables[methods[0], seeds[0], c].targets) for m, s, c in tables
    )
    reference = setting.reference if setting.reference in methods else None
    return Outcomes(task, methods, reference, seeds, clients, tuple(names), same, tables, tuple(notes)), ""


def _chosen(setting: Setting) -> list[Line]:
    """The leader, training alone, what sites are told to join with, and the next best."""
    advised = {one.get("method") for one in setting.results.get("answers") or () if isinstance(one, Mapping)}
    ranked = sorted(setting.lines, key=lambda x: (x.label not in advised, -setting.rank(x)))
    order = [line for line in (setting.leader, setting.local) if line is not None]
    order += [line for line in ranked if line not in order]
    return order[: 2 if len(setting.clients) > _MANY else METHODS]


def _of_line(line: Line) -> tuple[dict[tuple[int, str], Predictions], str]:
    found = {}
    for run in line.runs:
        if run.folder is None or not (run.folder / FOLDER).is_dir():
            continue
        for client in run.final:
            try:
                found[run.seed, client] = read(run.folder, client, split="test", round=run.round)
            except UserError as error:
                return {}, f"{line.label} has no curves: {error}."
    return found, "" if found else f"{line.label} has kept no predictions."


def _task(targets: Tensor) -> Task:
    if targets.dim() == 2:
        whole = bool(((targets == 0) | (targets == 1)).all())
        return "multilabel" if whole else "regression"
    return "regression" if targets.is_floating_point() else "classification"
