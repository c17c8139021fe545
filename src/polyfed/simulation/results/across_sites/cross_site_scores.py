"""Holds the scores of every client's model at every client, writes them as text, JSON and CSV, and says which model
works well for which client.
"""

import csv
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file, write_file_atomically
from polyfed.core.io.text.number_format import count_with_noun, format_number, join_first_and_count_rest
from polyfed.core.io.text.site_words import name_sites
from polyfed.core.io.text.terminal_text import escape_spreadsheet_formula
from polyfed.core.io.values.validation import parse_json, validation_error

FILE = "cross_site.json"
"""Names the file of a run directory with the matrix; `cross_site.csv` has the same for a spreadsheet."""
CSV_FILE = "cross_site.csv"
_MAX_PRINTED_CLIENTS = 10
LEVEL = 0.95
_NAMED = 5


@final
@dataclass(frozen=True)
class CrossSiteCell:
    """Holds the score of one client's model on another client's test examples.

    Args:
        model_of: the client whose model it is.
        patients_of: the client whose test examples they are.
        metric: name of the score.
        value: the score; None where it is not defined.
        low, high: ends of its 95 % interval over test examples, or over groups (patients) if the examples have them; None
            where too few say anything, as for an AUC with fewer than five examples of a class.
        difference: the score minus that of the model of `patients_of` on the same examples.
        difference_low, difference_high: ends of its interval, by pairs of predictions for the same examples; the intervals
            of all differences of a metric hold simultaneously in 95 of 100 cases.
        examples: number of test examples.
        reason: why there is no score; empty if there is one.
    """

    model_of: str
    patients_of: str
    metric: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    examples: int = 0
    reason: str = ""


class _CrossSiteJSON(TypedDict):
    """Describes the content of `cross_site.json`."""

    format: int
    round: int
    level: float
    clients: list[str]
    metrics: list[dict[str, Any]]
    cells: list[dict[str, Any]]


@final
@dataclass(frozen=True)
class CrossSiteScores:
    """Holds the scores of every client's model on every client's test examples.

    Args:
        clients: in the order of rows and columns.
        metrics: name, label, unit and direction of each score; the first decides.
        cells: one for each metric, model and client.
        round: the round whose models these are.
    """

    clients: tuple[str, ...]
    metrics: tuple[Mapping[str, Any], ...]
    cells: tuple[CrossSiteCell, ...]
    round: int

    def __str__(self) -> str:
        return format_cross_site(self)

    def __repr__(self) -> str:
        metrics = ", ".join(entry["name"] for entry in self.metrics)
        return f"CrossSiteScores({count_with_noun(len(self.clients), 'client')}, {metrics}, round {self.round})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def matrix(self, metric: str | None = None) -> list[list[CrossSiteCell]]:
        """Returns a metric's scores (default: the deciding one), a row per model, a column per test client.

        Raises:
            UserError: the metric is unknown.
        """
        name = self.metrics[0]["name"] if metric is None else metric
        if name not in {entry["name"] for entry in self.metrics}:
            raise UserError(
                f"there is no score {name!r}; there are {', '.join(entry['name'] for entry in self.metrics)}"
            )
        cell_by_place = {(c.model_of, c.patients_of): c for c in self.cells if c.metric == name}
        return [[cell_by_place[model_of, patients_of] for patients_of in self.clients] for model_of in self.clients]

    def table(self) -> list[dict[str, Any]]:
        """Returns the scores as dicts of `CrossSiteCell`'s fields, one per metric, model and client."""
        return [asdict(cell) for cell in self.cells]

    def sentences(self) -> list[str]:
        """Says which model serves which client, as far as simultaneous intervals of the deciding metric decide it."""
        return list(_describe_scores(self))

    def to_json_dict(self) -> dict[str, Any]:
        """Returns the scores as a dict, the content of the file `cross_site.json`."""
        return {
            "format": 1, "round": self.round, "level": LEVEL, "clients": list(self.clients),
            "metrics": [dict(entry) for entry in self.metrics], "cells": self.table(),
        }  # fmt: skip

    def to_csv(self) -> str:
        """Returns the scores as a CSV text, one row per metric, model and client."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        rows = self.table()
        writer.writerow(rows[0])
        for row in rows:
            values = ["" if value is None else value for value in row.values()]
            writer.writerow([escape_spreadsheet_formula(v) if isinstance(v, str) else v for v in values])
        return text.getvalue()


def write_cross_site(scores: CrossSiteScores, folder: Path) -> None:
    """Writes the scores to the files `cross_site.json` and `cross_site.csv` in a run directory."""
    text = json.dumps(scores.to_json_dict(), ensure_ascii=False, indent=1, allow_nan=False)
    write_file_atomically(folder / FILE, text.encode())
    write_file_atomically(folder / CSV_FILE, scores.to_csv().encode())


def read_cross_site(folder: Path) -> CrossSiteScores | None:
    """Reads the cross-site scores from a run directory; returns None if it has none.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); resume the run with cross_site=True again") from error
    error_text = validation_error(content, _CrossSiteJSON)
    names = list(CrossSiteCell.__dataclass_fields__)
    if not error_text and any(set(cell) != set(names) for cell in content["cells"]):
        error_text = "a cell has other fields"
    if error_text:
        raise UserError(f"{path} is damaged: {error_text}")
    cells = tuple(CrossSiteCell(**cell) for cell in content["cells"])
    return CrossSiteScores(tuple(content["clients"]), tuple(content["metrics"]), cells, content["round"])


def _describe_scores(scores: CrossSiteScores) -> Iterator[str]:
    matrix, entry = scores.matrix(), scores.metrics[0]
    sign, unit = (1 if entry["higher_is_better"] else -1), entry["unit"]
    better, worse = dict[str, list[str]](), dict[str, list[str]]()
    for row in matrix:
        for cell in row:
            if cell.difference_low is None or cell.difference_high is None:
                continue
            low, high = sorted((sign * cell.difference_low, sign * cell.difference_high))
            if low > 0:
                better.setdefault(cell.model_of, []).append(cell.patients_of)
            elif high < 0:
                worse.setdefault(cell.model_of, []).append(cell.patients_of)
    for name, sites in better.items():
        serves = f"The model of {name_sites([name])} serves {name_sites(sites, _NAMED)}"
        yield f"{serves} better than their own: the interval of the difference is above 0."
    for name, sites in worse.items():
        yield f"The model of {name_sites([name])} serves {name_sites(sites, _NAMED)} worse than their own."
    if not better and not worse and len(scores.clients) > 1:
        yield "No model is decided to be better or worse than a site's own: the test examples are too few to say."
    for position, name in enumerate(scores.clients):
        others = [row[position] for row in matrix if row[position].value is not None]
        diagonal = matrix[position][position]
        if diagonal.value is None or len(others) < 2 or len(scores.clients) > 12:
            continue
        best = max(others, key=lambda cell: sign * (cell.value or 0.0))
        if best.model_of != name and sign * (best.value or 0.0) > sign * diagonal.value and name not in better.get(
            best.model_of, []
        ):  # fmt: skip
            yield (
                f"By the best estimates {name_sites([name])} is served best by the model of {name_sites([best.model_of])}, "
                f"{format_number(best.value, unit)} against {format_number(diagonal.value, unit)} of its own; not decided."
            )
    if reasons := list(dict.fromkeys(cell.reason for row in matrix for cell in row if cell.reason)):
        yield f"Empty cells: {join_first_and_count_rest(reasons, 3)}."


def format_cross_site(scores: CrossSiteScores) -> str:
    """Returns the matrix of the deciding metric as text for a terminal, with confidence intervals and sentences."""
    entry = scores.metrics[0]
    positions = range(min(len(scores.clients), _MAX_PRINTED_CLIENTS))
    names = [scores.clients[k] for k in positions]
    cells = [[_format_cell(row[k], entry["unit"], is_own=k == j) for k in positions] for j, row in
             enumerate(scores.matrix()[: len(positions)])]  # fmt: skip
    width = max(len(text) for text in [*names, *(text for row in cells for text in row)]) + 2
    first = max(map(len, [*names, "model of"])) + 2
    title = f"{entry['label']} of every site's model (rows) on every site's test examples (columns), 95 % intervals"
    lines = [title, f"{'model of':{first}}" + "".join(f"{name:>{width}}" for name in names)]
    lines += [
        f"{name:{first}}" + "".join(f"{text:>{width}}" for text in row) for name, row in zip(names, cells, strict=True)
    ]
    if hidden := len(scores.clients) - len(names):
        lines.append(f"and {hidden} more; {FILE} and {CSV_FILE} have all")
    return "\n".join(
        [*lines, "[ ] is the site's own model. Intervals of scores hold one at a time.", *scores.sentences()]
    )


def _format_cell(cell: CrossSiteCell, unit: Any, *, is_own: bool) -> str:
    if cell.value is None:
        return "–"
    scale = 100 if unit == "%" else 1
    digits = 0 if unit == "%" else 2
    text = f"{scale * cell.value:.{digits if unit == '%' else 3}f}"
    if cell.low is not None and cell.high is not None:
        text += f" ({scale * cell.low:.{digits}f} to {scale * cell.high:.{digits}f})"
    return f"[{text}]" if is_own else text


def average_cross_site(parts: Sequence[CrossSiteScores]) -> CrossSiteScores:
    """Returns the mean of several matrices of cross-site scores, one for each seed or each partition of the data.

    Ends of intervals are averaged, too: the seeds share the same patients, so that their number makes no interval shorter.
    """
    first = parts[0]
    cells = []
    for position, cell in enumerate(first.cells):
        same_cells = [part.cells[position] for part in parts]
        means = {
            name: _mean_or_none([getattr(c, name) for c in same_cells])
            for name in ("value", "low", "high", "difference", "difference_low", "difference_high")
        }
        cells.append(replace(cell, **means, reason="" if means["value"] is not None else cell.reason))  # type: ignore[arg-type]
    return replace(first, cells=tuple(cells))


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None if a value is missing."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None
