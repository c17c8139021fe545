"""Nothing that is printed of runs, clients and examples holds a value of a client's data."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.data.pool import PooledDataset

MARK = 73591.25  # stands for a measurement of a patient
FORMS = ("73591", "7.3591", "7.36e")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x / MARK)


def marked(n=12):
    columns = {"age": np.full(n, MARK), "name": np.array([f"x{MARK}"] * n)}
    return pf.Examples(torch.full((n, 3), MARK), torch.full((n, 1), MARK), columns=columns, group=np.arange(n))


def client(name="north", model=Net):
    return pf.Client(name, model, marked(), marked(6), val=marked(4), task="regression")


def shown(thing):
    return [repr(thing), str(thing), f"{thing}", repr([thing]), repr({"thing": thing})]


@pytest.mark.filterwarnings("ignore")  # of equal rows in training and test
def test_public_objects_show_one_line_and_no_data():
    run = pf.federate(
        [client("north"), client("south")], pf.algorithms.FedAvg(lr=1e-9), rounds=1, workers=0, progress=False
    )
    pool = PooledDataset(marked(), marked(5), ("value",), task="regression", columns={"id": np.full(12, MARK)})
    message = pf.Message({"model": {"w": torch.full((3,), MARK)}}, {"sum": MARK})
    things = [run, run.federation, run.last, run.predictions("north"), client(), marked(), pool, message]
    for thing in things:
        for text in shown(thing):
            assert "\n" not in text
            assert len(text) < 200
            assert not any(form in text for form in FORMS), type(thing).__name__
    assert repr(run).startswith("Run(FedAvg, 2 clients, 1 round, ")
    assert repr(run).endswith("out=None)")
    assert repr(client()) == "Client('north', 12 train, 4 val, 6 test, regression)"
    assert repr(pool) == "PooledDataset(12 train, 5 test, 1 outputs, regression)"
