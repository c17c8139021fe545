"""What sites say of themselves is compared before round 1, as a simulation compares its clients."""

from functools import partial

import pytest
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedGH, FedProto, FedTGP, LGFedAvg
from polyfed.core.errors import UserError
from polyfed.deploy.claims import check_widths
from polyfed.testing import small_clients

from .conftest import MemoryGrid


def network(layers):
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*sizes) for sizes in layers))


@pytest.mark.parametrize("method", [FedProto, FedTGP, FedGH, LGFedAvg])
def test_representations_of_other_widths_are_refused_before_round_1(nodes, run, method):
    one, two, *_ = small_clients()
    features = one.train.one_input[0].numel()

    def clients(width):
        for client, hidden in ((one, 4), (two, width)):
            layers = (features, hidden), (hidden, 3)
            yield pf.Client(client.id, partial(network, layers), client.train, client.test)

    sites = f"{one.id},{two.id}"
    with pytest.raises(UserError, match=rf"the last layer of '{two.id}' takes 5 numbers, that of '{one.id}' 4"):
        run(grid=MemoryGrid(nodes(clients(5))), method=method(lr=0.05), sites=sites)
    assert run(grid=MemoryGrid(nodes(clients(4))), method=method(lr=0.05), sites=sites, rounds=1).last.round == 1


@pytest.mark.parametrize("width", [None, True, 0, "4", [4]])
def test_a_site_that_tells_no_width_is_refused(width):
    with pytest.raises(UserError, match="site 'b' does not tell how many numbers"):
        check_widths({"a": {"width": 4}, "b": {"width": width}}, "fedproto")
