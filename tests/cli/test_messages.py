"""How errors and warnings stand in a terminal and in a log."""

import sys

import pytest

from polyfed.cli.commands.messages import build_warning_formatter
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.data.sources.table_file import TableFile


@pytest.fixture
def terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True)


UNKNOWN_OPTION = ["look", "--data", "table", "--data.path", "rows.csv", "--data.targt", "ill"]


def test_a_long_error_has_a_line_for_what_why_and_hints_in_a_terminal(terminal, capsys):
    assert main(UNKNOWN_OPTION) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "polyfed: unknown option --data.targt"
    assert lines[1:3] == ["  table has no 'targt'", "  hint: did you mean target?"]
    assert lines[3].startswith("  Choices: augment, categorical, ")
    assert all(line.startswith("    ") for line in lines[4:])
    assert max(map(len, lines)) <= 80


def test_an_error_is_one_line_in_a_log_and_a_short_one_also_in_a_terminal(monkeypatch, capsys):
    assert main(UNKNOWN_OPTION) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert len(err) > 200
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True)
    assert main(["run", "--algorithm", "fedavgg"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_command_in_a_message_stays_on_one_line_and_a_warning_has_the_same_form(terminal):
    text = (
        f"the rows are few; on all of them: polyfed run {'a' * 60}.csv --data.target ill --data.site ward; {'b ' * 40}"
    )
    lines = build_warning_formatter()(UserWarning(text)).splitlines()
    assert lines[0] == "polyfed: warning: the rows are few"
    assert lines[1] == f"  on all of them: polyfed run {'a' * 60}.csv --data.target ill --data.site ward"


def test_the_text_of_the_exception_is_one_line_in_python(terminal):
    with pytest.raises(UserError) as refusal:
        TableFile(target="", event="died").build_dataset(TableFile().read({"died": [0, 1], "age": [30.5, 40]}))
    assert "\n" not in str(refusal.value)


def test_a_file_in_place_of_a_command_is_told_what_to_begin_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rows.csv").write_text("age,ill\n")
    assert main(["my rows.csv", "--data.target", "ill"]) == 2
    assert (
        "it is a path; begin with what to do with it: polyfed look 'my rows.csv', for example"
        in capsys.readouterr().err
    )
    assert main(["lok"]) == 2
    assert "unknown command 'lok'; did you mean look?" in capsys.readouterr().err
