"""A call with other tensors in the place of a network's own: they are everywhere inside, and nowhere after it."""

import pytest
import torch
from torch import nn

from polyfed.core.nn.functional_call import call_with_tensors


class TwoNames(nn.Module):
    """One layer under two names, its weight under a third in another layer, and a buffer that is shared too."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.a.weight
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", self.norm.running_mean)

    def forward(self, x):
        return self.norm(self.tied(self.b(self.a(x)))) + self.mean


def by_hand(tensors):
    net = TwoNames().eval()
    with torch.no_grad():
        for name, tensor in tensors.items():
            net.get_parameter(name).copy_(tensor)
    return net


def places(net):
    modules = dict(net.named_modules(remove_duplicate=False))
    return {
        (name, key): tensor
        for name, part in modules.items()
        for key, tensor in (*part._parameters.items(), *part._buffers.items())
    }


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "tied.weight"])
def test_a_shared_tensor_is_replaced_in_all_its_places_by_any_of_its_names(name):
    net, x = TwoNames().eval(), torch.randn(3, 2)
    before = places(net)
    new = {name: torch.randn(2, 2), "a.bias": torch.randn(2)}
    wanted = by_hand(
        {**{n: p.detach() for n, p in net.named_parameters()}, "a.weight": new[name], "a.bias": new["a.bias"]}
    )
    wanted.tied.weight = wanted.a.weight
    assert torch.equal(call_with_tensors(net, new, (x,), {}), wanted(x))
    after = places(net)
    assert after.keys() == before.keys()
    assert all(after[place] is before[place] for place in before)


def test_a_shared_buffer_is_replaced_and_restored():
    net = TwoNames().eval()
    before, x = places(net), torch.randn(3, 2)
    shifted = call_with_tensors(net, {"norm.running_mean": torch.ones(2)}, (x,), {})
    plain = net(x)
    assert torch.allclose(shifted - plain, 1 - 1 / torch.sqrt(torch.ones(()) + net.norm.eps), atol=1e-6)
    assert all(tensor is before[place] for place, tensor in places(net).items())


def test_gradients_reach_the_replacement_and_a_failure_restores_too():
    net = TwoNames().eval()
    before, new = places(net), torch.randn(2, 2, requires_grad=True)
    call_with_tensors(net, {"a.weight": new}, (torch.randn(3, 2),), {}).sum().backward()
    assert new.grad is not None
    assert net.a.weight.grad is None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call_with_tensors(net, {"a.weight": new}, (torch.randn(3, 5),), {})
    assert all(tensor is before[place] for place, tensor in places(net).items())
