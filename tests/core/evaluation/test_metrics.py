"""Metrics, against scikit-learn and by hand."""

import math

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch.nn import functional as F

import polyfed as pf
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metric_names import METRIC_NAMES, check_metric_names
from polyfed.core.evaluation.metrics import (
    METRICS,
    is_built_in_metric,
    metric_by_name,
    resolve_metrics,
    unpicklable_metric_error,
)
from polyfed.core.seeds import torch_generator
from polyfed.core.tasks.task_lookup import get_task
from polyfed.tasks.scores.entities import EntityF1
from polyfed.tasks.tokens import token_accuracy


def test_the_names_that_are_known_without_torch_are_those_of_the_metrics():
    assert sorted(METRICS) == list(METRIC_NAMES)
    options = ("sensitivity_at_95", "mae_at_3", "rmse_at_12", "entity_f1", "integrated_brier")
    assert all(map(is_built_in_metric, options))
    check_metric_names([*METRICS, *options, "my_module:cost", len])
    for name in ("AUC", "mse", "auc_at_3"):
        with pytest.raises(pf.UserError) as early:
            check_metric_names(["accuracy", name])
        with pytest.raises(pf.UserError) as late:
            metric_by_name(name)
        assert str(early.value) == str(late.value)


G = torch_generator(5)
TWO = torch.randn(200, 2, generator=G), torch.randint(0, 2, (200,), generator=G)
FIVE = torch.randn(300, 5, generator=G), torch.randint(0, 5, (300,), generator=G)
LABELS = torch.randn(150, 3, generator=G), (torch.rand(150, 3, generator=G) < 0.3).float()
NUMBERS = torch.randn(80, 2, generator=G), torch.randn(80, 2, generator=G)
SHARE = {"two": TWO[0].double().softmax(1).numpy(), "five": FIVE[0].double().softmax(1).numpy()}
Y = {"two": TWO[1].numpy(), "five": FIVE[1].numpy(), "labels": LABELS[1].numpy(), "numbers": NUMBERS[1].numpy()}
DATA = {"two": TWO, "five": FIVE, "labels": LABELS, "numbers": NUMBERS}
GUESS = {"two": TWO[0].argmax(1).numpy(), "five": FIVE[0].argmax(1).numpy(), "labels": (LABELS[0] > 0).numpy()}
SIGMOID = LABELS[0].double().sigmoid().numpy()

EXPECTED = {
    ("accuracy", "two"): sk.accuracy_score(Y["two"], GUESS["two"]),
    ("accuracy", "labels"): 1 - sk.hamming_loss(Y["labels"], GUESS["labels"]),
    ("balanced_accuracy", "two"): sk.balanced_accuracy_score(Y["two"], GUESS["two"]),
    ("balanced_accuracy", "five"): sk.balanced_accuracy_score(Y["five"], GUESS["five"]),
    ("balanced_accuracy", "labels"): np.mean(
        [sk.balanced_accuracy_score(Y["labels"][:, k], GUESS["labels"][:, k]) for k in range(3)]
    ),
    ("auc", "two"): sk.roc_auc_score(Y["two"], SHARE["two"][:, 1]),
    ("auc", "five"): sk.roc_auc_score(Y["five"], SHARE["five"], multi_class="ovr", average="macro"),
    ("auc", "labels"): sk.roc_auc_score(Y["labels"], SIGMOID, average="macro"),
    ("average_precision", "two"): sk.average_precision_score(Y["two"], SHARE["two"][:, 1]),
    ("average_precision", "labels"): sk.average_precision_score(Y["labels"], SIGMOID, average="macro"),
    ("f1", "two"): sk.f1_score(Y["two"], GUESS["two"]),
    ("f1", "five"): sk.f1_score(Y["five"], GUESS["five"], average="macro"),
    ("f1", "labels"): sk.f1_score(Y["labels"], GUESS["labels"], average="macro"),
    ("brier", "two"): sk.brier_score_loss(Y["two"], SHARE["two"][:, 1]),
    ("brier", "five"): ((SHARE["five"] - np.eye(5)[Y["five"]]) ** 2).sum(1).mean(),
    ("brier", "labels"): np.mean([sk.brier_score_loss(Y["labels"][:, k], SIGMOID[:, k]) for k in range(3)]),
    ("log_loss", "two"): sk.log_loss(Y["two"], SHARE["two"]),
    ("log_loss", "five"): sk.log_loss(Y["five"], SHARE["five"]),
    ("log_loss", "labels"): np.mean([sk.log_loss(Y["labels"][:, k], SIGMOID[:, k]) for k in range(3)]),
    ("r2", "numbers"): 1 - ((NUMBERS[0] - NUMBERS[1]) ** 2).sum() / ((NUMBERS[1] - NUMBERS[1].mean(0)) ** 2).sum(),
    ("mae", "numbers"): sk.mean_absolute_error(Y["numbers"], NUMBERS[0]),
    ("rmse", "numbers"): np.sqrt(sk.mean_squared_error(Y["numbers"], NUMBERS[0])),
}


@pytest.mark.parametrize(("name", "data"), EXPECTED)
def test_a_metric_is_that_of_scikit_learn(name, data):
    assert METRICS[name](*DATA[data]) == pytest.approx(float(EXPECTED[name, data]), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "reference"), [("auc", sk.roc_auc_score), ("average_precision", sk.average_precision_score)]
)
def test_scores_of_ranks_are_those_of_scikit_learn_where_many_values_are_equal(name, reference):
    random = np.random.default_rng(0)
    for size in (2, 3, 10, 200):
        for values in (1, 2, 5, 1000):
            outputs = torch.tensor(random.integers(values, size=(size, 2)), dtype=torch.float32)
            targets = torch.tensor([0, 1, *random.integers(2, size=size - 2)])
            expected = reference(targets.numpy(), (outputs[:, 1] - outputs[:, 0]).numpy())
            assert METRICS[name](outputs, targets) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("percent", [80, 90, 97.5])
def test_sensitivity_is_the_best_point_of_the_roc_curve_with_that_specificity(percent):
    false, true, _ = sk.roc_curve(Y["two"], SHARE["two"][:, 1], drop_intermediate=False)
    best = true[false <= 1 - percent / 100 + 1e-9].max()
    assert metric_by_name(f"sensitivity_at_{percent:g}")(*TWO) == pytest.approx(best)


def test_calibration_error_by_hand():
    """Six of logit log(0.8 / 0.2), half of them right, in the bin [0.8, 0.9); four of 0.6, all right, in [0.6, 0.7)."""
    logit = torch.tensor([0.8 / 0.2] * 6 + [0.6 / 0.4] * 4).log() + 1e-6
    outputs = torch.stack([torch.zeros(10), logit], 1)
    targets = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1, 1])
    assert METRICS["ece"](outputs, targets) == pytest.approx(0.6 * 0.3 + 0.4 * 0.4, abs=1e-5)
    labels = METRICS["ece"](torch.full((4, 1), 50.0), torch.tensor([[1.0], [1.0], [0.0], [0.0]]))
    assert labels == pytest.approx(0.5)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_values_of_single_examples_have_the_metric_as_their_mean(name):
    metric = METRICS[name]
    for kind, data in DATA.items():
        task = {"numbers": "regression", "labels": "multilabel"}.get(kind, "classification")
        if metric.per_example is not None and task in metric.tasks:
            values = metric.per_example(*data)
            assert values.shape == (len(data[1]),)
            assert metric.function(*data) == pytest.approx(values.mean())
            assert metric(*(part[:1] for part in data)) == values[0]


def test_log_loss_is_the_loss_of_training():
    assert METRICS["log_loss"](*FIVE) == pytest.approx(float(F.cross_entropy(*FIVE)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", sorted(METRICS))
def test_of_outputs_that_are_not_finite_no_metric_fails(name):
    metric = METRICS[name]
    by_task = {
        "survival": (torch.zeros(4, 1), torch.tensor([[3.0, 1], [2.0, 0], [5.0, 1], [2.0, 1]])),
        "segmentation": (torch.zeros(4, 3, 2, 2), torch.arange(16).view(4, 2, 2) % 3),
        "tokens": (torch.zeros(4, 3, 3), torch.tensor([[0, 1, 2], [2, 2, -100], [1, -100, -100], [0, 0, 1]])),
        "forecasting": (torch.zeros(4, 1), torch.tensor([[1.0, 2.0], [2.0, 1.0], [-1.0, 2.0], [0.5, -1.0]])),
        "regression": DATA["numbers"],
        "classification": DATA["two"],
    }
    outputs, targets = next(data for task, data in by_task.items() if task in metric.tasks)
    value = metric(torch.full_like(outputs, float("nan")), targets)
    assert np.isnan(value) or name in (
        "accuracy",
        "token_accuracy",
        "balanced_accuracy",
        "f1",
    )  # of a guess, which there always is
    assert np.isnan(metric(outputs[:0], targets[:0]))


def test_one_class_alone_has_no_auc_and_all_right_is_one():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    assert np.isnan(METRICS["auc"](outputs, torch.ones(3, dtype=torch.int64)))
    assert METRICS["auc"](outputs, torch.tensor([0, 1, 1])) == 1.0
    three = torch.eye(3)[[0, 1, 0, 1]]  # the third class does not occur and does not count
    assert METRICS["auc"](three, torch.tensor([0, 1, 0, 1])) == 1.0


def own(outputs, targets):
    """A metric of a user."""
    return float(outputs.sum())


def worse(outputs, targets):
    """A metric of a user that says itself what is better."""
    return 0.0


worse.higher_is_better = False


def test_metrics_are_names_functions_and_objects():
    cost = Metric("cost", own, higher_is_better=False, unit="%")
    found = resolve_metrics(["f1", own, cost, "sensitivity_at_specificity", worse], "classification")
    assert [m.name for m in found] == ["f1", "own", "cost", "sensitivity_at_90", "worse"]
    assert [m.higher_is_better for m in found] == [True, True, False, True, False]
    assert resolve_metrics("brier", "multilabel") == (METRICS["brier"],)
    assert resolve_metrics(own, "regression")[0](torch.ones(2, 1), torch.zeros(2, 1)) == 2.0
    assert pf.Metric is Metric


def test_built_in_metrics_can_be_sent_to_another_process():
    assert (
        unpicklable_metric_error(
            [*METRICS.values(), metric_by_name("sensitivity_at_85"), *resolve_metrics(own, "regression")]
        )
        is None
    )
    assert "metric 'local' cannot be sent" in unpicklable_metric_error([Metric("local", lambda outputs, targets: 0.0)])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (["acuracy"], "unknown metric 'acuracy'; did you mean accuracy"),
        (["acc"], r"unknown metric 'acc'; did you mean accuracy.*\? Choices: [a-z, _0-9]*accuracy(?!.*(c_index|dice))"),
        (["ROC-AUC"], r"unknown metric 'ROC-AUC'; did you mean auc\?"),
        (["F1_score"], "unknown metric 'F1_score'; did you mean f1"),
        (["auc", "auc"], "metrics has 'auc' twice"),
        (["r2"], "r2 is not a metric of a task of classification; choose among accuracy, auc"),
        ([lambda outputs, targets: 0.0], "a metric needs a name"),
        ([3], r"metrics must be names, functions f\(outputs, targets\) -> float or Metric objects, got 3"),
        ([Metric("auc", own)], "'auc' is the name of a built-in metric; give yours another name"),
        (["sensitivity_at_0"], "above 0 and below 100"),
    ],
)
def test_what_is_asked_for_is_checked(asked, sentence):
    with pytest.raises(pf.UserError, match=sentence):
        resolve_metrics(asked, "classification")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "two words"}, "must be a word"),
        ({"name": "val_mine"}, "not begin with val_, global_, loss"),
        ({"name": "seconds"}, "cannot be called 'seconds'"),
        ({"function": "auc"}, "must be callable, got 'auc'"),
        ({"unit": "s"}, "must be '%' or '', got 's'"),
        ({"higher_is_better": 1}, "Metric: higher_is_better must be true or false, got 1"),
        ({"name": 3}, "Metric: name must be text, got 3"),
    ],
)
def test_a_metric_is_checked(fields, sentence):
    with pytest.raises(pf.UserError, match=sentence):
        Metric(**{"name": "mine", "function": own, **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"function": lambda outputs, targets: 81.0, "unit": "%"},
            "has the value 81, and unit='%' is for shares from 0 to 1",
        ),
        ({"function": lambda outputs, targets: -0.1, "unit": "%"}, "has the value -0.1"),
        ({"per_example": lambda outputs, targets: outputs.numpy()}, r"returned shape \(3, 2\) for 3 examples"),
        (
            {"per_example": lambda outputs, targets: 1 / 0},
            "metric 'mine' failed on outputs of shape .* ZeroDivisionError",
        ),
    ],
)
def test_what_a_metric_returns_is_checked(fields, sentence):
    """Intervals of shares are cut to -1 and 1: percentages would get intervals that do not hold them."""
    with pytest.raises(pf.UserError, match=sentence):
        Metric(**{"name": "mine", "function": own, **fields})(torch.zeros(3, 2), torch.zeros(3))


def test_a_share_that_is_undefined_or_rounded_is_no_error():
    for value in (float("nan"), 1.0 + 1e-9, 0.0):
        assert repr(Metric("mine", lambda o, t, v=value: v, unit="%")(torch.zeros(1, 2), torch.zeros(1))) == repr(value)


@pytest.mark.parametrize("name", [n for n, metric in METRICS.items() if "classification" in metric.tasks])
def test_outputs_that_are_nan_have_no_score(name):
    outputs, targets = torch.tensor([[0.0, 1.0], [2.0, 0.0], [float("nan")] * 2]), torch.tensor([1, 0, 0])
    assert math.isnan(METRICS[name](outputs, targets))
    assert math.isfinite(METRICS[name](outputs[:2], targets[:2]))


def test_tokens_that_are_nan_have_no_score_and_padding_does_not_count():
    outputs, targets = torch.zeros(1, 3, 3), torch.tensor([[1, 2, -100]])
    scores = [token_accuracy, EntityF1(("O", "B-place", "I-place"))]
    outputs[0, 2] = float("nan")  # of padding
    assert all(math.isfinite(score(outputs, targets)) for score in scores)
    outputs[0, 0] = float("nan")
    assert all(math.isnan(score(outputs, targets)) for score in scores)


def test_a_row_whose_probabilities_are_nan_has_no_predicted_class():
    columns = get_task("classification").prediction_columns(
        torch.tensor([[0.0, 1.0], [float("nan")] * 2]), ["no", "yes"]
    )
    assert columns["predicted"] == ["yes", ""]
