"""Intervals over seeds and test examples: closed forms, and the share of false claims on data without an effect."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from polyfed.comparison.statistics.cross_validation.resplits import (
    ResplitDifferences,
    estimate_client_means_over_resplits,
)
from polyfed.comparison.statistics.curves.learning_curve import (
    CurvePoint,
    first_point_reaching_target,
    last_point_within_budget,
)
from polyfed.comparison.statistics.estimate import ALPHA, CONFIDENCE_LEVEL
from polyfed.comparison.statistics.mrmc import (
    estimate_client_means,
    estimate_mean_over_clients,
    estimate_variance_components,
)
from polyfed.comparison.statistics.pseudo_values import jackknife as influence
from polyfed.comparison.statistics.pseudo_values.jackknife import (
    NUM_GROUPS,
    example_class_of_each_pseudo_value,
    score_with_pseudo_values,
)
from polyfed.comparison.statistics.score_intervals import mean_gain_with_interval, mean_score_with_interval
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import METRICS, resolve_metrics
from polyfed.tasks.survival import Survival

ACCURACY, AUC, R2 = METRICS["accuracy"], METRICS["auc"], METRICS["r2"]


def logits(right, targets):
    """Two-class outputs that are right where `right` is."""
    return torch.eye(2)[torch.where(torch.as_tensor(right), targets, 1 - targets)]


def scored(values):
    """Two-class outputs with these scores for class 1."""
    values = torch.as_tensor(np.asarray(values), dtype=torch.float64)
    return torch.stack([torch.zeros_like(values), values], dim=1)


# -- closed forms -----------------------------------------------------------------------------------------------------


def placements(values, positive):
    """DeLong's components: of each positive and each negative example the share of the others that it is right of."""
    wins = (values[positive][:, None] > values[~positive]) + 0.5 * (values[positive][:, None] == values[~positive])
    return wins.mean(axis=1), wins.mean(axis=0)


def test_the_variance_of_one_seed_is_delong_s():
    """DeLong et al. 1988 for two correlated AUCs, times m/(m − 1) in each class, as a jackknife has it."""
    rng = np.random.default_rng(0)
    positive = rng.random(60) < 0.4
    one = np.round(rng.normal(size=60) + positive, 1)  # with ties
    other = np.round(0.5 * one + rng.normal(size=60), 1)
    targets = torch.from_numpy(positive.astype(np.int64))
    found = estimate_variance_components(AUC, [scored(one)], [scored(other)], targets)
    (p1, n1), (p2, n2) = placements(one, positive), placements(other, positive)
    assert found.mean == pytest.approx(p1.mean() - p2.mean())
    m, q, n = len(p1), len(n1), 60
    jackknife = [(d - d.mean()) / (len(d) - 1) for d in (p1 - p2, n1 - n2)]
    assert found.example_variance == pytest.approx((n - 1) / n * sum(float((d**2).sum()) for d in jackknife))
    delong = (p1 - p2).var(ddof=1) / m + (n1 - n2).var(ddof=1) / q
    assert delong < found.example_variance < 1.06 * delong


def test_one_seed_of_accuracy_agrees_with_mcnemar():
    """p against McNemar's mid-p: the binomial of examples that only the one has right, half of the observed counted."""
    targets = torch.arange(200) % 2
    for only_one, only_other in ((20, 5), (14, 4), (30, 30), (9, 1), (6, 0), (40, 22)):
        ours, theirs = np.ones(200, dtype=bool), np.ones(200, dtype=bool)
        ours[:only_other], theirs[only_other : only_other + only_one] = False, False
        one = estimate_mean_over_clients(
            [estimate_variance_components(ACCURACY, [logits(ours, targets)], [logits(theirs, targets)], targets)],
            alpha=1 - CONFIDENCE_LEVEL,
        )
        n = only_one + only_other
        least = min(only_one, only_other)
        mid = min(1.0, 2 * (stats.binom.cdf(least, n, 0.5) - 0.5 * stats.binom.pmf(least, n, 0.5)))
        assert (one.p <= 0.05) == (mid <= 0.05), (only_one, only_other, one.p, mid)
        assert abs(math.log10(one.p) - math.log10(mid)) < 0.75, (only_one, only_other, one.p, mid)


def brute(metric, outputs, targets):
    n = len(targets)
    kept = [torch.arange(n) != j for j in range(n)]
    return [n * metric(outputs, targets) - (n - 1) * metric(outputs[k], targets[k]) for k in kept]


@pytest.mark.parametrize("name", ["accuracy", "auc", "r2", "brier", "balanced_accuracy", "mae"])
def test_pseudo_values_are_those_of_leaving_one_out(name):
    rng = np.random.default_rng(1)
    metric = METRICS[name]
    if "regression" in metric.tasks:
        outputs, targets = torch.from_numpy(rng.normal(size=(20, 1))), torch.from_numpy(rng.normal(size=(20, 1)))
    else:
        outputs, targets = torch.from_numpy(rng.normal(size=(20, 3))), torch.arange(20) % 3
    score, values = score_with_pseudo_values(metric, outputs, targets)
    assert score == pytest.approx(metric(outputs, targets))
    assert values == pytest.approx(np.array(brute(metric, outputs, targets)))


def test_ranks_and_pairs_give_the_same_areas(monkeypatch):
    rng = np.random.default_rng(11)
    outputs, targets = torch.from_numpy(np.round(rng.normal(size=(60, 4)), 1)), torch.arange(60) % 4
    by_pairs = score_with_pseudo_values(AUC, outputs, targets)
    monkeypatch.setattr(influence, "_PAIRS", 0)
    by_ranks = score_with_pseudo_values(AUC, outputs, targets)
    assert by_ranks[0] == pytest.approx(by_pairs[0])
    assert by_ranks[1] == pytest.approx(by_pairs[1])


def test_many_examples_are_left_out_in_groups_that_depend_on_the_targets_alone():
    calls = []

    def recall(outputs, targets):
        calls.append(len(targets))
        return float((outputs.argmax(1) == targets)[targets == 1].double().mean())

    targets = torch.from_numpy(np.random.default_rng(2).permutation(np.arange(300) % 3 == 0).astype(np.int64))
    outputs = torch.from_numpy(np.random.default_rng(3).normal(size=(300, 2)))
    _, values = score_with_pseudo_values(Metric("recall", recall), outputs, targets)
    assert len(values) == NUM_GROUPS
    assert set(calls[1:]) == {294}
    mean = score_with_pseudo_values(Metric("average", lambda o, t: float(o[:, 0].mean())), outputs, targets)[1]
    assert mean.var(ddof=1) / NUM_GROUPS == pytest.approx(outputs[:, 0].numpy().var(ddof=1) / 300, rel=0.5)


def test_the_mean_squares_are_those_of_the_table():
    """Brier scores of three seeds: the variance of the mean by the two-way analysis of variance, written out."""
    rng = np.random.default_rng(4)
    targets = torch.from_numpy(rng.integers(0, 2, 30))
    ours, theirs = ([scored(rng.normal(size=30)) for _ in range(3)] for _ in range(2))
    metric = METRICS["brier"]
    table = np.array(
        [metric.per_example(t, targets) - metric.per_example(o, targets) for o, t in zip(ours, theirs, strict=True)]
    )
    found = estimate_variance_components(metric, ours, theirs, targets)
    assert found.mean == pytest.approx(table.mean())  # positive where the loss is lower
    rows, columns, grand = table.mean(axis=1), table.mean(axis=0), table.mean()
    seeds = 30 * ((rows - grand) ** 2).sum() / 2
    examples = 3 * ((columns - grand) ** 2).sum() / 29
    rest = ((table - rows[:, None] - columns + grand) ** 2).sum() / 58
    assert found.seed_variance + found.residual_variance == pytest.approx(seeds / 90)
    assert found.residual_variance == pytest.approx(rest / 90)
    assert found.example_variance == pytest.approx(max(examples - rest, 0) / 90)
    one = estimate_mean_over_clients([found])
    half = math.sqrt(
        stats.t.ppf(1 - ALPHA / 2, 2) ** 2 * seeds / 90
        + stats.t.ppf(1 - ALPHA / 2, found.degrees_of_freedom) ** 2 * found.example_variance
    )
    assert (one.low, one.high) == (pytest.approx(grand - half), pytest.approx(grand + half))


def test_what_is_certain_and_what_is_not_defined():
    targets = torch.tensor([0, 1] * 20)
    same = logits(np.ones(40, dtype=bool), targets)
    equal = estimate_mean_over_clients([estimate_variance_components(ACCURACY, [same, same], [same, same], targets)])
    assert equal.low < 0 < equal.high  # two networks that agree on 40 examples may differ on others
    assert equal.p == 1.0
    one_positive = torch.tensor([1] + [0] * 39)
    assert estimate_variance_components(AUC, [scored(np.arange(40.0))], None, one_positive) is None
    assert (
        estimate_variance_components(AUC, [scored(np.arange(40.0))], None, torch.zeros(40, dtype=torch.int64)) is None
    )
    assert mean_score_with_interval(AUC, [scored(np.arange(40.0))], one_positive) is None
    nan = torch.full((40, 2), float("nan"))
    assert estimate_variance_components(AUC, [nan], [same], targets) is None
    low, high = mean_score_with_interval(ACCURACY, [same], targets)[1:]
    assert 0.8 < low < 1.0 < high  # not a certainty of 100 %


def test_an_interval_holds_what_was_seen():
    """Networks that always say one class, another one with each seed: neither seeds nor the examples of a class vary, and
    the middle of the interval is moved by more than its width."""
    targets = torch.arange(10).repeat(10)
    always = [torch.eye(10)[torch.full((100,), said)] for said in range(2)]
    found = estimate_mean_over_clients([estimate_variance_components(ACCURACY, always, None, targets)] * 10)
    assert found.value == pytest.approx(0.1)
    assert found.low <= found.value <= found.high


def test_losses_are_turned_so_that_better_is_positive():
    targets = torch.tensor([0, 1] * 50)
    rng = np.random.default_rng(5)
    good, bad = scored((4 * targets.numpy() - 2) + rng.normal(size=100)), scored(rng.normal(size=100))
    for name in ("brier", "log_loss", "accuracy", "auc"):
        value, low, high = mean_gain_with_interval(METRICS[name], [good], [bad], targets)
        assert low > 0, name
        assert low < value < high


def test_p_is_where_the_interval_touches_zero():
    rng = np.random.default_rng(6)
    targets = torch.tensor([0, 1] * 40)
    for _ in range(5):
        ours, theirs = ([scored(rng.normal(size=80) + k * targets.numpy()) for _ in range(3)] for k in (1.2, 0.6))
        one = estimate_variance_components(AUC, ours, theirs, targets)
        for found in (
            estimate_mean_over_clients([one], num_tests=2),
            estimate_client_means([one, one], num_tests=2)[0],
        ):
            assert (found.p <= 1 - CONFIDENCE_LEVEL) == (found.low > 0 or found.high < 0)
        mean = estimate_mean_over_clients([one])
        at = estimate_mean_over_clients([one], alpha=min(mean.p, 1.0) * ALPHA / (1 - CONFIDENCE_LEVEL))
        assert min(abs(at.low), abs(at.high)) < 1e-6


def test_more_sites_methods_and_fewer_seeds_are_wider():
    rng = np.random.default_rng(7)
    targets = torch.tensor([0, 1] * 40)
    outputs = [[scored(rng.normal(size=80)) for _ in range(6)] for _ in range(2)]
    whole, half = (estimate_variance_components(AUC, outputs[0][:k], outputs[1][:k], targets) for k in (6, 3))
    width = [
        e.high - e.low
        for e in (
            estimate_client_means([whole])[0],
            estimate_client_means([whole] * 4)[0],
            estimate_client_means([whole] * 4, num_tests=5)[0],
        )
    ]
    assert width[0] < width[1] < width[2]
    assert (
        estimate_mean_over_clients([whole]).high - estimate_mean_over_clients([whole]).low
        < estimate_mean_over_clients([half]).high - estimate_mean_over_clients([half]).low
    )


def test_dealings_share_examples():
    """Nadeau and Bengio 2003, eq. 9: variance (1/K + test/train)·s², K − 1 degrees of freedom."""
    values = [0.02, 0.05, 0.03, 0.06]
    (found,) = estimate_client_means_over_resplits([ResplitDifferences(values, 100, 50)], alpha=0.05)
    half = stats.t.ppf(0.975, 3) * math.sqrt(0.75) * np.std(values, ddof=1)
    assert (found.low, found.high) == (pytest.approx(0.04 - half), pytest.approx(0.04 + half))
    four = estimate_client_means_over_resplits([ResplitDifferences(values, 100, 50)] * 4, alpha=0.05)[0]
    assert found.high <= four.high < 0.04 + stats.t.ppf(1 - 0.0125 / 2, 3) * math.sqrt(0.75) * np.std(values, ddof=1)


# -- data without an effect -------------------------------------------------------------------------------------------


def drawn(name, clients, examples, seeds, rng):
    """Two methods alike in expectation: examples differ in difficulty, networks in luck. Outputs and targets."""
    common = rng.normal(0, 0.1, (2, seeds)) if seeds > 1 else np.zeros((2, 1))
    for _ in range(clients):
        sure = (
            rng.normal(0, 1.2, examples)
            + rng.normal(0, 0.7, (2, 1, examples))
            + rng.normal(0, 0.7, (2, seeds, examples))
        )
        sure = sure + 0.8 + (common + rng.normal(0, 0.15, (2, seeds)) * (seeds > 1))[..., None]
        if name == "r2":
            targets = torch.from_numpy(rng.normal(size=(examples, 1)))
            outputs = targets[:, 0] + 0.5 * torch.from_numpy(sure)
            yield [o[:, None] for o in outputs[0]], [o[:, None] for o in outputs[1]], targets
            continue
        targets = torch.from_numpy(rng.permutation(np.arange(examples) % 5 < 2).astype(np.int64))
        sign = 2 * targets.numpy() - 1 if name == "accuracy" else targets.numpy()
        sure = sign * sure if name == "accuracy" else sure + sign
        yield [scored(o) for o in sure[0]], [scored(o) for o in sure[1]], targets


def wrong(name, clients, examples, seeds, repetitions):
    """Share of comparisons with a false claim about the mean, and about a site or more."""
    rng, metric, false = np.random.default_rng([clients, examples, seeds]), METRICS[name], [0, 0]
    for _ in range(repetitions):
        sites = [estimate_variance_components(metric, *site) for site in drawn(name, clients, examples, seeds, rng)]
        false[0] += estimate_mean_over_clients(sites).p <= 1 - CONFIDENCE_LEVEL
        false[1] += any(site.p <= 1 - CONFIDENCE_LEVEL for site in estimate_client_means(sites))
    return [count / repetitions for count in false]


def most(share, repetitions):
    """Up to which share a simulation does not contradict `share`: 3 standard errors."""
    return share + 3 * math.sqrt(share * (1 - share) / repetitions)


def test_a_few_events_decide_a_c_index_however_many_patients_were_censored():
    """With degrees of freedom by patient, 8 % of comparisons of four sites with five events each made a false claim."""
    rng = np.random.default_rng(4)
    risk = torch.from_numpy(rng.normal(size=50))
    targets = torch.stack([torch.from_numpy(rng.exponential(size=50)) / risk.exp(), torch.arange(50) % 10 == 0], dim=1)
    outputs = [(risk + 0.8 * torch.from_numpy(rng.normal(size=50)))[:, None] for _ in range(2)]
    components = estimate_variance_components(Survival().default_metric, outputs[:1], outputs[1:], targets)
    assert components.degrees_of_freedom < 6
    by_patient = estimate_variance_components(
        Metric("mine", Survival().default_metric.function), outputs[:1], outputs[1:], targets
    )
    assert by_patient.degrees_of_freedom > 1.5 * components.degrees_of_freedom
    assert by_patient.example_variance == components.example_variance
    many = torch.stack([torch.arange(300.0), torch.arange(300) < 6], dim=1)  # in blocks, each event in its own
    for metric, truth in ((Survival().default_metric, many), (METRICS["f1"], many[:, 1].long())):
        classes = example_class_of_each_pseudo_value(metric, truth)
        assert (len(classes), sorted(np.unique(classes, return_counts=True)[1])) == (NUM_GROUPS, [6, NUM_GROUPS - 6])
    nearly_all = torch.arange(191) < 48  # in 48 of 50 blocks: two blocks without one are no rare class
    assert not example_class_of_each_pseudo_value(METRICS["f1"], nearly_all.long()).any()
    halves = torch.arange(96) % 2  # of which a block has one, or both
    assert not example_class_of_each_pseudo_value(METRICS["balanced_accuracy"], halves).any()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "examples", "seeds"),
    [
        ("accuracy", 40, 3),
        ("auc", 12, 1),
        *(pytest.param(name, 40, 3, marks=pytest.mark.slow) for name in ("auc", "r2")),
    ],
)
def test_nothing_is_claimed_where_nothing_differs(name, examples, seeds):
    assert max(wrong(name, 4, examples, seeds, 150)) <= most(0.05, 150)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy", "auc", "r2"])
@pytest.mark.parametrize(("clients", "examples", "seeds"), [(4, 12, 3), (4, 200, 10), (12, 40, 5), (4, 200, 1)])
def test_nothing_is_claimed_where_nothing_differs_in_more_cases(name, clients, examples, seeds):
    assert max(wrong(name, clients, examples, seeds, 400)) <= most(0.05, 400)


def test_an_interval_over_seeds_alone_would_claim_much():
    """What went before: Student's t over the seeds, which share their test examples. The check above can fail."""
    rng, false = np.random.default_rng(8), 0
    for _ in range(60):
        sites = [estimate_variance_components(AUC, *site) for site in drawn("auc", 4, 40, 5, rng)]
        means = np.mean([site.values for site in sites], axis=0)
        false += abs(means.mean()) > stats.t.ppf(0.975, 4) * stats.sem(means)
    assert false / 60 > 0.12


def test_a_difference_that_is_there_is_found():
    rng, found = np.random.default_rng(9), 0
    targets = torch.tensor([0, 1] * 100)
    for _ in range(20):
        hard = rng.normal(0, 1.0, 200)
        ours, theirs = (
            [scored(hard + rng.normal(0, 0.7, 200) + gain * targets.numpy()) for _ in range(3)] for gain in (2.0, 1.0)
        )
        found += estimate_mean_over_clients([estimate_variance_components(AUC, ours, theirs, targets)]).low > 0
    assert found >= 18


@pytest.mark.parametrize(("clients", "examples"), [(30, 20), pytest.param(100, 12, marks=pytest.mark.thorough)])
def test_intervals_of_means_over_many_small_sites_hold_the_truth_where_there_is_an_effect(clients, examples):
    """Shares are moved towards the middle at each site, and a mean of many sites must not be. At most 5 % of 60 are to
    miss; 9 or more would be one chance in a thousand."""
    rng = np.random.default_rng(0)
    targets, repeats = torch.zeros(examples, dtype=torch.int64), 60
    missed = {"gain": 0, "score": 0}
    for _ in range(repeats):
        ours, theirs = rng.uniform(0.8, 1.0, clients), rng.uniform(0.1, 0.5, clients)
        right = [[logits(rng.random(examples) < p, targets) for p in chances] for chances in (ours, theirs)]
        gain = estimate_mean_over_clients(
            [estimate_variance_components(ACCURACY, [o], [t], targets) for o, t in zip(*right, strict=True)]
        )
        score_parts = [estimate_variance_components(ACCURACY, [o], None, targets) for o in right[0]]
        score = estimate_mean_over_clients(score_parts)
        missed["gain"] += not gain.low <= (ours - theirs).mean() <= gain.high
        missed["score"] += not score.low <= ours.mean() <= score.high
    assert max(missed.values()) < 9, missed


def test_budget_and_target_on_a_curve():
    points = [CurvePoint(2, 0.5, 20, 2.0), CurvePoint(4, None, 40, 4.0), CurvePoint(6, 0.7, 60, 6.0)]
    assert last_point_within_budget(points, "steps", None).round == 6
    assert last_point_within_budget(points, "bytes", 60).round == 6
    assert last_point_within_budget(points, "bytes", 59).round == 4
    assert last_point_within_budget(points, "seconds", 1.9) is None
    assert first_point_reaching_target(points, 0.5).round == 2
    assert first_point_reaching_target(points, 0.6).round == 6
    assert first_point_reaching_target(points, 0.71) is None
    assert first_point_reaching_target(points, None) is None
    assert first_point_reaching_target(points, 0.6, higher_is_better=False).round == 2


@pytest.mark.thorough
def test_any_score_has_an_interval():
    """Also those of which no closed form is known, and a user's own."""
    rng = np.random.default_rng(10)
    targets = torch.from_numpy(rng.permutation(np.arange(90) % 3))
    ours = [torch.from_numpy(rng.normal(size=(90, 3))) + 2 * torch.eye(3)[targets] for _ in range(4)]
    theirs = [torch.from_numpy(rng.normal(size=(90, 3))) for _ in range(4)]
    own = Metric("own", lambda outputs, t: float(outputs.softmax(1).gather(1, t[:, None]).square().mean().sqrt()))
    asked = ["balanced_accuracy", "f1", "average_precision", "ece", "log_loss", "sensitivity_at_80", own]
    for metric in resolve_metrics(asked, "classification"):
        value, low, high = mean_gain_with_interval(metric, ours, theirs, targets)
        assert low < value < high, metric.name
        if metric.name not in ("ece",):
            assert low > 0, metric.name
