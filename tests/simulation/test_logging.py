"""What the library logs: nothing is printed unless an application asks for it."""

import logging
import sys
import types

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.io.text.advice import keep_advice_for_python
from polyfed.deploy.logs import send_logs_to_stderr
from polyfed.testing import small_clients


@pytest.fixture(autouse=True)
def _loggers_as_after_an_import(monkeypatch):
    """Whatever a test of deployments has set up before."""
    monkeypatch.setattr(logging.getLogger("polyfed"), "propagate", True)
    simulation = logging.getLogger("polyfed.simulation")
    level = simulation.level
    simulation.setLevel(logging.NOTSET)
    yield
    simulation.setLevel(level)


def test_a_run_logs_its_start_its_rounds_and_its_end(caplog, capsys):
    caplog.set_level(logging.INFO, "polyfed")
    pf.federate(small_clients(), "fedavg", rounds=2, workers=0, progress=False)
    messages = [record.getMessage() for record in caplog.records if record.name == "polyfed.simulation"]
    assert messages[0] == "fedavg: 3 clients, 2 of 2 rounds to do"
    assert messages[1].startswith("round 1 of 2: accuracy ")
    assert messages[-1] == "ended after round 2 of 2"
    assert capsys.readouterr() == ("", "")


def test_a_comparison_logs_its_runs_and_warnings(caplog):
    caplog.set_level(logging.INFO, "polyfed")
    found = pf.compare(small_clients(2), ["fedprox", "fedmd"], rounds=1, seeds=1, tune="none", references=False,
                       parallel=1, quiet=True)  # fmt: skip
    records = [record for record in caplog.records if record.name == "polyfed.comparison"]
    assert [r.getMessage() for r in records if r.levelno == logging.WARNING] == [
        keep_advice_for_python(sentence) for sentence in found.results["warnings"]
    ]
    assert any(record.getMessage().startswith("fedprox, seed 0: done") for record in records)


def test_nothing_is_printed_unless_asked_and_a_deployment_asks(monkeypatch):
    logger = logging.getLogger("polyfed")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    level = logger.level
    send_logs_to_stderr()
    send_logs_to_stderr()
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler, logging.StreamHandler]
    logger.setLevel(level)


def test_of_a_lightning_module_a_sentence_says_what_is_taken(monkeypatch):
    lightning = types.ModuleType("lightning")
    monkeypatch.setitem(sys.modules, "lightning", lightning)
    base = type("LightningModule", (nn.Module,), {"__module__": "lightning.pytorch.core.module"})

    class Net(base):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, position):
            raise AssertionError("not used")

    clients = [pf.Client(c.id, Net, c.train, c.test) for c in small_clients(2)]
    with pytest.warns(
        UserWarning, match="of its LightningModule, forward and the weights are taken; training_step, "
    ) as told:
        pf.federate(clients, "fedavg", rounds=1, workers=0, progress=False)
    assert len(told) == 1


def test_of_a_model_of_transformers_the_log_says_what_is_taken(caplog):
    caplog.set_level(logging.INFO, "polyfed")
    base = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})

    class Net(base):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, labels=None):
            return {"logits": self.layer(x), "loss": torch.zeros(())}

    clients = [pf.Client(c.id, Net, c.train, c.test) for c in small_clients(2)]
    pf.federate(clients, "fedavg", rounds=1, workers=0, progress=False)
    assert any("logits and weights are taken; the loss" in record.getMessage() for record in caplog.records)


def test_a_trainer_and_a_module_of_data_are_refused_with_what_to_give():
    data = small_clients(1)[0].train
    trainer = types.SimpleNamespace(train_dataset=data, model=None)
    with pytest.raises(
        pf.UserError, match=r"got SimpleNamespace; of a trainer give the network.*deepcopy\(trainer.model\)"
    ):
        pf.Client("c", trainer, data, data)
    module = types.SimpleNamespace(train_dataloader=lambda: None)
    with pytest.raises(pf.UserError, match=r"train: a SimpleNamespace holds several sets; give one of them"):
        pf.Client("c", nn.Identity, module, data)


def test_help_explains_every_parameter():
    """`help(pf.federate)` has the words of `Settings`, and names no other page for them."""
    import inspect
    import re

    from polyfed.simulation.settings import (
        SCHEDULING_FIELDS,
        Settings,
    )  # which take objects in Python, and texts in files

    def entries(doc):
        arguments = re.sub(r"\s+", " ", doc.partition("Args:")[2].partition("Raises:")[0])
        return {name: text.strip() for name, text in re.findall(r" (\w+): (.*?)(?= \w+(?:, \w+)*: |$)", arguments)}

    federate, settings = entries(inspect.getdoc(pf.federate)), entries(inspect.getdoc(Settings))
    for name in inspect.signature(pf.federate).parameters.keys() & settings.keys() - {"metrics", *SCHEDULING_FIELDS}:
        assert federate[name] == settings[name], name
    for function in (pf.federate, pf.compare, pf.resume):
        doc = inspect.getdoc(function).partition("Args:")[2]
        missing = [name for name in inspect.signature(function).parameters if not re.search(rf"\b{name}\b", doc)]
        assert missing == [], function.__name__
