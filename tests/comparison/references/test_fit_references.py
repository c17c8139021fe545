"""What each site has alone beside the methods: fitted again for each dividing, bounded, and told."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.comparison.references import simple_models
from polyfed.comparison.references.reference_models import fit_client_references
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.evaluation.simple_model import SimpleModel
from polyfed.data.partitioning.resplit import resplit_clients
from polyfed.tasks.simple_models import linear_models
from tests.few_cases import few

QUICK = {"rounds": 1, "budget": "steps", "tune": "none", "parallel": 1, "quiet": True}


def linear():
    return nn.Linear(4, 2)


def sites(number=2, size=60):
    """Sites whose labels a line tells, so that one round of a network is behind a logistic regression."""
    found = []
    for k in range(number):
        rng = np.random.default_rng(k)
        x = torch.from_numpy(rng.normal(size=(size, 4))).float()
        y = (x[:, 0] + 0.3 * torch.from_numpy(rng.normal(size=size)).float() > 0).long()
        half = size // 2
        found.append(pf.Client(f"site-{k}", linear, (x[:half], y[:half]), (x[half:], y[half:])))
    return found


@pytest.mark.parametrize("words", [{"seeds": [0, 1]}, {"resplit": 2}])
@pytest.mark.thorough
def test_simple_models_of_each_dealing_take_part_in_the_answers(tmp_path, words):
    clients = sites()
    content = pf.compare(clients, ["fedavg"], **QUICK, **words, metrics=["auc"], out=tmp_path / "c").results
    divided = [clients, clients] if "seeds" in words else resplit_clients(clients, 2)
    for seed, of_seed in zip(("0", "1"), divided, strict=True):
        for one in fit_client_references(of_seed, seed=0)[0]:
            runs = content["references"][one.name]["runs"][seed]
            assert runs == {c.id: METRICS["auc"](one.outputs[c.id], c.test.labels) for c in of_seed}
    logistic = content["references"]["logistic_regression"]
    assert logistic["scores"]["site-0"] == pytest.approx(np.mean([run["site-0"] for run in logistic["runs"].values()]))
    assert logistic["gain"] > 0
    assert {one["over"] for one in content["answers"]} <= {"logistic_regression", "gradient_boosting"}
    assert all(one["gains"].keys() >= {"local", "majority", "logistic_regression"} for one in content["answers"])
    assert content["references"]["pooled"]["alone"] is False
    again = pf.compare(clients, ["fedavg"], **QUICK, **words, metrics=["auc"], out=tmp_path / "c", references=False)
    assert again.results["references"] == {}, "the runs are there, and simple models may be left out of them"
    assert {one["over"] for one in again.results["answers"]} == {"local"}


class Logarithm(nn.Linear):
    """Has no finite output for negative inputs."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        return super().forward(x.log())


def test_references_that_fail_are_left_out_and_the_methods_keep_their_results(monkeypatch):
    def fail(table, outputs, seed):
        raise ZeroDivisionError("no fit\nand more")

    def overflow(table, outputs, seed):
        return np.full((len(table.test), outputs), 1e39)

    failing = (SimpleModel("failing", "a failing model", fail), SimpleModel("large", "a large model", overflow))
    monkeypatch.setattr(type(sites()[0].task), "simple_models", lambda task: failing)
    people = [replace(c, model=Logarithm, train=(c.train.x.abs() + 0.1, c.train.y)) for c in sites()]
    found = pf.compare(people, ["fedavg"], **QUICK, seeds=1).results
    assert set(found["references"]) == {"majority"}
    assert found["methods"]["fedavg"]["runs"]["0"]["scores"] == {}  # outputs are NaN
    sentences = " ".join(found["left_out"])
    assert "A failing model could not be fitted at every site, and is not among the alternatives: no fit." in sentences
    assert "A large model predicted what is not finite at some site" in sentences
    assert "One network on the data of all sites is not among the references: pooled: outputs for client" in sentences


@pytest.mark.thorough
def test_dealings_are_fitted_side_by_side_to_the_same():
    words = QUICK | {"resplit": 2}
    one, other = (pf.compare(sites(), ["fedavg"], **(words | {"parallel": n})).results["references"] for n in (1, 2))
    assert one == other


@pytest.mark.thorough
def test_progress_is_told(capsys):
    pf.compare(sites(), ["fedavg"], **(QUICK | {"quiet": False}), resplit=2)
    assert "simple models of each site alone: done (2 of 2 splits)" in capsys.readouterr().err


def test_images_have_the_constant_alone_and_that_is_said():
    x, y = torch.rand(20, 1, 4, 4), torch.arange(20) % 2
    client = pf.Client(
        "north", lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), (x[:10], y[:10]), (x[10:], y[10:])
    )
    content = pf.compare([client, replace(client, id="south")], ["fedavg"], **QUICK, seeds=[0]).results
    assert [name for name, one in content["references"].items() if one["alone"]] == ["majority"]
    assert any(text.startswith("Inputs are not rows of finite numbers") for text in content["covers"])


def test_thousands_of_labels_and_rows_are_bounded(monkeypatch):
    y = (torch.rand(30, 300) > 0.5).float()
    many = pf.Client("north", None, (torch.rand(30, 4), y), (torch.rand(5, 4), y[:5]), task="multilabel")
    found, left_out = fit_client_references([many])
    assert [one.name for one in found] == ["majority"]
    assert left_out[0].startswith("There are more than 200 labels")
    monkeypatch.setattr(simple_models, "_EXAMPLES", 25)
    monkeypatch.setattr(simple_models, "_FEW", 25)
    (_, line, trees), _ = fit_client_references(sites(1))
    assert line.sentence.endswith("of these at most 25")
    assert trees.sentence.endswith("of these at most 25")


def test_of_more_labels_than_ten_one_penalty_is_chosen(monkeypatch):
    chosen = []
    monkeypatch.setattr(linear_models, "_choose_regularisation", lambda table, y, seed: chosen.append(seed) or 1.0)
    x = torch.rand(40, 4)
    for labels, times in ((3, 3), (12, 1)):
        y = (torch.rand(40, labels) > 0.5).float()
        y[:2] = torch.tensor([[0.0], [1.0]])
        fit_client_references([pf.Client("north", None, (x, y), (x[:5] + 1, y[:5]), task="multilabel")])
        assert len(chosen) == times
        chosen.clear()


@pytest.mark.parametrize("task", few(["classification", "regression"], ["classification"]))
def test_rows_of_one_group_stay_together_where_a_penalty_is_chosen(task):
    """Twenty patients with ten rows each that say who they are: with rows apart, a weak penalty looks best."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(20), 10)
    x = torch.from_numpy(rng.normal(size=(20, 40))[who] + 0.01 * rng.normal(size=(200, 40))).float()
    y = torch.from_numpy(rng.integers(0, 2, 20)[who])
    y = y if task == "classification" else y.float()
    test = torch.from_numpy(rng.normal(size=(50, 40))).float(), y[:50]

    def sure(group):
        train = pf.Examples(x, y, columns={"patient": who.tolist()}, group=group)
        (_, line, *_), _ = fit_client_references([pf.Client("north", None, train, test, task=task)])
        return float(line.outputs["north"].std())

    assert sure("patient") < 0.7 * sure(None)
