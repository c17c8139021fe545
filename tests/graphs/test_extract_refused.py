"""Which networks the tracers refuse, and with which sentence."""

import threading
import warnings

import pytest
import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.graphs import extract
from tests.graphs.made_networks import Net, X, line


def locked():
    module = line()
    module.lock = threading.Lock()
    return module


def compiled():
    with warnings.catch_warnings(action="ignore"):  # torch.jit is on its way out
        return torch.jit.trace(line(), X, check_trace=False)  # which imports a lot


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (
            nn.Sequential(line(), line(5)),
            X,
            r"fails on an example of shape \(3, 4\) and type torch.float32, in 1 \(Linear\)",
        ),
        (nn.Embedding(3, 4), X, "fails on an example"),
        (nn.Bilinear(4, 4, 2), X, r"Bilinear.forward cannot be called with one tensor \(missing .*input2"),
        (Net(lambda net: 1), X, "fails on an example"),
        (nn.LazyLinear(3), X, "LazyLinear leaves 'weight' uninitialised; run one batch"),
        (nn.Sequential(compiled()), X, "0 is compiled by torch.jit"),
        (locked(), X, r"Linear cannot be copied, .*_thread.lock.*deepcopy"),
        (lambda x: x, X, "from a torch.nn.Module and a tensor, got function and Tensor"),
        (line(), [1.0], "got Linear and list"),
    ],
)
def test_what_is_refused(model, x, message):
    with pytest.raises(UserError, match=message):
        extract(model, x)
