"""Depthwise convolutions against torch's: values, gradients, and gradients of gradients."""

import pytest
import torch
from torch import nn

from polyfed.nas import depthwise
from polyfed.nas.depthwise import DepthwiseConv2d


@pytest.fixture
def own(monkeypatch):
    """However few pixels there are, the gradients are not torch's own."""
    monkeypatch.setattr(depthwise, "_FEW", 0)
    monkeypatch.setattr(depthwise, "_FEW_DILATED", 0)


@pytest.mark.parametrize(
    ("layer", "batch", "torchs"),
    [((3,), 48, True), ((5,), 48, False), ((5,), 5, True), ((3, 1, 2), 5, False), ((3, 1, 2), 1, True)],
)
def test_gradients_are_torchs_own_where_these_are_as_quick(layer, batch, torchs):
    out = DepthwiseConv2d(2, *layer)(torch.randn(batch, 2, 20, 20))
    assert ("Convolution" in out.grad_fn.name()) == torchs


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(3, 1, 1), (5, 2, 1), (7, 1, 1), (7, 2, 1), (3, 1, 2), (5, 2, 2), (3, 2, 3)]
)
@pytest.mark.one_case
def test_it_is_the_convolution_of_torch(kernel, stride, dilation, size):
    one = DepthwiseConv2d(4, kernel, stride, dilation).double()
    other = nn.Conv2d(4, 4, kernel, stride, dilation * (kernel // 2), dilation, groups=4, bias=False).double()
    other.load_state_dict(one.state_dict())
    x = torch.randn(3, 4, size, size + 1, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outs = [layer(leaf) for layer, leaf in zip((one, other), leaves, strict=True)]
    weights = torch.randn_like(outs[0])
    for out in outs:
        (out * weights).sum().backward()
    for found, expected in [outs, [leaf.grad for leaf in leaves], [one.weight.grad, other.weight.grad]]:
        assert torch.allclose(found, expected, atol=1e-12)
    single = [layer.float()(x.float()) for layer in (one, other)]
    assert torch.allclose(*single, atol=1e-6)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(5, 1, 1), (5, 2, 1), (3, 1, 2)])
@pytest.mark.one_case
def test_its_gradients_have_gradients(kernel, stride, dilation):
    layer = DepthwiseConv2d(1, kernel, stride, dilation).double()
    x = torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True)

    def convolved(x, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(convolved, (x, layer.weight))
    assert torch.autograd.gradgradcheck(convolved, (x, layer.weight))


@pytest.mark.usefixtures("own")
def test_a_gradient_that_nobody_wants_is_not_computed():
    layer = DepthwiseConv2d(2, 5)
    layer.weight.requires_grad_(False)
    x = torch.randn(1, 2, 6, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
