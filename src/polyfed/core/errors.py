"""Errors that a user can act on: each says what was wrong, shows the value, and says what to do."""

import difflib
from collections.abc import Iterable
from importlib.util import find_spec


class UserError(ValueError):
    """Something the user gave (configuration, data, a file) that polyfed cannot work with.

    The command line prints the sentence without a traceback and exits with status 2.
    """


class ClientError(RuntimeError):
    """A client could not finish its part of a round, or sent a reply that the server refused.

    Attributes: `round` (counted from 1), `client` (its id), `phase` ("local", "evaluate" or "reply") and `reason`.
    """

    def __init__(self, round_number: int, client: str, phase: str, reason: str, trace: str = "") -> None:
        super().__init__(f"round {round_number}, client {client!r}, phase {phase!r}: {reason}")
        self.round, self.client, self.phase, self.reason, self.trace = round_number, client, phase, reason, trace


class RoundError(RuntimeError):
    """A round that cannot be completed because too few clients replied, or a comparison of which runs could not be."""


class RunInterrupt(KeyboardInterrupt):
    """Ctrl-C in a run; the message says which round is saved and how to go on."""


def check_extra_installed(package: str, extra: str, feature: str, alternative: str = "") -> None:
    """Raises if an optional package is missing; does not import it.

    Args:
        package: as one imports it.
        extra: the extra of polyfed that installs it.
        feature: what needs it, the start of the error's sentence.
        alternative: what to do without it.

    Raises:
        UserError: it is not installed.

    >>> check_extra_installed("numpy", "hub", "this example")  # installed
    >>> check_extra_installed("no_such_package", "hub", "this example", "do without it")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: this example needs the package no_such_package, which is not installed:
    pip install 'polyfed[hub]', or do without it
    """
    if find_spec(package) is None:
        remedy = f"pip install 'polyfed[{extra}]'{', or ' if alternative else ''}{alternative}"
        raise UserError(f"{feature} needs the package {package}, which is not installed: {remedy}")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A half sentence that offers the choices closest to a misspelt `name`.

    >>> did_you_mean("fedprx", ["fedavg", "fedprox"])
    'did you mean fedprox? Choices: fedavg, fedprox'
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(name.lower(), choices, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}Choices: {', '.join(choices)}"
