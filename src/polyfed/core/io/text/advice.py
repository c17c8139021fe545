"""Fits advice that names both an argument of Python and an option of the command line to where it is read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

_options_kept = False

# An argument of Python, then the option of the command line that does the same: "drop='age', --data.drop age" or
# "drop='age' (--data.drop age)".
_ARGUMENT = r"""\b\w+=(?:'[^']*'|"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\.\.\.|[\w.]+)(?: \(Client\))?"""
_VALUE = r"(?: (?:'[^']*'|(?!and |or )(?:[^\s;,.()]|[,.](?! |$))+))?"
_ARGUMENT_COMMA_OPTION = re.compile(rf"({_ARGUMENT}), (?:or )?(--[\w.-]*\w{_VALUE})")
_ARGUMENT_AND_OPTION_IN_PARENTHESES = re.compile(rf"({_ARGUMENT}) \((--[^()]+)\)")
_CALL_AND_COMMAND = re.compile(r"(polyfed(?:\.\w+)+\(\)) \((polyfed [a-z ]+)\)")


def keep_advice_for_terminal(text: str) -> str:
    """Returns advice that names both an argument of Python and an option of the command line, with the option alone.

    >>> keep_advice_for_terminal("Try values beyond (tune={'lr': [1, 3]}, --tune lr=1,3,...).")
    'Try values beyond (--tune lr=1,3,...).'
    >>> keep_advice_for_terminal("give path=... (--data.path) with a file")
    'give --data.path with a file'
    """
    return _keep_one_of_each_pair(text, r"\2")


def _keep_one_of_each_pair(text: str, group: str) -> str:
    for pair in (_ARGUMENT_COMMA_OPTION, _ARGUMENT_AND_OPTION_IN_PARENTHESES, _CALL_AND_COMMAND):
        text = pair.sub(group, text)
    return text


def keep_advice_for_python(text: str) -> str:
    """Returns advice that names both an argument of Python and an option of the command line, with the argument alone.

    >>> keep_advice_for_python("give more (seeds=5, --seeds 5; or folds=5, --folds 5).")
    'give more (seeds=5; or folds=5).'
    >>> keep_advice_for_python("Try values beyond (tune={'lr': [1, 3]}, --tune lr=1,3,...), then more rounds.")
    "Try values beyond (tune={'lr': [1, 3]}), then more rounds."
    >>> keep_advice_for_python("All 58: polyfed.algorithms.names() (polyfed list algorithms)")
    'All 58: polyfed.algorithms.names()'
    """
    return _keep_one_of_each_pair(text, r"\1")


@contextmanager
def keep_options_in_errors() -> Iterator[None]:
    """Keeps the options of the command line in errors and warnings that this process makes in the `with` block."""
    global _options_kept
    before, _options_kept = _options_kept, True
    try:
        yield
    finally:
        _options_kept = before


def keep_advice_for_this_process(text: str) -> str:
    """Returns the text of an error or a warning, with the argument alone unless this process may work for the command.

    The command, and a worker process, which does not know for whom it works, keep both: who prints the text chooses.

    >>> keep_advice_for_this_process("give path=... (--data.path) with a file")
    'give path=... with a file'
    """
    if _options_kept or ("--" not in text and "() (polyfed " not in text):
        return text
    from multiprocessing import parent_process  # takes milliseconds, which a help text should not cost

    return text if parent_process() is not None else keep_advice_for_python(text)
