"""Tables of who is called what: counts at a threshold for two classes, and by the most probable class for more."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from polyfed.report.html import table
from polyfed.report.roc import wilson

HALF = 49  # the position of 50 % among the thresholds


def threshold_tables(
    cells: Sequence[tuple[Mapping[str, Any], str]], yes: str, others: str, level: float, at: int = HALF
) -> str:
    """For each method the four counts at a threshold, and one table of the shares that follow from them.

    Args:
        cells: with the name of the method, as `polyfed.report.curves.cell` makes them.
        yes: name of what is looked for.
        others: name of the other class; empty for "not" and the name.
        level: of the intervals.
        at: position of the threshold.
    """
    other = others or f"not {yes}"
    shown = []
    for one, name in cells:
        hits, alarms = one["hits"][at], one["alarms"][at]
        no = one["n"] - one["yes"]
        rows = [[f"is {yes}", amount(hits), amount(one["yes"] - hits), amount(one["yes"])],
                [f"is {other}", amount(alarms), amount(no - alarms), amount(no)]]  # fmt: skip
        columns = ["", f"called {yes}", f"called {other}", "all"]
        shown.append(f"<div>{table(f'{name}: test examples', columns, rows, bold=[{1}, {2}])}</div>")
    measures = [measures_of(one, at) for one, _ in cells]
    texts = (
        f"sensitivity: of those that are {yes}, called so",
        f"specificity: of those that are {other}, called so",
        f"positive predictive value: of those called {yes}, are so",
        f"negative predictive value: of those called {other}, are so",
    )
    rows = [[text, *(share(*found[k], level) for found in measures)] for k, text in enumerate(texts)]
    shares = table("Shares at this threshold", ["", *(name for _, name in cells)], rows)
    return f'<div class="sideways">{"".join(shown)}</div>{shares}'


def measures_of(one: Mapping[str, Any], at: int) -> list[tuple[float, float]]:
    """Sensitivity, specificity, and the predictive values of yes and no at a threshold, each as hits and of how many."""
    hits, alarms, yes = one["hits"][at], one["alarms"][at], one["yes"]
    no = one["n"] - yes
    right = no - alarms
    return [(hits, yes), (right, no), (hits, hits + alarms), (right, right + yes - hits)]


def share(hits: float, examples: float, level: float) -> str:
    """A share with its interval in words.

    >>> share(8, 10, 0.95), share(0, 0, 0.95)
    ('80.0 % (49.0 to 94.3 %)', '–')
    """
    low, high = wilson(hits, examples, level)
    if math.isnan(low):
        return "–"
    return f"{100 * hits / examples:.1f} % ({100 * low:.1f} to {100 * high:.1f} %)"


def amount(value: float) -> str:
    """A count, whole where it is.

    >>> amount(3.0), amount(3.25), amount(-0.0)
    ('3', '3.2', '0')
    """
    value = round(value, 1) + 0.0
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def matrix_table(matrix: Sequence[Sequence[float]], method: str, names: Sequence[str]) -> str:
    """Counts by true class (rows) and by the class that is called; the more of a row, the darker."""
    head = "".join(f'<th scope="col">called {escape(name)}</th>' for name in names)
    body = []
    for k, row in enumerate(matrix):
        whole = sum(row)
        cells = [
            f'<td style="--share:{round(100 * value / whole) if whole else 0}%">'
            f"{f'<b>{amount(value)}</b>' if j == k else amount(value)}</td>"
            for j, value in enumerate(row)
        ]
        body.append(f'<tr><th scope="row">is {escape(names[k])}</th>{"".join(cells)}<td>{amount(whole)}</td></tr>')
    right = sum(row[k] for k, row in enumerate(matrix))
    told = f"{method}: {amount(right)} of {amount(sum(map(sum, matrix)))} test examples are called what they are"
    label = escape(told)
    return (
        f'<p class="caption">{label}</p><div class="wide" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="matrix"><thead><tr><th scope="col"></th>{head}<th scope="col">all</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
