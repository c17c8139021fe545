"""What the page makes of predictions: curves and counts by site, subgroups, and why there are none."""

import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console

from polyfed.cli.commands.results.report_command import show_report
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metrics import METRICS
from polyfed.report.data.predictions import read_group_predictions
from polyfed.report.data.run_groups import read_run_groups
from polyfed.report.page.predictions.performance import html_performance_section, performance_numbers_for_script
from polyfed.report.page.predictions.subgroups import example_positions_by_group, score_subgroups


@pytest.fixture
def outcomes(write_comparison, tmp_path):
    """The predictions of a comparison of three sites."""

    def outcomes(sites=None, names=("healthy", "sick"), **more):
        folder = write_comparison(tmp_path / "mine", sites or {"north": 60, "south": 40, "tiny": 3}, **more)
        ((setting,), _) = read_run_groups([folder])
        found, why = read_group_predictions(setting, names)
        assert why == ""
        return found

    return outcomes


def test_the_leader_comes_first_and_each_run_tells_the_shown_round(outcomes):
    found = outcomes()
    assert (found.methods[:2], found.local_label, found.seeds) == (("fedavg", "local"), "local", (0, 1, 2))
    assert {table.round for table in found.prediction_tables.values()} == {2}
    assert found.column_names() == ["age", "sex"]
    assert [problem.name for problem in found.binary_questions] == ["sick"]


def test_cells_tell_scores_of_the_known_outputs(outcomes):
    found = outcomes({"north": 60, "south": 40, "tiny": 3, "small": 16})
    told = performance_numbers_for_script(found, 0.95)
    assert told["sites"] == ["All sites", "north", "small", "south"]  # one row of tiny could be told
    assert "The menu has 3 of 4 tested sites: " in html_performance_section(found, 0.95, "k")
    auc, accuracy = METRICS["auc"], METRICS["accuracy"]
    for s, clients in enumerate((found.clients, ("north",))):
        for m, method in enumerate(found.methods):
            tables = [[found.prediction_tables[method, seed, c] for c in clients] for seed in found.seeds]
            outputs = [torch.cat([t.outputs for t in one]) for one in tables]
            targets = torch.cat([t.targets for t in tables[0]])
            cell = told["cells"][s][0][m]
            assert cell["area"][0] == pytest.approx(np.mean([auc(one, targets) for one in outputs]), abs=6e-4)
            assert (cell["n"], cell["yes"]) == (len(targets), int((targets == 1).sum()))
            right = cell["hits"][49] + cell["n"] - cell["yes"] - cell["alarms"][49]
            mean = np.mean([accuracy(one, targets) for one in outputs])
            assert right == pytest.approx(len(targets) * mean, abs=0.11)
    assert told["cells"][2][0][0]["groups"] == []  # sixteen examples have no calibration


def test_folds_of_a_repeat_are_counted_together(outcomes):
    found = outcomes({"north": 60, "south": 40}, seeds=range(6), folds=3)
    assert (found.seeds, found.same_clients, found.same_order) == ((0, 1), True, True)
    told = performance_numbers_for_script(found, 0.95)
    assert told["sites"] == ["All sites", "north", "south"]  # each site tests the same examples in every repeat
    whole, north = told["cells"][0][0][0], told["cells"][1][0][0]
    assert (whole["n"], north["n"]) == (300, 180)
    assert whole["yes"] == sum(int((found.prediction_tables["local", 0, c].targets == 1).sum()) for c in found.clients)
    assert sum(examples for *_, examples in whole["groups"]) == 300
    assert found.fold_of_rows[1, "south"].tolist() == [0] * 40 + [1] * 40 + [2] * 40
    (every, *_) = score_subgroups(found, "sex", found.clients, METRICS["auc"], 0.95)
    assert every.examples == 300
    text = str(html_performance_section(found, 0.95, "k"))
    assert "All sites: 300 test examples" in text
    assert "means over 2 repeats of the folds" in text


def test_folds_of_which_some_are_missing_stay_apart(outcomes):
    found = outcomes({"north": 60}, seeds=range(3), folds=2)
    assert (found.seeds, found.fold_of_rows) == ((0, 1, 2), {})


def test_more_classes_are_told_one_by_one_and_by_the_most_probable(outcomes):
    found = outcomes({"north": 90, "south": 60}, names=list("abcd"), classes=4)
    told = performance_numbers_for_script(found, 0.95)
    assert told["classes"] == list("abcd")
    assert "hits" not in told["cells"][0][0][0]
    matrix = np.array(told["matrices"][1][0])
    targets = found.prediction_tables["fedavg", 0, "north"].targets
    assert matrix.sum(axis=1) == pytest.approx(np.bincount(targets, minlength=4), abs=0.01)
    right = np.mean(
        [METRICS["accuracy"](found.prediction_tables["fedavg", s, "north"].outputs, targets) for s in found.seeds]
    )
    assert np.trace(matrix) == pytest.approx(90 * right, abs=0.01)


def test_labels_and_numbers(write_run, write_predictions, tmp_path):
    draw = np.random.default_rng(0)
    for name, targets, width in (
        ("labels", draw.integers(0, 2, (30, 3)).astype(float), 3),
        ("numbers", draw.normal(size=30), 1),
    ):
        folder = write_run(tmp_path / name, "fedavg", {"x": [0.5]})
        write_predictions(folder, "x", {1: draw.normal(size=(30, width))}, targets)
        ((setting,), _) = read_run_groups([folder])
        found, _ = read_group_predictions(setting)
        assert found.task == {"labels": "multilabel", "numbers": "regression"}[name]
        assert len(found.binary_questions) == {"labels": 3, "numbers": 0}[name]
        if name == "labels":
            assert len(performance_numbers_for_script(found, 0.95)["cells"][0][2][0]["hits"]) == 99
        else:
            assert "these networks predict numbers" in html_performance_section(found, 0.95, "k")


def test_other_data_in_each_seed_give_no_choice_of_sites(outcomes):
    found = outcomes(same_clients=False)
    assert performance_numbers_for_script(found, 0.95)["sites"] == ["All sites"]
    assert "Each seed divides the data in another way, so that a site cannot be chosen." in html_performance_section(
        found, 0.95, "k"
    )


def test_outputs_that_are_not_finite_are_left_out_and_counted(outcomes, write_predictions, tmp_path):
    outcomes({"north": 30})
    values = np.zeros((30, 2))
    values[:2] = np.nan
    write_predictions(tmp_path / "mine/local/seed-1", "north", {2: values}, np.arange(30) % 2)
    ((setting,), _) = read_run_groups([tmp_path / "mine"])
    found, _ = read_group_predictions(setting)
    assert "2 predictions are not finite numbers" in found.notes[0]
    assert len(found.binary_predictions("local", 1, ["north"], found.binary_questions[0])[0]) == 28


def test_why_there_are_none(outcomes, tmp_path):
    outcomes({"north": 30, "south": 20})
    for seed in range(3):
        (tmp_path / f"mine/fedrep/seed-{seed}/predictions/north.parquet").unlink()
    ((setting,), _) = read_run_groups([tmp_path / "mine"])
    found, _ = read_group_predictions(setting)
    assert found.methods == ("fedavg", "local")
    assert "fedrep has no curves" in found.notes[0]
    damaged = tmp_path / "mine/local/seed-0/predictions/north.parquet"
    damaged.write_bytes(b"no parquet")
    found, _ = read_group_predictions(setting)
    assert found.methods == ("fedavg",)
    assert "holds no predictions that can be read" in found.notes[0]
    for seed in range(3):
        (tmp_path / f"mine/fedavg/seed-{seed}/predictions/north.parquet").write_bytes(b"no parquet")
    none, why = read_group_predictions(setting)
    assert none is None
    assert why.startswith("There are no curves by example and no subgroups. fedavg has no curves: ")
    assert "holds no predictions that can be read" in why


def test_groups_of_a_column():
    assert example_positions_by_group(["b", None, "a", "", "b", float("nan")]) == {
        "a": [2],
        "b": [0, 4],
        "not known": [1, 3, 5],
    }
    assert example_positions_by_group([2, 1, 2]) == {"1": [1], "2": [0, 2]}
    ages = list(range(100))
    found = example_positions_by_group(ages)
    assert list(found) == ["0 to 24", "25 to 49", "50 to 74", "75 to 99"]
    assert sorted(k for rows in found.values() for k in rows) == ages
    assert [len(rows) for rows in found.values()] == [25] * 4
    many = example_positions_by_group([f"v{k}" for k in range(30)] + ["v0"])
    assert len(many) == 13
    assert len(many["all other values"]) == 18
    assert many["v0"] == [0, 30]
    weights = example_positions_by_group([k / 7 for k in range(40)])
    assert sum(len(rows) for rows in weights.values()) == 40


def test_scores_of_subgroups_are_those_of_their_examples(outcomes):
    found = outcomes({"north": 60, "south": 40}, seeds=(0,))
    metric = METRICS["accuracy"]
    told = score_subgroups(found, "sex", found.clients, metric, 0.95)
    assert [group.name for group in told] == ["all", "f", "m"]
    outputs, targets, sex = [], [], []
    for client in found.clients:
        table = found.prediction_tables["fedavg", 0, client]
        outputs, targets = [*outputs, table.outputs], [*targets, table.targets]
        sex += list(table.columns["sex"])
    rows = [k for k, value in enumerate(sex) if value == "f"]
    assert told[1].examples == len(rows)
    expected = metric(torch.cat(outputs)[rows], torch.cat(targets)[rows])
    value, low, high = told[1].scores["fedavg"]
    assert value == pytest.approx(expected)
    assert low < value < high
    assert told[1].gains["fedavg"][0] == pytest.approx(value - told[1].scores["local"][0])


def test_the_command_takes_columns_and_names_those_there_are(write_comparison, tmp_path, capsys):
    folder = write_comparison(tmp_path / "mine", {"north": 30, "south": 20}, seeds=(0,))
    assert main(["report", str(folder), "--subgroup", "sex,age", "--subgroup=sex"]) == 0
    text = (folder / "report.html").read_text()
    assert re.findall(r"<h3>(Subgroups by [^<]+)</h3>", text) == ["Subgroups by sex", "Subgroups by age"]
    assert main(["report", str(folder), "--subgroup", "sx"]) == 2
    error = capsys.readouterr().err
    assert "--subgroup 'sx': the test examples have no such column" in error
    assert "sex" in error
    assert main(["report", str(folder)]) == 0
    assert "Subgroups" not in (folder / "report.html").read_text()
    other = write_comparison(tmp_path / "other", {"north": 30}, seeds=(0,), keep=False)
    assert main(["report", str(other), "--subgroup", "sex"]) == 2
    assert "--subgroup 'sex': The runs kept no predictions" in capsys.readouterr().err


def test_names_of_sites_and_columns_stay_text(write_comparison, tmp_path):
    evil = "</script><script>alert(1)</script>"
    folder = write_comparison(tmp_path / "mine", {evil: 30, "b": 20}, seeds=(0,), class_names=["a", "<i>"])
    show_report([folder], Console(quiet=True), out=tmp_path / "page.html", subgroups=["sex"])
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script") == text.count("</script>") == 3
    assert "<i>" not in text
    told = re.search(r'id="p0-curves">(.*?)</script>', text)[1]
    assert evil in json.loads(told)["sites"]


@pytest.mark.slow
def test_a_page_of_many_sites_stays_small(write_comparison, tmp_path):
    sites = {f"site-{k:02d}": 40 for k in range(44)}
    folder = write_comparison(tmp_path / "mine", sites, seeds=(0, 1))
    show_report([folder], Console(quiet=True), out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert len(text.encode()) < 700_000
    assert "The menu has 40 of 44 tested sites: those with the most test examples" in text


def test_an_unknown_subgroup_of_a_run_is_refused(write_run, tmp_path):
    folder = write_run(tmp_path / "a", "fedavg", {"x": [0.5]})
    with pytest.raises(UserError, match="no predictions"):
        show_report([folder], Console(quiet=True), out=tmp_path / "page.html", subgroups=["sex"])
