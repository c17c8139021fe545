"""Runs and comparisons as a notebook shows them: HTML, frames, plots and printed answers, and nothing of the data."""

import html
import importlib.util
from dataclasses import replace

import pandas as pd
import pytest
from matplotlib import pyplot

import polyfed as pf
from polyfed.simulation.results.display.remarks import list_remarks
from polyfed.testing import small_clients

WORDS = {"tune": "none", "references": False, "parallel": 1, "quiet": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("notebook") / "run"
    return pf.federate(small_clients(), "fedavg", rounds=3, evaluate_every=2, workers=0, out=out, progress=False)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    out = tmp_path_factory.mktemp("notebook") / "comparison"
    return pf.compare(small_clients(2), ["fedprox", "fedmd"], rounds=2, seeds=2, out=out, **WORDS)


@pytest.fixture(autouse=True)
def _no_figures_stay():
    yield
    pyplot.close("all")


def test_a_look_and_a_matrix_are_shown_as_they_are_printed(run):
    shown = run.cross_site()
    assert repr(shown) == "CrossSiteScores(3 clients, accuracy, round 3)"
    for table in (shown, pf.look([pf.Client(f"<b>{c.id}", c.model, c.train, c.test) for c in small_clients()])):
        page = table._repr_html_()
        assert page == f"<pre>{html.escape(str(table))}</pre>"
        assert "<b>" not in page


def test_html_has_a_table_and_escapes_names(run):
    saved = pf.load(run.out)
    for shown in (run, saved):
        page = shown._repr_html_()
        assert page.startswith("<div><p><b>")
        assert page.count("<tr>") == 5  # head, three clients, mean
        mean = run.table()[-1]["accuracy"]
        assert f"<td>{100 * mean:.1f} %</td>" in page
    odd = [pf.Client(f"<b>{c.id}", c.model, c.train, c.test) for c in small_clients()]
    page = pf.federate(odd, "local", rounds=1, workers=0, progress=False)._repr_html_()
    assert "<b>client" not in page
    assert "&lt;b&gt;client-0" in page


def test_what_failed_and_what_a_run_warns_of_is_shown_however_quiet_it_was(tmp_path):
    def broken(outputs, targets):
        raise IndexError("out of range")

    first, second, third = small_clients()
    second = pf.Client(second.id, second.model, second.train, second.test, loss=broken)
    run = pf.federate(
        [first, second, third], "fedavg", rounds=2, workers=0, quiet=True, on_error="skip", out=tmp_path / "a"
    )
    run.history[1]["warnings"].append("round 2: 'client-2' has a norm of 7")
    line, *table, sentence, warning = str(run).splitlines()
    assert line == repr(run)
    assert table == str(run.table()).splitlines()
    assert [row.split()[0] for row in table] == ["client", "client-0", "client-1", "client-2", "mean"]
    assert ", 'client-1' failed, 1 warning, out=" in line
    assert sentence.startswith("client 'client-1' failed in 2 of 2 rounds: its loss fails on outputs of shape (26, 3)")
    assert warning == "round 2: 'client-2' has a norm of 7"
    assert html.escape(sentence) in run._repr_html_()
    assert ", 'client-1' failed, out=" in repr(pf.load(run.out))
    assert str(pf.load(run.out)).splitlines()[1:] == [*table, sentence]
    assert html.escape(sentence) in pf.load(run.out)._repr_html_()
    assert len(list_remarks([{"round": 1, "warnings": [f"'site-{k}' is far" for k in range(20)]}])) == 9


def test_html_of_many_clients_is_short():
    client = small_clients()[0]
    clients = [pf.Client(f"c{i}", client.model, client.train, client.test) for i in range(25)]
    run = pf.federate(clients, "local", rounds=1, workers=0, progress=False)
    page, lines = run._repr_html_(), str(run).splitlines()
    assert (len(lines), lines[-2].split()[0], lines[-1]) == (23, "mean", "and 6 clients more: run.table() has all")
    assert page.count("<tr>") == 21
    assert "6 clients left out" in page
    assert "<td>mean</td>" in page


def test_a_frame_has_a_row_for_each_client_and_round(run):
    frame = run.to_frame()
    assert list(frame.columns[:3]) == ["round", "client", "accuracy"]
    assert list(frame["round"]) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert frame["accuracy"].isna().tolist() == [True] * 3 + [False] * 6  # not evaluated
    last = frame[frame["round"] == 3].set_index("client")["accuracy"]
    assert {row["client"]: row["accuracy"] for row in run.table()[:-1]} == last.to_dict()
    pd.testing.assert_frame_equal(pf.load(run.out).to_frame(), frame)


@pytest.mark.thorough
def test_a_frame_of_a_comparison_has_a_row_for_each_method_seed_and_client(comparison):
    frame = comparison.to_frame()
    assert list(frame.columns) == ["method", "seed", "client", "round", "accuracy"]
    assert len(frame) == 4 * 2 * 2
    means = frame.groupby("method")["accuracy"].mean()
    for row in comparison.table():
        assert means[row["method"]] == pytest.approx(row["mean"])


def test_without_pandas_a_sentence_says_what_to_install(run, comparison, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("polyfed.simulation.results.display.frames.find_spec", lambda name: None)
    for thing in (run, pf.load(run.out), comparison):
        with pytest.raises(pf.UserError, match=r"to_frame\(\) needs the package pandas.*pip install pandas; table\(\)"):
            thing.to_frame()


def test_a_plot_draws_each_client_and_the_mean(run):
    for thing in (run, pf.load(run.out)):
        ax = thing.plot()
        assert [line.get_label() for line in ax.lines] == ["client-0", "client-1", "client-2", "mean over clients"]
        assert list(ax.lines[-1].get_xdata()) == [2, 3]
        assert ax.lines[-1].get_ydata()[-1] == pytest.approx(100 * run.table()[-1]["accuracy"])
        assert ax.get_ylabel() == "accuracy (%)"
        assert all(tick == round(tick) for tick in ax.get_xticks())
        assert thing.plot("loss", ax=ax) is ax
        with pytest.raises(pf.UserError, match="no round of this run has the score 'acuracy'; did you mean accuracy"):
            thing.plot("acuracy")


def test_a_plot_of_a_comparison_draws_gains_with_their_intervals(comparison):
    ax, rows = comparison.plot(), comparison.answer_table()
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"{row['client']}: {row['method']}" for row in rows]
    assert [row["client"] for row in rows] == ["mean", "client-0", "client-1"]
    drawn = [list(line.get_xdata()) for line in ax.lines[:-1]]  # the last is the line at 0
    ends = [[row["low"], row["high"]] for row in rows]
    assert drawn == [
        [100 * x for x in part] for row, pair in zip(rows, ends, strict=True) for part in (pair, [row["gain"]])
    ]
    assert ax.get_xlabel() == "gain in points of accuracy"


def test_a_plot_without_gains_has_the_mean_scores(comparison):
    answers = [{**answer, "gain": None, "interval": None} for answer in comparison.results["answers"]]
    mean = {**comparison.results["mean_answer"], "gain": None, "interval": None}
    ax = replace(comparison, results={**comparison.results, "answers": answers, "mean_answer": mean}).plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["local", "fedavg", "fedavg_ft", "fedprox"]
    assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"] == [
        pytest.approx(100 * row["mean"]) for row in comparison.table()
    ]
    assert ax.get_xlabel() == "accuracy (%)"


def test_what_was_left_out_and_not_judged_is_said_however_quiet(comparison):
    (reason,) = comparison.skipped.values()
    left_out = f"Left out fedmd: {reason}"
    unjudged = [sentence for sentence in comparison.answers if sentence.startswith("Convergence not judged for local,")]
    assert "cannot be judged from 2 evaluated rounds" in unjudged[0]
    for sentence in (left_out, *unjudged, *comparison.verdicts):
        assert sentence in comparison.answers
    for sentence in (left_out, *unjudged):
        assert str(comparison).splitlines().count(sentence) == 1
    assert {left_out, *unjudged} <= set(comparison.results["warnings"])
    assert {left_out, *unjudged} <= set(pf.load(comparison.out).answers)
    page = comparison.report().read_text("utf-8")
    assert page.partition("Before you rely on this")[2].partition("</div>")[0].count("Left out fedmd") == 1
    page = comparison._repr_html_()
    heading = "Gain in points of accuracy on new examples, with its 95 % interval"
    assert page.count("<li>") == len(str(comparison).splitlines()) - 1
    warnings, answers = page.partition(f"<p>{heading}:</p>")[::2]
    assert "<p>Before you rely on this:</p>" in warnings
    assert warnings.count("<li>") == len(comparison.results["warnings"])
    for line in str(comparison).partition(f"{heading}\n")[2].splitlines():
        assert html.escape(line) in answers
    assert page.count("<tr>") == 1 + len(comparison.table())


def test_a_failed_method_is_among_the_answers():
    methods = {"fedavg": pf.algorithms.FedAvg(lr=0.1), "wild": pf.algorithms.FedProx(lr=1e38, local_epochs=1)}
    found = pf.compare(small_clients(2), methods, rounds=1, seeds=1, **WORDS)
    assert any(sentence.startswith("wild failed and is not compared: ") for sentence in found.answers)


def test_a_forecast_prints_and_shows_its_sentences():
    plan = pf.compare(small_clients(2), ["fedprox"], rounds=6, plan_only=True, **WORDS)
    assert str(plan).splitlines() == list(plan.answers) == list(plan.verdicts)
    assert "<li>" in plan._repr_html_()
