"""Operations: Table 3's counts, shapes, and BatchNorm of a group of one."""

import pytest
import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.nas import OPERATION_NAMES, SMALL_OPERATION_NAMES, build_operation, build_operations
from polyfed.nas.operations import GroupedNorm

# FedPNAS, Table 3, and METHODS for the operation that the table leaves out (sep_conv_7); written by hand.
TABLE_3 = {
    32: {"avg_pool_3": 64, "max_pool_3": 64, "sep_conv_3": 2752, "sep_conv_5": 3776, "sep_conv_7": 5312, "dil_conv_3": 1376,
         "dil_conv_5": 1888, "conv_7x1_1x7": 14400, "skip": 0},
    16: {"avg_pool_3": 32, "max_pool_3": 32, "sep_conv_3": 864, "sep_conv_5": 1376, "sep_conv_7": 2144, "dil_conv_3": 432,
         "dil_conv_5": 688, "conv_7x1_1x7": 3616, "skip": 0},
}  # fmt: skip


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("channels", "edge"), [(32, 29_632), (16, 9_184)])
def test_parameters_of_table_3(channels, edge):
    found = build_operations(channels)
    assert {name: count(op) for name, op in found.items()} == TABLE_3[channels]
    assert count(found) == edge


def test_small_operations_have_no_large_kernel():
    assert len(OPERATION_NAMES) == 9
    kernels = {m.kernel_size for m in build_operations(4, SMALL_OPERATION_NAMES).modules() if isinstance(m, nn.Conv2d)}
    assert kernels == {(1, 1), (3, 3)}


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", OPERATION_NAMES)
def test_shapes(name, stride, size):
    op = build_operation(name, 4, stride)
    x = torch.randn(3, 4, size, size, requires_grad=True)
    out = op(x)
    half = (size + stride - 1) // stride
    assert out.shape == (3, 4, half, half)
    out.square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_strided_skip_sees_both_diagonals_of_each_patch():
    """A pixel at (even, even) and one at (odd, odd) both reach the output; the 1×1 kernels are set to pick one channel."""
    halve = build_operation("skip", 2, 2).eval()
    with torch.no_grad():
        halve.even.weight.copy_(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
        halve.odd.weight.copy_(torch.tensor([1.0, 0.0]).view(1, 2, 1, 1))
    x = torch.zeros(1, 2, 4, 4)
    x[0, 0, 0, 0], x[0, 0, 1, 1] = 1.0, 2.0
    scale = 1 / (1 + 1e-5) ** 0.5
    assert torch.allclose(halve(x)[0, :, 0, 0], torch.tensor([1.0, 2.0]) * scale)


def test_average_pooling_leaves_padding_out():
    pool = build_operation("avg_pool_3", 1)[0]
    assert torch.equal(pool(torch.ones(1, 1, 3, 3)), torch.ones(1, 1, 3, 3))


def test_norm_of_a_group_of_one_takes_running_statistics():
    norm = GroupedNorm(2)
    norm.running_mean.fill_(1.0)
    x = torch.full((1, 2, 1, 1), 3.0)
    assert torch.allclose(norm(x), torch.full((1, 2, 1, 1), 2.0), atol=1e-4)
    assert torch.equal(norm.running_mean, torch.ones(2))
    many = torch.randn(5, 2, 1, 1)
    assert torch.equal(norm(many), nn.BatchNorm2d(2)(many))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"channels": 4, "stride": 3}, "stride must be 1 or 2, got 3"),
        ({"channels": 4, "names": ()}, "different names"),
        ({"channels": 4, "names": ("skip", "skip")}, "different names"),
        ({"channels": 4, "names": ("sep_conv_9",)}, "unknown operation 'sep_conv_9'.*sep_conv_7"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        build_operations(**arguments)
