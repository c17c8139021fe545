"""Text from elsewhere (ids, names of methods, classes and folders, titles, errors of sites) on its way to a terminal or a
spreadsheet."""

import re
import unicodedata

_UNSEEN = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Zl",
    "Zp",
}  # control, format (bidirectional marks among them), surrogates, separators
_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # with which spreadsheets begin a formula
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")


def clean(text: object) -> str:
    """The text without what a terminal would obey: escape sequences, other control characters and marks of direction
    become "�"; line breaks and tabs a space.

    >>> clean("north\\x1b[2J\\u202e"), clean("a\\nb"), clean("Zürich 北京 [/b]")
    ('north�[2J�', 'a b', 'Zürich 北京 [/b]')
    """
    whole = str(text)
    if whole.isascii() and whole.isprintable():
        return whole
    return "".join(_shown(letter) for letter in whole)


def _shown(letter: str) -> str:
    if letter in "\n\t":
        return " "
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter) in _UNSEEN else letter


def defuse(text: str) -> str:
    """The text as a cell of a CSV file, which no spreadsheet takes for a formula: an apostrophe before what would be one.

    >>> defuse("=1+1"), defuse("@SUM(A1)"), defuse("-a"), defuse("-1.5"), defuse("ill")
    ("'=1+1", "'@SUM(A1)", "'-a", '-1.5', 'ill')
    """
    return f"'{text}" if text.startswith(_STARTS) and not _NUMBER.fullmatch(text) else text
