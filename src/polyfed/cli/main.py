"""Starts the command `polyfed`: chooses the subcommand and returns its exit status.

Progress goes to standard error, results to standard output.

Exit status: 0; 2 with one sentence for what the user can fix; 1 for a failure of the run; 130 for Ctrl-C; 141 for training
that ended because nobody reads its output.
"""

import io
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote

import polyfed
from polyfed.cli import subcommands
from polyfed.cli.command_table import format_overview
from polyfed.cli.commands import completion_command
from polyfed.cli.commands.argv import CommandParser
from polyfed.cli.commands.deploy import flower_options
from polyfed.cli.commands.messages import build_warning_formatter, print_error_and_return_status
from polyfed.cli.commands.results import audit_command, export_command, predict_command
from polyfed.cli.commands.run import inspect_commands, look_command
from polyfed.core.errors import ClientError, RoundError, UserError, did_you_mean
from polyfed.core.io.text.advice import keep_options_in_errors
from polyfed.core.io.trusted_code import restore_trusted_names_afterwards, trust_code


def entry() -> None:
    """Runs the command `polyfed` from the installed script, and exits the process with the command's status."""
    warnings.formatwarning = build_warning_formatter()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal's encoding lacks ends no command
        sys.stdout.reconfigure(errors="backslashreplace")
    status = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `polyfed list | head`: nobody reads on, which is not a failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def main(arguments: Sequence[str]) -> int:
    """Runs the subcommand of `polyfed` that `arguments` name, and returns the exit status."""
    commands: dict[str, Callable[[list[str]], None]] = {
        "run": subcommands.run,
        "compare": subcommands.compare,
        "resume": subcommands.resume,
        "report": subcommands.report,
        "show": subcommands.show,
        "warmstart": subcommands.warmstart,
        "audit": audit_command.audit_command,
        "graph": inspect_commands.graph_command,
        "list": subcommands.list_choices,
        "flower": flower_options.parse_and_run_flower_command,
        "reproduce": subcommands.reproduce,
        "export": export_command.export_command,
        "predict": predict_command.predict_command,
        "data": inspect_commands.data_command,
        "look": look_command.look_command,
        "completion": completion_command.completion_command,
    }
    if arguments and arguments[0] == "help":  # `polyfed help run` is `polyfed run --help`
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(format_overview(), end="")
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"polyfed {polyfed.__version__}{_describe_environment() if arguments[0] == 'version' else ''}")
        return 0
    try:
        if arguments[0] not in commands:
            choices = [*commands, "help", "version"]
            if arguments[0].startswith("-"):
                raise UserError(f"unknown option {arguments[0]}; give a command (polyfed --help), or --version")
            hint = did_you_mean(arguments[0], choices)
            if Path(arguments[0]).exists():
                hint = f"it is a path; begin with what to do with it: polyfed look {quote(arguments[0])}, for example"
            raise UserError(f"unknown command {arguments[0]!r}; {hint}")
        with restore_trusted_names_afterwards(), keep_options_in_errors():
            parser = CommandParser("polyfed COMMAND", "")
            parser.add_flag("--trust-code", "execute the code that a file or run directory names")
            options, words = parser.parse_declared_options(arguments[1:])
            if options.trust_code:
                trust_code()
            commands[arguments[0]](words)
    except UserError as error:
        return print_error_and_return_status(error, 2)
    except (ClientError, RoundError) as error:
        return print_error_and_return_status(error, 1)
    except KeyboardInterrupt as stop:
        return print_error_and_return_status(stop if stop.args else "interrupted", 130)
    except BrokenPipeError:
        return _status_if_output_is_closed(arguments[0])
    except MemoryError:
        return print_error_and_return_status(
            "there is not enough memory for this; close other programs, or make the data or networks smaller", 1
        )
    except OSError as error:  # a full disk, say; what was saved before is whole
        return print_error_and_return_status(
            f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1
        )
    except SystemExit as exit_request:
        if isinstance(exit_request.__context__, BrokenPipeError):
            return _status_if_output_is_closed(arguments[0])  # as `rich` ends the process
        return exit_request.code if isinstance(exit_request.code, int) else 0
    return 0


def _status_if_output_is_closed(command: str) -> int:
    """Returns the exit status of a command whose output nobody reads on: 0 unless it may have stopped training."""
    return 141 if command in ("run", "compare", "resume", "reproduce", "warmstart", "audit") else 0


def _describe_environment() -> str:
    """Returns lines with the versions that a report of an error needs, without importing the packages."""
    versions = [f"Python {platform.python_version()}"]
    for name in ("torch", "numpy", "pyarrow", "scikit-learn", "flwr", "ray"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    return f"\n{', '.join(versions)}\n{platform.platform()}"
