"""What the clients of a table take besides their networks."""

import random

import pytest
from torch import nn

import polyfed as pf
from polyfed.data.look import counts

ROWS = {"age": range(20), "ill": [0, 1] * 10, "site": ["north"] * 10 + ["south"] * 10}


def test_clients_of_a_table_train_by_a_loss_of_ones_own():
    sites, loss = pf.data.split_table(ROWS, "ill", "site"), nn.CrossEntropyLoss(label_smoothing=0.1)
    assert [c.loss for c in sites.build_clients(lambda: nn.Linear(1, 2), loss=loss)] == [loss, loss]
    assert [c.loss for c in sites.build_clients(lambda: nn.Linear(1, 2))] == [None, None]
    with pytest.raises(TypeError, match=r"build_clients\(\) has no argument 'network'; did you mean model\?"):
        sites.build_clients(network=lambda: nn.Linear(1, 2))
    with pytest.raises(TypeError, match=r"no argument 'criterion'; choices: loss, model"):
        sites.build_clients(lambda: nn.Linear(1, 2), criterion=loss)
    with pytest.raises(pf.UserError, match=r"loss is a class, not a function; make one of it: loss=CrossEntropyLoss"):
        sites.build_clients(lambda: nn.Linear(1, 2), loss=nn.CrossEntropyLoss)


def test_coded_values_are_those_of_a_look_without_its_histograms(monkeypatch):
    draw = random.Random(0)
    chol = [0.0 if k > 60 and k % 3 else draw.gauss(240, 30) for k in range(120)]
    mass = [999.0 if k < 60 and k % 10 == 0 else draw.gauss(70, 5) for k in range(120)]
    rows = {"chol": chol, "mass": mass, "ill": [0, 1] * 60, "site": ["north"] * 60 + ["south"] * 60}
    sites = pf.data.split_table(rows, "ill", "site")
    texts = [finding.text for finding in pf.look(sites).findings if finding.kind == "code"]
    assert [text.split(" at ")[0] for text in texts] == ["chol is 0", "mass is 999"]
    monkeypatch.setattr(counts, "count_values", None)  # it takes seconds for a large table
    with pytest.warns(UserWarning, match="empty these cells") as issued:
        sites.build_clients(lambda: nn.Linear(2, 2))
    assert [str(warning.message).startswith(text) for warning, text in zip(issued, texts, strict=True)] == [True] * 2


def test_all_sites_with_too_few_rows_are_named_at_once():
    rows = {
        name: [*values, *{"age": [3, 4], "ill": [0, 1], "site": ["east", "west"]}[name]]
        for name, values in ROWS.items()
    }
    with pytest.raises(pf.UserError, match="too few rows to test on at 'east', 'west'; give them more, or leave these"):
        pf.data.split_table(rows, "ill", "site").build_clients(lambda: nn.Linear(1, 2))
