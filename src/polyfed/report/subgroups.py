"""Scores and gains of groups of test examples, by a column of theirs such as "sex"."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from polyfed.comparison.crossed import gain_interval, score_interval
from polyfed.core.errors import UserError, nearest
from polyfed.core.metrics import Metric, metrics_of
from polyfed.report.charts import COLOURS, number
from polyfed.report.forest import Mark, Row, forest
from polyfed.report.html import choice, figure, legend, table
from polyfed.report.predictions import Outcomes
from polyfed.report.scale import Scale

Spread = tuple[float, float, float] | None
_GROUPS = 12  # of a column; further values are taken together
_NUMBERS = 8  # different numbers from which a column is divided into quarters
_SITES = 8  # sites up to which each has groups of its own
_UNKNOWN = "not known"
_NOTHING = (math.nan, math.nan, math.nan)


@final
@dataclass(frozen=True, eq=False)
class Subgroup:
    """Scores of a group of test examples: value, low and high; None where they are not defined.

    Attributes:
        name: the value of the column.
        examples: how many.
        scores: by method.
        gains: by method, over training alone, positive where it is better.
    """

    name: str
    examples: int
    scores: dict[str, Spread]
    gains: dict[str, Spread]


def groups_of(values: Sequence[Any]) -> dict[str, list[int]]:
    """Positions of the examples of each group of a column: its values; the quarters of numbers of many values; rare values
    of a long list together. Missing values are a group of their own, the last.

    >>> groups_of(["f", "m", None, "f"])
    {'f': [0, 3], 'm': [1], 'not known': [2]}
    >>> list(groups_of([30, 40, 50, 60, 70, 80, 90, 100, 110]))
    ['30 to 50', '51 to 70', '71 to 90', '91 to 110']
    """
    known = {k: v for k, v in enumerate(values) if v is not None and v == v and v != ""}
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in known.values())
    found: dict[str, list[int]] = {}
    if numbers and len(set(known.values())) > _NUMBERS:
        found = _quarters(known)
    else:
        frequent = {v for v, _ in Counter(known.values()).most_common(_GROUPS)}
        order = sorted(frequent) if numbers else sorted(frequent, key=str)
        found = {str(v): [k for k, one in known.items() if one == v] for v in order}
        if rest := [k for k, v in known.items() if v not in frequent]:
            found["all other values"] = rest
    if missing := [k for k in range(len(values)) if k not in known]:
        found[_UNKNOWN] = missing
    return found


def _quarters(known: dict[int, Any]) -> dict[str, list[int]]:
    values = np.array([float(v) for v in known.values()])
    cuts = np.unique(np.quantile(values, [0.25, 0.5, 0.75], method="lower"))
    at = np.searchsorted(cuts, values, side="left")  # a cut belongs to the group below it
    whole = bool((values == np.round(values)).all())
    found = {}
    for group in np.unique(at):
        low = float(values.min() if group == 0 else cuts[group - 1])
        high = float(cuts[group] if group < len(cuts) else values.max())
        ends = (
            f"{low + (group > 0):.0f} to {high:.0f}" if whole else _between(low, high, group == 0, group == len(cuts))
        )
        found[ends] = [k for k, here in zip(known, at, strict=True) if here == group]
    return found


def _between(low: float, high: float, first: bool, last: bool) -> str:
    """A quarter of numbers that are not whole, in few letters: the chart has no room for more."""
    return f"up to {high:.4g}" if first else f"above {low:.4g}" if last else f"{low:.4g} to {high:.4g}"


def subgroups(outcomes: Outcomes, column: str, clients: Sequence[str], metric: Metric, level: float) -> list[Subgroup]:
    """Scores and gains of the groups of a column, and first of all examples together.

    Args:
        outcomes: the predictions. Where each seed deals other data, those of the first seed.
        column: of the examples.
        clients: whose test examples are taken together, each with its own network.
        metric: the score.
        level: of the intervals.
    """
    seeds = outcomes.seeds if outcomes.same_clients else outcomes.seeds[:1]
    tables = outcomes.tables
    targets = torch.cat([tables[outcomes.methods[0], seeds[0], c].targets for c in clients])
    outputs = {
        m: [torch.cat([tables[m, seed, c].outputs for c in clients]) for seed in seeds] for m in shown_methods(outcomes)
    }
    groups = {"all": list(range(len(targets))), **groups_of(outcomes.values(column, clients, seeds[0]))}
    return [_subgroup(name, rows, outputs, targets, outcomes.reference, metric, level) for name, rows in groups.items()]


def shown_methods(outcomes: Outcomes) -> list[str]:
    """The leader and training alone: an interval takes its time, and more of them would hide what matters."""
    first, reference = outcomes.methods[0], outcomes.reference
    return [first] if reference in (None, first) else [first, str(reference)]


def _subgroup(
    name: str, rows: Sequence[int], outputs: dict[str, list[Tensor]], targets: Tensor, reference: str | None,
    metric: Metric, level: float,
) -> Subgroup:  # fmt: skip
    at = torch.tensor(rows, dtype=torch.int64)
    here = {method: [one[at] for one in by_seed] for method, by_seed in outputs.items()}
    scores = {m: _known(score_interval(metric, found, targets[at], level), metric, 0.0) for m, found in here.items()}
    gains = {
        m: _known(gain_interval(metric, found, here[reference], targets[at], level), metric, -1.0)
        for m, found in here.items()
        if reference is not None and m != reference
    }
    return Subgroup(name, len(rows), scores, gains)


def _known(found: Spread, metric: Metric, lowest: float) -> Spread:
    """Without what no share and no AUC can be."""
    if found is None or not math.isfinite(found[0]):
        return None
    if metric.unit != "%" and metric.name != "auc":
        return found
    value, low, high = found
    return value, max(low, lowest), min(high, 1.0)


def section(outcomes: Outcomes, column: str, scale: Scale, level: float, key: str) -> str:
    """The groups of a column as a chart and a table, over all sites and, where they are few, of each.

    Raises:
        UserError: there is no such column.
    """
    if column not in outcomes.columns():
        known = outcomes.columns()
        hint = nearest(column, known) if known else "the predictions have no columns beside targets and outputs"
        raise UserError(f"--subgroup {column!r}: the test examples have no such column; {hint}")
    try:
        (metric,) = metrics_of([scale.name], outcomes.task)
    except UserError as error:
        return f"<p>No subgroups: {escape(str(error))}.</p>"
    panels = {"All sites": _panel(outcomes, column, outcomes.clients, metric, scale, level, f"{key}-all")}
    if 1 < len(outcomes.clients) <= _SITES and outcomes.same_clients:
        for k, client in enumerate(outcomes.clients):
            panels[client] = _panel(outcomes, column, [client], metric, scale, level, f"{key}-{k}")
    return choice(f"{key}-site", "Site", panels)


def _panel(
    outcomes: Outcomes, column: str, clients: Sequence[str], metric: Metric, scale: Scale, level: float, key: str
) -> str:
    found = subgroups(outcomes, column, clients, metric, level)
    shown = shown_methods(outcomes)
    styles = {m: 2 * COLOURS - 1 if m == outcomes.reference else 0 for m in shown}
    rows = [
        Row(f"{group.name} ({group.examples})", tuple(Mark(m, *(group.scores[m] or _NOTHING), styles[m]) for m in shown))
        for group in found
    ]  # fmt: skip
    chart = forest(rows, key=key, title=f"{scale.label} by {column}", x_label=f"{scale.label}, {100 * level:g} % interval",
                   unit=scale.unit)  # fmt: skip
    which = "the test examples of this site" if len(clients) == 1 and len(outcomes.clients) > 1 else (
        "the test examples of all sites together, each with its own site's network")  # fmt: skip
    caption = f"{scale.label} by {column}: {which}; in brackets how many. Lines: {100 * level:g} % intervals. "
    if not outcomes.same_clients:
        caption += f"Each seed deals other data; these are those of seed {outcomes.seeds[0]}. "
    elif len(outcomes.seeds) > 1:
        caption += f"Means over {len(outcomes.seeds)} seeds. "
    caption += (
        "Over all sites together the score is not the mean of the sites' scores. Where groups are small, differences "
    )
    caption += "between them may be chance; no correction is made for looking at several."
    columns = [column, "test examples"]
    for method in shown:
        columns += [f"{method} {scale.label}", "interval"]
        columns += [f"gain of {method}", "interval"] if method != outcomes.reference and outcomes.reference else []
    cells = [[group.name, str(group.examples), *_cells(group, outcomes, scale)] for group in found]
    bars = legend(shown, [styles[m] for m in shown])
    return figure(chart + bars, caption) + table(
        f"{scale.label} and gain over training alone by {column}", columns, cells
    )


def _cells(group: Subgroup, outcomes: Outcomes, scale: Scale) -> list[str]:
    cells = []
    for method in shown_methods(outcomes):
        score = group.scores[method]
        cells += ["–", "–"] if score is None else [
            number(score[0], scale.unit), _ends(number(score[1], scale.unit), number(score[2], scale.unit), f" {scale.unit}")
        ]  # fmt: skip
        if method != outcomes.reference and outcomes.reference:
            gain = group.gains.get(method)
            cells += (
                ["–", "–"]
                if gain is None
                else [scale.signed(gain[0]), _ends(scale.signed(gain[1]), scale.signed(gain[2]), " points")]
            )
    return cells


def _ends(low: str, high: str, unit: str) -> str:
    """An interval, with its unit once."""
    return f"{low.removesuffix(unit)} to {high}"
