"""A run of a comparison: its predictions give the compared scores, and its networks are those of this process."""

import dataclasses

import pytest
import torch
from torch import nn

import polyfed as pf


def noisy_clients():
    """Two clients whose few examples are soon learnt by heart, so that the last round is not the one that is kept."""
    draw = torch.Generator().manual_seed(3)
    clients = []
    for name in ("north", "south"):
        x = torch.randn(60, 6, generator=draw)
        y = ((x[:, 0] + 2 * torch.randn(60, generator=draw)) > 0).long()
        sets = [(x[rows], y[rows]) for rows in (slice(20), slice(20, 40), slice(40, 60))]
        clients.append(pf.Client(name, lambda: nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2)), *sets))
    return clients


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "c"
    return pf.compare(noisy_clients(), ["fedprox"], rounds=12, seeds=[0], tune={"lr": [1.0]}, budget="bytes",
                      references=False, metrics="accuracy", out=out, quiet=True)  # fmt: skip


def test_predictions_of_a_run_give_the_compared_scores(comparison):
    kept_rounds = set()
    for _, row in comparison.to_frame().iterrows():
        run = comparison.run(row.method, seed=row.seed)
        predictions = run.predictions(row.client)
        assert predictions.round == row["round"] == 12
        is_right = predictions.outputs.argmax(1) == predictions.targets
        assert float(is_right.float().mean()) == pytest.approx(row.accuracy)
        kept_rounds.add(run.history[-1]["best_round"])
    assert min(kept_rounds) < 12, "else this test could not fail"
    assert comparison.run("local").predictions("north", round=1).round == 1


def test_answers_and_verdicts_say_the_same_words(comparison):
    sites = dataclasses.replace(comparison, results={**comparison.results, "verdicts": ["2 of 2 clients gain"]})
    assert [*sites.verdicts] == [*sites.answers[: len(sites.verdicts)]] == ["2 of 2 sites gain"]


def test_networks_of_this_process_are_used(comparison):
    rows = torch.zeros(2, 6)
    network = noisy_clients()[0].model
    table = comparison.run("fedprox").predict_table("north", rows)
    loaded = pf.load(comparison.out)
    assert table == loaded.run("fedprox").predict_table("north", rows, model=network)
    assert comparison == loaded
    with pytest.raises(pf.UserError, match="model=MyNetwork"):
        loaded.run("fedprox").predict_table("north", rows)
