"""Nothing that is printed of runs, clients and examples holds a value of a client's data."""

import logging
import shutil
import traceback
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.data.pooled_dataset import PooledDataset
from polyfed.simulation.monitoring.progress import LineProgress

MARK = 73591.25  # stands for a measurement of a patient
FORMS = ("73591", "7.3591", "7.36e")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x / MARK)


class FailingNet(Net):
    def forward(self, x):
        raise RuntimeError("the network fails")


def marked(n=12):
    columns = {"age": np.full(n, MARK), "name": np.array([f"x{MARK}"] * n)}
    return pf.Examples(torch.full((n, 3), MARK), torch.full((n, 1), MARK), columns=columns, group=np.arange(n))


def client(name="north", model=Net):
    return pf.Client(name, model, marked(), marked(6), val=marked(4), task="regression")


def shown(thing):
    return [repr(thing), str(thing), f"{thing}", repr([thing]), repr({"thing": thing})]


@pytest.mark.filterwarnings("ignore")  # of equal rows in training and test
def test_public_objects_show_no_data_and_one_line_but_for_the_scores_of_a_run():
    run = pf.federate(
        [client("north"), client("south")], pf.algorithms.FedAvg(lr=1e-9), rounds=1, workers=0, progress=False
    )
    pool = PooledDataset(marked(), marked(5), ("value",), task="regression", columns={"id": np.full(12, MARK)})
    message = pf.Message({"model": {"w": torch.full((3,), MARK)}}, {"sum": MARK})
    things = [run, run.federation, run.last, run.predictions("north"), client(), marked(), pool, message]
    for thing in things:
        for text in shown(thing):
            assert "\n" not in text or text == str(run)
            assert len(text) < 200 or text == str(run)
            assert not any(form in text for form in FORMS), type(thing).__name__
    assert repr(run).startswith("Run(FedAvg, 2 clients, 1 round, ")
    assert repr(run).endswith("out=None)")
    assert repr(client()) == "Client('north', 12 train, 4 val, 6 test, regression)"
    assert repr(pool) == "PooledDataset(12 train, 5 test, 1 outputs, regression)"


def test_errors_warnings_and_logs_hold_no_data(caplog):
    caplog.set_level(logging.DEBUG)
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for action in (
            lambda: pf.federate([client(model=FailingNet)], pf.algorithms.Local(), rounds=1, workers=0, progress=False),
            lambda: pf.Client("north", Net, marked(), (torch.full((2, 3), MARK), torch.tensor([MARK, np.nan]))),
            lambda: pf.Client("north", Net, (torch.full((2, 3), MARK), torch.full((5,), MARK)), marked()),
        ):
            with pytest.raises((pf.UserError, pf.ClientError)) as caught_error:
                action()
            texts += traceback.format_exception(caught_error.value)
        try:  # it may diverge, or not
            pf.federate([client(), client("south")], pf.algorithms.FedAvg(lr=1e9), rounds=4, workers=0, progress=False)
        except (pf.ClientError, pf.RoundError) as error:
            texts += traceback.format_exception(error)
    texts += [str(warning.message) for warning in caught] + [record.getMessage() for record in caplog.records]
    assert not [text for text in texts if any(form in text for form in FORMS)]


class WrongShape(Net):
    def forward(self, x):
        return x @ torch.ones(4, 1)


class Misused(Net):
    """Fails in training, by a call of torch that torch itself explains."""

    def forward(self, x):
        if self.training and len(x) > 2:
            torch.nn.functional.cross_entropy(self.layer(x), torch.full((len(x),), -3))
        return self.layer(x / MARK)


def classes(n=12, **words):
    return pf.Examples(torch.full((n, 3), MARK), torch.arange(n) % 2, **words)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", [{"workers": 0}, {"workers": 2, "engine": "pool"}], ids=str)
def test_nothing_that_a_failing_run_prints_logs_or_raises_holds_data(tmp_path, capsys, caplog, monkeypatch, engine):
    """Shape errors, wrong targets, NaN and failures in a worker, with progress in lines and everything logged."""
    monkeypatch.setattr(logging.getLogger("polyfed"), "propagate", True)  # whatever a test of deployments has set up
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "polyfed.simulation")
    good = client("south")
    nan = torch.full((2, 3), MARK).index_fill(1, torch.tensor([1]), float("nan"))
    actions = (
        lambda: run([client(model=WrongShape), good]),
        lambda: run([client(model=Misused), good]),
        lambda: run([client(model=lambda: nn.Linear(3, 2)), good]),
        lambda: pf.Client("north", Net, (nan, torch.full((2, 1), MARK)), marked(), task="regression"),
        lambda: pf.Client("north", Net, marked(), marked(), task="classification"),
        lambda: pf.Client("north", Net, (torch.full((2, 3), MARK), [f"x{MARK}", None]), classes()),
        lambda: pf.Client("north", Net, [(torch.full((3,), MARK), "a"), (torch.full((2,), MARK), "b")], classes()),
        lambda: pf.Client("north", Net, (torch.full((2, 3), MARK), torch.tensor([MARK, MARK])), classes()),
        lambda: run([pf.Client("north", lambda: nn.Linear(3, 1), classes(), classes())]),
    )

    def run(clients):
        method = pf.algorithms.FedAvg(lr=1e-9)
        return pf.federate(clients, method, rounds=1, progress=LineProgress(), out=tmp_path / "run", **engine)

    texts = []
    for action in actions:
        with pytest.raises((pf.UserError, pf.ClientError, pf.RoundError)) as caught:
            action()
        texts += traceback.format_exception(caught.value)
        texts += [getattr(caught.value, "trace", "")]
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    finished = run([pf.Client(name, lambda: nn.Linear(3, 2), classes(), classes(6)) for name in "ab"])
    print(finished, finished.table(), pf.load(tmp_path / "run"))
    texts += [finished._repr_html_(), pf.load(tmp_path / "run")._repr_html_(), *map(str, finished.history)]
    texts += [*capsys.readouterr(), *(record.getMessage() for record in caplog.records)]
    assert not [text for text in texts if any(form in text for form in FORMS)]
    assert any("round 1 of 1" in record.getMessage() for record in caplog.records)
