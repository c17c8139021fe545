"""Starts the command `polyfed`: chooses the subcommand and returns its exit status.

Progress goes to standard error, results to standard output.

Exit status: 0; 2 with one sentence for what the user can mend; 1 for a failure of the run; 130 for Ctrl-C.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence

import polyfed
from polyfed.cli import subcommands
from polyfed.cli.commands.argv import CommandParser, format_warning, print_error_and_return_status
from polyfed.cli.commands.results import export_command, predict_command
from polyfed.cli.commands.run import inspect_commands, look_command
from polyfed.core.errors import ClientError, RoundError, UserError, did_you_mean
from polyfed.core.io.trusted_code import restore_trusted_names_afterwards, trust_code

_USAGE = """usage: polyfed COMMAND [...]   (polyfed COMMAND --help says more)

  run [RECIPE|config.yaml] [OPTIONS]   run a federation; without arguments the recipe quickstart
  compare [RECIPE|config.yaml|DIR]     compare methods on the same clients, several seeds each
  resume DIR                           continue a run that was stopped
  show DIR [--json]                    show the answers and scores of a run or comparison, and how to go on
  report DIR...                        show the scores of runs and what their methods learned, also as an HTML page
  predict RUN FILE                     predict the rows of a CSV file with a client's network
  export RUN --client ID --to FOLDER   write a client's network to a folder that works without polyfed and the data
  warmstart RUN [OPTIONS]              generate weights for unseen clients with the hypernetwork of a run of flha_ghn
  look [RECIPE|config.yaml|DATA]       show all sites' data side by side before training, and what differs
  data [RECIPE|config.yaml] [OPTIONS]  show how many examples of each class every client has
  graph MODEL --input SHAPE [OPTIONS]  show the layers of a network, and which of them a hypernetwork can generate
  reproduce [PAPER TABLE] [OPTIONS]    run a table or figure of a paper, and print the results next to the paper's
  flower init|up|run|status|doctor DIR deploy a federation to real sites, or try that on this machine
  list [algorithms|data|models|recipes]
                                       list methods, data, networks and recipes
  --version
  --trust-code                         with any of these: execute what a file or run directory names as code (module:factory)
"""


def entry() -> None:
    """Runs the command `polyfed` from the installed script, and exits the process with the command's status."""
    warnings.formatwarning = format_warning
    status = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `polyfed list | head`: nobody reads on, which is no failure
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
        "graph": inspect_commands.graph_command,
        "list": subcommands.list_choices,
        "flower": subcommands.flower,
        "reproduce": subcommands.reproduce,
        "export": export_command.export_command,
        "predict": predict_command.predict_command,
        "data": inspect_commands.data_command,
        "look": look_command.look_command,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"polyfed {polyfed.__version__}")
        return 0
    try:
        if arguments[0] not in commands:
            raise UserError(f"unknown command {arguments[0]!r}; {did_you_mean(arguments[0], commands)}")
        with restore_trusted_names_afterwards():
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
        return 0  # the reader of our output has seen enough
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
            return 0  # as `rich` ends the process where the reader has seen enough
        return exit_request.code if isinstance(exit_request.code, int) else 0
    return 0
