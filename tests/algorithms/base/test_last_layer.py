"""What methods see and change at the last layer of a network, however that layer is called."""

import pytest
import torch
from torch import nn

from polyfed.algorithms.base.heads.last_layer import (
    NetworkWithAddedHead,
    NetworkWithConditionedRepresentation,
    NetworkWithShiftedRepresentation,
    watch_last_layer,
)
from polyfed.core.seeds import torch_generator


class Last(nn.Module):
    def forward(self, z, by, sign=1):
        return sign * z.flatten(1) + by


class Calls(nn.Module):
    """Calls its last layer with a map of 3 × 4 numbers, by position or by name."""

    def __init__(self, by_name):
        super().__init__()
        self.last, self.by_name = Last(), by_name

    def forward(self, x):
        return self.last(z=x, by=1.0, sign=-1) if self.by_name else self.last(x, 1.0, -1)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_representation_is_seen_flat_and_changed_in_its_form(by_name):
    x, network = torch.randn(2, 3, 4, generator=torch_generator(0)), Calls(by_name)
    with watch_last_layer(network, "last", lambda z: 2 * z) as seen:
        outputs = network(x)
    assert torch.equal(seen[-1], x.flatten(1))
    assert torch.equal(outputs, 1 - 2 * x.flatten(1))
    with watch_last_layer(network, "last") as seen:
        assert torch.equal(network(x), 1 - x.flatten(1))
    assert torch.equal(seen[-1], x.flatten(1))
    assert not network.last._forward_pre_hooks


def test_networks_that_are_built_again_from_their_weights_give_the_same():
    """From the name as it is saved, a tensor."""
    network, x = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), torch.randn(5, 6, generator=torch_generator(1))
    z, a, b = network[0](x), torch.rand(4), torch.rand(4)
    weight, bias = torch.rand(3, 4), torch.rand(3)
    for first, expected in (
        (NetworkWithAddedHead(network, "1", weight, bias), network[1](z) + z @ weight.T + bias),
        (NetworkWithShiftedRepresentation(network, "1", a), network[1](z + a)),
        (NetworkWithConditionedRepresentation(network, "1", a, b), network[1](torch.relu(a * z + b))),
    ):
        torch.testing.assert_close(first(x), expected)
        saved = {name: tensor for name, tensor in first.named_buffers() if "." not in name}
        again = type(first)(network, saved.pop("name"), *saved.values())
        assert torch.equal(again(x), first(x))
