"""Infers columns of table rows from a network, the rows' other columns and their labels (attribute inference)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.examples import Examples
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.report.audit.attack_rates import AttackRate, share_of_right_guesses

MOST_VALUES, MOST_COLUMNS = 10, 20
Guesses = Mapping[str, NDArray[np.float64]]
"""Maps a column's name to 1 for each row whose value was guessed rightly, 0 for others, NaN for rows without a value."""


@final
@dataclass(frozen=True)
class AttributeAudit:
    """Holds how often the attack guesses a column of table rows.

    Attributes:
        column: its name, or "column 3" of a table without names.
        values: number of values that were tried, the most of any client.
        examples: number of rows that have a value, of all attacked clients.
        trained_on: share of rows guessed rightly, of those that the network was trained on.
        others: the same for rows that it was not trained on: what the network tells of the population.
        most_frequent: the same for who always guesses a client's most frequent value.
    """

    column: str
    values: int
    examples: int
    trained_on: AttackRate
    others: AttackRate
    most_frequent: float

    def describe(self) -> list[str]:
        """Returns the cells of a row of a table: column, values, rows and the three shares."""
        shares = (str(self.trained_on), str(self.others), f"{self.most_frequent:.3f}")
        return [self.column, str(self.values), str(self.examples), *shares]


ATTRIBUTE_COLUMNS = ["column", "values", "rows", "rows trained on", "other rows", "most frequent value"]


def guess_attributes(network: nn.Module, examples: Examples) -> Guesses:
    """Returns for each column of few values whether the attack guesses the rows' values.

    The attacker has the network and a row's other columns and label, tries each value, and takes the most probable one: the
    highest probability of the label, times the frequency of the value. Source: Fredrikson et al. 2014, "Privacy in
    Pharmacogenetics".
    """
    rows, labels = examples.raw_inputs, examples.labels
    guesses = {}
    for name, (position, values, frequencies) in columns_of_few_values(examples).items():
        assert isinstance(rows, Tensor)
        costs = []
        for value, frequency in zip(values, frequencies, strict=True):
            changed = rows.clone()
            changed[:, position] = value
            outputs = predict(network, Examples(changed, labels, transform=examples.transform)).double()
            loss = nn.functional.cross_entropy(outputs, labels.cpu().long(), reduction="none")
            costs.append(loss.nan_to_num(nan=torch.inf) - frequency.log())
        guessed, cells = values[torch.stack(costs).argmin(0)], rows[:, position].cpu()
        guesses[name] = torch.where(cells.isnan(), torch.nan, (guessed == cells).double()).numpy()
    return guesses


def columns_of_few_values(examples: Examples) -> dict[str, tuple[int, Tensor, Tensor]]:
    """Returns the first 20 table columns of 2 to 10 values as `{name: (position, values, frequencies)}`.

    Values are sorted by frequency, the highest first. Inputs that are no table have none.
    """
    rows = examples.raw_inputs
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        return {}
    columns = examples.transform.columns if isinstance(examples.transform, TablePreprocessor) else None
    few_valued: dict[str, tuple[int, Tensor, Tensor]] = {}
    for position in range(rows.shape[1]):
        cells = rows[:, position].cpu()
        values, counts = torch.unique(cells[~cells.isnan()], return_counts=True)
        if 2 <= len(values) <= MOST_VALUES and len(few_valued) < MOST_COLUMNS:
            order = counts.argsort(descending=True, stable=True)
            name = f"column {position + 1}" if columns is None else columns[position].name
            few_valued[name] = position, values[order], counts[order].double() / counts.sum()
    return few_valued


def measure_attributes(
    parts: Sequence[tuple[Examples, NDArray[np.int64], Sequence[Guesses], Sequence[NDArray[np.bool_]]]],
) -> tuple[AttributeAudit, ...]:
    """Returns how often the attack guesses each column, of all clients together.

    Args:
        parts: for each client its training examples, the unit of each, and for each run the guesses and which examples the
            run was trained on.
    """
    tables = [columns_of_few_values(examples) for examples, *_ in parts]
    audits = []
    for name in dict.fromkeys(name for table in tables for name in table):
        right, inside, units = list[NDArray[np.float64]](), list[NDArray[np.bool_]](), list[NDArray[np.int64]]()
        first_unit, num_values, num_rows, num_frequent = 0, 0, 0, 0.0
        for table, (_, own_units, guesses, own_members) in zip(tables, parts, strict=True):
            if name in table:
                _, values, frequencies = table[name]
                right += [guess[name] for guess in guesses]
                inside += own_members
                units += [own_units + first_unit] * len(guesses)
                rows_with_value = int((~np.isnan(guesses[0][name])).sum())
                num_values, num_rows = max(num_values, len(values)), num_rows + rows_with_value
                num_frequent += float(frequencies[0]) * rows_with_value
            first_unit += int(own_units.max()) + 1
        scores, is_member, unit = np.concatenate(right), np.concatenate(inside), np.concatenate(units)
        kinds = [~np.isnan(scores) & kept_rows for kept_rows in (is_member, np.logical_not(is_member))]
        if all(kind.any() for kind in kinds):
            trained_on, others = (share_of_right_guesses(scores[kind], unit[kind]) for kind in kinds)
            audits.append(AttributeAudit(name, num_values, num_rows, trained_on, others, num_frequent / num_rows))
    return tuple(audits)
