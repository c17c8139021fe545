"""The layout in which networks are trained: quick where that is right, the default where oneDNN's gradients are not."""

import multiprocessing
import warnings

import pytest
import torch
from torch import nn

from polyfed.algorithms import Local
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.training.loop import fit
from polyfed.models import flha_arch2

IMAGES = torch.zeros(2, 4, 8, 8)


def last(module, x=IMAGES):
    return to_preferred_memory_format(module, x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("layer", "safe"),
    [
        (nn.Conv2d(4, 8, 1, 2), False),
        (nn.Conv2d(4, 8, 1, (1, 2)), False),
        (nn.Conv2d(4, 8, 1), True),
        (nn.Conv2d(4, 8, 3, 2, 1), True),
        (nn.Sequential(nn.Conv2d(4, 16, 3), nn.Conv2d(16, 8, 1, 2)), True),
    ],
)
def test_networks_whose_gradients_onednn_computes_outside_of_its_memory_keep_the_default_layout(layer, safe):
    assert last(layer) is safe


def trained():
    torch.manual_seed(0)
    examples = Examples(torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))
    networks = [flha_arch2((1, 8, 8), 10, width=4) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    networks[1].double()
    options = Local(local_steps=3, batch_size=16)
    fit(networks[0], examples, options, lr=0.01, seed=0)
    wide = Examples(examples.x.double(), examples.y)
    with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
        fit(networks[1], wide, options, lr=0.01, seed=0)
    for (name, p), q in zip(networks[0].named_parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-3, atol=1e-4, msg=name)


def test_narrow_residual_networks_are_trained_with_right_gradients():
    """In a process of its own: what this is about would end it."""
    process = multiprocessing.get_context("fork").Process(target=trained)
    process.start()
    process.join()
    assert process.exitcode == 0
