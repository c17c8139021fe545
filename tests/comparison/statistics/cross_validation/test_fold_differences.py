"""Intervals from cross-validation: closed forms, groups as units, and the share of false claims where nothing differs."""

import numpy as np
import pytest
import torch

from polyfed.comparison.execution.sequential_looks import error_rates_of_looks
from polyfed.comparison.statistics.cross_validation.fold_differences import (
    FoldDifferences,
    difference_over_folds,
    estimate_clients_from_folds,
    estimate_mean_from_folds,
)
from polyfed.comparison.statistics.cross_validation.fold_influence import score_folds
from polyfed.comparison.statistics.estimate import ALPHA
from polyfed.comparison.statistics.power import (
    ComparisonDesign,
    PilotVariances,
    estimate_pilot_variances,
    smallest_decidable_gain,
)
from polyfed.comparison.statistics.random_effects import SiteGain, fit_random_effects
from polyfed.core.evaluation.metrics import METRICS, Metric

ACCURACY, AUC, R2 = METRICS["accuracy"], METRICS["auc"], METRICS["r2"]


def two_outputs(values):
    values = torch.as_tensor(np.asarray(values, dtype=np.float64))
    return torch.stack([torch.zeros_like(values), values], dim=1)


def in_folds(metric, values, targets, fold, units=None, num_folds=5):
    """The scores of one repeat."""
    units = np.arange(len(targets)) if units is None else np.asarray(units)
    parts = [np.flatnonzero(fold == k) for k in range(num_folds)]
    outputs = [
        two_outputs(values[part]) if metric is not R2 else torch.as_tensor(values[part])[:, None] for part in parts
    ]
    labels = torch.as_tensor(targets)
    return score_folds(metric, outputs, [labels[part] for part in parts], [units[part] for part in parts], num_folds)


def drawn(rng, size=100, signal=1.0):
    targets = (rng.random(size) < 0.4).astype(np.int64)
    return targets, rng.normal(size=size) + signal * targets, rng.permutation(np.arange(size) % 5)


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_an_auc_compares_pairs_within_folds_only():
    """Outputs of another fold may be shifted at will. Folds count by their number of pairs."""
    rng = np.random.default_rng(0)
    targets, values, fold = drawn(rng)
    found = in_folds(AUC, values, targets, fold)
    wins = pairs = 0
    for k in range(5):
        above, below = values[(fold == k) & (targets == 1)], values[(fold == k) & (targets == 0)]
        wins, pairs = wins + (above[:, None] > below).sum(), pairs + len(above) * len(below)
    assert found.values[0] == pytest.approx(wins / pairs)
    assert found.folds.mean() == pytest.approx(wins / pairs)
    shifted = in_folds(AUC, values + 100 * fold, targets, fold)
    assert shifted.values[0] == found.values[0]
    np.testing.assert_allclose(shifted.influence, found.influence)


def test_many_pairs_are_counted_by_ranks(monkeypatch):
    rng = np.random.default_rng(1)
    targets, values, fold = drawn(rng)
    values = np.round(values, 1)  # ties
    found = in_folds(AUC, values, targets, fold)
    monkeypatch.setattr("polyfed.comparison.statistics.pseudo_values.cluster_jackknife._PAIRS", 0)
    ranked = in_folds(AUC, values, targets, fold)
    np.testing.assert_allclose(ranked.influence, found.influence, atol=1e-12)
    np.testing.assert_allclose(ranked.folds, found.folds)


def test_the_variance_of_one_network_is_near_delong_s():
    """With all folds tested by networks alike, the variance due to test examples is that of an AUC of all examples."""
    rng = np.random.default_rng(2)
    ratios = []
    for _ in range(40):
        targets, values, fold = drawn(rng, 200)
        above, below = values[targets == 1], values[targets == 0]
        wins = above[:, None] > below
        delong = wins.mean(1).var(ddof=1) / len(above) + wins.mean(0).var(ddof=1) / len(below)
        ratios.append((in_folds(AUC, values, targets, fold).influence ** 2).sum() / delong)
    assert 0.97 < np.mean(ratios) < 1.15


def test_a_mean_has_the_variance_within_folds():
    rng = np.random.default_rng(3)
    targets, values, fold = drawn(rng)
    right = (values > 0) == (targets == 1)
    found = in_folds(ACCURACY, values, targets, fold)
    assert found.values[0] == right.mean()
    np.testing.assert_allclose(found.folds[0], [right[fold == k].mean() for k in range(5)])
    within = sum(((right[fold == k] - right[fold == k].mean()) ** 2).sum() for k in range(5)) / (100 - 5)
    assert (found.influence**2).sum() == pytest.approx(within / 100)


def test_a_metric_without_a_closed_form_is_a_mean_over_folds():
    """Accuracy given as a function has the same score and nearly the same variance as by examples."""
    rng = np.random.default_rng(4)
    targets, values, fold = drawn(rng)
    plain = Metric("share", lambda outputs, labels: float((outputs.argmax(1) == labels).double().mean()), unit="%")
    found, exact = in_folds(plain, values, targets, fold), in_folds(ACCURACY, values, targets, fold)
    assert found.values[0] == pytest.approx(exact.values[0])
    np.testing.assert_allclose(found.folds, exact.folds)
    assert (found.influence**2).sum() == pytest.approx((exact.influence**2).sum(), rel=0.01)


def test_r2_takes_the_errors_of_all_folds_together():
    rng = np.random.default_rng(5)
    targets, fold = rng.normal(size=(60, 1)), rng.permutation(np.arange(60) % 5)
    values = targets[:, 0] + rng.normal(size=60) / 2
    found = in_folds(R2, values, targets, fold)
    assert found.values[0] == pytest.approx(R2(torch.as_tensor(values)[:, None], torch.as_tensor(targets)))


def test_rows_of_one_group_are_one_unit():
    """Ten copies of each example say no more than one."""
    rng = np.random.default_rng(6)
    targets, values, fold = drawn(rng, 60)
    for metric in (ACCURACY, AUC):
        single = in_folds(metric, values, targets, fold)
        copies = in_folds(
            metric, *(np.repeat(part, 10) for part in (values, targets, fold)), np.repeat(np.arange(60), 10)
        )
        assert copies.values[0] == pytest.approx(single.values[0])
        assert (copies.influence**2).sum() == pytest.approx((single.influence**2).sum())
        naive = in_folds(metric, *(np.repeat(part, 10) for part in (values, targets, fold)))
        assert (naive.influence**2).sum() < 0.2 * (single.influence**2).sum()


def test_no_score_where_no_fold_tests_both_classes():
    targets, fold = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 2, 2, 3])
    assert in_folds(AUC, np.zeros(6), targets, fold) is None
    assert in_folds(AUC, np.full(6, np.nan), np.array([0, 1] * 3), fold) is None


def test_losses_are_better_where_they_are_lower():
    rng = np.random.default_rng(7)
    targets, values, fold = drawn(rng)
    good, bad = (in_folds(METRICS["brier"], v, targets, fold) for v in (8 * targets - 4.0, values))
    assert difference_over_folds(good, bad).value > 0


def test_methods_that_never_differ_decide_nothing():
    rng = np.random.default_rng(8)
    targets, values, fold = drawn(rng)
    same = difference_over_folds(*(in_folds(METRICS["brier"], values, targets, fold) for _ in range(2)))
    (site,) = estimate_clients_from_folds([same])
    assert (site.low, site.high, site.p) == (-np.inf, np.inf, 1.0)


def test_methods_that_differ_on_two_examples_of_200_have_an_interval_of_a_few_points():
    """Two examples are few, but the other 198 count, too: they say that the methods mostly agree."""
    rng = np.random.default_rng(6)
    targets, values, fold = drawn(rng, 200)
    others = values.copy()
    wrong, right = (np.flatnonzero(((values > 0) == (targets == 1)) == kind)[0] for kind in (False, True))
    others[[wrong, right]] *= -1
    difference = difference_over_folds(
        in_folds(ACCURACY, values, targets, fold), in_folds(ACCURACY, others, targets, fold)
    )
    sites = estimate_clients_from_folds([difference] * 4)
    assert sites[0].value == 0
    assert 0.01 < sites[0].high < 0.06


# -- calibration ------------------------------------------------------------------------------------------------------


def made(rng, sites=4, units=60, luck=0.0, gain=0.0, repeats=1):
    """Differences drawn directly: units of variance 1, networks of standard deviation `luck`, common to all sites."""
    shared = rng.normal(0, luck, (repeats, 5))
    found = []
    for _ in range(sites):
        noise = rng.normal(size=(1, units)) + rng.normal(0, 0.5, (repeats, units))
        folds = gain + shared + noise.reshape(repeats, 5, -1).mean(2)
        within = (noise - np.repeat(noise.reshape(repeats, 5, -1).mean(2), units // 5, axis=1)) / units
        within *= np.sqrt(units / (units - 5))
        found.append(FoldDifferences(float(folds.mean()), folds, within, np.zeros(units, dtype=np.int64), 0.0))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "luck", [pytest.param(0.0, marks=pytest.mark.thorough), 0.3, pytest.param(1.0, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("repeats", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_false_claims_are_rare_whatever_the_luck_of_networks(luck, repeats):
    rng = np.random.default_rng(9)
    means = sites = 0
    for _ in range(200):
        differences = made(rng, luck=luck, repeats=repeats)
        means += estimate_mean_from_folds(differences).p <= 0.05
        sites += any(site.p <= 0.05 for site in estimate_clients_from_folds(differences))
    assert means <= 17  # the probability of more is 1 % at a share of 5 %
    assert sites <= 17


def test_a_large_gain_is_said_and_more_repeats_narrow_the_interval():
    rng = np.random.default_rng(10)
    once, often = (estimate_mean_from_folds(made(rng, gain=1.0, repeats=repeats)) for repeats in (1, 8))
    assert once.low > 0
    assert often.high - often.low < once.high - once.low


# -- sites as units ---------------------------------------------------------------------------------------------------


def test_the_mean_of_alike_sites_is_the_weighted_mean():
    gains, variances = [0.10, 0.14, 0.12, 0.12], [0.01, 0.04, 0.01, 0.02]
    fitted = fit_random_effects(list(map(SiteGain, gains, variances)))
    weights = 1 / np.array(variances)
    assert fitted.deviation == 0
    assert fitted.mean.value == pytest.approx(weights @ np.array(gains) / weights.sum())
    assert fit_random_effects(list(map(SiteGain, gains[:3], variances))) is None
    assert fit_random_effects(list(map(SiteGain, gains, [0.0, 1, 1, 1]))) is None


def test_dersimonian_and_laird_s_variance_between_sites():
    """Against the formula of the paper, on sites of equal variance: s² − v."""
    gains = [0.0, 0.3, -0.2, 0.5, 0.1]
    fitted = fit_random_effects(list(map(SiteGain, gains, [0.01] * 5)))
    assert fitted.deviation == pytest.approx(np.sqrt(np.var(gains, ddof=1) - 0.01))
    assert fitted.mean.value == pytest.approx(np.mean(gains))
    for site, gain in zip(fitted.sites, gains, strict=True):
        assert abs(site.value - np.mean(gains)) < abs(gain - np.mean(gains)) or gain == np.mean(gains)


@pytest.mark.parametrize(
    ("sites", "deviation"),
    [(4, 0.0), pytest.param(4, 1.0, marks=pytest.mark.thorough), pytest.param(20, 0.5, marks=pytest.mark.thorough)],
)
def test_intervals_of_the_mean_over_sites_and_of_pooled_sites_hold(sites, deviation):
    rng = np.random.default_rng(11)
    missed, missed_sites = 0, []
    for _ in range(300):
        truth = rng.normal(0, deviation, sites)
        variance = rng.uniform(0.2, 2, sites)
        fitted = fit_random_effects(list(map(SiteGain, truth + rng.normal(size=sites) * np.sqrt(variance), variance)))
        missed += not fitted.mean.low <= 0 <= fitted.mean.high
        missed_sites.append(np.mean([not s.low <= t <= s.high for s, t in zip(fitted.sites, truth, strict=True)]))
    assert missed <= 24  # 1 % at a share of 5 %
    assert np.mean(missed_sites) <= 0.06


# -- looks and plans --------------------------------------------------------------------------------------------------


def test_looks_share_the_error_rate():
    for looks in (1, 2, 5):
        rates = error_rates_of_looks(looks)
        assert sum(rates) == pytest.approx(ALPHA)
        assert rates == sorted(rates)


@pytest.mark.thorough
def test_looking_several_times_claims_no_more():
    rng = np.random.default_rng(12)
    wrong = 0
    for _ in range(200):
        shared = made(rng, repeats=4, luck=0.3)
        wrong += any(
            estimate_mean_from_folds([first(site, look) for site in shared], alpha=rate).p <= 0.05
            for look, rate in enumerate(error_rates_of_looks(4), start=1)
        )
    assert wrong <= 17


def first(site, repeats):
    folds = site.folds[:repeats]
    return FoldDifferences(float(folds.mean()), folds, site.influence[:repeats], site.classes, 0.0)


def test_the_smallest_decidable_gain_is_decided_as_often_as_planned():
    """A pilot of known variances, and differences drawn from them."""
    rng, luck = np.random.default_rng(13), 0.1
    pilot = PilotVariances((1.0,) * 4, (0.25,) * 4, luck**2, luck**2)
    gain, _ = smallest_decidable_gain(pilot, ComparisonDesign("folds", 10, 5, (60,) * 4, (12,) * 4))
    said = sum(estimate_mean_from_folds(made(rng, repeats=2, luck=luck, gain=gain)).low > 0 for _ in range(200))
    assert 0.75 < said / 200 < 0.99  # without luck of training examples in the draw, a little more often


def test_a_client_needs_no_smaller_gain_than_the_mean_where_clients_are_alike():
    """Also where networks of other seeds differ more than examples do, in plans of few runs and in unlike directions."""
    rng = np.random.default_rng(14)
    for kind, runs, folds in (("folds", 5, 5), ("seeds", 3, 3), ("resplit", 3, 3), ("seeds", 2, 2)):
        design = ComparisonDesign(kind, runs, folds, (60,) * 4, (12,) * 4)
        for luck in (0.0, 0.03, 0.3):
            mean, client = smallest_decidable_gain(PilotVariances((0.2,) * 4, (0.1,) * 4, luck**2, luck**2), design)
            assert client >= mean
    opposed = np.array([[-0.1, 0.1], [0.1, -0.1]])
    sites = [
        FoldDifferences(0.0, row[:, None], rng.normal(0, 1e-4, (2, 50)), np.zeros(50, int), 0.0) for row in opposed
    ]
    pilot = estimate_pilot_variances(sites)
    assert pilot.networks == pytest.approx(0.0)  # opposite seeds cancel in the mean, and not at a client
    assert pilot.networks_of_client == pytest.approx(0.02, rel=1e-3)


@pytest.mark.thorough
def test_a_client_is_decided_as_often_as_planned():
    rng, luck, found = np.random.default_rng(15), 0.1, []
    pilot = PilotVariances((1.0,) * 4, (0.25,) * 4, luck**2, luck**2)
    _, gain = smallest_decidable_gain(pilot, ComparisonDesign("folds", 10, 5, (60,) * 4, (12,) * 4))
    for _ in range(100):
        found += [site.low > 0 for site in estimate_clients_from_folds(made(rng, repeats=2, luck=luck, gain=gain))]
    assert 0.75 < np.mean(found) < 0.99


def test_scores_without_bounds_have_the_training_part_of_nadeau_and_bengio():
    rng = np.random.default_rng(0)
    rows = [np.arange(k, 40, 5) for k in range(5)]
    truth = rng.normal(size=40)
    parts = {}
    for name in ("r2", "c_index"):
        targets = truth if name == "r2" else np.stack([np.exp(truth), np.ones(40)], axis=1)
        outputs = [torch.from_numpy(rng.normal(size=(len(part), 1))) for part in rows]
        scores = score_folds(METRICS[name], outputs, [torch.from_numpy(targets[part]) for part in rows], rows, 5)
        gain = difference_over_folds(scores, None)
        parts[name] = (gain.variance_due_to_examples - gain.example_variance) / gain.repeat_variance
    assert parts == {"r2": pytest.approx(1.25), "c_index": pytest.approx(0.8)}
