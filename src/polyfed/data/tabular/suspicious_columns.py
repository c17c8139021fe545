"""Warns of columns of a table that look like ids, and of columns that are nearly equal to the target."""

import math
import re
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import warn_of_data
from polyfed.core.examples.text_columns import is_numeric_text
from polyfed.data.formats.files import Table
from polyfed.data.tabular.columns import LARGEST_EXACT
from polyfed.data.tabular.table_reader import (
    column_as_arrow_array,
    column_as_numbers,
    column_as_texts,
    is_numeric_column,
    is_text_type,
)

_LEAST_ROWS = 50  # below which chance explains what is said here
_LEAST_IDS = 10  # different values of an id that repeats
_MANY_TIMES = 20  # rows of a value in sequence from which on that alone makes an id
_MOST_COMPARED = 50  # columns that may be constant within the values of an id
# Correlation from which on a column nearly is the target. A rare one for a feature that is known before: the two scores of
# UCI's Parkinson data, one of which contains the other, have 0.947.
_CORRELATION = 0.94
_AREA = 0.995  # AUC of a single column
_PEOPLE = frozenset({"patient", "subject", "participant", "person", "mrn", "pid"})  # words in the names of their ids
_ID_WORDS = frozenset({"id", "nr", "no", "number", "nummer", "case", "fall", "key", "index", "record", "row"}) | _PEOPLE
_ID_ENDING = re.compile(r"(nr|nummer|number|(case|encounter|pat|patient|person|record|sample|subject|user|visit)id)$")
_ALMOST_UNIQUE = 0.9  # share of different values in a column with such a name
_REPEATS = 10  # pairs of equal numbers that chance would make, from which on to have hardly any says something
_LEAST_OF_SITE = 20  # rows of a site from which on the range of its numbers says something
_LEAST_EVEN = 100  # rows from which on evenly spread numbers differ from a bell curve
_EVEN = 1.22  # Kolmogorov and Smirnov's statistic: nine of ten columns of evenly drawn numbers are below it
_ROLES = {"group": "that of a patient with several rows", "time": "a time"}
_LEAST_OF_CLASS = 10  # examples of a class for that AUC

_MOST_SITES = 20  # from which on a column of sites may be another
_LEAST_AT_SITE = 5  # rows of a site on average, below which the column of sites is nearly unique
_LEAST_AT_NUMBERED_SITE = 20  # the same where sites are numbers, which ages and amounts are, too
_SITE_WORDS = frozenset(
    {
        "site",
        "hospital",
        "clinic",
        "centre",
        "center",
        "institution",
        "client",
        "ward",
        "department",
        "country",
        "region",
    }
)

Codes = NDArray[np.int64]


def warn_of_suspicious_columns(
    table: Table, y: Tensor, targets: Sequence[str], features: Sequence[str], site: str | None, roles: Sequence[str]
) -> None:
    """Warns of columns that look like ids, and of features from which the target nearly follows.

    Args:
        table: the rows.
        y: the targets as networks get them, shape (n,) of classes or (n, targets) of numbers or labels.
        targets: the columns of `y`.
        features: the columns that networks get.
        site: the column of sites; None without one.
        roles: columns with another role (groups, times).
    """
    sites = None if site is None else np.unique(column_as_texts(table, site).astype(str), return_inverse=True)[1]
    identifiers = set()
    for name in features:
        row_numbers = column_as_numbers(table, name) if is_numeric_column(table, name) else np.zeros(0)
        if looks := describe_identifier(name, row_numbers, sites):
            identifiers.add(name)
            role = "time" if "in order" in looks else "group"
            otherwise = (
                "" if roles else f", or give {role}={name!r} (--data.{role} {quote(name)}) if it is {_ROLES[role]}"
            )
            warn_of_data(
                f"column {name!r} looks like an identifier ({looks}) and is used as a feature: if it is one, leave it out "
                f"(drop={name!r}, --data.drop {quote(name)}){otherwise}"
            )
    if table.num_rows < _LEAST_ROWS:
        return
    others = [name for name in table.column_names if name not in (*targets, *roles, site)]
    values = {name: numbers for name in others if (numbers := _values_as_codes(table, name)) is not None}
    codes = {name: numbers for name, numbers in values.items() if _has_whole_values(table, name)}
    if not roles:
        for name in others:
            if (
                name in codes
                and name not in identifiers
                and (looks := _describe_id(name, values, sites, name in features))
            ):
                cure = (
                    f"give group={name!r} (--data.group {quote(name)}) if it is that of a patient or the like (its rows "
                    "then count as one), or "
                )
                warn_of_data(
                    f"column {name!r} has {looks}: an id? {cure}leave it out (drop={name!r}, --data.drop {quote(name)})"
                    if name in features
                    else f"column {name!r}, which is not a feature, has {looks}: an id? If its rows belong together, give "
                    f"group={name!r} (--data.group {quote(name)}); otherwise they train in one set and test in another"
                )
    for name in features:
        for sentence in _near_target_sentences(table, name, y, targets, codes.get(name)):
            warn_of_data(
                f"{sentence}: is it known before the target is? If not, leave it out (drop={name!r}, --data.drop "
                f"{quote(name)})"
            )


def warn_of_unlikely_sites(table: Table, site: str, targets: Sequence[str]) -> None:
    """Warns if the column of sites looks like another: nearly unique, or many numbers. It may be swapped with the target."""
    names, num_rows = np.unique(column_as_texts(table, site).astype(str)).tolist(), table.num_rows
    are_numbers = all(map(is_numeric_text, names))
    target_texts = column_as_texts(table, targets[0])
    num_values = len({text for text in target_texts.tolist() if text is not None})
    target_has_site_name = bool(_SITE_WORDS & {*_split_name(targets[0])})
    is_named = bool((_SITE_WORDS | _ID_WORDS) & {*_split_name(site)})
    is_measured = are_numbers and not is_named and num_rows < _LEAST_AT_NUMBERED_SITE * len(names)
    has_fractions = are_numbers and any(not float(name).is_integer() for name in names)
    looks_wrong = num_rows < _LEAST_AT_SITE * len(names) or is_measured or has_fractions
    if len(names) <= _MOST_SITES or not (looks_wrong or (are_numbers and target_has_site_name)):
        return
    swapped = target_has_site_name or (num_values <= _MOST_SITES and not is_numeric_column(table, targets[0]))
    advice = "if these are no clients, give site=... (--data.site) with the column that says where a row comes from"
    if len(targets) == 1 and swapped:
        advice = f"if the two are swapped, give site={targets[0]!r} (--data.site {quote(targets[0])}) and "
        advice += f"target={site!r} (--data.target {quote(site)})"
    warn_of_data(
        f"site: column {site!r} has {len(names)} different {'numbers' if are_numbers else 'texts'} in {num_rows} rows, and "
        f"target {targets[0]!r} {num_values} different values; each of the {len(names)} becomes a client; {advice}"
    )


def _split_name(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-zß-ÿ]+|[A-Z]+", name)]


def describe_identifier(name: str, numbers: NDArray[np.float64], sites: Codes | None) -> str:
    """Returns in what a column of whole numbers looks like an identifier of rows, in a few words, or "" if it does not.

    Numbers that were measured repeat at least as often as numbers drawn evenly from the same range. Those of cases hardly
    do, in all rows or at each site. Longer ones, drawn from too wide a range for that, are spread evenly and have as many
    digits each. Where rows are few or values repeat, the name decides.

    Args:
        name: of the column.
        numbers: a number per row, NaN where there is none.
        sites: a number per row for its site; None without sites.
    """
    present = ~np.isnan(numbers)
    values = numbers[present]
    if len(values) < 2 or bool((values != np.floor(values)).any()) or float(np.abs(values).max()) > LARGEST_EXACT:
        return ""
    different = np.unique(values)
    counts = f"{len(different)} different whole numbers in {len(values)} rows"
    steps = np.diff(values)
    if len(values) >= _LEAST_ROWS and (bool((steps > 0).all()) or bool((steps < 0).all())):
        return f"{counts}, in order"
    codes = np.zeros(0, int) if sites is None else sites[present]
    by_site = [values[codes == code] for code, count in enumerate(np.bincount(codes)) if count >= _LEAST_OF_SITE]
    if len(values) >= _LEAST_ROWS and (_hardly_repeats([values]) or _hardly_repeats(by_site)):
        return f"{counts}, which would repeat more often if they were measured"
    digits = len(str(int(different[0])))
    if (
        len(values) >= _LEAST_EVEN and 2 * len(different) >= len(values) and different[0] > 0
        and digits >= 5 and len(str(int(different[-1]))) == digits and _are_spread_evenly(different)
    ):  # fmt: skip
        return f"{counts}, each of {digits} digits and spread evenly"
    last = (_split_name(name) or [""])[-1]
    is_named_so = last in _ID_WORDS or _ID_ENDING.search(last) is not None
    return f"{counts}, and its name" if is_named_so and len(different) >= _ALMOST_UNIQUE * len(values) else ""


def _hardly_repeats(parts: Sequence[NDArray[np.float64]]) -> bool:
    """Returns whether whole numbers repeat far more rarely within each part than evenly drawn ones of the same range."""
    expected = sum(len(part) * (len(part) - 1) / 2 / (part.max() - part.min() + 1) for part in parts)
    counts = [np.unique(part, return_counts=True)[1] for part in parts]
    return bool(expected >= _REPEATS and sum((count * (count - 1)).sum() / 2 for count in counts) <= expected / 4)


def _are_spread_evenly(different: NDArray[np.float64]) -> bool:
    """Returns whether sorted numbers fill the range from the first to the last evenly."""
    shares = (different - different[0]) / (different[-1] - different[0])
    even = (np.arange(len(different)) + 0.5) / len(different)
    return bool(np.abs(shares - even).max() * math.sqrt(len(different)) < _EVEN)


def _values_as_codes(table: Table, name: str) -> Codes | None:
    """Returns a number from 0 for each value of a column of texts or numbers, missing ones too; None for others."""
    column: NDArray[Any]
    if is_numeric_column(table, name):
        column = column_as_numbers(table, name)
    elif is_text_type(column_as_arrow_array(table, name).type):
        column = column_as_texts(table, name).astype(str)
    else:
        return None
    return np.unique(column, return_inverse=True)[1]


def _has_whole_values(table: Table, name: str) -> bool:
    """Returns whether a column has a text or a whole number in each row."""
    if is_numeric_column(table, name):
        numbers = column_as_numbers(table, name)
        return bool((numbers == np.floor(numbers)).all())  # NaN is not a whole number either
    return not column_as_arrow_array(table, name).null_count


def _describe_id(name: str, codes: dict[str, Codes], sites: Codes | None, is_feature: bool) -> str:
    """Returns in what a column looks like an id, in a few words, or "" if it does not.

    Either its values stand in sequence, many times each or with another column constant within each of them; or several
    columns are constant within each of its values, in any order of the rows: sex and age within a patient; or the name
    of a feature says so.
    """
    values = codes[name]
    rows, different = len(values), int(values.max()) + 1
    if different < _LEAST_IDS or rows < 2 * different:
        return ""
    keys = values if sites is None else sites * different + values
    pairs = len(np.unique(keys))
    if sites is not None and pairs <= int(sites.max()) + 1:
        return ""  # one value a site: it describes the site
    in_sequence = 1 + int((np.diff(keys) != 0).sum()) == pairs
    compared = [other for other in codes if other != name][:_MOST_COMPARED]
    num_constant = sum(
        bool(codes[other].max() > 0) and len(np.unique(keys * (int(codes[other].max()) + 1) + codes[other])) == pairs
        for other in compared
    )
    times = f"{different} values that each occur about {round(rows / different)} times"
    if in_sequence and (rows >= _MANY_TIMES * different or num_constant):
        return f"{times} in sequence"
    if num_constant > 1:
        return f"{times}, and {num_constant} columns are constant within each"
    return times if is_feature and _PEOPLE & {*name.lower().replace("-", "_").split("_")} else ""


def _near_target_sentences(
    table: Table, name: str, y: Tensor, targets: Sequence[str], codes: Codes | None
) -> Iterator[str]:
    """Yields a sentence for each target that a single column nearly is."""
    numbers = column_as_numbers(table, name) if is_numeric_column(table, name) else None
    columns = [y.numpy()] if y.dim() == 1 else list(y.numpy().T)
    for target, values in zip(targets, columns, strict=True):
        has_classes = not y.is_floating_point() or bool(np.isin(values, (0, 1)).all())
        if has_classes and codes is not None and _values_determine_class(codes, values.astype(np.int64)):
            yield f"column {name!r} nearly is the target {target!r} (each of its values goes with one class)"
        elif has_classes and numbers is not None and len(np.unique(values)) == 2:
            area = _area_of_column(numbers, values == values.max())
            if area is not None and max(area, 1 - area) >= _AREA:
                yield f"column {name!r} nearly is the target {target!r} (alone it has an AUC of {max(area, 1 - area):.3f})"
        elif not has_classes and numbers is not None:
            present = ~np.isnan(numbers)
            x, t = numbers[present], values[present].astype(np.float64)
            if len(x) >= _LEAST_ROWS and x.std() > 0 and t.std() > 0:
                correlation = float(np.corrcoef(x, t)[0, 1])
                if abs(correlation) >= _CORRELATION:
                    yield f"column {name!r} nearly is the target {target!r} (correlation {correlation:.2f})"


def _values_determine_class(codes: Codes, classes: Codes) -> bool:
    """Returns whether each value of a column, of several rows each, goes with one class only."""
    different, pairs = int(codes.max()) + 1, len(np.unique(codes * (int(classes.max()) + 1) + classes))
    return 2 <= different <= len(codes) / 5 and pairs == different and len(np.unique(classes)) > 1


def _area_of_column(numbers: NDArray[np.float64], positive: NDArray[np.bool_]) -> float | None:
    """Returns the AUC of a column for two classes; None if a class has few rows with a value."""
    present = ~np.isnan(numbers)
    x, is_positive = numbers[present], positive[present]
    m, q = int(is_positive.sum()), int((~is_positive).sum())
    if min(m, q) < _LEAST_OF_CLASS:
        return None
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[is_positive].sum() - m * (m + 1) / 2) / (m * q))
