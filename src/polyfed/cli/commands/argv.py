"""Reading the words of a command line."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from polyfed.core.errors import UserError
from polyfed.core.io.terminal_text import sanitise_for_terminal

_CODE_OPTIONS = {
    f"--{name}" for name in ("data.name", "data.partition.name", "algorithm.name", "metrics", "baselines", "loss")
}
_FACTORY = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")  # module:factory, anywhere in a value


def pop_option_values(argv: list[str], option: str) -> list[str]:
    """Removes every `--option VALUE` or `--option=VALUE` from the words and returns the values.

    >>> words = ["--set", "a=1", "DIR", "--set=b=2"]
    >>> pop_option_values(words, "--set"), words
    (['a=1', 'b=2'], ['DIR'])
    """
    values = []
    while (at := next((i for i, w in enumerate(argv) if option_name(w) == option), None)) is not None:
        word = argv.pop(at)
        if "=" in word:
            values.append(word.partition("=")[2])
        elif at < len(argv):
            values.append(argv.pop(at))
        else:
            raise UserError(f"{option} needs a value")
    return values


def pop_option(argv: list[str], option: str) -> str | None:
    """The same, the last value; None without one."""
    values = pop_option_values(argv, option)
    return values[-1] if values else None


def pop_flag(argv: list[str], option: str) -> bool:
    """Removes `--option`; whether it was there."""
    occurrences = [word for word in argv if option_name(word) == option]
    if with_value := [word for word in occurrences if "=" in word]:
        raise UserError(f"{option} takes no value, got {with_value[0]!r}")
    argv[:] = [word for word in argv if word not in occurrences]
    return bool(occurrences)


def option_name(word: str) -> str:
    """The option of a word as help and errors write it, with hyphens; underscores are accepted too.

    >>> option_name("--data.test_fraction=0.2"), option_name("my_recipe")
    ('--data.test-fraction', 'my_recipe')
    """
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def has_help_flag(argv: Sequence[str]) -> bool:
    """Whether -h or --help is among the words."""
    return "-h" in argv or "--help" in argv


def parse_number(option: str, text: str, kind: Callable[[str], Any], expected: str) -> Any:
    """The value of an option as a number; `expected` says in an error what it must be."""
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{option} must be {expected}, got {text!r}") from None


def parse_positive_integers(option: str, text: str, example: str) -> tuple[int, ...]:
    """Whole numbers of at least 1 with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"{option} must be whole numbers of at least 1, for instance {option} {example}, got {text!r}")
    return tuple(int(part) for part in parts)


def parse_yaml_value(option: str, text: str) -> Any:
    """A number, word or list as YAML writes it."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{option} must be a number, a word or a [list], got {text!r}") from None


def help_text(command: Callable[[list[str]], None]) -> str:
    """The help of a command: its docstring."""
    lines = (command.__doc__ or "").split("\n")
    return "\n".join(line.removeprefix("    ") for line in lines)


def user_code_names(argv: Sequence[str]) -> list[str]:
    """What the user typed as code of their own (a network, method, metric, source or partition) or as a cluster: their word
    allows it, that of a file does not.

    >>> user_code_names(["--model.name", "mlp,my_nets:make", "--algorithm.teacher={name: nets:big}", "--data.path", "a:b"])
    ['my_nets:make', 'nets:big']
    """
    names = []
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        option_value = value if equals else following
        if option == "--ray_address":
            names.append(option_value)
        elif option.startswith(("--model", "--algorithm.teacher")) or option in _CODE_OPTIONS:
            names += _FACTORY.findall(option_value)
    return names


def bracket_metrics(argv: Sequence[str]) -> list[str]:
    """`--metrics auc,accuracy` means `--metrics [auc,accuracy]`.

    >>> bracket_metrics(["--metrics", "auc,f1", "--metrics=auc", "--metrics", "[r2]"])
    ['--metrics', '[auc,f1]', '--metrics=[auc]', '--metrics', '[r2]']
    """
    result = list(argv)
    for position, (word, before) in enumerate(zip(argv, ["", *argv], strict=False)):
        option, _, value = word.partition("=") if word.startswith("--metrics=") else ("", "", word)
        if (option or before == "--metrics") and value and not value.startswith(("[", "--")):
            result[position] = f"{option}=[{value}]" if option else f"[{value}]"
    return result


def print_error(message: object, status: int) -> int:
    """Prints an error as one sentence on standard error, and returns the exit status."""
    print(f"polyfed: {sanitise_for_terminal(' '.join(str(message).split()))}", file=sys.stderr)
    return status


def format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """A warning without the line of code that Python adds."""
    return f"polyfed: warning: {sanitise_for_terminal(' '.join(str(message).split()))}\n"
