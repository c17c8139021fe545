"""Whether a loss still fell at the end: curves of which it is known."""

import math

import numpy as np
import pytest

from polyfed.comparison.statistics.curves.convergence import judge_convergence


def curve(values, every=1):
    return [(every * (k + 1), float(value)) for k, value in enumerate(values)]


def decay(length, time_constant, noise=0.0, seed=0):
    t = np.arange(length)
    return curve(0.2 + np.exp(-t / time_constant) + noise * np.random.default_rng(seed).normal(size=length))


@pytest.mark.parametrize(("time_constant", "converged"), [(2, True), (4, True), (20, False), (100, False)])
@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_exponential_decays(time_constant, converged, noise):
    """Over the last 10 of 30 rounds an exponential of time constant 2 or 4 falls by less than 1 % of its whole fall, one of
    20 or 100 by more than 15 %."""
    runs = [decay(30, time_constant, noise, seed) for seed in range(3)]
    assert judge_convergence(runs).converged is converged


def test_the_sentence_tells_how_much():
    """A straight line over 11 rounds: the last four are three of its ten steps."""
    found = judge_convergence([curve(1 - 0.1 * np.arange(11), every=5)])
    assert found.sentence == (
        "the validation loss still fell at round 55: by 30 % of its whole fall over the last 4 evaluated rounds; "
        "give more rounds"
    )
    assert not found.converged


def test_flat_noise_is_seldom_called_a_fall():
    """A one-sided test at 5 %: of 400 curves that go nowhere 20 are expected, and 35 or more have a chance below 0.1 %."""
    rng = np.random.default_rng(0)
    wrong = sum(judge_convergence([curve(1 + 0.1 * rng.normal(size=24))]).converged is False for _ in range(400))
    assert 0 < wrong < 35


def test_a_slow_fall_in_much_noise_is_seen_over_several_runs():
    """One noisy run may not show it; the mean of many does."""
    rng = np.random.default_rng(0)
    runs = [curve(np.linspace(1, 0.5, 24) + 0.2 * rng.normal(size=24)) for _ in range(60)]
    assert judge_convergence(runs).converged is False
    assert sum(judge_convergence([run]).converged is False for run in runs) < 40


def test_a_curve_that_rises_again_has_converged():
    t = np.arange(20)
    found = judge_convergence([curve((t - 6) ** 2 / 100)])
    assert found.converged
    assert found.sentence == "the validation loss no longer fell at round 20; it was lowest at round 7"


def test_a_fall_back_to_where_the_loss_had_been_is_none():
    """Twenty rounds of training alone on a small table, in hundredths: lowest at round 7, then a rise, then back."""
    loss = np.fromstring("39 40 36 37 39 34 31 32 33 33 36 34 37 37 39 38 38 36 35 34", sep=" ") / 100
    found = judge_convergence([curve(loss)])
    assert found.converged
    assert found.sentence == "the validation loss no longer fell at round 20; it was lowest at round 7"
    assert (
        judge_convergence([curve([*loss[:-7], *np.linspace(0.36, 0.24, 7)])]).converged is False
    )  # below where it had been


def test_one_low_value_before_does_not_hide_a_fall():
    loss = np.linspace(1, 0.5, 24)
    loss[5] = 0.3
    assert judge_convergence([curve(loss)]).converged is False


def test_a_fall_after_a_rise_from_the_first_value_counts():
    found = judge_convergence([curve([1, 4, 5, 6, 5, 4, 3, 2])], loss_name="training loss")
    assert found.converged is False
    assert "after it had risen" in found.sentence


@pytest.mark.parametrize("values", [[0.1] * 12, [1 / 3] * 7])
def test_a_constant_has_converged(values):
    assert judge_convergence([curve(values)] * 3).converged


@pytest.mark.parametrize("curves", [[], [[]], [decay(5, 2)], [decay(20, 2), decay(5, 2)]])
def test_too_few_rounds_are_not_judged(curves):
    found = judge_convergence(curves)
    assert found.converged is None
    assert "cannot be judged" in found.sentence


def test_values_that_are_not_finite_are_skipped():
    falling, flat = decay(30, 40), decay(30, 2)
    for whole in (falling, flat):
        holes = [(t, math.nan if t % 5 == 2 else math.inf if t == 30 else loss) for t, loss in whole]
        assert judge_convergence([holes, whole]).converged is judge_convergence([whole]).converged
    assert "round 29" in judge_convergence([[(t, math.nan if t == 30 else loss) for t, loss in falling]]).sentence
    assert judge_convergence([[(t, math.nan) for t, _ in flat]]).converged is None
