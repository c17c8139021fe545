"""The display of a comparison: counts of runs and rounds, the time left, a bar on a terminal and lines elsewhere."""

import io
import sys
import time

import pytest
from rich.console import Console

import polyfed as pf
from polyfed.comparison.execution import runs_display
from polyfed.comparison.execution.runs_display import (
    RoundCounter,
    RunLines,
    RunsBar,
    SilentRunsDisplay,
    open_runs_display,
)
from polyfed.core.io.text.number_format import format_time_left
from polyfed.testing import small_clients


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(runs_display.time, "monotonic", lambda: now[0])
    return now


def play(counts, position, rounds, display=None):
    counter = RoundCounter(counts, position, display)
    counter.start("fedavg", rounds, 0)
    for number in range(1, rounds + 1):
        counter.finish_round({"round": number})
    counter.stop()


def test_runs_rounds_and_the_time_left_are_counted(clock):
    display = SilentRunsDisplay()
    display.set_expected_runs(4, 2)
    assert (display.num_runs, display.seconds_left()) == (6, None)
    counts = display.announce_runs(["a with lr=1", "b with lr=1"], 0, 10, is_search=True)
    play(counts, 0, 5)
    clock[0] += 10
    assert display.list_running_runs() == ["a with lr=1: round 6 of 10"]
    assert display.seconds_left() == pytest.approx(110.0)  # 5 of 60 rounds took 10 s
    play(counts, 0, 10)
    play(counts, 1, 10)
    display.finish_run(0, failed=False)
    display.finish_run(1, failed=True)
    assert (display.num_done, display.list_running_runs()) == (2, [])
    display.announce_runs(["a, seed 0"], 3, 10, is_search=False)  # three of its runs were finished before
    assert (display.num_runs, display.num_done) == (6, 5)
    assert display.share_done() == pytest.approx(20 / 30)


def test_a_search_that_is_extended_raises_the_number_of_runs():
    display = SilentRunsDisplay()
    display.set_expected_runs(2, 1)
    display.announce_runs(["a with lr=1"], 0, 1, is_search=True)
    display.announce_runs(["a with lr=2"], 0, 1, is_search=True)
    assert display.num_runs == 4
    display.announce_runs(["a, seed 0", "a, seed 1"], 0, 1, is_search=False)
    assert display.num_runs == 4


def test_lines_for_a_log(capsys):
    display = RunLines()
    display.set_expected_runs(2, 0)
    counts = display.announce_runs(["a, seed 0", "b\x1b[2J, seed 0"], 0, 1, is_search=False)
    play(counts, 0, 1)
    display.finish_run(0, failed=False)
    display.finish_run(1, failed=True)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("a, seed 0: done (1 of 2 runs, ")
    assert first.endswith(" left)")
    assert second.endswith("failed (2 of 2 runs)")
    assert "\x1b" not in second


def test_a_log_of_a_comparison_is_short(capsys, clock):
    display = RunLines()
    display.set_expected_runs(15, 15)
    for kind in (True, False):
        display.announce_runs([f"run {k}" for k in range(15)], 0, 1, is_search=kind)
        for k in range(15):
            display.finish_run(k, failed=k == 7 and not kind)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("(")[2].partition(" ")[0] for line in lines] == ["6", "12", "18", "23", "24", "30"]
    assert [line for line in lines if "failed" in line] == ["run 7: failed (23 of 30 runs, 0 s left)"]
    display.show_stage("simple models", 5)
    for k in range(5):
        display.finish_step(f"simple models: done ({k + 1} of 5 splits)")
    assert capsys.readouterr().err == "simple models: done (5 of 5 splits)\n"


def test_a_log_of_a_long_comparison_has_a_line_a_minute(capsys, clock):
    display = RunLines()
    display.set_expected_runs(100, 0)
    display.announce_runs([f"run {k}" for k in range(100)], 0, 1, is_search=False)
    for k in range(10):
        clock[0] += 61 if k % 3 == 0 else 1
        display.finish_run(k, failed=False)
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "run 0",
        "run 3",
        "run 6",
        "run 9",
    ]


def test_a_bar_shows_runs_time_left_and_the_runs_that_go_on(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with open_runs_display(quiet=False) as display:
        assert isinstance(display, RunsBar)
        assert str(display.render()) == "checking clients and methods"
        display.set_expected_runs(3, 0)
        counts = display.announce_runs(["a, fold 1 of 3", "[b], fold 1 of 3"], 0, 4, is_search=False)
        play(counts, 0, 4)
        display.finish_run(0, failed=False)
        RoundCounter(counts, 1).start("b", 4, 2)
        time.sleep(0.01)
        console = Console(file=io.StringIO(), width=80)
        console.print(display.render())
        text = console.file.getvalue()
        assert "1 of 3 runs" in text
        assert " left" in text
        assert "[b], fold 1 of 3: round 3 of 4" in text
        display.finish_run(1, failed=True)
        display.show_stage("simple models", 3)
        display.finish_step("simple models: done (1 of 3 splits)")
        time.sleep(0.01)
        console.file = io.StringIO()
        console.print(display.render())
        text = console.file.getvalue()
        assert "simple models: 1 of 3" in text
        assert " left" in text
        display.show_stage("intervals")
        console.file = io.StringIO()
        console.print(display.render())
        assert " left" not in console.file.getvalue()
    assert "[b], fold 1 of 3: failed" in stream.getvalue()


def test_quiet_shows_nothing_and_no_terminal_has_lines(capsys):
    with open_runs_display(quiet=True) as display:
        assert isinstance(display, SilentRunsDisplay)
    with open_runs_display(quiet=False) as display:
        assert isinstance(display, RunLines)


def test_times_are_short():
    assert [format_time_left(s) for s in (None, 3, 89, 100, 5399, 5401)] == [
        "", "3 s left", "89 s left", "2 min left", "90 min left", "1.5 h left",
    ]  # fmt: skip


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.one_case
def test_a_comparison_counts_rounds_here_and_in_processes(parallel, capsys):
    words = {"tune": "none", "references": False, "parallel": parallel}
    pf.compare(small_clients(2), ["fedprox"], rounds=2, seeds=[0], budget="steps", **words)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", seed 0: done (")[2].partition(" runs")[0] for line in lines] == [
        f"{k} of 4" for k in (1, 2, 3, 4)
    ]
    assert all(" left)" in line for line in lines[:-1])
