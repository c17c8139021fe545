"""Says why a table's text, or columns of it, cannot be used as they are; all columns in one error.

Nothing here needs torch or NumPy, so that the command line refuses a table in an instant.
"""

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import final

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import UNLIMITED_BYTES, open_file
from polyfed.core.io.text.number_format import format_row_numbers, join_with_and

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
MOST_CATEGORIES = 50
MAX_MISSING_WORDS = 3  # different words among numbers that may all stand for no value
_MOST_CLASSES = 20  # different whole numbers that are taken as classes by default
_THOUSANDS_COMMA = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_NUMBER_WITH_SIGN = re.compile(r"[$£€]\s?[+-]?\d+([.,]\d+)*|[+-]?\d+([.,]\d+)*\s?[%$£€]")
_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}([ T]\d{1,2}:\d{2}.*)?")


@final
@dataclass(frozen=True)
class ColumnRefusal:
    """Says why one column cannot be a feature.

    Args:
        name: of the column.
        what: what it holds, such as "holds dates or times".
        cure: what to do about it, if leaving it out is not the first choice; "" if it is.
        otherwise: what else to do than to leave it out.
    """

    name: str
    what: str
    cure: str = ""
    otherwise: str = ""

    def __str__(self) -> str:
        cure = self.cure or f"leave it out ({_drop_advice([self.name])}){self.otherwise}"
        return f"column {self.name!r} {self.what}: {cure}"


def _drop_advice(names: Sequence[str]) -> str:
    joined = ",".join(names)
    return f"drop={joined!r}, --data.drop {quote(joined)}"


def refuse_columns(refusals: Sequence[ColumnRefusal]) -> None:
    """Raises one `UserError` about all columns that cannot be features; does nothing without any.

    >>> refuse_columns([ColumnRefusal("day", "holds dates or times"), ColumnRefusal("id", "has 9 texts in 9 rows")])
    Traceback (most recent call last):
    polyfed.core.errors.UserError: 2 columns cannot be features as they are: 'day' holds dates or times and 'id' has 9
    texts in 9 rows; leave them out (drop='day,id'), or make numbers or categories of them (categorical=...)
    """
    unusable = [refusal for refusal in refusals if not refusal.cure]
    sentences = [str(refusal) for refusal in refusals if refusal.cure][:1]
    if len(unusable) > 1:
        reasons = join_with_and([f"{refusal.name!r} {refusal.what}" for refusal in unusable])
        advice = _drop_advice([refusal.name for refusal in unusable])
        sentences.insert(0, f"{len(unusable)} columns cannot be features as they are: {reasons}; leave them out ({advice}), "
                            "or make numbers or categories of them (categorical=..., --data.categorical)")  # fmt: skip
    elif unusable:
        sentences.insert(0, str(unusable[0]))
    if sentences:
        raise UserError("; besides, ".join(sentences))


def find_text_refusal(column: Sequence[str | None], name: str) -> ColumnRefusal | None:
    """Says why a column of texts, None where a cell is empty, can be neither numbers nor categories; None if it can.

    >>> print(find_text_refusal(["1,5", None, "2,0"], "dose"))
    column 'dose' has numbers with a comma in rows 1 and 3: give decimal=',' (--data.decimal ,)
    """
    rows = [row for row, value in enumerate(column) if value is not None]
    present = [value for value in column if value is not None]
    if not present:
        return ColumnRefusal(name, "has no value in any row")
    if all(_DATE.fullmatch(value) for value in present[:100]):
        return refuse_dates(name)
    odd = [row for row, value in zip(rows, present, strict=True) if not is_numeric_text(value)]
    odd_texts = [str(column[row]) for row in odd]
    if odd and all(map(_THOUSANDS_COMMA.fullmatch, odd_texts)):
        return ColumnRefusal(
            name, f"has numbers with a comma before three digits in {format_row_numbers(odd)}",
            "if it separates thousands, take it out of the file; if it begins a fraction, give decimal=',' "
            "(--data.decimal ,)",
        )  # fmt: skip
    if odd and all(map(DECIMAL_COMMA.fullmatch, odd_texts)):
        return ColumnRefusal(
            name, f"has numbers with a comma in {format_row_numbers(odd)}", "give decimal=',' (--data.decimal ,)"
        )
    different, words = len(set(present)), sorted(set(odd_texts))
    many = different > MOST_CATEGORIES or (different > 10 and 2 * different > len(present))
    are_few = len(odd) <= 0.2 * len(present) or (many and len(words) <= MAX_MISSING_WORDS and different > len(words))
    if odd and (are_few or many) and all(map(_NUMBER_WITH_SIGN.fullmatch, odd_texts)):
        return ColumnRefusal(
            name,
            f"has numbers with a sign such as % or € in {format_row_numbers(odd)}",
            "take the sign out of the file",
        )
    if odd and are_few:
        texts = (
            join_with_and([repr(word) for word in words[:MAX_MISSING_WORDS]])
            if len(words) <= MAX_MISSING_WORDS
            else f"{len(words)} different texts"  # which may be notes about patients
        )
        words = words[:MAX_MISSING_WORDS]
        return ColumnRefusal(
            name, f"holds numbers, and {texts} in {format_row_numbers(odd)}",
            f"if that means no value, give missing={words} (--data.missing {quote(','.join(words))}); otherwise correct it, "
            f"or take all as categories (categorical={name!r}, --data.categorical {quote(name)})",
        )  # fmt: skip
    if many:
        return ColumnRefusal(
            name, f"has {different} different texts in {len(present)} rows (free text or an identifier)",
            otherwise=f", or make numbers of it before, take it as categories (categorical={name!r}, --data.categorical "
            f"{quote(name)}), or, if its rows belong together, give group={name!r} (--data.group {quote(name)})",
        )  # fmt: skip
    return None


def refuse_dates(name: str) -> ColumnRefusal:
    """Says that a column holds dates or times."""
    return ColumnRefusal(
        name, "holds dates or times",
        otherwise=", or make numbers of it before, such as an age or days since admission",
    )  # fmt: skip


def check_whole_numbers_are_classes(different: int, name: str) -> None:
    """Raises a `UserError` if a target has so many different whole numbers that they may be amounts."""
    if different > _MOST_CLASSES:
        raise UserError(
            f"target {name!r} has {different} different whole numbers: give task='regression' (--data.task regression) "
            "if they are amounts, or 'classification' if they are classes"
        )


def check_texts_are_classes(column: Sequence[str | None], name: str) -> None:
    """Raises a `UserError` if a target has so many different texts that they are no classes, but rather numbers.

    >>> check_texts_are_classes([f"{k},5" for k in range(90)], "dose")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: target: column 'dose' has numbers with a comma in rows 1, 2, 3, 4, 5 and 85 more: give
    decimal=','
    """
    present = [text for text in column if text is not None]
    if (different := len(set(present))) <= max(MOST_CATEGORIES, len(present) // 10):
        return
    if (refusal := find_text_refusal(column, name)) is not None and refusal.cure:
        cure = refusal.cure.partition(", or take all as categories")[0]
        raise UserError(f"target: column {name!r} {refusal.what}: {cure}")
    raise UserError(f"target {name!r} has {different} different values in {len(present)} rows: too many to be classes")


def check_texts_are_no_dates(column: Sequence[str | None], name: str) -> None:
    """Raises a `UserError` if a target holds dates or times alone, which nobody asked to take as classes.

    >>> check_texts_are_no_dates(["2026-01-03", None, "2026-02-03"], "visit")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: target: column 'visit' holds dates or times: name another, or give task='classification'
    if each is a class
    """
    present = [text for text in column if text is not None]
    if present and all(map(_DATE.fullmatch, present)):
        raise UserError(
            f"target: column {name!r} holds dates or times: name another, or give task='classification' (--data.task "
            "classification) if each is a class"
        )


def check_names_of_columns(header: Sequence[str], names: Sequence[str], role: str) -> None:
    """Raises a `UserError` that says which names are none of a table's columns, with the nearest to the first.

    >>> check_names_of_columns(["age", "lab"], ["age", "labb", "sex"], "features")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: features: the table has no column 'labb' (nor 'sex'); did you mean lab? Choices: age, lab
    """
    missing = [name for name in dict.fromkeys(names) if name not in header]
    if not missing:
        return
    columns = [name for name in header if name]
    more = f" (nor {', '.join(map(repr, missing[1:6]))}{', ...' if missing[6:] else ''})" if missing[1:] else ""
    advice = did_you_mean(missing[0], columns) if columns else "its first line must name the columns, and it is empty"
    if len(columns) == 1 and not advice.startswith("did you mean"):
        advice = (
            f"it has {columns[0]!r} alone; the first line of a file must name the columns: take titles above them out"
        )
    raise UserError(f"{role}: the table has no column {missing[0]!r}{more}; {advice}")


def check_targets_are_named(columns: Sequence[str], targets: Sequence[str], roles: Mapping[str, str | None]) -> None:
    """Raises a `UserError` if no target is named, or a target is the column of another role, too.

    Args:
        columns: of the table.
        targets: columns to predict, without that of the event.
        roles: {"event", "site", "group" or "time": the column that is named for it, or None}.
    """
    event, time = roles.get("event"), roles.get("time")
    names = [*targets, *(name for name in roles.values() if name is not None)]
    twice = [name for name in (*targets, *([event] if event and targets else [])) if names.count(name) > 1]
    if targets and not twice:
        return
    if event is not None:
        advice = (
            "survival needs target=... (--data.target) with the time until the event, and event=... (--data.event) "
        )
        advice += "with 1 where it happened"
        if time not in (None, event) and (not targets or twice == [event, event]):
            advice += (
                f"; time={time!r} (--data.time {quote(str(time))}) only orders rows: did you mean target={time!r} "
                f"(--data.target {quote(str(time))})?"
            )
    else:
        advice = "give target=... (--data.target) with the column to predict"
    if twice:
        raise UserError(
            f"column {twice[0]!r} is named twice, as a target and as another target, the event, the site, the group or "
            f"the time; give each its own column{f': {advice}' if event in targets else ''}"
        )
    raise UserError(f"{advice}{'' if advice.endswith('?') else ';'} the columns: {', '.join(columns)}")


def check_no_empty_cells(empty_rows: Sequence[int], name: str, role: str, *, may_drop: bool = True) -> None:
    """Raises a `UserError` if a column of this role has no value in some rows, the first of which is 0.

    Args:
        may_drop: whether the source can leave out rows without a target or a site.
    """
    if len(empty_rows):
        which = "row" if len(empty_rows) == 1 else "rows"
        has_option = may_drop and role in ("target", "site")
        option = f" (missing_{role}='drop', --data.missing-{role} drop)" if has_option else ""
        raise UserError(
            f"{role}: column {name!r} has no value in {format_row_numbers(empty_rows)} (the first row below the names is "
            f"1); fill it in, or drop the {which}{option}"
        )


def is_numeric_text(value: str) -> bool:
    """Returns whether a text represents a number, which "12_3", a number in Python, does not.

    >>> is_numeric_text("1.5e3"), is_numeric_text("12_3")
    (True, False)
    """
    try:
        float(value)
    except ValueError:
        return False
    return "_" not in value


def describe_undecodable_file(file: Path, encoding: str, error: Exception) -> str:
    """Returns a sentence about a file that is no text in this encoding, with what to do."""
    reason, advice = error_in_one_line(error), advise_encoding(file, encoding)
    return f"{str(file)!r} cannot be read as text in {encoding} ({reason}); {advice}"


def describe_missing_rows(name: str) -> str:
    """Returns a sentence about a table that has names of columns alone, with what to do."""
    return f"{name} has no rows, only the names of its columns; give a table with one row per example"


def advise_encoding(file: Path, encoding: str) -> str:
    """Returns advice on the encoding of a file that could not be read in this one."""
    try:
        with open_file(file, UNLIMITED_BYTES) as stream:
            start = stream.read(4)
    except (OSError, UserError):
        start = b""
    if start == b"PAR1":
        return "it is a Parquet file, whose name must end with .parquet"
    is_utf16 = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    likely = "utf-16" if is_utf16 else "cp1252"  # which has all letters of latin-1, and € and – besides
    if likely == encoding:
        return "save the file as UTF-8, or name the encoding of the program that wrote it, such as cp850 or mac-roman"
    return f"give encoding={likely!r} (--data.encoding {likely}), or save the file as UTF-8"


def error_in_one_line(error: BaseException) -> str:
    """Returns the text of an error without line breaks, at most 200 characters."""
    return " ".join(str(error).split())[:200]


def split_column_and_cuts(entry: str, column_names: Sequence[str]) -> tuple[str, str]:
    """Splits "age=50:65" into the column and its cut points; these are empty if the entry is a column.

    >>> split_column_and_cuts("age=50:65", ["age"]), split_column_and_cuts("a=1", ["a=1"])
    (('age', '50:65'), ('a=1', ''))
    """
    name, equals, cuts = entry.rpartition("=")
    return (entry, "") if entry in column_names or not equals else (name, cuts)
