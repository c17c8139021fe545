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
_RUN = ("--out", *_SCALED, "--quiet", "--cross-site", "--logger")
_COMPARE = (
    "--algorithms", "--seeds", "--same-data", "--resplit", "--folds", "--fold-repeats", "--stop-when-decided", "--plan",
    "--budget", "--target", "--method-config", "--tune", "--trials", "--no-references", "--parallel", "--tables", *_RUN,
)  # fmt: skip
CONFIGURED = ("run", "compare", "data", "look", "reproduce")
"""Commands that take the options of data, networks, methods and settings, too."""

COMMANDS = (
    Subcommand("run", "run [RECIPE|config.yaml|DATA]", "run a federation; without arguments the recipe quickstart", _RUN,
        "recipes"),
    Subcommand("compare", "compare [RECIPE|DATA|DIR]", "compare methods on the same clients, several seeds each",
        _COMPARE, "recipes"),
    Subcommand("resume", "resume DIR", "continue a run or a comparison that was stopped", ("--quiet",)),
    Subcommand("show", "show DIR [--json]", "show the answers and scores of a run or comparison, and how to go on",
        ("--json",)),
    Subcommand("audit", "audit DIR [--runs K] [--client ID]",
        "try to find a run's training examples from its networks, and images and labels from its messages",
        ("--runs", "--client", "--iterations", "--restarts", "--json")),
    Subcommand("report", "report DIR...", "show the scores of runs and what their methods learned, also as an HTML page",
        ("--out", "--subgroup", "--images")),
    Subcommand("predict", "predict DIR FILE", "predict the rows of a CSV file with a client's network",
        ("--client", "--out")),
    Subcommand("export", "export DIR --client ID --out FOLDER",
        "write a client's network to a folder that works without polyfed and the data",
        ("--client", "--out", "--to", "--format", "--model")),
    Subcommand("warmstart", "warmstart DIR [OPTIONS]",
        "generate weights for unseen clients with the hypernetwork of a run of flha_ghn",
        ("--unseen", "--client", "--epochs", "--lr", "--scratch-lr", "--plot", "--out")),
    Subcommand("look", "look [RECIPE|config.yaml|DATA]",
        "show all sites' data side by side before training, and what differs",
        ("--out", "--json", "--between-sites", *_SCALED), "recipes"),
    Subcommand("data", "data [RECIPE|config.yaml|DATA]", "show how many examples of each class every client has",
        ("--plot", "--json", *_SCALED), "recipes"),
    Subcommand("graph", "graph MODEL --input SHAPE [OPTIONS]",
        "show the layers of a network, and which of them a hypernetwork can generate",
        ("--input", "--integer", "--classes", "--plot", "--catalogue", "--graph", "--no-joins", "--tables"), "models"),
    Subcommand("reproduce", "reproduce [PAPER TABLE] [OPTIONS]",
        "run a table or figure of a paper, and print the results next to the paper's",
        (*_SCALED, "--seeds", "--out", "--quiet"), "papers"),
    Subcommand("flower", "flower init|up|run|status|doctor|health DIR",
        "deploy a federation to real sites, or try that on this machine"),
    Subcommand("flower init", "", "", ("--sites",)),
    Subcommand("flower up", "", "", ("--sites", "--port", "--node-config", "--loss")),
    Subcommand("flower run", "", "", ("--connection", "--out", "--resume", "--allow-disclosure", "--set")),
    Subcommand("flower status", "", "", ("--connection", "--json")),
    Subcommand("flower doctor", "", "", ("--port", "--address", "--json")),
    Subcommand("flower health", "", "", ()),
    Subcommand("list", "list [algorithms|data|models|recipes]", "list methods, data, networks and recipes", ("--json",),
        "kinds"),
    Subcommand("completion", "completion bash|zsh|fish", "print a script that completes commands and options in your shell",
        (), "shells"),
    Subcommand("help", "help [COMMAND]", "print this, or the help of a command", (), "commands"),
    Subcommand("version", "version", "print the version"),
)  # fmt: skip


def format_overview() -> str:
    """Returns the overview of all commands, which `polyfed --help` prints.

    >>> print(format_overview().splitlines()[2])
      run [RECIPE|config.yaml|DATA]        run a federation; without arguments the recipe quickstart
    """
    lines = ["usage: polyfed COMMAND [...]   (polyfed COMMAND --help says more)", ""]
    for command in COMMANDS:
        if not command.summary:
            continue
        if len(command.usage) > _USAGE_WIDTH:
            lines += [f"  {command.usage}", f"  {'':{_USAGE_WIDTH}} {command.summary}"]
        else:
            lines.append(f"  {command.usage:{_USAGE_WIDTH}} {command.summary}")
    lines += [f"  {'--trust-code':{_USAGE_WIDTH}} with any of these: execute what a file or run directory names as code",
              f"  {'':{_USAGE_WIDTH}} (module:factory)"]  # fmt: skip
    return "\n".join(lines) + "\n"
