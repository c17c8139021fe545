"""Text from elsewhere (ids, names of methods and folders, titles, errors of sites) on its way to a terminal."""

import unicodedata

_UNSEEN = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Zl",
    "Zp",
}  # control, format (bidirectional marks among them), surrogates, separators


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
