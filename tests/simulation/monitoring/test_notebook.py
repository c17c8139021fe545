"""Progress in a notebook, and every form of the argument `progress`, the same in `federate`, `resume` and `compare`."""

import re
import sys
import types

import pytest

import polyfed as pf
from polyfed.simulation.monitoring.notebook import NotebookProgress, find_notebook_display
from polyfed.simulation.monitoring.progress_argument import resolve_progress
from polyfed.testing import small_clients

QUICK = {"rounds": 2, "workers": 0}
COMPARED = QUICK | {"seeds": [0], "tune": "none", "references": False}


class Cell:
    """Stands for a Jupyter kernel: what `display` shows, and how often it was updated."""

    def __init__(self):
        self.shown, self.updates = [], 0

    def display(self, thing, display_id):
        assert display_id is True
        self.shown.append(thing)
        return self

    def update(self, thing):
        assert thing is self.shown[-1]
        self.updates += 1


@pytest.fixture
def cell(monkeypatch):
    cell = Cell()
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    display.display = cell.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cell


def test_a_run_has_one_bar_in_its_cell(cell, capsys):
    pf.federate(small_clients(), "fedavg", **QUICK)
    (bar,) = cell.shown
    assert cell.updates >= 2
    assert repr(bar).startswith("fedavg: round 2/2, accuracy ")
    assert '<progress value="2" max="2"' in bar._repr_html_()
    assert capsys.readouterr() == ("", "")


def test_sentences_stand_below_the_bar_and_are_escaped(cell):
    progress = resolve_progress()
    assert isinstance(progress, NotebookProgress)
    progress.start("<x>", 3, 0)
    for number in range(30):
        progress.say(f"<b>{number}\x1b[0m")
    page = cell.shown[0]._repr_html_()
    assert "<b>" not in page
    assert "<x>" not in page
    assert "\x1b" not in page
    assert "&lt;b&gt;29" in page
    assert page.count("&lt;b&gt;") == 20


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.one_case
def test_a_comparison_has_one_bar_for_its_runs(cell, capsys, parallel):
    pf.compare(small_clients(2), "fedavg", parallel=parallel, **COMPARED)
    (bar,) = cell.shown
    assert bar.text == "3 of 3 runs"
    assert not any("done (" in sentence for sentence in bar.sentences)
    assert capsys.readouterr() == ("", "")


def test_of_the_runs_of_a_comparison_a_cell_keeps_those_that_failed(cell):
    progress = resolve_progress()
    progress.finish_run("local, seed 0: done (1 of 4 runs)", 1, 4)
    assert re.fullmatch(r"1 of 4 runs, \d+ s left", cell.shown[0].text)
    progress.finish_run("wild, seed 0: failed (2 of 4 runs)", 2, 4)
    assert cell.shown[0].sentences == ["wild, seed 0: failed (2 of 4 runs)"]


def test_without_a_kernel_or_where_nothing_shall_be_shown_there_is_no_bar(cell, monkeypatch):
    for words in ({"progress": False}, {"quiet": True}):
        pf.federate(small_clients(), "fedavg", **QUICK, **words)
        pf.compare(small_clients(2), "fedavg", **COMPARED, **words)
    assert cell.shown == []
    sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace()  # IPython in a terminal
    assert find_notebook_display() is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert find_notebook_display() is None


def test_a_function_gets_each_record(tmp_path):
    records, compared = [], []
    run = pf.federate(small_clients(), "fedavg", progress=records.append, **QUICK)
    assert records == list(run.history)
    pf.compare(small_clients(2), "fedavg", parallel=1, progress=compared.append, **COMPARED)
    assert [record["round"] for record in compared] == [1, 2] * 3


@pytest.mark.parametrize("progress", ["bar", 1, Cell, [print]])
def test_anything_else_is_refused_at_once_with_a_sentence(tmp_path, progress):
    calls = (
        lambda **words: pf.federate(small_clients(), "fedavg", out=tmp_path / "a", **QUICK, **words),
        lambda **words: pf.compare(small_clients(), "fedavg", out=tmp_path / "b", **COMPARED, **words),
        lambda **words: pf.resume(tmp_path, **words),
    )
    for call in calls:
        with pytest.raises(pf.UserError, match="progress must be True, False, a Progress or a function of a round"):
            call(progress=progress)
    assert list(tmp_path.iterdir()) == []
