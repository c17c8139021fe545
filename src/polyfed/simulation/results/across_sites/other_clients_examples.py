"""Prepares one client's test examples for another client's model, with the model's preprocessing of raw inputs."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import input_spec_of
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor


class IncompatibleExamplesError(ValueError):
    """Raised when a client's model cannot read another client's examples, or cannot be scored on them."""


def adapt_test_examples_to_model_of(owner: Client, client: Client) -> tuple[Examples, Callable[[Tensor], Tensor]]:
    """Returns a client's test examples for the owner's model, and a converter of its outputs.

    Raises:
        IncompatibleExamplesError: tables, inputs or classes differ.
    """
    test, train = client.test, owner.train
    if owner is client:
        return test, lambda outputs: outputs
    if owner.task != client.task:
        raise IncompatibleExamplesError(f"the task of {owner.id} is {owner.task}, that of {client.id} {client.task}")
    own_table, table = train.transform, test.transform
    if isinstance(own_table, TablePreprocessor) and isinstance(table, TablePreprocessor):
        inputs = _recode_rows(test, table, own_table, owner.id, client.id)
        examples = Examples(inputs, test.labels, transform=own_table)
        return examples, _output_converter(own_table, table, test.labels, owner.id, client.id)
    if isinstance(own_table, TablePreprocessor) or isinstance(table, TablePreprocessor):
        raise IncompatibleExamplesError(f"of {owner.id} and {client.id} only one has a table")
    own_spec, spec = input_spec_of(train.x), input_spec_of(test.x)
    if own_spec != spec:
        raise IncompatibleExamplesError(f"inputs are {spec} at {client.id} and {own_spec} at {owner.id}")
    decodes = hasattr(test.transform, "decode_pixels")  # it knows the files of these images alone
    return replace(test, transform=test.transform if decodes else train.transform), lambda outputs: _check_classes(
        outputs, client
    )


def _check_classes(outputs: Tensor, client: Client) -> Tensor:
    labels = client.test.labels
    has_classes = labels.dim() == 1 and not labels.is_floating_point()
    if has_classes and outputs.dim() == 2 and int(labels.max()) >= outputs.shape[1]:
        raise IncompatibleExamplesError(
            f"{client.id} has examples of class {int(labels.max())}, and the model has {outputs.shape[1]} outputs"
        )
    if not has_classes:
        try:
            client.task.check_outputs(tuple(outputs.shape[1:]), labels, f"targets of {client.id}")
        except UserError as error:
            raise IncompatibleExamplesError(str(error)) from error
    return outputs


def _recode_rows(
    test: Examples, table: TablePreprocessor, own_table: TablePreprocessor, owner: str, client: str
) -> Tensor:
    """Returns a client's raw rows with the columns and codes of the owner's table."""
    rows = test.input_tensor if test.index is None else test.input_tensor[test.index]
    if table.columns == own_table.columns:
        return rows
    position_by_name = {column.name: position for position, column in enumerate(table.columns)}
    recoded = []
    for column in own_table.columns:
        if column.name not in position_by_name:
            raise IncompatibleExamplesError(f"{client} has no column {column.name!r}, which the model of {owner} reads")
        position = position_by_name[column.name]
        recoded.append(_recode_column(rows[:, position], table.columns[position], column, owner, client))
    return torch.stack(recoded, dim=1)


def _recode_column(cells: Tensor, column: Column, own_column: Column, owner: str, client: str) -> Tensor:
    if (column.categories is None) != (own_column.categories is None):
        raise IncompatibleExamplesError(
            f"column {column.name!r} holds numbers at one of {owner} and {client}, and categories at the other"
        )
    if column.categories is None or own_column.categories is None:
        return cells
    own_code = {value: float(code) for code, value in enumerate(own_column.categories)}
    missing_code = float(len(own_column.categories)) if own_column.missing else -1.0
    new_codes = [*(own_code.get(value, -1.0) for value in column.categories), missing_code, -1.0]
    codes = torch.tensor(new_codes, dtype=cells.dtype)
    return codes[torch.where(cells < 0, len(codes) - 1, cells).long()]


def _output_converter(
    own_table: TablePreprocessor, table: TablePreprocessor, labels: Tensor, owner: str, client: str
) -> Callable[[Tensor], Tensor]:
    """Returns a function from the outputs of the owner's model to outputs in the classes or the scale of the client."""
    own_names, names = own_table.classes, table.classes
    if labels.dim() == 1 and not labels.is_floating_point():
        if own_names == names:
            return lambda outputs: outputs
        present = [names[k] for k in sorted(set(labels.tolist()))]
        if unknown := [name for name in present if name not in own_names]:
            raise IncompatibleExamplesError(
                f"{client} has examples of class {unknown[0]!r}, which the model of {owner} does not know"
            )
        places = [own_names.index(name) if name in own_names else -1 for name in names]
        return lambda outputs: torch.stack(
            [outputs[:, k] if k >= 0 else torch.full_like(outputs[:, 0], -math.inf) for k in places], dim=1
        )
    if own_names != names:
        raise IncompatibleExamplesError(
            f"the targets of {owner} are {', '.join(own_names)}, of {client} {', '.join(names)}"
        )
    if not own_table.target and not table.target:
        return lambda outputs: outputs
    mean, spread = torch.tensor(table.target or ((0.0, 1.0),), dtype=torch.float64).T
    return lambda outputs: ((own_table.unscale_outputs(outputs).double() - mean) / spread).to(torch.float32)
