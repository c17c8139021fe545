"""The sentences and ranks of a page: only means over the same seeds stand side by side, and ties are ties."""

import json
import random

import pytest
from rich.console import Console

from polyfed.cli.commands.results.report_command import show_report
from polyfed.core.errors import UserError
from polyfed.report.data.run_groups import read_run_groups
from polyfed.report.page.sentences import omission_and_tuning_notes, result_summary_sentences


@pytest.fixture
def stopped(write_run, tmp_path):
    """A comparison that has runs of given scores: method -> seed -> scores of clients x, y, ..."""

    def stopped(scores, *, same_clients=True):
        told = f"title: mine\nsame_clients: {str(same_clients).lower()}\nreference: local\n"
        (tmp_path / "comparison.yaml").write_text(told)
        for method, by_seed in scores.items():
            for seed, values in by_seed.items():
                named = {name: [value] for name, value in zip("xyz", values, strict=False)}
                write_run(tmp_path / f"{method}/seed-{seed}", method, named, seed=seed)
        ((setting,), _) = read_run_groups([tmp_path])
        return setting

    return stopped


def test_methods_of_different_seeds_are_not_ranked(stopped):
    setting = stopped({"local": {0: [0.7]}, "fedprox": {1: [0.8]}})
    assert (
        result_summary_sentences(setting)[0]
        == "No seed has a score of every method, so that none can be called the highest."
    )


def test_methods_are_ranked_over_the_seeds_that_all_have(stopped):
    """Over both seeds local has 0.7, over the common one 0.9."""
    setting = stopped({"local": {0: [0.9], 1: [0.5]}, "fedprox": {0: [0.85]}})
    first = result_summary_sentences(setting)[0]
    assert first == "local has the highest mean, 90.0 %."  # a note on the page names the seed
    assert [setting.mean_score(line) for line in setting.methods] == [0.85, 0.9]
    assert setting.mean_score_by_participant(setting.methods[1]) == {"x": 0.9}


def test_a_method_without_any_score_does_not_keep_the_others_from_being_ranked(stopped):
    setting = stopped(
        {"local": {0: [0.5], 1: [0.5]}, "fedprox": {0: [None], 1: [None]}, "fedavg": {0: [0.6], 1: [0.7]}}
    )
    assert result_summary_sentences(setting)[0] == "fedavg has the highest mean, 65.0 %; training alone has 50.0 %."


def test_ties_are_ties_whatever_the_rounding(stopped):
    scores = {"local": {0: [0.7, 0.2], 1: [0.3, 0.3]}, "fedavg": {0: [0.8, 0.1], 1: [0.2, 0.4]}}
    setting = stopped(scores)
    assert result_summary_sentences(setting)[0] == "No method has a higher mean than training alone, 37.5 %."
    assert "0 gain, 0 lose" in result_summary_sentences(setting)[1]


def test_what_the_command_tells_of_a_comparison_is_on_the_page(comparison_of, tmp_path):
    content = comparison_of({"local": {0: {"x": 0.5}}, "fedavg": {0: {"x": 0.6}}})
    one = {"chosen": {"lr": 0.0312345}, "runs": 3, "tried": []}
    content["tuning"] = {"sentence": "lr, by Optuna", "by": "validation", "methods": {"fedavg": one}}
    (tmp_path / "comparison.yaml").write_text("title: mine\n")
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    ((setting,), _) = read_run_groups([tmp_path])
    assert (
        result_summary_sentences(setting)[0]
        == "fedprox failed and is not in the table: round 1, client 'north', phase 'reply': it diverged."
    )
    told = omission_and_tuning_notes(setting)
    assert "3 seeds: intervals are wide." in told
    assert "The best by test examples is fedavg, with which “p (best)” compares." in told
    assert "Searched lr, by Optuna." in told
    assert "fedavg got lr 0.03123 of 3 runs." in told


def test_gains_are_over_the_reference_of_the_comparison(comparison_of, tmp_path):
    """Two methods train alone; the comparison says which one counts."""
    by_method = {"alone": 0.9, "local": 0.3, "fedavg": 0.5}
    content = comparison_of({m: {s: {"x": v} for s in (0, 1)} for m, v in by_method.items()}, reference="alone")
    content["methods"]["alone"]["name"] = "local"
    (tmp_path / "comparison.yaml").write_text("title: mine\n")
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    ((setting,), _) = read_run_groups([tmp_path])
    assert setting.local_method.label == "alone"
    gains = {line.label: setting.gains_over_local(line) for line in setting.methods}
    assert {label: found[0].mean for label, found in gains.items() if found} == {"local": -0.6, "fedavg": -0.4}


def test_a_comparison_without_a_round_within_its_budget_is_not_damaged(comparison_of, tmp_path):
    content = comparison_of({"local": {0: {"x": 0.5}}, "fedavg": {0: {"x": 0.6}}})
    for method in content["methods"].values():
        method["runs"]["0"] |= {"round": None, "scores": {}, "mean": None}
    (tmp_path / "comparison.yaml").write_text("title: mine\n")
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"no method of .* has an evaluated round within the budget; read it with"):
        read_run_groups([tmp_path])


@pytest.mark.slow
def test_a_page_of_500_clients_stays_below_3_megabytes(comparison_of, tmp_path):
    """FedHeNN's number of clients, seven methods, three seeds that divide 100 classes anew."""
    draw = random.Random(0)
    clients = [f"client-{k:03d}" for k in range(500)]
    labels = ["local", "fedavg", *(f"method-{k}" for k in range(5))]
    content = comparison_of(
        {label: {seed: {c: draw.random() for c in clients} for seed in (0, 1, 2)} for label in labels}
    )
    told = {c: {"train": 100, "test": 50, "classes": [draw.randrange(20) for _ in range(100)]} for c in clients}
    content |= {
        "same_clients": False,
        "data": dict.fromkeys(("0", "1", "2"), told),
        "class_names": [str(k) for k in range(100)],
    }
    (tmp_path / "comparison.yaml").write_text("title: mine\n")
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    show_report([tmp_path], Console(quiet=True), out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert len(page.encode()) < 3 * 2**20
    assert "Drawn are 400 of them, evenly." in page
    assert "Training examples of the first 50 sites" in page
