"""Texts of exceptions, which may show data, stay in the site's log unless its owner discloses them."""

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import Local
from polyfed.core.errors import ClientError, UserError
from polyfed.testing import small_clients

from .conftest import MemoryGrid


def test_the_text_of_an_exception_goes_up_only_if_it_is_disclosed(run, nodes, caplog):
    class Fails(torch.nn.Linear):
        def forward(self, x):
            if self.training and len(x) > 2:  # in round 1, not when the network is tried on two examples before
                raise RuntimeError("patient 4711")
            return super().forward(x)

    class FailsAtOnce(torch.nn.Linear):
        def forward(self, x):
            raise RuntimeError("patient 4711")

    def clients(network=Fails):
        return [pf.Client(c.id, lambda: network(6, 3), c.train, c.test) for c in small_clients()]

    method = Local(lr=0.05)
    with pytest.raises(UserError) as refusal:
        run(grid=MemoryGrid(nodes(clients(FailsAtOnce), disclose="num_examples")), method=method, out="c")
    assert "UserError (its text is in the log of the site)" in str(refusal.value)
    assert "4711" not in str(refusal.value)
    with pytest.raises(ClientError, match="patient 4711"):
        run(grid=MemoryGrid(nodes(clients())), method=method, out="a", **{"on-error": "raise"})
    with pytest.raises(ClientError) as error:
        run(grid=MemoryGrid(nodes(clients(), disclose="num_examples")), method=method, out="b", **{"on-error": "raise"})
    assert "RuntimeError (its text is in the log of the site)" in str(error.value)
    assert "4711" not in str(error.value)
    assert "patient 4711" in caplog.text
