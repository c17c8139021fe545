"""A comparison says before it trains where the score that decides cannot be computed."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.comparison.storage.load import load_comparison
from polyfed.core.io.text.advice import keep_advice_for_python

QUICK = {"rounds": 1, "budget": "steps", "tune": "none", "references": False, "parallel": 1, "quiet": True,
         "engine": "inprocess"}  # fmt: skip


def sites(**positives):
    """Clients of 24 examples each, with this many of class 1."""
    clients = []
    for number, (name, count) in enumerate(positives.items()):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(number))
        y = (torch.arange(24) % 12 < count / 2).long()  # half of them in training, half in test
        clients.append(pf.Client(name, lambda: nn.Linear(4, 2), (x[:12], y[:12]), (x[12:], y[12:])))
    return clients


def patients(**events):
    clients = []
    for number, (name, count) in enumerate(events.items()):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(number))
        y = torch.stack([torch.arange(24) % 12 + 1.0, (torch.arange(24) % 12 < count / 2).float()], 1)
        parts = (x[:12], y[:12]), (x[12:], y[12:])
        clients.append(pf.Client(name, lambda: nn.Linear(4, 1), *parts, task="survival"))
    return clients


def refuse_to_train(record):
    raise AssertionError("a run was trained")


def test_clients_without_a_score_in_some_folds_are_warned_of_and_the_answer_says_what_is_missing(tmp_path):
    with pytest.warns(UserWarning, match="not defined") as seen:
        result = pf.compare(
            sites(north=12, south=2, west=0), ["fedavg"], **QUICK, folds=3, metrics=["auc"], out=tmp_path / "out"
        )
    (sentence,) = (str(w.message) for w in seen if "not defined" in str(w.message))
    assert sentence.startswith("AUC is not defined at south in 1 of 3 folds, west in 3 of 3 folds: ")
    for part in ("all of one class", "folds=...", "brier, log_loss"):
        assert part in sentence
    assert f"{sentence}." in map(keep_advice_for_python, result.results["warnings"])
    west = next(row["sentence"] for row in result.results["answers"] if row["client"] == "west")
    assert west.startswith("west: not decided: fedavg")
    assert " has no AUC there (24 test examples, all of one class)" in west
    assert load_comparison(tmp_path / "out").results["answers"] == result.results["answers"]


@pytest.mark.filterwarnings("ignore:client .* has no event")
@pytest.mark.parametrize(
    ("clients", "metric", "why"),
    [(sites(north=2, south=2), "auc", "all of one class"), (patients(north=2, south=2), "c_index", "no events")],
)
def test_a_fold_in_which_no_client_has_a_score_is_refused_before_training(clients, metric, why):
    with pytest.raises(pf.UserError) as error:
        pf.compare(clients, ["fedavg"], **QUICK, folds=4, metrics=[metric], callbacks=[refuse_to_train])
    for part in ("is not defined at any client in fold", why, "fewer folds"):
        assert part in str(error.value)


def test_fewer_folds_are_no_advice_for_a_site_with_one_class():
    with pytest.warns(UserWarning, match="AUC is not defined at west in 3 of 3 folds") as seen:
        pf.compare(sites(north=12, west=0), ["fedavg"], **QUICK, folds=3, metrics=["auc"])
    (sentence,) = (str(w.message) for w in seen if "not defined" in str(w.message))
    assert "Such a client has no answer, and no part in that for the mean; leave small sites out" in sentence
    assert "fewer folds" not in sentence


def test_scores_that_every_example_has_are_compared_at_a_site_with_one_class():
    result = pf.compare(sites(north=12, west=0), ["fedavg"], **QUICK, folds=3, metrics=["brier"])
    assert not any("not defined" in sentence for sentence in result.results["warnings"])
