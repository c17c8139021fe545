"""The optimisers are torch's own, bit for bit, with groups, parameters without a gradient and state."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from polyfed.core.nn.optimizers import SGD, Adam, ParameterGroup
from polyfed.core.seeds import torch_generator

KINDS = {
    "sgd": (SGD, torch.optim.SGD, {}),
    "decay": (SGD, torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (SGD, torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (Adam, torch.optim.Adam, {}),
    "adam with decay": (Adam, torch.optim.Adam, {"weight_decay": 0.1}),
}


def parameters():
    generator = torch_generator(3)
    shapes = (4, 3), (4,), (2, 2, 2), ()
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize(("ours", "theirs", "options"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torch(ours, theirs, options, dtype):
    """Two groups; the last parameter has a gradient in every second step only, the first none before the third."""
    mine, reference = ([nn.Parameter(p.to(dtype)) for p in parameters()] for _ in range(2))
    optimizer = ours([ParameterGroup(mine[:2], lr=0.1), ParameterGroup(mine[2:], lr=0.03)], **options)
    other = theirs([{"params": reference[:2], "lr": 0.1}, {"params": reference[2:], "lr": 0.03}], **options)
    generator = torch_generator(4)
    for step in range(7):
        optimizer.zero_grad()
        other.zero_grad()
        assert all(p.grad is None for p in mine)
        for number, (a, b) in enumerate(zip(mine, reference, strict=True)):
            slope = torch.randn(a.shape, generator=generator, dtype=dtype)
            if not ((number == 3 and step % 2) or (number == 0 and step < 2)):
                a.grad, b.grad = slope.clone(), slope
        optimizer.step()
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=True)), step
    assert not any(torch.equal(a, b) for a, b in zip(mine, parameters(), strict=True))


def test_sparse_gradients_are_taken_as_by_torch():
    tables = [nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = SGD([ParameterGroup(list(tables[0].parameters()), 0.5)]), torch.optim.SGD(tables[1].parameters(), 0.5)
    for table, optimizer in zip(tables, optimizers, strict=True):
        table(torch.tensor([1, 1, 3])).square().sum().backward()
        optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


@pytest.mark.slow  # tests/test_layout.py has the same of a round
def test_a_step_does_not_import_the_compiler():
    code = """
import sys, torch
from polyfed.core.nn.optimizers import SGD, Adam, ParameterGroup
for kind in (SGD, Adam):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([ParameterGroup([weight], 0.1)])
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
