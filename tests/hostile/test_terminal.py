"""Foreign text reaches the terminal as text: no escape sequences, no marks of direction, no markup of rich's."""

import ast
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

import polyfed as pf
from polyfed.cli import subcommands
from polyfed.cli.commands.compare import comparison_tables
from polyfed.cli.commands.messages import build_warning_formatter, print_error_and_return_status
from polyfed.cli.commands.results.report_command import show_report
from polyfed.cli.commands.run import run_tables
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.cli.main import main
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.simulation.monitoring.progress import LineProgress, ProgressBar

SOURCE = Path(pf.__file__).parent
EVIL = ["a[/b]", "b\x1b[2J\x1b]0;title\x07", "c\u202egnp.exe", "d[red]x[/red]", "e\nf\r\x08", "g\x9b31m",
        "[link=file:///x]h[/link]"]  # fmt: skip
FORBIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def console():
    return Console(file=io.StringIO(), width=220, force_terminal=False)


def text_of(where):
    text = where.file.getvalue()
    assert not FORBIDDEN.search(text), FORBIDDEN.search(text)
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    data = (torch.randn(12, 4), torch.arange(12) % 2), (torch.randn(6, 4), torch.arange(6) % 2)
    clients = [pf.Client(name, lambda: torch.nn.Linear(4, 2), *data) for name in EVIL]
    out = tmp_path_factory.mktemp("evil") / "[b]run\x1b[31m\u202e"
    return pf.federate(clients, "local", rounds=1, workers=0, out=out)


def test_letters_that_a_terminal_obeys_are_replaced():
    for text in EVIL:
        assert not FORBIDDEN.search(sanitise_for_terminal(text))
    every = "".join(map(chr, range(0x2100)))
    assert not FORBIDDEN.search(sanitise_for_terminal(every))
    assert sanitise_for_terminal("Zürich 北京 ≥ – [/b]") == "Zürich 北京 ≥ – [/b]"


def test_the_table_of_a_run(run, tmp_path):
    folder = tmp_path / "out[/b]\x1b[31m"
    shutil.copytree(run.out, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("name: local", 'name: "local[/b]\\x1b[1m"'))
    where = console()
    run_tables.print_end_of_run(folder, where)
    text = text_of(where)
    assert "a[/b]" in text
    assert "d[red]x[/red]" in text
    assert "local[/b]" in text


def test_the_terminal_of_a_report(run, tmp_path):
    where = console()
    show_report([run.out], where, out=tmp_path / "page.html")
    text = text_of(where)
    for shown in ("a[/b]", "d[red]x[/red]", "[link=file:///x]h[/link]"):
        assert shown in text


def test_the_tables_of_a_comparison(tmp_path):
    data = (torch.randn(12, 4), torch.arange(12) % 2), (torch.randn(6, 4), torch.arange(6) % 2)
    clients = [pf.Client(name, lambda: torch.nn.Linear(4, 2), *data) for name in EVIL[:3]]
    out = tmp_path / "c"
    words = {"rounds": 1, "seeds": [0], "out": out, "tune": None, "references": False, "parallel": 1}
    found = pf.compare(clients, ["local"], **words)
    content = json.loads(json.dumps(found.results))
    content["methods"]["m[/b]\x1b[31m"] = content["methods"].pop("local")
    content["reference"] = content["best"] = "m[/b]\x1b[31m"
    content["budget"]["sentence"] = "[/b]\x1b]0;x\x07"
    content["notes"] = EVIL
    content["skipped"] = {"[/i]\x1b": "\u202e"}
    where = console()
    comparison_tables.show_comparison(type(found)(content, out), where, with_tables=True)
    assert "m[/b]" in text_of(where)


def test_errors_and_warnings_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["report", "[/b]\x1b[31mdir"], ["resume", "\x1b]0;x\x07"], ["run", "\u202erecipe"], ["\x9bx"]):
        assert main(words) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert not FORBIDDEN.search(told.err)
    Path("c.yaml").write_text(yaml.safe_dump({"algorithm": {"name": "\x1b[31mx"}, "data": {"name": "[/b]"}}))
    assert main(["run", "c.yaml"]) == 2
    assert not FORBIDDEN.search(capsys.readouterr().err)
    assert not FORBIDDEN.search(build_warning_formatter()(UserWarning("a\x1b[2J\nb")).rstrip("\n"))
    print_error_and_return_status("a\x1b[2J", 2)
    assert not FORBIDDEN.search(capsys.readouterr().err)


def test_progress(capsys):
    lines = LineProgress(stream := io.StringIO())
    lines.start("[/b]\x1b[31m", 2, 0)
    lines.say("site a[/b]: \x1b[2J")
    assert not FORBIDDEN.search(stream.getvalue())
    bar = ProgressBar()
    bar.start("[/b]\x1b[31m", 2, 0)
    bar.show_clients_done("[/b]", 1, 2)
    bar.say("site a[/b]: \x1b[2J")
    bar.stop()
    assert "site a[/b]" in capsys.readouterr().err


def test_tables_and_lines_are_plain():
    where, table = console(), PlainTable("[/b]", title="[/i]\x1b[31m", caption="[/u]\x07")
    table.add_row("[/b]\x1b[31m")
    where.print(table)
    print_line(where, "[/b]\x1b[31m")
    assert text_of(where).count("[/b]") == 3


def test_nothing_is_printed_in_another_way():
    """Commands print tables of `terminal.Table` and lines by `say`; a string given to a console would be read as markup."""
    for file in SOURCE.joinpath("cli").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file.name != "terminal.py":
            imported = {
                f"{n.module}.{a.name}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
            }
            assert not imported & {"rich.table.Table", "rich.print", "rich.markup.escape"}, file
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("onsole.print"):
                    (given,) = node.args
                    assert not isinstance(given, ast.JoinedStr | ast.Constant), (file, ast.unparse(node))
                    assert not node.keywords, (file, ast.unparse(node))


@pytest.mark.parametrize(("command", "status"), [("compare", 141), ("resume", 141), ("list", 0), ("show", 0)])
def test_training_that_ends_because_nobody_reads_its_output_is_no_success(command, status, monkeypatch):
    def write_to_a_closed_pipe(_):
        raise BrokenPipeError

    name = {"list": "list_choices"}.get(command, command)
    monkeypatch.setattr(subcommands, name, write_to_a_closed_pipe)
    assert main([command]) == status
