"""ROC curves, counts and calibration against closed forms and scikit-learn."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from polyfed.report.data.binary_stats import (
    FALSE_ALARM_GRID,
    THRESHOLDS,
    auc_interval,
    calibration_points,
    count_true_and_false_positives,
    roc_curve_and_area,
    wilson_interval,
)


def _drawn(size, seed=0, digits=None):
    draw = np.random.default_rng(seed)
    positive = draw.random(size) < 0.4
    score = np.clip(draw.normal(0.4 + 0.2 * positive, 0.2), 0, 1)
    return (score if digits is None else score.round(digits)), positive


@pytest.mark.parametrize("digits", [None, 1])  # with one digit many examples are equal
def test_curve_and_area_are_those_of_scikit_learn(digits):
    from sklearn.metrics import roc_auc_score, roc_curve

    score, positive = _drawn(300, digits=digits)
    curve, area = roc_curve_and_area((score, positive))
    assert area == pytest.approx(roc_auc_score(positive, score))
    alarms, found, _ = roc_curve(positive, score, drop_intermediate=False)
    for x, y in zip(FALSE_ALARM_GRID[:-1], curve, strict=False):
        before, after = alarms[alarms <= x + 1e-12].max(), alarms[alarms > x + 1e-12].min()
        ends = found[alarms == before].max(), found[alarms == after].min()
        assert y == pytest.approx(np.interp(x, [before, after], ends))
    assert curve[-1] == 1
    assert (np.diff(curve) >= -1e-12).all()


def test_a_perfect_and_a_useless_score():
    positive = np.array([True] * 4 + [False] * 6)
    curve, area = roc_curve_and_area((positive.astype(float), positive))
    assert (area, curve.min()) == (1, 1)
    curve, area = roc_curve_and_area((np.full(10, 0.3), positive))
    assert area == 0.5
    assert curve == pytest.approx(FALSE_ALARM_GRID)
    assert roc_curve_and_area((np.ones(3), np.ones(3, bool))) is None


def test_counts_at_a_threshold():
    score, positive = _drawn(100, digits=2)
    hits, alarms = count_true_and_false_positives((score, positive))
    for k, threshold in enumerate(THRESHOLDS):
        assert hits[k] == sum(s > threshold - 1e-6 for s, p in zip(score, positive, strict=True) if p)
        assert alarms[k] == sum(s > threshold - 1e-6 for s, p in zip(score, positive, strict=True) if not p)


def test_calibration_finds_what_is_overconfident():
    draw = np.random.default_rng(1)
    true = draw.random(4000)
    positive = draw.random(4000) < true
    for group in calibration_points([(true, positive)], 0.99):
        assert group.low < group.mean_probability < group.high
        assert group.examples == 400
    bold = 1 / (1 + np.exp(-3 * np.log(true / (1 - true))))
    found = calibration_points([(bold, positive)], 0.99)
    assert found[0].low > found[0].mean_probability
    assert found[-1].high < found[-1].mean_probability


def test_seeds_add_no_examples_to_a_group():
    part = _drawn(60)
    once, thrice = calibration_points([part], 0.95), calibration_points([part] * 3, 0.95)
    assert [g.examples for g in once] == [g.examples for g in thrice] == [10] * 6
    assert [g.low for g in thrice] == pytest.approx([g.low for g in once])
    assert calibration_points([_drawn(19)], 0.95) == []


def test_intervals_are_those_of_their_sources():
    # Newcombe (1998), Table I: 81 of 263, and 0 of 20, by Wilson's score method.
    assert wilson_interval(81, 263, 0.95) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20, 0.95) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert all(map(math.isnan, wilson_interval(0, 0, 0.95)))
    # Hanley and McNeil (1982): area 0.893 of 51 abnormal and 58 normal images, standard error 0.032.
    low, high = auc_interval(0.893, 51, 58, 0.95)
    assert (high - low) / 2 / 1.96 == pytest.approx(0.032, abs=0.001)


@pytest.mark.parametrize(("auc", "positives", "negatives"), [(0.7, 3, 3), (0.9, 10, 10), (0.97, 5, 20)])
def test_intervals_of_an_auc_hold_with_few_examples(auc, positives, negatives):
    rng, distance = np.random.default_rng(0), math.sqrt(2) * NormalDist().inv_cdf(auc)
    areas = [float((rng.normal(distance, 1, (positives, 1)) > rng.normal(0, 1, negatives)).mean()) for _ in range(500)]
    intervals = [auc_interval(area, positives, negatives, 0.95) for area in areas]
    assert np.mean([low <= auc <= high for low, high in intervals]) > 0.93


def test_a_perfect_auc_of_few_examples_has_an_interval_with_a_width():
    low, high = auc_interval(1.0, 3, 3, 0.95)
    assert low < 0.6
    assert high == pytest.approx(1.0)
    assert auc_interval(0.0, 3, 3, 0.95) == pytest.approx((0.0, 1 - low), abs=1e-6)
