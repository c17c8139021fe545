"""The page of results as `polyfed.compare` writes them, not as a test makes them up."""

import io
import re
from statistics import fmean

import pytest
import torch
from rich.console import Console
from torch import nn

import polyfed as pf
from polyfed.cli.commands.results.report_command import show_report
from polyfed.comparison.verdicts.verdict_sentences import describe_local_alternative
from polyfed.core.io.text.advice import keep_advice_for_python
from polyfed.core.seeds import torch_generator
from polyfed.report.data.predictions import read_group_predictions
from polyfed.report.data.run_groups import read_run_groups
from polyfed.testing import small_clients

QUICK = {"rounds": 2, "budget": "steps", "parallel": 1, "quiet": True}


def page(folder):
    show_report([folder], Console(quiet=True), out=folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "metrics"),
    [
        ({"seeds": [0, 1], "tune": {"lr": [0.1, 0.3]}}, None),
        ({"resplit": 2, "tune": "none", "references": False}, ["log_loss"]),
    ],
)
def test_a_comparison_has_a_page(tmp_path, words, metrics):
    bare = [pf.Client(c.id, c.model, c.train, c.test) for c in small_clients(2)]
    found = pf.compare(bare, ["fedprox"], **QUICK, **words, metrics=metrics, out=tmp_path / "a")
    text = page(tmp_path / "a")
    content = found.results
    warnings = map(keep_advice_for_python, content["warnings"])  # who made it in Python needs no options of a command
    for sentence in (content["mean_answer"]["sentence"].partition(": ")[2], *content["covers"], *warnings):
        assert sentence.rstrip(".") in text.replace("&#x27;", "'").replace("&#39;", "'")
    for label, method in content["methods"].items():
        if (p := method["statistics"]["p_reference"]) is not None:
            assert re.search(rf"<tr><t[dh][^>]*>{label}</t[dh]>.*?<td[^>]*>{p:.2g}</td>", text)
    for name, reference in content["references"].items():
        label = describe_local_alternative(name, "local", "classification") if reference["alone"] else "(for reference)"
        assert bool(re.search(rf"<th [^>]*>{re.escape(label)}</th>", text)) == reference["alone"]
    assert "(alone)" not in text  # one name for what a site has alone
    has = "no predictions" not in text
    assert has == content["predictions"]
    assert 'id="p0-curves"' in text


@pytest.mark.thorough
def test_scores_of_clients_are_those_of_all_folds_together_and_the_worst_has_the_largest_error(tmp_path):
    x = torch.randn(42, 2, generator=torch_generator(0))
    y = x[:, :1] + torch.randn(42, 1, generator=torch_generator(1))
    parts = zip("abc", x.split([10, 13, 19]), y.split([10, 13, 19]), strict=True)  # folds of unequal size
    clients = [
        pf.Client(k, lambda: nn.Linear(2, 1), (x[4:], y[4:]), (x[:4], y[:4]), task="regression") for k, x, y in parts
    ]
    words = QUICK | {"folds": 3, "tune": "none", "references": False, "metrics": ["rmse"]}
    found = pf.compare(clients, ["fedavg"], **words, out=tmp_path / "a")
    (group,), _ = read_run_groups([tmp_path / "a"])
    for method in group.methods:
        stored = found.results["methods"][method.label]["statistics"]["clients"]
        scores = group.mean_score_by_participant(method)
        assert scores == {name: entry["mean"] for name, entry in stored.items()}
        assert fmean(scores.values()) == pytest.approx(group.mean_score(method), abs=1e-6)
        assert all(gain.mean == stored[gain.client]["gain"] for gain in group.gains_over_local(method))
    predictions, _ = read_group_predictions(group)
    for client in clients:
        tested = predictions.prediction_tables["fedavg", 0, client.id].targets
        every = torch.cat([client.train.y, client.test.y])
        torch.testing.assert_close(tested.sort(0).values, every.sort(0).values)  # each example once
    console = Console(width=200, file=io.StringIO())
    show_report([tmp_path / "a"], console)
    worst = max(scores, key=scores.__getitem__)
    assert f"{scores[worst]:.3f} ({worst})" in console.file.getvalue()
