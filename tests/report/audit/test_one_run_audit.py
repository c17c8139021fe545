"""The lower bound of ε from one training with canaries: known values, how often it errs, and training that adds too little
noise."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.training.loop import fit
from polyfed.core.training.privacy.randomness import PrivateRandomness, use_randomness_source
from polyfed.report.audit.one_run_audit import count_right_guesses, epsilon_lower_bound, p_value_of_guesses


def test_the_bound_without_delta_is_that_of_clopper_and_pearson():
    """All of r right: (e^ε / (e^ε + 1))^r = 5 %."""
    for number in (5, 50, 500):
        share = 0.05 ** (1 / number)
        assert epsilon_lower_bound(1000, number, number, 0.0) == pytest.approx(math.log(share / (1 - share)), rel=1e-9)
    assert epsilon_lower_bound(1000, 100, 50, 0.0) == 0.0
    assert epsilon_lower_bound(1000, 100, 95, 0.0) > epsilon_lower_bound(1000, 100, 90, 0.0)
    assert epsilon_lower_bound(1000, 100, 95, 0.0, confidence=0.99) < epsilon_lower_bound(1000, 100, 95, 0.0)


def test_delta_makes_the_bound_smaller_and_at_last_nothing():
    bounds = [epsilon_lower_bound(1000, 100, 95, delta) for delta in (0.0, 1e-6, 1e-4, 1e-2, 0.5)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[2] > bounds[4] == 0.0


def test_the_p_value_with_delta_by_hand():
    """m = 4 canaries, r = 2 guesses, both right, ε = 0: P[2 of 2] = 1/4; δ adds 2·4·δ·max(P[1] / 1, (P[0] + P[1]) / 2)."""
    assert p_value_of_guesses(4, 2, 2, 0.0, 0.01) == pytest.approx(0.25 + 2 * 4 * 0.01 * 0.5)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_never_said_to_be_worse_by_more_than_chance(epsilon):
    """It reaches the bound: each guess is right with e^ε / (e^ε + 1). Of 400 audits about 5 % exceed ε, and the others are
    close."""
    right = np.random.default_rng(1).binomial(300, 1 / (1 + math.exp(-epsilon)), 400)
    values, places = np.unique(right, return_inverse=True)
    bounds = np.array([epsilon_lower_bound(1000, 300, int(v), 0.0) for v in values])[places]
    assert (bounds > epsilon).mean() <= 0.08
    assert np.median(bounds) == pytest.approx(epsilon, abs=0.35)


def test_numbers_that_cannot_be_are_refused():
    for words in ((10, 11, 5), (10, 5, 6), (10, 0, 0), (10, 5, -1)):
        with pytest.raises(UserError, match="which cannot be"):
            epsilon_lower_bound(*words, 0.0)
    with pytest.raises(UserError, match="confidence must be above 0 and below 1, got 1"):
        epsilon_lower_bound(10, 5, 5, 0.0, 1)
    for guesses in (3, 0, 6):
        with pytest.raises(UserError, match="guesses must be an even number from 2 to the 4 canaries"):
            count_right_guesses(np.arange(4.0), np.zeros(4, bool), guesses)


class Less(PrivateRandomness):
    """Adds a share of the noise that is asked for."""

    def __init__(self, share):
        self._share = share

    def draw_sample(self, num_units, sampling_rate):
        return (torch.rand(num_units) < sampling_rate).nonzero().flatten()

    def add_noise(self, total, deviation):
        return total + self._share * deviation * torch.randn_like(total)


def audited(share, epsilon=2.0, canaries=200):
    """The bound from one step on a network with a weight for each canary, whose gradient is −1 there: the full norm."""
    generator = np.random.default_rng(2)
    included = torch.from_numpy(generator.random(canaries) < 0.5)
    model = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(model.weight)
    examples = Examples(torch.eye(canaries)[included], torch.full((int(included.sum()), 1), 0.5))
    privacy = pf.Privacy(target_epsilon=epsilon, run_steps=1)
    method = pf.algorithms.Local(batch_size=0, local_steps=1, privacy=privacy)
    torch.manual_seed(3)
    with use_randomness_source(lambda steps: Less(share)):
        fit(model, examples, method, lr=1.0, seed=0, task="regression")
    scores = model.weight.detach().numpy().ravel().astype(float)
    return epsilon_lower_bound(canaries, 100, count_right_guesses(scores, included.numpy(), 100), privacy.delta)


def test_training_keeps_what_it_states_and_too_little_noise_is_found():
    assert audited(1.0) <= 2.0
    assert audited(0.1) > 2.0
