"""Makes text from other people (ids, names, titles, errors of sites) safe to show in a terminal or a spreadsheet."""

import re
import unicodedata

# Control, format (bidirectional marks among them), surrogates, separators.
_CONTROL_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
# With which spreadsheets begin a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?")


def sanitise_for_terminal(text: object) -> str:
    r"""Returns the text with characters that control a terminal, such as escape sequences, replaced.

    Escape sequences, other control characters and direction marks become "�"; line breaks and tabs become a space.

    >>> (sanitise_for_terminal("north\x1b[2J\u202e"), sanitise_for_terminal("a\nb"),
    ...  sanitise_for_terminal("Zürich 北京 [/b]"))
    ('north�[2J�', 'a b', 'Zürich 北京 [/b]')
    """
    string = str(text)
    if string.isascii() and string.isprintable():
        return string
    return "".join(_escape_unless_printable(letter) for letter in string)


def _escape_unless_printable(letter: str) -> str:
    if letter in "\n\t":
        return " "
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter) in _CONTROL_CATEGORIES else letter


def fold_spelling(text: str) -> str:
    """Returns one text for spellings that read alike: capitals, combining accents, wide letters, spaces.

    >>> fold_spelling("Zu\u0308rich  Nord") == fold_spelling("ZÜRICH Nord ")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def escape_spreadsheet_formula(text: str) -> str:
    """Puts an apostrophe before a text that a spreadsheet would read as a formula.

    >>> (escape_spreadsheet_formula("=1+1"), escape_spreadsheet_formula("@SUM(A1)"),
    ...  escape_spreadsheet_formula("-a"), escape_spreadsheet_formula("-1.5"), escape_spreadsheet_formula("ill"))
    ("'=1+1", "'@SUM(A1)", "'-a", '-1.5', 'ill')
    """
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(text) else text
