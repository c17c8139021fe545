"""What the clients of a table take besides their networks."""

import pytest
from torch import nn

import polyfed as pf

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
