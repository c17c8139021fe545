"""Implements `polyfed completion`: prints a static script that completes commands, options and names in a shell."""

from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple, final

from polyfed.cli.command_table import COMMANDS, CONFIGURED
from polyfed.cli.commands.argv import CommandParser, option_name
from polyfed.cli.commands.options.recipes import shipped_recipe_files
from polyfed.cli.static_registry import ALGORITHMS, MODELS, PARTITIONS, SOURCES
from polyfed.core.errors import UserError, did_you_mean
from polyfed.simulation.settings import Settings

SHELLS = ("bash", "zsh", "fish")
_PAPERS = ("fedhenn", "fedpnas", "flha", "pfedla")
_KINDS = ("algorithms", "data", "models", "recipes")
_INSTALL = {
    "bash": 'add this line to ~/.bashrc: eval "$(polyfed completion bash)"',
    "zsh": 'add this line to ~/.zshrc, below compinit: eval "$(polyfed completion zsh)"',
    "fish": "polyfed completion fish > ~/.config/fish/completions/polyfed.fish",
}


@final
class ShellCompletions(NamedTuple):
    """Holds the words that a shell suggests after each command and option.

    Attributes:
        commands: the words after `polyfed`, by command: "" for the commands themselves, "flower" for those of flower,
            and for any other command the names that it takes as words.
        options: names of the options of each command.
        values: names that an option takes.
    """

    commands: Mapping[str, tuple[str, ...]]
    options: Mapping[str, tuple[str, ...]]
    values: Mapping[str, tuple[str, ...]]


def completion_command(argv: list[str]) -> None:
    """Parses the command line of `polyfed completion`, and prints the script for a shell.

    Raises:
        UserError: an unknown shell, or none.
    """
    parser = CommandParser(
        "polyfed completion bash|zsh|fish",
        "Prints a script that completes commands, options, and names of methods, data, networks and recipes. "
        + "; ".join(f"{shell}: {how}" for shell, how in _INSTALL.items())
        + ".",
    )
    _, (shell,) = parser.parse_options_and_words(argv, "one of bash, zsh and fish")
    if shell not in SHELLS:
        raise UserError(f"there is no completion for {shell!r}; {did_you_mean(shell, SHELLS)}")
    print(build_completion_script(shell), end="")


def collect_completions() -> ShellCompletions:
    """Collects the commands, options and names that a shell completes, from the table of commands and the registries.

    >>> completions = collect_completions()
    >>> completions.commands["flower"], completions.options["flower init"]
    (('doctor', 'health', 'init', 'run', 'status', 'up'), ('--help', '--sites'))
    """
    names = {
        "recipes": tuple(shipped_recipe_files()), "papers": _PAPERS, "kinds": _KINDS, "shells": SHELLS,
        "models": tuple(MODELS), "commands": tuple(c.name for c in COMMANDS if c.summary), "": (),
    }  # fmt: skip
    common = (
        "--algorithm", "--baselines", "--data", "--data.clients", "--data.partition", "--data.path", "--data.site",
        "--data.target", "--model", "--print-config", "--help-all",
        *(option_name(f"--{field.name}") for field in fields(Settings)),
    )  # fmt: skip
    options = {
        c.name: tuple(sorted({"--help", *c.options, *(common if c.name in CONFIGURED else ())})) for c in COMMANDS
    }
    words = {c.name: names[c.takes] for c in COMMANDS if names[c.takes]}
    words[""] = names["commands"]
    words["flower"] = tuple(sorted(c.name.split()[1] for c in COMMANDS if c.name.startswith("flower ")))
    values = {
        "--algorithm": tuple(ALGORITHMS), "--algorithms": tuple(ALGORITHMS), "--baselines": tuple(ALGORITHMS),
        "--data": tuple(SOURCES), "--data.partition": tuple(PARTITIONS), "--model": tuple(MODELS),
        "--scale": ("cpu", "paper", "smoke"), "--budget": ("best", "bytes", "seconds", "steps"),
        "--engine": ("auto", "cohort", "inprocess", "pool", "ray"), "--logger": ("mlflow", "tensorboard"),
        "--format": ("onnx", "torchscript", "weights"),
    }  # fmt: skip
    return ShellCompletions(words, options, values)


def build_completion_script(shell: str) -> str:
    """Returns the completion script for "bash", "zsh" or "fish".

    >>> print(build_completion_script("bash").splitlines()[0])
    # Completion of polyfed for bash; add this line to ~/.bashrc: eval "$(polyfed completion bash)"
    """
    head = f"# Completion of polyfed for {shell}; {_INSTALL[shell]}"
    return "\n".join([head, *(_fish_lines() if shell == "fish" else _bash_lines(shell == "zsh"))]) + "\n"


def _bash_lines(for_zsh: bool) -> list[str]:
    """Returns the lines of the script for bash, or for zsh, which runs it through `bashcompinit`."""
    completions = collect_completions()
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if for_zsh else []
    lines += [
        "_polyfed() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words=""',
        '  if [[ "$command" == flower ]] && (( COMP_CWORD > 2 )); then command="flower ${COMP_WORDS[2]}"; fi',
        "  COMPREPLY=()",
        '  if (( COMP_CWORD == 1 )); then command=""; fi',
        '  case "$before" in',
        *(f'    {option}) COMPREPLY=($(compgen -W "{" ".join(v)}" -- "$word")); return ;;'
          for option, v in completions.values.items()),
        "  esac",
        '  if [[ "$word" == -* ]]; then',
        '    case "$command" in',
        *(f'      "{name}") words="{" ".join(v)}" ;;' for name, v in completions.options.items()),
        '      "") words="--help --version" ;;',
        "    esac",
        "  else",
        '    case "$command" in',
        *(f'      "{name}") words="{" ".join(v)}" ;;' for name, v in completions.commands.items()),
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _polyfed polyfed",
    ]  # fmt: skip
    return lines


def _fish_lines() -> list[str]:
    completions = collect_completions()
    summaries = {c.name: c.summary for c in COMMANDS}
    lines = []
    for name in completions.commands[""]:
        quoted_summary = summaries[name].replace("'", "\\'")
        lines.append(f"complete -c polyfed -f -n __fish_use_subcommand -a {name} -d '{quoted_summary}'")
    for name, words in completions.commands.items():
        if name:
            lines.append(f"complete -c polyfed -n '{_fish_condition(name)}' -a '{' '.join(words)}'")
    for name, options in completions.options.items():
        for option in options:
            values = completions.values.get(option)
            takes = f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"complete -c polyfed -n '{_fish_condition(name)}' -l {option.removeprefix('--')}{takes}")
    return lines


def _fish_condition(name: str) -> str:
    return " && ".join(f"__fish_seen_subcommand_from {part}" for part in name.split())
