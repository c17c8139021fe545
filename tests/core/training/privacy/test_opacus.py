"""Private training beside opacus (`pip install opacus`; skipped without): gradients of the same examples, accountants."""

import copy
import warnings

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.examples.examples import Examples
from polyfed.core.training.loop import fit
from polyfed.core.training.privacy.sampled_gaussian import epsilon_of_steps, noise_multiplier_for_epsilon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opacus = pytest.importorskip("opacus")
    from opacus.accountants import RDPAccountant
    from opacus.accountants.utils import get_noise_multiplier
    from opacus.optimizers import DPOptimizer


def dense():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("network", "width"), [(dense, 6), (convolutions, 36)])
@pytest.mark.parametrize("norm", [0.1, 1.0, 100.0])
def test_a_step_without_noise_is_that_of_opacus(network, width, norm):
    """All examples in the sample, and next to no noise: the same weights up to rounding."""
    torch.manual_seed(0)
    ours, x, y = network(), torch.randn(12, width), torch.arange(12) % 3
    theirs = opacus.GradSampleModule(copy.deepcopy(ours))
    optimizer = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.5), noise_multiplier=0.0, max_grad_norm=norm, expected_batch_size=12
    )
    theirs.train()
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    privacy = pf.Privacy(noise_multiplier=1e-9, max_grad_norm=norm, run_steps=3)
    fit(ours, Examples(x, y), pf.algorithms.Local(batch_size=0, local_steps=3, privacy=privacy), lr=0.5, seed=0,
        task="classification")  # fmt: skip
    for our_weights, their_weights in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(our_weights, their_weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps"),
    [(0.01, 1.0, 1000), (1.0, 3.0, 50), (0.3, 2.0, 400), (0.05, 1.5, 200), (0.001, 0.8, 5000)],
)
@pytest.mark.filterwarnings("ignore")
def test_accountants_agree(rate, sigma, steps):
    """Ours has whole orders only, so that it is above theirs, by at most 4 % here."""
    accountant = RDPAccountant()
    accountant.history = [(sigma, rate, steps)]
    found, theirs = epsilon_of_steps(rate, sigma, steps, 1e-5), accountant.get_epsilon(1e-5)
    assert theirs * (1 - 1e-6) <= found <= 1.04 * theirs
    if rate < 1:
        noise = get_noise_multiplier(
            target_epsilon=theirs, target_delta=1e-5, sample_rate=rate, steps=steps, accountant="rdp"
        )
        assert noise_multiplier_for_epsilon(theirs, rate, steps, 1e-5) == pytest.approx(noise, rel=0.04)
