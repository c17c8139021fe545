"""Reading the words of a command line."""

from collections.abc import Callable, Sequence
from typing import Any

from polyfed.errors import UserError


def take_all(words: list[str], option: str) -> list[str]:
    """Removes every `--option VALUE` or `--option=VALUE` from the words and returns the values.

    >>> words = ["--set", "a=1", "DIR", "--set=b=2"]
    >>> take_all(words, "--set"), words
    (['a=1', 'b=2'], ['DIR'])
    """
    values = []
    while (at := next((i for i, w in enumerate(words) if w.partition("=")[0] == option), None)) is not None:
        word = words.pop(at)
        if "=" in word:
            values.append(word.partition("=")[2])
        elif at < len(words):
            values.append(words.pop(at))
        else:
            raise UserError(f"{option} needs a value")
    return values


def take(words: list[str], option: str) -> str | None:
    """The same, the last value; None without one."""
    values = take_all(words, option)
    return values[-1] if values else None


def flag(words: list[str], option: str) -> bool:
    """Removes `--option`; whether it was there."""
    if given := [word for word in words if word.startswith(f"{option}=")]:
        raise UserError(f"{option} takes no value, got {given[0]!r}")
    found = option in words
    words[:] = [word for word in words if word != option]
    return found


def asked_for_help(words: Sequence[str]) -> bool:
    """Whether -h or --help is among the words."""
    return "-h" in words or "--help" in words


def number(option: str, text: str, kind: Callable[[str], Any], wanted: str) -> Any:
    """The value of an option as a number; `wanted` says in an error what it must be."""
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{option} must be {wanted}, got {text!r}") from None


def positive(option: str, text: str, example: str) -> tuple[int, ...]:
    """Whole numbers of at least 1 with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"{option} must be whole numbers of at least 1, for instance {option} {example}, got {text!r}")
    return tuple(int(part) for part in parts)


def value_of(option: str, text: str) -> Any:
    """A number, word or list as YAML writes it."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{option} must be a number, a word or a [list], got {text!r}") from None


def help_of(command: Callable[[list[str]], None]) -> str:
    """The help of a command: its docstring."""
    lines = (command.__doc__ or "").split("\n")
    return "\n".join(line.removeprefix("    ") for line in lines)
