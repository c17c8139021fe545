"""`polyfed completion`, `help` and `version`: made from the table of commands, which has all options that commands have."""

import platform
import shutil
import subprocess
from importlib.metadata import version

import pytest

import polyfed
from polyfed.cli.command_table import COMMANDS, CONFIGURED
from polyfed.cli.commands.argv import CommandParser
from polyfed.cli.commands.completion_command import SHELLS, build_completion_script, collect_completions
from polyfed.cli.main import main


@pytest.mark.parametrize("command", COMMANDS, ids=[command.name for command in COMMANDS])
def test_the_table_has_the_options_of_a_command(command, monkeypatch, capsys):
    declared = []
    monkeypatch.setattr(CommandParser, "print_help", lambda parser: declared.append(parser.option_names))
    if command.name in ("help", "version", "flower"):
        return
    flag = "--help-all" if command.name in ("run", "compare") else "--help"
    assert main([*command.name.split(), flag]) == 0
    assert sorted(declared[-1]) == sorted(command.options)


def test_help_of_a_command_and_version(capsys):
    assert main(["help"]) == 0
    overview = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == overview
    assert all(f"  {command.name} " in overview for command in COMMANDS if command.summary)
    assert max(map(len, overview.splitlines())) <= 100
    headings = [line for line in overview.splitlines() if line and not line.startswith((" ", "usage"))]
    assert headings[0] == "before training"
    assert headings[-1].startswith("begin with four hospitals")
    assert overview.index("real sites") < overview.index("flower init|up") < overview.index("papers and hypernetworks")
    assert main(["help", "resume"]) == 0
    assert "usage: polyfed resume DIR" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"polyfed {polyfed.__version__}\n"
    assert main(["version"]) == 0
    first, packages, system = capsys.readouterr().out.splitlines()
    assert first == f"polyfed {polyfed.__version__}"
    assert f"Python {platform.python_version()}, torch {version('torch')}, numpy " in packages
    assert platform.machine() in system


COMPLETED = [
    (["com"], ["compare", "completion"]),
    (["compare", "qui"], ["quickstart"]),
    (["compare", "quickstart", "--same"], ["--same-data"]),
    (["compare", "quickstart", "--algorithms", "fedpr"], ["fedprox", "fedproto"]),
    (["flower", "do"], ["doctor"]),
    (["flower", "doctor", "--ad"], ["--address"]),
    (["list", "m"], ["models"]),
    (["resume", "--"], ["--help", "--json", "--quiet", "--rounds"]),
    (["run", "--evaluate-e"], ["--evaluate-every"]),
    (["completion", ""], list(SHELLS)),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("words", "expected"), COMPLETED, ids=[" ".join(words) for words, _ in COMPLETED])
def test_bash_completes(words, expected):
    line = " ".join(f"'{word}'" for word in ["polyfed", *words])
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _polyfed; printf "%s\\n" "${{COMPREPLY[@]}}"'
    script = f"{build_completion_script('bash')}\n{ask}"
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(expected)
    assert done.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script == build_completion_script(shell)
    assert all(name in script for name in collect_completions().commands[""])
    if shell != "bash" and shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "fsih"]) == 2
    assert "there is no completion for 'fsih'; did you mean fish?" in capsys.readouterr().err


def test_configured_commands_complete_settings():
    options = collect_completions().options
    assert all("--rounds" in options[name] for name in CONFIGURED)
    assert "--seed" not in options["resume"]
