"""What pFedHN's server keeps: no entry for each client, and states of earlier versions go on."""

import json

import pytest
import torch

from polyfed.algorithms.hypernetworks.pfedhn import PFedHN
from polyfed.testing import small_clients
from tests.algorithms.hypernetworks.test_pfedhn import OPTIONS, halves, mixed_clients, replies_of


@pytest.mark.parametrize("heads", ["architecture", "client"])
def test_a_state_of_an_earlier_version_goes_on(heads):
    """It has mappings by client, in place of two texts."""
    method = PFedHN(**OPTIONS, heads=heads)
    federation, state = halves(method, mixed_clients(4))
    rows = {client: row for row, client in enumerate(json.loads(state["clients"]))}
    keys = dict(zip(rows, json.loads(state["heads"]), strict=True))
    earlier = {name: value for name, value in state.items() if name not in ("clients", "heads")}
    earlier |= {"rows": rows, "architectures": keys}
    replies = replies_of(method, federation, state)
    after, after_earlier = (
        method.aggregate(which, replies, federation.server_context())["network"] for which in (state, earlier)
    )
    assert all(torch.equal(tensor, after_earlier[name]) for name, tensor in after.items())


def test_a_state_has_no_entry_for_each_client():
    """A million clients of one architecture are one text: no check of the state goes through them."""
    method = PFedHN(**OPTIONS, embedding_dim=2)
    small, large = (halves(method, small_clients(number))[1] for number in (2, 5))
    assert {name: type(value) for name, value in small.items()} == {name: type(value) for name, value in large.items()}
    assert small["network"].keys() == large["network"].keys()
    assert not any(
        isinstance(value, list) or "client-0" in value for value in large.values() if not isinstance(value, str)
    )
