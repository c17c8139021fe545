"""What `polyfed report` prints: each method once, then a few clients."""

import io
import re

import pytest
from rich.console import Console

from polyfed.cli.commands.results.report_command import show_report


@pytest.fixture
def shown(tmp_path):
    """What is printed of run directories, on a terminal of so many columns; without the page."""

    def shown(*folders, width=80):
        file = io.StringIO()
        show_report(folders, Console(file=file, width=width), out=tmp_path / "page.html")
        return file.getvalue()

    return shown


def rows_of(text, heading):
    """The rows of the table with this heading, as lists of words."""
    lines = text[text.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if "├" in line or "┡" in line) + 1
    end = next(i for i, line in enumerate(lines[start:], start) if "└" in line)
    return [re.split(r"\s{2,}", line.strip("│ ").replace("│", "  ")) for line in lines[start:end]]


def test_a_row_for_each_method_however_many_seeds(write_run, shown, tmp_path):
    methods = {"local": 0.5, "fedavg": 0.6, "fedprox": 0.7}
    folders = []
    for seed in range(3):
        for method, level in methods.items():
            scores = {f"client-{k:03d}": [level + 0.01 * k + 0.1 * seed] for k in range(20)}
            folders.append(write_run(tmp_path / f"{method}-{seed}", method, scores, seed=seed))
    text = shown(*folders)
    # The mean of 0, 0.01, ..., 0.19 is 0.095, that of 0, 0.1 and 0.2 is 0.1; each client of a seed is one of its own.
    assert rows_of(text, "accuracy on each client's own test examples") == [
        ["fedavg", "3", "1", "79.5 %", "60.0 % (client-000, seed 0)", "1.0"],
        ["fedprox", "3", "1", "89.5 %", "70.0 % (client-000, seed 0)", "1.0"],
        ["local", "3", "1", "69.5 %", "50.0 % (client-000, seed 0)", "1.0"],
    ]
    clients = rows_of(text, "each client, of seed 0")
    assert clients[0] == ["client-000", "60.0 %", "70.0 %", "50.0 %"]
    assert [row[0] for row in clients] == [f"client-{k:03d}" for k in range(12)]
    assert "and 8 more clients on the page" in text


def test_names_that_look_like_markup_and_a_score_that_is_missing(write_run, shown, tmp_path):
    folder = write_run(tmp_path / "a", "fedavg", {"[red]": [0.5], "south": [None]})
    text = shown(folder)
    assert rows_of(text, "own test examples") == [["fedavg", "1", "50.0 %", "50.0 % ([red])", "1.0"]]
    assert rows_of(text, "each site") == [["[red]", "50.0 %"], ["south", "–"]]
    assert "more client" not in text


def test_a_run_without_any_score(write_run, shown, tmp_path):
    text = shown(write_run(tmp_path / "a", "fedavg", {"a": [None], "b": [None]}))
    assert rows_of(text, "own test examples") == [["fedavg", "1", "–", "–", "1.0"]]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_methods_side_by_side_as_the_terminal_has_room(write_run, shown, tmp_path, width):
    names = ["local", "fedavg", "fedprox", "fedavg_ft", "fedrep", "fedbn", "per_fedavg", "pfedme", "fedfomo", "pfedhn"]
    folders = [write_run(tmp_path / name, name, {f"client-{k}": [0.5] for k in range(3)}) for name in names]
    text = shown(*folders, width=width)
    assert max(map(len, text[: text.index("Everything")].splitlines())) <= width
    assert len(rows_of(text, "own test examples")) == 10
    header = next(line for line in text.splitlines() if re.match(r"┃ client\b", line))
    columns = header.count("┃") - 2
    assert columns == {60: 4, 80: 6, 200: 9}[width]
    assert f"and {10 - columns} more method" in text
    assert "local" in header
