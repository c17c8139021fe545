"""A task of the user's own, the example of docs/tasks/own_task.md, from clients to the report."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.tasks.task_lookup import has_elementwise_loss
from polyfed.simulation.storage.directory import read_manifest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counts():
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/tasks/own_task.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (block,) = (block for block in blocks if "class Counts" in block)
    namespace = {"__name__": "my_tasks"}
    exec(compile(block.partition("\nclients =")[0], "docs/tasks/own_task.md", "exec"), namespace)  # noqa: S102  # the page's own code
    return namespace["Counts"]


def clients_of(task):
    generator = torch.Generator().manual_seed(0)

    def examples(number):
        x = torch.randn(number, 4, generator=generator)
        return x, torch.poisson((x[:, 0] / 2).exp(), generator=generator)

    return [pf.Client(f"c{i}", Line, examples(20), examples(12), examples(8), task=task) for i in range(3)]


class StopAtOnce(pf.Callback):
    def on_round(self, record):
        return False


def test_a_loss_that_cannot_be_trained_is_refused_before_round_1(counts):
    for loss, message in (
        (lambda self, outputs, targets: outputs.exp() - targets * outputs, r"got shape \(20, 1\)$"),
        (
            lambda self, outputs: outputs.mean(),
            r"Wrong.* fails on outputs .* TypeError: .* It is called as loss\(outputs, ",
        ),
    ):
        wrong = dataclasses.dataclass(frozen=True)(type("Wrong", (counts,), {"loss": loss, "__module__": __name__}))
        with pytest.raises(pf.UserError, match=f"^the loss of the task .*{message}"):
            pf.federate(clients_of(wrong()), "fedavg", rounds=1)


def test_names_in_place_of_metrics_are_refused(counts):
    wrong = dataclasses.dataclass(frozen=True)(type("Wrong", (counts,), {"metrics": ("mae",), "__module__": __name__}))
    with pytest.raises(pf.UserError, match=r"its metrics must be polyfed.Metric objects, got 'mae'$"):
        pf.federate(clients_of(wrong()), "fedavg", rounds=1)


class Line(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)


def test_it_runs_resumes_and_is_written_by_class_and_options(counts, tmp_path):
    task = counts(largest=5.0)
    clients = clients_of(task)
    assert task != "my_tasks:Counts"
    assert counts() == "my_tasks:Counts"
    assert pf.tasks.get_task(task.spec) == task
    assert hash(pf.tasks.get_task(task.spec)) == hash(task)
    assert not has_elementwise_loss(task)
    short = pf.federate(
        clients,
        "fedavg",
        rounds=2,
        out=tmp_path / "a",
        engine="cohort",
        workers=0,
        progress=False,
        callbacks=[StopAtOnce()],
    )
    assert len(short.history) == 1
    assert read_manifest(tmp_path / "a")["task"] == {"name": "my_tasks:Counts", "largest": 5.0}
    assert "deviance" in short.history[0]["clients"]["c0"]
    longer = pf.resume(tmp_path / "a", clients=clients, progress=False)
    whole = pf.federate(clients, "fedavg", rounds=2, workers=0, progress=False)
    assert longer.history[-1]["clients"]["c0"]["loss"] == whole.history[-1]["clients"]["c0"]["loss"]
    folder = pf.export_model(whole, "c0", tmp_path / "north", format="weights")
    assert "my_tasks:Counts" in (folder / "signature.json").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_it_is_compared_and_its_references_cost_nothing(counts):
    comparison = pf.compare(
        clients_of(counts()), ["local", "fedavg"], seeds=[0, 1], rounds=1, tune="none", progress=False
    )
    assert comparison.results["task"] == "my_tasks:Counts"
    assert comparison.results["score"] == "deviance"
    assert comparison.results["references"].keys() <= {"pooled"}
    assert "deviance" in comparison.verdicts[0]


def test_a_row_that_is_no_count_is_named(counts):
    wrong = torch.zeros(2, 4), torch.tensor([1.0, -1.0])
    with pytest.raises(pf.UserError, match="client 'north': train targets: row 1 is -1"):
        pf.Client("north", Line, wrong, wrong, task=counts())


def test_options_of_another_type_are_refused(counts):
    with pytest.raises(pf.UserError, match="largest"):
        counts(largest="much")
