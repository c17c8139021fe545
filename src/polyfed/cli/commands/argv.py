"""Parses the options that a subcommand declares itself, and leaves the rest of the command line unparsed."""

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import expand_user_path, read_file
from polyfed.core.io.values.number_checks import MAX_RUNS
from polyfed.core.io.values.validation import parse_yaml

_CODE_OPTIONS = {
    f"--{name}"
    for name in ("data.name", "data.partition.name", "algorithm.name", "metrics", "baselines", "loss", "sampler")
}
_SHORT_NAMES = {"--out": ["-o"], "--quiet": ["-q"]}  # of options that have one
_FACTORY = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")  # module:factory, anywhere in a value
_PAGE_MARK = b'<meta name="generator" content="polyfed">'  # of pages that polyfed has written


@final
class CommandParser(argparse.ArgumentParser):
    """Parses the options that a subcommand declares, and returns all other words unparsed.

    Options of data, networks and methods (`--data.clients`) are parsed by `parse_configuration`.

    >>> parser = CommandParser("polyfed resume DIR [--quiet]", "Continues a run.")
    >>> parser.add_flag("--quiet", "print no progress")
    >>> parser.parse_declared_options(["runs/a", "--quiet"])
    (Namespace(quiet=True), ['runs/a'])
    """

    def __init__(self, usage: str, description: str, epilog: str | None = None) -> None:
        super().__init__(usage=usage, description=description, epilog=epilog, add_help=False, allow_abbrev=False)
        self.option_names: list[str] = []

    def add_option(
        self, name: str, metavar: str, help_text: str, convert: Callable[[str], Any] = str, *, repeatable: bool = False
    ) -> None:
        """Declares an option that takes a value; `convert` converts the value's text.

        Without the option the value is None, or [] where repeatable.
        """
        self.option_names.append(name)
        self.add_argument(
            *_SHORT_NAMES.get(name, ()),
            name,
            metavar=metavar,
            help=help_text.replace("%", "%%"),
            type=convert,
            action="append" if repeatable else "store",
            default=[] if repeatable else None,
        )

    def add_flag(self, name: str, help_text: str) -> None:
        """Declares an option that takes no value."""
        self.option_names.append(name)
        self.add_argument(*_SHORT_NAMES.get(name, ()), name, action="store_true", help=help_text.replace("%", "%%"))

    def parse_declared_options(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parses the declared options; returns their values, and all other words in their order.

        Underscores in names of options count as hyphens.

        Raises:
            UserError: a value is missing, or is not of its kind.
        """
        words = []
        for word in argv:
            _, equals, value = word.partition("=")
            words.append(option_name(word) + equals + value if option_name(word) in self.option_names else word)
            if equals and option_name(word) in self.flag_names():
                raise UserError(f"{option_name(word)} takes no value, got {word!r}")
        return self.parse_known_args(words)

    def flag_names(self) -> set[str]:
        """Returns the names of the declared options that take no value."""
        return {
            name for name in self.option_names if self.get_default(name.removeprefix("--").replace("-", "_")) is False
        }

    def parse_options_and_words(
        self, argv: Sequence[str], expected_text: str, word_count: int = 1
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the declared options; returns their values and the other words, or prints help and exits.

        Args:
            argv: the words after the command.
            expected_text: what the command takes, for the error: "one run directory".
            word_count: number of words that are not options.

        Raises:
            UserError: an unknown option, or another number of words.
        """
        self.print_help_and_exit_if_asked(argv)
        options, words = self.parse_declared_options(argv)
        self.refuse_unknown_option(words)
        if len(words) != word_count:
            command = " ".join(itertools.takewhile(str.islower, (self.usage or "").split()))
            epilog = self.epilog or ""
            hint = epilog if epilog.startswith("example: ") else f"usage: {self.usage}"
            raise UserError(f"{command} takes {expected_text}, got {' and '.join(words) or 'none'}; {hint}")
        return options, words

    def refuse_unknown_option(self, words: Sequence[str]) -> None:
        """Raises a `UserError` with the nearest declared option if a word is an option."""
        if unknown := [word for word in words if word.startswith("-")]:
            raise UserError(f"unknown option {unknown[0]}; {did_you_mean(option_name(unknown[0]), self.option_names)}")

    def print_help_and_exit_if_asked(self, argv: Sequence[str]) -> None:
        """Prints the help and exits with status 0 if the command line contains -h or --help."""
        if has_help_flag(argv):
            self.print_help()
            raise SystemExit(0)

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError` with argparse's message, rewritten so that the option stands first."""
        text = re.sub(r"^argument (?:-\w/)?(--[\w-]+): ", r"\1 ", message)
        raise UserError(text.replace("expected one argument", "needs a value"))


def parse_whole_number(text: str) -> int:
    """Converts the text of an option's value to an int; raises an error if it is not a whole number."""
    return int(_convert_text(text, int, "a whole number"))


def parse_decimal_number(text: str) -> float:
    """Converts the text of an option's value to a float; raises an error if it is not a number."""
    return float(_convert_text(text, float, "a number"))


def split_names(text: str) -> tuple[str, ...]:
    """Splits the text of an option's value at its commas, and returns the names.

    >>> split_names("local, fedavg")
    ('local', 'fedavg')
    """
    return tuple(name.strip() for name in text.split(",")) if text else ()


def parse_seeds(text: str) -> tuple[int, ...]:
    """Returns the seeds that an option's value stands for: those it lists, or as many as it says.

    >>> parse_seeds("3"), parse_seeds("4,7"), parse_seeds("0")
    ((0, 1, 2), (4, 7), (0,))

    Raises:
        argparse.ArgumentTypeError: a part of it is not a whole number, or it says too many.
    """
    expected = "whole numbers with commas between, such as 0,1,2, or how many"
    numbers = tuple(_convert_text(part, int, expected) for part in text.removesuffix(",").split(","))
    if "," in text or numbers[0] <= 0:
        return numbers
    if numbers[0] > MAX_RUNS:
        raise argparse.ArgumentTypeError(f"{text} would be {text} seeds; for the one seed {text}, give {text},")
    return tuple(range(numbers[0]))


def _convert_text(text: str, kind: Callable[[str], Any], expected: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}") from None


def expand_optional_path(text: str | None, option: str) -> Path | None:
    """Converts the text of an option's value to a path, with `~` expanded; None if the option was not given."""
    return None if text is None else expand_user_path(text, option)


def expand_page_path(text: str | None) -> Path | None:
    """Converts the text of `--out` to the path of an HTML page, new or made by polyfed; None if the option was not given.

    >>> expand_page_path("page.pdf")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: --out must be an HTML file (.html), which a browser prints to PDF, got 'page.pdf'
    """
    if text is not None and not text.lower().endswith((".html", ".htm")):
        raise UserError(f"--out must be an HTML file (.html), which a browser prints to PDF, got {text!r}")
    path = expand_optional_path(text, "--out")
    if path is not None and not (path.is_file() and _PAGE_MARK in read_file(path, None)[:1000]):
        check_is_new_file(path)
    return path


def check_is_new_file(path: Path | None) -> None:
    """Raises a `UserError` if a file that `--out` names exists: no command overwrites one, but for its own pages."""
    if path is not None and path.exists():
        raise UserError(f"{path} exists; choose another --out")


def option_name(word: str) -> str:
    """Returns the option's name in a word, without a value after "=" and with hyphens.

    >>> option_name("--data.test_fraction=0.2"), option_name("my_recipe")
    ('--data.test-fraction', 'my_recipe')
    """
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def has_help_flag(argv: Sequence[str]) -> bool:
    """Returns True if the command line contains -h or --help."""
    return "-h" in argv or "--help" in argv


def parse_positive_integers(option: str, text: str, example: str) -> tuple[int, ...]:
    """Parses positive whole numbers separated by commas; an error names the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"{option} must be whole numbers of at least 1, for instance {option} {example}, got {text!r}")
    return tuple(int(part) for part in parts)


def parse_yaml_value(option: str, text: str) -> Any:
    """Parses an option's value as YAML (a number, a word or a list); an error names the option."""
    try:
        return parse_yaml(text)
    except ValueError:
        raise UserError(f"{option} must be a number, a word or a [list], got {text!r}") from None


def list_user_code_and_ray_address(argv: Sequence[str]) -> list[str]:
    """Lists the user's code (MODULE:NAME) on the command line, and the address of a Ray cluster.

    What is typed there is trusted; what a file names is not.

    >>> list_user_code_and_ray_address(
    ...     ["--model.name", "mlp,my_nets:make", "--algorithm.teacher={name: nets:big}", "--data.path", "a:b"]
    ... )
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


def put_metric_names_in_brackets(argv: Sequence[str]) -> list[str]:
    """Returns the command line with brackets around the names after `--metrics`, so that they are parsed as one list.

    >>> put_metric_names_in_brackets(["--metrics", "auc,f1", "--metrics=auc", "--metrics", "[r2]"])
    ['--metrics', '[auc,f1]', '--metrics=[auc]', '--metrics', '[r2]']
    """
    result = list(argv)
    for position, (word, before) in enumerate(zip(argv, ["", *argv], strict=False)):
        option, _, value = word.partition("=") if word.startswith("--metrics=") else ("", "", word)
        if (option or before == "--metrics") and value and not value.startswith(("[", "--")):
            result[position] = f"{option}=[{value}]" if option else f"[{value}]"
    return result
