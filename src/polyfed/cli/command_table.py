"""Lists the subcommands of `polyfed` with their options; the overview (`polyfed --help`) and the completion of shells
are made from it.
"""

from dataclasses import dataclass
from typing import final

_USAGE_WIDTH = 36


@final
@dataclass(frozen=True)
class Subcommand:
    """Describes a subcommand: its name, its usage and summary in the overview, and what a shell completes after it.

    Args:
        name: the word after `polyfed`, or two words, as in `flower init`.
        usage: words and options after the name, as the overview shows them.
        summary: what the command does, in one line; empty leaves the command out of the overview.
        options: names of all options that the command declares itself.
        takes: what its words are: "recipes", "papers", "kinds", "shells", "models", or "" for paths alone. Paths are
            completed after every command.
    """

    name: str
    usage: str
    summary: str
    options: tuple[str, ...] = ()
    takes: str = ""


_SCALED = ("--scale", "--variant")
_SAVED = ("--out", *_SCALED, "--quiet", "--cross-site", "--logger")
_RUN = ("--json", *_SAVED)
_COMPARE = (
    "--algorithms", "--seeds", "--same-data", "--resplit", "--folds", "--fold-repeats", "--stop-when-decided", "--plan",
    "--budget", "--target", "--method-config", "--tune", "--trials", "--no-references", "--parallel", "--tables", "--json",
    *_SAVED,
)  # fmt: skip
CONFIGURED = ("run", "compare", "data", "look", "reproduce")
"""Commands that take the options of data, networks, methods and settings, too."""

COMMANDS = (
    Subcommand("look", "look [RECIPE|config.yaml|DATA]",
        "show the sites' data side by side, and what differs",
        ("--out", "--json", "--between-sites", "--quiet", *_SCALED), "recipes"),
    Subcommand("data", "data [RECIPE|config.yaml|DATA]", "show how many examples of each class every client has",
        ("--plot", "--json", "--quiet", *_SCALED), "recipes"),
    Subcommand("run", "run [RECIPE|config.yaml|DATA]", "train with one method (without arguments: on four hospitals)", _RUN,
        "recipes"),
    Subcommand("compare", "compare [RECIPE|DATA|DIR]", "say which site should join, with intervals",
        _COMPARE, "recipes"),
    Subcommand("resume", "resume DIR [--rounds N]", "continue a stopped run or comparison, or add rounds",
        ("--rounds", "--json", "--quiet")),
    Subcommand("show", "show DIR [--json]", "print answers and scores, and how to go on",
        ("--json",)),
    Subcommand("report", "report DIR...", "write one HTML page of runs or a comparison",
        ("--out", "--subgroup", "--images", "--quiet")),
    Subcommand("predict", "predict DIR FILE", "predict the rows of a CSV file, each by its site's network",
        ("--client", "--out", "--json")),
    Subcommand("export", "export DIR --client ID --out FOLDER",
        "write a client's network to a folder that needs no polyfed",
        ("--client", "--out", "--to", "--format", "--model")),
    Subcommand("audit", "audit DIR [--runs K] [--client ID]",
        "try to find training examples in networks and messages",
        ("--runs", "--client", "--iterations", "--restarts", "--json", "--quiet")),
    Subcommand("flower", "flower init|up|run|status|doctor|health DIR",
        "deploy to real sites, or try that on this machine"),
    Subcommand("flower init", "", "", ("--sites",)),
    Subcommand("flower up", "", "", ("--sites", "--port", "--node-config", "--loss")),
    Subcommand("flower run", "", "", ("--connection", "--out", "--resume", "--allow-disclosure", "--set")),
    Subcommand("flower status", "", "", ("--connection", "--json")),
    Subcommand("flower doctor", "", "", ("--port", "--address", "--json")),
    Subcommand("flower health", "", "", ()),
    Subcommand("reproduce", "reproduce [PAPER TABLE] [OPTIONS]",
        "run a paper's table or figure, next to the paper's numbers",
        (*_SCALED, "--seeds", "--out", "--quiet"), "papers"),
    Subcommand("graph", "graph MODEL --input SHAPE [OPTIONS]",
        "show a network's layers, and which can be generated",
        ("--input", "--integer", "--classes", "--plot", "--catalogue", "--graph", "--no-joins", "--tables"), "models"),
    Subcommand("warmstart", "warmstart DIR [OPTIONS]",
        "generate weights for unseen clients, after flha_ghn",
        ("--unseen", "--client", "--epochs", "--lr", "--scratch-lr", "--plot", "--out")),
    Subcommand("list", "list [algorithms|data|models|recipes]", "list methods, data, networks and recipes", ("--json",),
        "kinds"),
    Subcommand("completion", "completion bash|zsh|fish", "print a script that completes commands in your shell",
        (), "shells"),
    Subcommand("help", "help [COMMAND]", "print this, or the help of a command", (), "commands"),
    Subcommand("version", "version", "print the versions of polyfed and what it stands on"),
)  # fmt: skip


_HEADINGS = {"look": "before training", "run": "train and compare", "show": "afterwards", "flower": "real sites",
             "reproduce": "papers and hypernetworks", "list": "this command"}  # fmt: skip
"""The heading above a command."""
_BEGINNING = """\
begin with four hospitals, offline, two minutes, and then with your table, a row for each example
  polyfed compare
  polyfed compare patients.csv --data.target outcome --data.site hospital
"""


def format_overview() -> str:
    """Returns the overview of all commands, which `polyfed --help` prints.

    >>> print(format_overview().splitlines()[3])
      look [RECIPE|config.yaml|DATA]       show the sites' data side by side, and what differs
    """
    lines = ["usage: polyfed COMMAND [...]   (polyfed COMMAND --help says more)"]
    for command in COMMANDS:
        if command.name in _HEADINGS:
            lines += ["", _HEADINGS[command.name]]
        if command.summary and len(command.usage) > _USAGE_WIDTH:
            lines += [f"  {command.usage}", f"  {'':{_USAGE_WIDTH}} {command.summary}"]
        elif command.summary:
            lines.append(f"  {command.usage:{_USAGE_WIDTH}} {command.summary}")
    lines += [f"  {'--trust-code':{_USAGE_WIDTH}} with any of these: execute code that a file or",
              f"  {'':{_USAGE_WIDTH}} run directory names (module:factory)", "", _BEGINNING]  # fmt: skip
    return "\n".join(lines)
